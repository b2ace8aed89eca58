"""Whatever a caller sends: a clear status that names the value and the limit, and nobody else is harmed."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.protobuf import empty_pb2
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from dragoman.config import EngineConfig
from dragoman.errors import OverloadedError, ReplyTooLargeError
from dragoman.testing import ScriptedRunner
from dragoman.types import DecodingOptions
from dragoman.v1 import generation_pb2 as pb

GENERATE = "/dragoman.v1.GenerationService/Generate"
SCORE = "/dragoman.v1.GenerationService/Score"
BATCH = "/dragoman.v1.GenerationService/BatchGenerate"
GET_MODEL = "/dragoman.v1.GenerationService/GetModel"
CHECK = "/grpc.health.v1.Health/Check"

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
IMPOSSIBLE_HERE = grpc.StatusCode.FAILED_PRECONDITION


def request(**options: Any) -> bytes:
    return pb.GenerateRequest(text="abc", options=pb.DecodingOptions(**options)).SerializeToString()


def request_with(option: bytes) -> bytes:
    """A request with an option as bytes of the wire."""
    message = pb.GenerateRequest(text="abc")
    message.options.MergeFromString(option)
    return message.SerializeToString()


BAD = {
    "not a message": (GENERATE, b"\xff\xff\xff", INVALID, ["3 bytes", "GenerateRequest"]),
    "cut message": (GENERATE, b"\x1a\x7fabc", INVALID, ["GenerateRequest"]),
    "text not UTF-8": (GENERATE, b"\x1a\x02\xff\xfe", INVALID, ["GenerateRequest"]),
    "unknown field": (GENERATE, b"\xf8\x06\x01", INVALID, ["GenerateRequest", "field 111"]),
    "unknown option": (GENERATE, request_with(b"\x98\x06\x01"), INVALID, ["GenerateRequest.options", "field 99"]),
    "unknown character": (GENERATE, b"\x1a\x03a1b", INVALID, ["'1'", "U+0031"]),
    "long text": (GENERATE, pb.GenerateRequest(text="é" * 600).SerializeToString(), INVALID, ["1200", "1000"]),
    "many lines": (GENERATE, pb.GenerateRequest(text="a\n" * 9).SerializeToString(), INVALID, ["more than 8 lines"]),
    "long source": (GENERATE, pb.GenerateRequest(text="a" * 99).SerializeToString(), INVALID, ["100 tokens", "64"]),
    "no steps": (GENERATE, request(max_new_tokens=0), INVALID, ["max_new_tokens is 0", "1"]),
    "absurd steps": (GENERATE, request(max_new_tokens=2**32 - 1), INVALID, ["4294967295", "1000000"]),
    "absurd beam": (GENERATE, request(beam_size=100_000), INVALID, ["beam_size is 100000", "1024"]),
    "no beam": (GENERATE, request(beam_size=0), INVALID, ["beam_size is 0"]),
    "too many hypotheses": (GENERATE, request(num_hypotheses=5, beam_size=3), INVALID, ["num_hypotheses is 5", "3"]),
    "no hypothesis": (GENERATE, request(num_hypotheses=0), INVALID, ["num_hypotheses is 0"]),
    "more beams than rows": (GENERATE, request(beam_size=9), INVALID, ["beam_size is 9", "8 rows"]),
    "more drawn than rows": (GENERATE, request(num_hypotheses=9, temperature=1.0), INVALID, ["num_hypotheses is 9"]),
    "NaN mass": (GENERATE, request(top_p=math.nan, temperature=1.0), INVALID, ["top_p is nan"]),
    "no mass": (GENERATE, request(top_p=0.0, temperature=1.0), INVALID, ["top_p is 0"]),
    "too much mass": (GENERATE, request(top_p=1.5, temperature=1.0), INVALID, ["top_p is 1.5"]),
    "hot": (GENERATE, request(temperature=math.inf), INVALID, ["temperature is inf"]),
    "two searches": (GENERATE, request(beam_size=2, temperature=1.0), INVALID, ["beam_size is 2", "temperature is 1"]),
    "seed of nothing": (GENERATE, request(seed=2**64 - 1), INVALID, ["seed is 18446744073709551615", "temperature"]),
    "minimum over maximum": (
        GENERATE,
        request(min_new_tokens=3, max_new_tokens=2),
        INVALID,
        ["min_new_tokens is 3", "max_new_tokens"],
    ),
    "minimum over the model's": (GENERATE, request(min_new_tokens=65), INVALID, ["min_new_tokens is 65", "64"]),
    "long prefix": (GENERATE, request(target_prefix="a" * 64), INVALID, ["target_prefix has 64 tokens", "up to 64"]),
    "unknown character of a prefix": (GENERATE, request(target_prefix="a1"), INVALID, ["target_prefix holds '1'"]),
    "empty stop": (GENERATE, request(stop=["a", ""]), INVALID, ["stop[1] has 0 characters"]),
    "unknown token": (GENERATE, request(suppress_tokens=["a", "ab"]), INVALID, ["suppress_tokens names 'ab'"]),
    "unknown token of a sequence": (
        GENERATE,
        request(suppress_sequences=[pb.TokenSequence(tokens=["a"]), pb.TokenSequence(tokens=["é", "b"])]),
        INVALID,
        ["suppress_sequences[1] names 'é'"],
    ),
    "token that never comes": (
        GENERATE,
        request(suppress_tokens=["<pad>"]),
        INVALID,
        ["suppress_tokens names '<pad>'"],
    ),
    "length penalty of nothing": (
        GENERATE,
        request(length_penalty=0.5),
        INVALID,
        ["length_penalty is 0.5", "beam_size"],
    ),
    "policy from the future": (GENERATE, request_with(b"\xc8\x01\x63"), INVALID, ["unknown_words is 99", "WORDS_COPY"]),
    "bytes that there are not": (
        GENERATE,
        request(unknown_words=pb.UNKNOWN_WORDS_BYTE_FALLBACK),
        IMPOSSIBLE_HERE,
        ["unknown_words is byte_fallback", "no tokens for bytes"],
    ),
    "copies without an alignment": (
        GENERATE,
        request(unknown_words=pb.UNKNOWN_WORDS_COPY),
        IMPOSSIBLE_HERE,
        ["unknown_words is copy", "without an alignment graph", "export"],
    ),
    "empty sequence": (
        GENERATE,
        request(suppress_sequences=[pb.TokenSequence()]),
        INVALID,
        ["suppress_sequences[0] has 0 tokens"],
    ),
    "prefix of two lines": (
        GENERATE,
        pb.GenerateRequest(text="a\nb", options=pb.DecodingOptions(target_prefix="a")).SerializeToString(),
        INVALID,
        ["target_prefix", "2 lines"],
    ),
    "answers to two lines": (
        GENERATE,
        pb.GenerateRequest(text="a\nb", options=pb.DecodingOptions(num_hypotheses=2, beam_size=2)).SerializeToString(),
        INVALID,
        ["num_hypotheses is 2", "2 lines"],
    ),
    "urgent": (GENERATE, pb.GenerateRequest(text="a", priority=11).SerializeToString(), INVALID, ["priority is 11"]),
    "score of lines": (
        SCORE,
        pb.ScoreRequest(text="a\nb", target="a").SerializeToString(),
        INVALID,
        ["text has more than one line"],
    ),
    "score of a long target": (
        SCORE,
        pb.ScoreRequest(text="a", target="a" * 64).SerializeToString(),
        INVALID,
        ["target has 65 tokens", "up to 64"],
    ),
    "score of an unknown target": (
        SCORE,
        pb.ScoreRequest(text="a", target="A").SerializeToString(),
        INVALID,
        ["target holds 'A'"],
    ),
    "NaN": (GENERATE, request(temperature=math.nan), INVALID, ["temperature is nan"]),
    "infinity": (GENERATE, request(length_penalty=math.inf), INVALID, ["length_penalty is inf"]),
    "negative": (GENERATE, request(temperature=-0.5), INVALID, ["temperature is -0.5"]),
    "language": (
        GENERATE,
        pb.GenerateRequest(text="abc", target_language="de").SerializeToString(),
        IMPOSSIBLE_HERE,
        ["target_language is 'de'; this model answers in one language"],
    ),
    "long id": (
        GENERATE,
        pb.GenerateRequest(text="a", request_id="é" * 65).SerializeToString(),
        INVALID,
        ["130", "128"],
    ),
    "wrong model": (
        GENERATE,
        pb.GenerateRequest(model="x" * 999).SerializeToString(),
        NOT_FOUND,
        ["scripted version 1"],
    ),
    "wrong version": (GET_MODEL, pb.GetModelRequest(version="7").SerializeToString(), NOT_FOUND, ["'7'", "version 1"]),
    "large batch": (
        BATCH,
        pb.BatchGenerateRequest(requests=[pb.GenerateRequest()] * 17).SerializeToString(),
        INVALID,
        ["17", "16"],
    ),
    "unknown field of a batch": (BATCH, b"\xf8\x06\x01", INVALID, ["BatchGenerateRequest", "field 111"]),
    "millions of items": (BATCH, b"\x0a\x00" * 2_000_000, INVALID, ["2000000", "16"]),
    "not a health request": (CHECK, b"\xff", INVALID, ["HealthCheckRequest"]),
    "unknown service": (CHECK, b"\x0a\x01x", NOT_FOUND, ["'x'"]),
    "unknown method": ("/dragoman.v1.GenerationService/Nothing", b"", UNIMPLEMENTED, ["method"]),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused_with_its_value_and_limit(start_server, name):
    """The status code says whose fault it is, the message what to change; a good request then works as ever."""
    method, data, code, words = BAD[name]
    running = await start_server(max_text_bytes=1000, max_segments=8, max_batch_items=16)
    error = await running.refusal(method, data)
    assert error.code() is code, error.details()
    for word in words:
        assert word in error.details()
    assert len(error.details()) < 500
    assert running.runner.encoded == []
    assert (await running.client.generate("abc")).text == "abc"


async def test_an_error_carries_its_reason_for_programs(start_server):
    """ErrorInfo tells apart what shares a gRPC code."""
    running = await start_server()
    error = await running.refusal(GENERATE, pb.GenerateRequest(text="a" * 99).SerializeToString())
    status = Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("source_too_long", "dragoman")
    assert (status.code, status.message) == (INVALID.value[0], error.details())


async def test_a_full_queue_refuses_with_the_time_to_wait(start_server):
    """RESOURCE_EXHAUSTED with RetryInfo, while the requests before it go on."""
    running = await start_server(ScriptedRunner(num_slots=1), EngineConfig(max_waiting=1), max_calls=100)
    gate = running.gate()
    first = running.channel.unary_unary(GENERATE)(request())
    await gate.wait_reached()
    second = running.channel.unary_unary(GENERATE)(request())
    while running.model.engine.snapshot().num_waiting != 1:
        await running.client.model_info()  # a round trip, so that the server can read what was sent
    error = await running.refusal(GENERATE, request())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    retry = RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToTimedelta().total_seconds() > 0
    with pytest.raises(OverloadedError, match="limit is 1"):
        await running.client.generate("abc")
    gate.open()
    assert pb.GenerateResponse.FromString(await first).text == "abc"
    assert pb.GenerateResponse.FromString(await second).text == "abc"
    assert await running.value("dragoman_requests_rejected_total", model="scripted", reason="overloaded") == 2


async def test_a_message_over_the_limit_is_refused_and_the_server_goes_on(start_server):
    """A little over it the refusal is ours, far over it gRPC's; both are clear."""
    running = await start_server(max_message_bytes=100_000, max_text_bytes=1 << 20)
    over = await running.refusal(GENERATE, pb.GenerateRequest(text="a" * 110_000).SerializeToString())
    assert over.code() is INVALID and "100000" in over.details()
    far = await running.refusal(GENERATE, pb.GenerateRequest(text="a" * 3_000_000).SerializeToString())
    assert far.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in far.details()
    assert (await running.client.generate("abc")).text == "abc"


async def test_a_reply_over_the_limit_is_a_clear_error(start_server):
    """The caller learns both sizes instead of a broken call."""
    running = await start_server(max_message_bytes=2_000)
    requests = [pb.GenerateRequest(text="abcdefgh") for _ in range(20)]
    error = await running.refusal(BATCH, pb.BatchGenerateRequest(requests=requests).SerializeToString())
    assert error.code() is EXHAUSTED
    assert "reply" in error.details() and "2000" in error.details()


LARGE = pb.DecodingOptions(num_top_tokens=8)
"""Of each token of an answer, some 100 bytes."""


async def test_an_answer_that_is_too_large_ends_as_soon_as_that_is_certain(start_server):
    """With its size, the limit and the remedy; the lines that were not begun by then are never decoded."""
    runner = ScriptedRunner(num_slots=1)
    running = await start_server(runner, max_message_bytes=10_000)
    text = "\n".join(["a" * 40] * 8)
    request = pb.GenerateRequest(text=text, options=LARGE)
    error = await running.refusal(GENERATE, request.SerializeToString())
    assert error.code() is EXHAUSTED
    assert "the reply would have" in error.details() and "10000" in error.details() and "top tokens" in error.details()
    assert not any(key == "retry" for key, _ in error.trailing_metadata())
    assert len(runner.encoded) < 8
    with pytest.raises(ReplyTooLargeError, match="ask for fewer lines"):
        await running.client.generate(text, DecodingOptions(num_top_tokens=8))
    assert (
        await running.value("dragoman_requests_total", model="scripted", method="Generate", code="reply_too_large") == 2
    )
    assert (await running.client.generate("abc")).text == "abc"


async def test_a_stream_whose_whole_answer_is_too_large_says_so_at_its_end(start_server):
    """What fits came piece by piece; then a clear status, no broken stream."""
    running = await start_server(ScriptedRunner(num_slots=1), max_message_bytes=6_000)
    got = []
    with pytest.raises(ReplyTooLargeError, match="6000"):
        async for item in running.client.stream("\n".join(["abcdefgh" * 4] * 4), DecodingOptions(num_top_tokens=8)):
            got.append(item)
    assert "".join(item.delta for item in got if item.segment == 0) == "abcdefgh" * 4


async def test_an_item_that_has_no_room_in_a_batch_fails_alone(start_server):
    """The others keep their answers: those that came before it, and those that are smaller."""
    running = await start_server(max_message_bytes=60_000)
    items = [pb.GenerateRequest(text="a" * 40, options=LARGE) for _ in range(20)]
    items += [pb.GenerateRequest(text="ab") for _ in range(10)]
    reply = await running.call(BATCH, pb.BatchGenerateRequest(requests=items).SerializeToString())
    assert len(reply) <= 60_000
    found = pb.BatchGenerateResponse.FromString(reply).items
    assert [item.response.text for item in found[20:]] == ["ab"] * 10
    answered = [item for item in found[:20] if item.HasField("response")]
    refused = [item.error for item in found[:20] if item.HasField("error")]
    assert answered and {item.response.text for item in answered} == {"a" * 40}
    assert refused and {error.code for error in refused} == {EXHAUSTED.value[0]}
    assert all("the reply would have" in error.message and "items" in error.message for error in refused)


async def test_errors_of_a_batch_that_have_no_room_are_shortened_and_marked_so(start_server):
    """Each item keeps its status; only words are missing, and of the first none."""
    running = await start_server(max_message_bytes=26_000)
    items = [pb.GenerateRequest(text="ab", model="m" * 100, version="v" * 100) for _ in range(100)]
    items.append(pb.GenerateRequest(text="ab"))
    reply = await running.call(BATCH, pb.BatchGenerateRequest(requests=items).SerializeToString())
    assert len(reply) <= 26_000
    found = pb.BatchGenerateResponse.FromString(reply).items
    assert {item.error.code for item in found[:-1]} == {grpc.StatusCode.NOT_FOUND.value[0]}
    whole = found[0].error.message
    assert not whole.endswith("\u2026")
    for item in found[:-1]:
        message = item.error.message
        assert message == whole or (message.endswith("\u2026") and whole.startswith(message[:-1]) and len(message) > 20)
    assert found[-2].error.message != whole


async def test_a_batch_of_more_items_than_a_reply_has_room_for_is_refused_before_any_work(start_server):
    """With both numbers and the remedy."""
    runner = ScriptedRunner()
    running = await start_server(runner, max_message_bytes=6_000)
    items = [pb.GenerateRequest(text="ab") for _ in range(26)]
    error = await running.refusal(BATCH, pb.BatchGenerateRequest(requests=items).SerializeToString())
    assert error.code() is EXHAUSTED
    assert "26 items" in error.details() and "6000" in error.details() and "split it" in error.details()
    assert not runner.encoded


async def test_a_wrong_type_of_message_with_a_known_shape_is_refused_or_answered_never_fatal(start_server):
    """An empty message is a valid one: all defaults."""
    running = await start_server()
    reply = await running.call(GENERATE, empty_pb2.Empty().SerializeToString())
    assert pb.GenerateResponse.FromString(reply).text == ""


class UnprintableError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text for you")


@pytest.mark.parametrize("fault", [RuntimeError("secret"), UnprintableError(), MemoryError()])
async def test_a_fault_of_ours_is_internal_and_keeps_its_text_to_the_log(start_server, monkeypatch, caplog, fault):
    """The caller gets an id; the log has the id and the traceback, even of an exception that cannot be printed."""
    running = await start_server()

    def broken(*args: object) -> None:
        raise fault

    monkeypatch.setattr(running.model.engine, "submit", broken)
    error = await running.refusal(GENERATE, request())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    error_id = error.details().split("id ")[1].split(":")[0]
    record = next(r for r in caplog.records if error_id in r.getMessage())
    assert record.exc_info is not None and record.exc_info[1] is fault
    items = pb.BatchGenerateRequest(requests=[pb.GenerateRequest(text="abc")]).SerializeToString()
    reply = pb.BatchGenerateResponse.FromString(await running.call(BATCH, items))
    assert reply.items[0].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in reply.items[0].error.message


@pytest.mark.parametrize("method", [GENERATE, BATCH, GET_MODEL, CHECK])
async def test_a_call_that_ends_without_a_message_is_refused(start_server, method):
    """A caller that half-closes before it sent anything gets its status, instead of waiting for ever."""
    running = await start_server()

    async def nothing():
        return
        yield b""

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.channel.stream_unary(method, None, None)(nothing(), timeout=30)
    assert caught.value.code() is INVALID
    assert "without a message" in caught.value.details()


async def test_a_text_with_more_lines_than_may_wait_is_told_so(start_server):
    """No retry could ever help it: INVALID_ARGUMENT with the limit, not an overload."""
    running = await start_server(engine=EngineConfig(max_waiting=2))
    error = await running.refusal(GENERATE, pb.GenerateRequest(text="a\nb\nc").SerializeToString())
    assert error.code() is INVALID
    assert "more than 2 lines" in error.details()
    assert (await running.client.generate("a\nb")).text == "a\nb"
