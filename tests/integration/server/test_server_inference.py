"""The Open Inference Protocol on the server's port, spoken by its messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.status_pb2 import Status
from tests.integration.server.conftest import Gate

import dragoman
from dragoman.config import EngineConfig
from dragoman.oip import inference_pb2 as pb
from dragoman.testing import ScriptedRunner, copy_script
from dragoman.v1 import generation_pb2

SERVICE = "/inference.GRPCInferenceService/"
EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs


def request(texts: Sequence[str], outputs: Sequence[str] = (), **parameters: Any) -> pb.ModelInferRequest:
    """Texts in typed contents, with parameters; an id if there is one among them."""
    message = pb.ModelInferRequest(id=parameters.pop("id", ""), model_name=parameters.pop("model", ""))
    tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    for name in outputs:
        message.outputs.add(name=name)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    return message


def columns(response: pb.ModelInferResponse) -> dict[str, list[Any]]:
    """Outputs by name, flat; texts as such."""
    fields = {"BYTES": "bytes_contents", "FP64": "fp64_contents", "UINT32": "uint_contents"}
    found: dict[str, list[Any]] = {}
    for output in response.outputs:
        values = list(getattr(output.contents, fields[output.datatype]))
        found[output.name] = [value.decode() for value in values] if output.datatype == "BYTES" else values
    return found


async def call(running: Any, method: str, message: Any, reply: Any, **options: Any) -> Any:
    return reply.FromString(await running.call(SERVICE + method, message.SerializeToString(), **options))


async def infer(running: Any, message: pb.ModelInferRequest, **options: Any) -> pb.ModelInferResponse:
    response = await call(running, "ModelInfer", message, pb.ModelInferResponse, **options)
    assert isinstance(response, pb.ModelInferResponse)
    return response


class Stream:
    """One ModelStreamInfer: send what is wanted when it is wanted, read what comes."""

    def __init__(self, running: Any, **options: Any) -> None:
        self.call = running.channel.stream_stream(
            SERVICE + "ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )(**options)

    async def send(self, *messages: pb.ModelInferRequest) -> None:
        for message in messages:
            await self.call.write(message)

    async def answer(self) -> list[pb.ModelStreamInferResponse]:
        """Responses up to the final one."""
        responses: list[pb.ModelStreamInferResponse] = []
        while not responses or not is_final(responses[-1]):
            response = await self.call.read()
            assert response is not EOF
            responses.append(response)
        return responses

    async def close(self) -> list[pb.ModelStreamInferResponse]:
        """No more requests; what else comes."""
        await self.call.done_writing()
        responses = []
        while (response := await self.call.read()) is not EOF:
            responses.append(response)
        return responses


def is_final(response: pb.ModelStreamInferResponse) -> bool:
    return response.infer_response.parameters["triton_final_response"].bool_param


def joined(responses: Iterable[pb.ModelStreamInferResponse]) -> list[str]:
    """What the texts of one request have grown to."""
    rows = [
        columns(response.infer_response)["text_output"] for response in responses if response.infer_response.outputs
    ]
    return ["".join(parts) for parts in zip(*rows, strict=True)]


async def test_texts_are_answered_as_one_batch(start_server):
    """In order, documents and blank texts as ever, with the request's id, and the model that answered."""
    running = await start_server()
    texts = ["abc", " de\n\nfg ", "", "x" * 20]
    response = await infer(running, request(texts, id="mine"))
    assert columns(response) == {"text_output": texts}
    assert (response.model_name, response.model_version, response.id) == ("scripted", "1", "mine")
    assert [list(output.shape) for output in response.outputs] == [[4]]


async def test_it_is_the_path_of_generate(start_server):
    """Options mean the same, and texts are counted as those of Generate are."""
    running = await start_server()
    whole = await infer(running, request(["abcdef"], max_tokens=2))
    assert columns(whole) == {"text_output": ["ab"]}
    assert (await infer(running, request(["abc"] * 3, id="x"))).id == "x"
    labels = {"model": "scripted", "method": "ModelInfer"}
    assert await running.value("dragoman_requests_total", code="ok", **labels) == 4


async def test_outputs_come_when_they_are_asked_for(start_server):
    """Texts, reasons, scores and counts, each in the shape of the input."""
    running = await start_server()
    names = ["finish_reason", "score", "source_tokens", "generated_tokens", "text_output"]
    message = request(["abc", "a\nbcdef", ""], names, max_new_tokens=4)
    message.inputs[0].shape[:] = [3, 1]
    response = await infer(running, message)
    found = columns(response)
    assert list(found) == names
    assert all(list(output.shape) == [3, 1] for output in response.outputs)
    assert found["text_output"] == ["abc", "a\nbcde", ""]
    assert found["finish_reason"] == ["stop", "length", "stop"]
    assert found["source_tokens"] == [4, 8, 0] and found["generated_tokens"] == [3, 5, 0]
    token = 5.0 - np.log(np.exp(5.0) + 26)  # of 27 that may come
    assert found["score"] == pytest.approx([4 * token, 2 * token + 4 * token, 0.0])


async def test_several_answers_to_a_text_are_columns_best_first(start_server):
    """A text that has fewer is filled up with what no answer is."""
    running = await start_server()
    names = ["text_output", "finish_reason", "score"]
    response = await infer(running, request([" ab", ""], names, num_beams=3, num_return_sequences=2))
    found = columns(response)
    assert all(list(output.shape) == [2, 2] for output in response.outputs)
    assert found["text_output"][0] == " ab" and found["text_output"][1].startswith(" ")
    assert found["text_output"][1] != " ab"
    assert found["score"][0] > found["score"][1]
    assert [found[name][2:] for name in names] == [["", ""], ["stop", ""], [0.0, -np.inf]]


async def test_one_failing_text_fails_its_request_alone(start_server):
    """With the status that it would have alone, and its place; requests beside it are answered."""
    running = await start_server()
    bad, good = await asyncio.gather(
        running.refusal(SERVICE + "ModelInfer", request(["abc", "x1", "yz"]).SerializeToString()),
        infer(running, request(["abc", "xy"])),
    )
    assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad.details().startswith("text_input[1]: text holds '1'")
    assert columns(good) == {"text_output": ["abc", "xy"]}
    labels = {"model": "scripted", "method": "ModelInfer"}
    assert await running.value("dragoman_requests_total", code="invalid_request", **labels) == 3
    assert await running.value("dragoman_slots_used", model="scripted") == 0


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (request(["a"], model="none"), grpc.StatusCode.NOT_FOUND, "no model 'none' is served"),
        (request(["a"], beam=2), grpc.StatusCode.INVALID_ARGUMENT, "'beam' is no parameter: did you mean"),
        (request(["a"] * 1025), grpc.StatusCode.INVALID_ARGUMENT, "has 1025 texts; this server accepts 1024"),
        (request(["a"], id="x" * 129), grpc.StatusCode.INVALID_ARGUMENT, "has 129 bytes"),
        (request(["a" * 65]), grpc.StatusCode.INVALID_ARGUMENT, "source has 66 tokens"),
        (request(["a"], return_alternatives=True, num_beams=2), grpc.StatusCode.INVALID_ARGUMENT, "alternatives are"),
        (request(["a"], target_language="de"), grpc.StatusCode.FAILED_PRECONDITION, "answers in one language"),
        (request(["a"], coverage_penalty=1.0, num_beams=2), grpc.StatusCode.FAILED_PRECONDITION, "alignment graph"),
    ],
)
async def test_errors_have_the_statuses_of_generate(start_server, message, code, words):
    """And the same details for machines."""
    running = await start_server()
    refusal = await running.refusal(SERVICE + "ModelInfer", message.SerializeToString())
    assert refusal.code() is code and words in refusal.details()
    assert any(key == "grpc-status-details-bin" for key, _ in refusal.trailing_metadata())


async def test_a_batch_that_the_queue_has_no_room_for_is_told_when_to_come_back(start_server):
    """Whichever of its texts it is that finds no room."""
    running = await start_server(engine=EngineConfig(num_slots=1, max_waiting=1))
    running.gate()
    refusal = await running.refusal(SERVICE + "ModelInfer", request(["a", "b", "c", "d"]).SerializeToString())
    assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and refusal.details().startswith("text_input[")
    status = Status.FromString(dict(refusal.trailing_metadata())["grpc-status-details-bin"])
    assert [detail.type_url.rpartition(".")[2] for detail in status.details] == ["ErrorInfo", "RetryInfo"]


async def test_a_timeout_ends_a_request_that_waits(start_server):
    """As a deadline of the call does, in microseconds."""
    running = await start_server(engine=EngineConfig(num_slots=1))
    gate = running.gate()
    first = asyncio.create_task(infer(running, request(["abc"])))
    await gate.wait_reached()
    late = await running.refusal(SERVICE + "ModelInfer", request(["xyz"], timeout=1).SerializeToString())
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    gate.open()
    assert columns(await first) == {"text_output": ["abc"]}


async def test_priorities_decide_who_waits(start_server):
    """The lower of Triton's numbers goes first."""
    runner = ScriptedRunner(num_slots=1)
    running = await start_server(runner, EngineConfig(num_slots=1))
    gate = running.gate()
    calls = [asyncio.create_task(infer(running, request(["a"])))]
    await gate.wait_reached()
    for count, (text, priority) in enumerate([("bb", 21), ("cc", 0), ("dd", 1)], start=1):
        calls.append(asyncio.create_task(infer(running, request([text], priority=priority))))
        while running.model.engine.snapshot().num_waiting < count:
            await asyncio.sleep(0.001)
    gate.open()
    await asyncio.gather(*calls)
    order = [source[0] for source in runner.encoded]
    assert order == [order[0], *sorted(order[1:], reverse=True)]  # dd, cc, bb


async def test_a_stream_answers_as_texts_grow(start_server):
    """Deltas, each for its text, add up to the answers; the last response has the other outputs, and says so."""
    running = await start_server()
    gate = Gate()
    running.gates.append(gate)
    running.runner.before_decode = lambda: gate() if running.runner.num_decode_steps == 2 else None
    stream = Stream(running)
    texts = [" abc\n\nde ", "xyz", ""]
    await stream.send(request(texts, ["text_output", "finish_reason"], id="mine"))
    responses = [await stream.call.read()]  # while the engine stands still
    gate.open()
    responses += await stream.answer()
    assert await stream.close() == []
    assert joined(responses) == texts
    assert [is_final(response) for response in responses] == [False] * (len(responses) - 1) + [True]
    assert all(r.infer_response.id == "mine" and r.infer_response.model_name == "scripted" for r in responses)
    assert all(list(columns(r.infer_response)) == ["text_output"] for r in responses[:-1])
    assert columns(responses[-1].infer_response)["finish_reason"] == ["stop"] * 3


async def test_a_stream_may_end_with_an_empty_response(start_server):
    """For clients that want to know of the end alone; what came before is all there is."""
    running = await start_server()
    stream = Stream(running)
    await stream.send(request(["abc"], triton_enable_empty_final_response=True))
    *responses, last = await stream.answer()
    assert joined(responses) == ["abc"] and not any(map(is_final, responses))
    assert not last.infer_response.outputs and last.infer_response.model_name == "scripted"
    await stream.close()


async def test_requests_of_a_stream_are_worked_on_together(start_server):
    """One that is slow keeps none behind it waiting; the id tells whose an answer is."""
    running = await start_server()
    both_wait, quick_ends = Gate(), Gate()
    running.gates += [both_wait, quick_ends]
    gates = {0: both_wait, 10: quick_ends}
    running.runner.before_decode = lambda: gates.get(running.runner.num_decode_steps, lambda: None)()
    stream = Stream(running)
    await stream.send(request(["a" * 30], id="slow"), request(["b"], id="quick"))
    await both_wait.wait_reached()
    while running.model.engine.snapshot().num_running + running.model.engine.snapshot().num_waiting < 2:
        await asyncio.sleep(0.001)
    both_wait.open()
    responses = []
    while not responses or not is_final(responses[-1]):
        responses.append(await stream.call.read())
    assert responses[-1].infer_response.id == "quick"
    quick_ends.open()
    responses += await stream.close()
    by_id = {name: joined(r for r in responses if r.infer_response.id == name) for name in ("slow", "quick")}
    assert by_id == {"slow": ["a" * 30], "quick": ["b"]}


async def test_a_request_that_fails_leaves_its_stream_open(start_server):
    """Its error comes as a message, with its id; the next one is answered."""
    running = await start_server()
    stream = Stream(running)
    await stream.send(request(["x1"], id="bad"))
    (error,) = await stream.answer()
    assert error.error_message.startswith("text holds '1'") and error.infer_response.id == "bad"
    await stream.send(request(["ab"]))
    assert joined(await stream.answer()) == ["ab"]
    await stream.close()
    labels = {"model": "scripted", "method": "ModelStreamInfer"}
    assert await running.value("dragoman_requests_total", code="invalid_request", **labels) == 1
    assert await running.value("dragoman_requests_total", code="ok", **labels) == 1


async def test_errors_of_a_stream_are_statuses_for_those_who_ask(start_server):
    """The header of Triton's that says so; the status is that of ModelInfer."""
    running = await start_server()
    stream = Stream(running, metadata=(("triton_grpc_error", "true"),))
    await stream.send(request(["ab"]))
    assert joined(await stream.answer()) == ["ab"]
    await stream.send(request(["ab"], model="none"))
    with pytest.raises(grpc.aio.AioRpcError, match="no model 'none'") as caught:
        await stream.call.read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_message_that_is_none_ends_a_stream_behind_what_was_sent_before(start_server):
    """Whatever answers are under way arrive; then the status."""
    running = await start_server()
    stub = running.channel.stream_stream(SERVICE + "ModelStreamInfer", None, pb.ModelStreamInferResponse.FromString)

    async def messages() -> AsyncIterator[bytes]:
        yield request(["abc"]).SerializeToString()
        yield b"\xff"

    call = stub(messages())
    responses = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for response in call:
            responses.append(response)
    assert joined(responses) == ["abc"]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_drain_ends_streams_when_their_requests_are_answered(start_server):
    """An idle stream at once, a busy one behind its answer; neither holds the drain up."""
    running = await start_server()
    idle, busy = Stream(running), Stream(running)
    await idle.send(request(["a"]))
    await idle.answer()
    gate = running.gate()
    await busy.send(request(["abc"]))
    await gate.wait_reached()
    drain = asyncio.create_task(running.server.drain())
    with pytest.raises(grpc.aio.AioRpcError, match="draining") as caught:
        await idle.call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not (await call(running, "ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse)).ready
    assert not (await call(running, "ModelReady", pb.ModelReadyRequest(), pb.ModelReadyResponse)).ready
    assert (await call(running, "ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse)).live
    gate.open()
    assert joined(await busy.answer()) == ["abc"]
    with pytest.raises(grpc.aio.AioRpcError, match="draining"):
        await busy.call.read()
    assert await drain is True


async def test_a_stream_that_is_cancelled_frees_what_it_had(start_server):
    """Its requests end, and are counted as cancelled."""
    running = await start_server()
    gate = running.gate()
    stream = Stream(running)
    await stream.send(request(["abc", "de"]))
    await gate.wait_reached()
    stream.call.cancel()
    labels = {"model": "scripted", "method": "ModelStreamInfer", "code": "cancelled"}
    while await running.value("dragoman_requests_total", **labels) < 2:
        await asyncio.sleep(0.001)
    gate.open()
    assert columns(await infer(running, request(["ab"]))) == {"text_output": ["ab"]}
    assert running.model.engine.snapshot().num_running == 0


async def test_the_server_and_its_models_describe_themselves(start_server):
    """Live, ready, metadata, configuration; unknown models are not ready, and otherwise not found."""
    running = await start_server(max_batch_items=7)
    assert (await call(running, "ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse)).live
    assert (await call(running, "ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse)).ready
    for name, ready in (("", True), ("scripted", True), ("none", False)):
        message = pb.ModelReadyRequest(name=name)
        assert (await call(running, "ModelReady", message, pb.ModelReadyResponse)).ready is ready
    server = await call(running, "ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse)
    assert (server.name, server.version) == ("dragoman", dragoman.__version__)
    model = await call(running, "ModelMetadata", pb.ModelMetadataRequest(name="scripted"), pb.ModelMetadataResponse)
    assert (model.name, list(model.versions), model.platform) == ("scripted", ["1"], "dragoman")
    assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [("text_input", "BYTES", [-1, 1])]
    assert model.outputs[0].name == "text_output" and model.properties["precision"] == "fp32"
    config = (await call(running, "ModelConfig", pb.ModelConfigRequest(), pb.ModelConfigResponse)).config
    assert (config.name, config.max_batch_size, config.HasField("dynamic_batching")) == ("scripted", 7, True)
    assert {t.name: t.data_type for t in config.output}["score"] == pb.TYPE_FP64
    for method in ("ModelMetadata", "ModelConfig", "ModelStatistics"):
        refusal = await running.refusal(SERVICE + method, pb.ModelMetadataRequest(name="none").SerializeToString())
        assert refusal.code() is grpc.StatusCode.NOT_FOUND


async def test_every_output_of_the_metadata_can_be_asked_for_at_once(start_server):
    """Load generators do so."""
    running = await start_server()
    model = await call(running, "ModelMetadata", pb.ModelMetadataRequest(), pb.ModelMetadataResponse)
    response = await infer(running, request(["ab"], [output.name for output in model.outputs]))
    assert [(o.name, o.datatype) for o in response.outputs] == [(o.name, o.datatype) for o in model.outputs]


async def test_statistics_are_what_was_computed_whoever_asked(start_server):
    """Texts and lines of both services; failures beside them."""
    running = await start_server()
    await infer(running, request(["ab\ncd", "ef"]))
    await running.client.generate("gh")
    await running.refusal(SERVICE + "ModelInfer", request(["x1"]).SerializeToString())
    for message in (pb.ModelStatisticsRequest(), pb.ModelStatisticsRequest(name="scripted")):
        reply = await call(running, "ModelStatistics", message, pb.ModelStatisticsResponse)
        (found,) = reply.model_stats
        assert (found.name, found.version, found.inference_count) == ("scripted", "1", 4)
        assert 1 <= found.execution_count <= 4
        counts = found.inference_stats
        assert (counts.success.count, counts.fail.count, counts.queue.count) == (3, 1, 4)
        assert counts.success.ns > 0 and counts.compute_infer.count == counts.compute_input.count == 4


async def test_the_repository_is_shown_and_closed(start_server):
    """What is served can be listed; callers do not change it unless they may."""
    running = await start_server()
    for ready in (False, True):
        message = pb.RepositoryIndexRequest(ready=ready)
        index = await call(running, "RepositoryIndex", message, pb.RepositoryIndexResponse)
        assert [(m.name, m.version, m.state) for m in index.models] == [("scripted", "1", "READY")]
    load = pb.RepositoryModelLoadRequest(model_name="scripted").SerializeToString()
    for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
        refusal = await running.refusal(SERVICE + method, load)
        assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "--allow-model-control" in refusal.details()
    other = pb.RepositoryIndexRequest(repository_name="other").SerializeToString()
    assert (await running.refusal(SERVICE + "RepositoryIndex", other)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_the_protocol_has_and_this_server_has_not_is_unimplemented(start_server):
    """Shared memory, tracing and log settings."""
    running = await start_server()
    for method in ("SystemSharedMemoryStatus", "TraceSetting", "LogSettings"):
        assert (await running.refusal(SERVICE + method, b"")).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_knows_the_service(start_server):
    """As it knows the other one."""
    running = await start_server()
    assert (
        await running.call("/grpc.health.v1.Health/Check", b"\n\x1e" + b"inference.GRPCInferenceService") == b"\x08\x01"
    )


async def test_a_reply_over_the_limit_is_refused_while_it_is_made(start_server):
    """Many long answers to a small request."""
    runner = ScriptedRunner(lambda source, fed: copy_script((source[0],) * 64, fed))
    running = await start_server(runner, max_message_bytes=4096)
    refusal = await running.refusal(SERVICE + "ModelInfer", request(["a"] * 200).SerializeToString())
    assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "this server's limit" in refusal.details()


async def test_spans_that_did_not_survive_are_told(start_server):
    """Beside the text, where something was to be protected and nothing else is asked for."""
    running = await start_server()
    message = request(["a\n abc", "ac"], protect='["b"]')  # which this model cannot but change
    expected = {"text_output": ["a\n abc", "ac"], "unprotected": ['["b"]', "[]"]}
    assert columns(await infer(running, message)) == expected
    stream = Stream(running)
    await stream.send(message)
    responses = await stream.answer()
    assert joined(responses) == expected["text_output"]
    assert columns(responses[-1].infer_response)["unprotected"] == expected["unprotected"]
    await stream.close()


async def test_both_services_share_one_port(start_server):
    """The same answer by either."""
    running = await start_server()
    theirs = await infer(running, request(["abc"]))
    data = generation_pb2.GenerateRequest(text="abc").SerializeToString()
    ours = generation_pb2.GenerateResponse.FromString(
        await running.call("/dragoman.v1.GenerationService/Generate", data)
    )
    assert columns(theirs) == {"text_output": [ours.text]}
