"""What is counted is what happened: under cancels, deadlines, bad calls and faults, and whatever callers make up."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import sys
import urllib.request

import pytest

from dragoman.client import AsyncClient
from dragoman.errors import DeadlineError, DragomanError, InvalidRequestError, TooLateError
from dragoman.logs import FIELDS
from dragoman.observer import RequestObserver
from dragoman.oip import inference_pb2 as oip
from dragoman.testing import VOCABULARY, ScriptedRunner, copy_script
from dragoman.types import TokenIds
from dragoman.v1 import generation_pb2 as pb

SERVICE = "/dragoman.v1.GenerationService/"
GAUGES = (
    "num_requests_waiting",
    "num_callers_waiting",
    "num_requests_running",
    "slots_used",
    "kv_cache_usage_ratio",
)


def faulty_script(source: TokenIds, fed: TokenIds) -> list[float]:
    """Copies, but for texts that begin with "z", of which the model makes nothing usable."""
    if source[0] == VOCABULARY.tokens.index("z"):
        return [math.nan] * len(VOCABULARY.tokens)
    return list(copy_script(source, fed))


async def test_every_request_is_counted_once_however_it_ends_and_nothing_stays_in_work(start_server):
    """Twenty of each kind of end: their counts add up, and all that is in work at a time is 0 again."""
    running = await start_server(ScriptedRunner(faulty_script, num_slots=4))
    client, each = running.client, 20
    for _ in range(each):
        await client.generate("ok")
        async for _item in client.stream("ok"):
            pass
        with pytest.raises(InvalidRequestError):
            await client.generate("NOT IN THE VOCABULARY")
        with pytest.raises(DragomanError):
            await client.generate("zz")
    gate = running.gate()

    async def stream() -> None:
        async for _ in client.stream("abcdefgh"):
            pass

    streams = [asyncio.create_task(stream()) for _ in range(each)]
    await gate.wait_reached()
    for outcome in await asyncio.gather(
        *(client.generate("late", timeout=2.0) for _ in range(each)), return_exceptions=True
    ):
        assert isinstance(outcome, DeadlineError | TooLateError)
    for task in streams:
        task.cancel()
    await asyncio.wait(streams)
    await running.server._router.idle()
    gate.open()
    await running.model.engine.drained()

    samples = await running.scrape()
    totals: dict[str, float] = {}
    for (name, labels), value in samples.items():
        if name == "dragoman_requests_total":
            code = dict(labels)["code"].replace("too_late", "deadline")
            totals[code] = totals.get(code, 0) + value
    assert totals == {
        "ok": 2 * each,
        "invalid_request": each,
        "internal": each,
        "deadline": each,
        "cancelled": each,
    }
    for gauge in GAUGES:
        assert samples[f"dragoman_{gauge}", frozenset({("model", "scripted")})] == 0, gauge
    for gauge in ("calls_in_progress", "call_bytes_in_progress"):
        assert samples[f"dragoman_{gauge}", frozenset()] == 0
    handled = sum(value for (name, _), value in samples.items() if name == "grpc_server_handled_total")
    assert handled == 6 * each
    # Tokens are those of sequences that ended well, in all series alike: here 2 letters, and the source's end token.
    of_model = frozenset({("model", "scripted")})
    assert samples["dragoman_source_tokens_total", of_model] == 2 * each * 3
    assert samples["dragoman_request_source_tokens_sum", of_model] == 2 * each * 3
    assert samples["dragoman_generation_tokens_total", of_model] == 2 * each * 2
    for name in ("request_queue_time", "request_decode_time", "time_to_first_token", "e2e_request_latency"):
        assert samples[f"dragoman_{name}_seconds_count", of_model] == 2 * each, name


async def test_a_stream_dropped_after_its_first_piece_is_a_cancel_and_has_no_tokens(start_server):
    """What was computed for it is in the tokens of steps alone."""
    running = await start_server()
    for _ in range(5):
        stream = running.client.stream("abcdefgh")
        first = running.gate()
        piece = asyncio.create_task(anext(stream))
        await first.wait_reached()
        second = running.gate()
        first.open()
        await piece
        await second.wait_reached()
        await stream.aclose()
        await running.server._router.idle()
        running.runner.before_decode = lambda: None
        second.open()
        await running.model.engine.drained()
    assert await running.value("dragoman_requests_cancelled_total", model="scripted") == 5
    assert await running.value("dragoman_source_tokens_total", model="scripted") == 0
    assert await running.value("dragoman_request_success_total", model="scripted", finish_reason="stop") == 0
    assert await running.value("dragoman_step_tokens_total", model="scripted", phase="encode") == 5 * 9


async def test_nothing_that_callers_make_up_becomes_a_label(start_server):
    """Models, versions, languages, ids, agents and methods by the thousand: not one series more."""
    running = await start_server()
    noise = random.Random(5)

    def word() -> str:
        return "".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=12))

    def item() -> pb.GenerateRequest:
        request = pb.GenerateRequest(text="ok")
        for name in noise.sample(("model", "version", "request_id", "target_language"), noise.randint(1, 4)):
            setattr(request, name, word())
        return request

    async def attempt(num_items: int, num_calls: int) -> None:
        batch = pb.BatchGenerateRequest(requests=[item() for _ in range(num_items)])
        await running.call(SERVICE + "BatchGenerate", batch.SerializeToString(), metadata=[("user-agent", word())])
        for _ in range(num_calls):
            inference = oip.ModelInferRequest(model_name=word(), model_version=word(), id=word())
            for method, data in (
                (f"/inference.GRPCInferenceService/{word()}", b""),
                (f"/{word()}/Generate", b""),
                (SERVICE + "GetModel", pb.GetModelRequest(model=word()).SerializeToString()),
                ("/inference.GRPCInferenceService/ModelInfer", inference.SerializeToString()),
            ):
                await running.refusal(method, data)

    def series(samples):
        return {sample for sample in samples if not sample[0].endswith("_created")}

    await attempt(200, 2)
    before = series(await running.scrape())
    await attempt(1000, 20)
    assert series(await running.scrape()) == before


async def test_a_request_is_one_line_of_the_log_whatever_it_came_by(start_server, caplog):
    """Unary, streamed, scored, in a batch and by the other protocol; refused ones too; never with their text."""
    caplog.set_level(logging.INFO, "dragoman.requests")
    running = await start_server(observer=lambda metrics: RequestObserver(metrics, logs_requests=True))
    await running.client.generate("secret", request_id="r-1")
    async for _ in running.client.stream("secret"):
        pass
    await running.client.score("secret", "secret")
    await running.client.batch(["secret", "SECRET"])
    inputs = [oip.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[2])]
    inputs[0].contents.bytes_contents.extend([b"secret", b"secret"])
    inference = oip.ModelInferRequest(model_name="scripted", id="r-2", inputs=inputs)
    await running.call("/inference.GRPCInferenceService/ModelInfer", inference.SerializeToString())
    await running.refusal(SERVICE + "Generate", b"\xff")
    await running.server._router.idle()
    lines = [getattr(record, FIELDS) for record in caplog.records]
    told = sorted((line["method"], line["code"], line.get("texts", 1), line.get("source_tokens")) for line in lines)
    assert told == [
        ("BatchGenerate", "invalid_request", 1, None),
        ("BatchGenerate", "ok", 1, 7),
        ("Generate", "invalid_request", 1, None),
        ("Generate", "ok", 1, 7),
        ("ModelInfer", "ok", 2, 14),
        ("Score", "ok", 1, 7),
        ("StreamGenerate", "ok", 1, 7),
    ]
    by_id = {line["request_id"]: line for line in lines if "request_id" in line}
    assert set(by_id) == {"r-1", "r-2"} and by_id["r-1"]["caller"] == "ipv4:127.0.0.1"
    assert by_id["r-1"]["generated_tokens"] == 6 and by_id["r-1"]["seconds"] > 0
    assert "secret" not in json.dumps(lines).lower()


async def test_a_server_process_takes_settings_from_everywhere_and_logs_as_json(tmp_path):
    """Model and address from a file, the log's form from the environment, ports by flags; every line is an object."""
    config = tmp_path / "server.toml"
    config.write_text('model = "g2p-en"\nhost = "127.0.0.1"\nslots = 1\n[per_model.g2p-en]\nslots = 4\n')
    environment = {**os.environ, "DRAGOMAN_CONFIG": str(config), "DRAGOMAN_LOG_FORMAT": "json"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dragoman.cli.main", "serve", "--port", "0", "--metrics-port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
    url = f"http://127.0.0.1:{ready['metrics_port']}/metrics"
    scraped = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    assert 'dragoman_slots_total{model="g2p-en"} 4.0' in scraped
    async with AsyncClient(f"127.0.0.1:{ready['port']}") as client:
        await client.generate("giraffe", request_id="r-1")
    process.terminate()
    _, log = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    lines = [json.loads(line) for line in log.splitlines()]
    (request,) = [line for line in lines if line["logger"] == "dragoman.requests"]
    assert (request["request_id"], request["model"], request["code"]) == ("r-1", "g2p-en", "ok")
    assert b"giraffe" not in log
    assert lines[-1]["message"] == "stopped"
