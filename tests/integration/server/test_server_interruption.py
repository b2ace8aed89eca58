"""Deadlines, cancels and vanished callers reach the engine, and nothing is left behind."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

import dragoman.server
from dragoman.config import EngineConfig
from dragoman.errors import DeadlineError, RequestCancelledError
from dragoman.testing import ScriptedRunner
from dragoman.v1 import generation_pb2 as pb

GENERATE = "/dragoman.v1.GenerationService/Generate"


async def test_expired_calls_never_reach_the_encoder(start_server):
    """Thirty calls whose deadline passes in the queue end DEADLINE_EXCEEDED, are never computed, and are counted."""
    running = await start_server(ScriptedRunner(num_slots=1))
    gate = running.gate()
    busy = asyncio.create_task(running.client.generate("a"))
    await gate.wait_reached()
    expired = await asyncio.gather(
        *(running.client.generate("bcd", timeout=1.0) for _ in range(30)), return_exceptions=True
    )
    assert [type(error) for error in expired] == [DeadlineError] * 30
    fresh = asyncio.create_task(running.client.generate("e"))
    gate.open()
    assert (await fresh).text == "e"
    assert (await busy).text == "a"
    await running.model.engine.drained()
    assert len(running.runner.encoded) == 2
    assert await running.value("dragoman_requests_expired_in_queue_total", model="scripted") == 30
    ended = await running.value("dragoman_requests_total", model="scripted", method="Generate", code="deadline")
    assert ended == 30


async def test_a_deadline_that_passes_while_decoding_frees_the_slot(start_server):
    """Both calls are being decoded when one's deadline passes: the next step ends it, its neighbour is unharmed."""
    running = await start_server()
    gate = running.gate()
    neighbour = asyncio.create_task(running.client.generate("abcdefgh"))
    await gate.wait_reached()  # the neighbour's first step waits
    late = asyncio.create_task(running.client.generate("zzzzzzzz", timeout=2.0))
    while running.model.engine.snapshot().num_waiting == 0:
        await asyncio.sleep(0.01)
    second = running.gate()
    gate.open()
    await second.wait_reached()  # both rows are in this step
    assert len(running.runner.encoded) == 2
    with pytest.raises(DeadlineError):
        await late
    second.open()
    assert (await neighbour).text == "abcdefgh"
    await running.model.engine.drained()
    assert running.model.engine.snapshot().slots_used == 0
    assert await running.value("dragoman_requests_expired_in_queue_total", model="scripted") == 0


@pytest.mark.parametrize("method", ["generate", "stream", "batch"])
async def test_a_cancelled_call_is_cancelled_in_the_engine(start_server, method):
    """Whichever method it came by, its slots are free as soon as the step is over."""
    running = await start_server()
    gate = running.gate()

    async def consume() -> None:
        if method == "stream":
            async for _ in running.client.stream("a" * 60):
                pass
        elif method == "batch":
            await running.client.batch(["a" * 60, "b" * 60])
        else:
            await running.client.generate("a" * 60)

    call = asyncio.create_task(consume())
    await gate.wait_reached()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await running.server._router.idle()  # the handlers are gone, though the engine still hangs in its step
    gate.open()
    await running.model.engine.drained()
    assert running.runner.num_decode_steps <= 2
    snapshot = running.model.engine.snapshot()
    assert (snapshot.slots_used, snapshot.num_running, snapshot.num_waiting) == (0, 0, 0)
    count = 2 if method == "batch" else 1
    assert await running.value("dragoman_requests_cancelled_total", model="scripted") == count


async def test_a_caller_that_hangs_up_is_a_cancel(start_server):
    """Closing the connection with a call in flight frees its slots."""
    running = await start_server()
    gate = running.gate()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{running.server.port}", options=[("grpc.enable_http_proxy", 0)])
    call = channel.unary_unary(GENERATE, None, None)(pb.GenerateRequest(text="a" * 60).SerializeToString())
    await gate.wait_reached()
    await channel.close(None)
    with pytest.raises(asyncio.CancelledError):
        await call
    await running.server._router.idle()
    gate.open()
    await running.model.engine.drained()
    assert running.runner.num_decode_steps <= 2


async def test_one_of_two_calls_with_the_same_id_can_be_cancelled(start_server):
    """The caller's id identifies nothing here."""
    running = await start_server()
    gate = running.gate()
    kept = asyncio.create_task(running.client.generate("abc", request_id="same"))
    dropped = asyncio.create_task(running.client.generate("xyz", request_id="same"))
    await gate.wait_reached()
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    gate.open()
    result = await kept
    assert (result.text, result.request_id) == ("abc", "same")


async def test_metrics_are_at_rest_and_complete_after_any_mixture(start_server):
    """Every request is counted once, by how it ended, and every gauge is back at zero."""
    running = await start_server(ScriptedRunner(num_slots=4), EngineConfig(max_waiting=1000))
    client = running.client

    async def dropped_stream() -> None:
        items = client.stream("abcdef")
        await anext(items)
        await items.aclose()

    gate = running.gate()
    late = [asyncio.create_task(client.generate("b", timeout=1.0)) for _ in range(10)]
    assert {type(r) for r in await asyncio.gather(*late, return_exceptions=True)} == {DeadlineError}
    gone = [asyncio.create_task(client.generate("c" * 60)) for _ in range(10)]
    while running.model.engine.snapshot().num_waiting + running.model.engine.snapshot().num_running < 20:
        await client.model_info()
    for call in gone:
        call.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    gate.open()
    await asyncio.gather(*(client.generate("abc") for _ in range(10)))
    await asyncio.gather(*(client.generate("123") for _ in range(10)), return_exceptions=True)
    await asyncio.gather(*(dropped_stream() for _ in range(10)))
    await client.batch(["a", "1"] * 5)
    await running.server._router.idle()
    await running.model.engine.drained()

    samples = await running.scrape()
    ended: dict[str, float] = {}
    for (name, labels), value in samples.items():
        if name == "dragoman_requests_total":
            code = dict(labels)["code"]
            ended[code] = ended.get(code, 0) + value
    # A stream may have been answered in full before its caller's hang-up came through.
    assert ended["ok"] + ended.get("cancelled", 0) == 10 + 5 + 10 + 10
    assert ended["cancelled"] >= 10
    assert (ended["deadline"], ended["invalid_request"]) == (10, 15)
    assert set(ended) == {"ok", "cancelled", "deadline", "invalid_request"}
    for gauge in ("num_requests_running", "num_requests_waiting", "slots_used"):
        assert samples[(f"dragoman_{gauge}", frozenset({("model", "scripted")}))] == 0
    for (name, labels), value in samples.items():
        if name == "grpc_server_started_total":
            handled = sum(
                other for (n, ls), other in samples.items() if n == "grpc_server_handled_total" and labels <= ls
            )
            assert handled == value, labels


async def test_callers_cannot_make_up_series(start_server):
    """Model names, versions, ids, methods and services from outside never become labels."""
    running = await start_server()
    await running.refusal("/a.b/C", b"")
    await running.refusal(GENERATE, pb.GenerateRequest(model="first").SerializeToString())
    before = set(await running.scrape())
    for i in range(20):
        await running.refusal(f"/made.up{i}/Method{i}", b"")
        data = pb.GenerateRequest(model=f"m{i}", version=f"v{i}", request_id=f"r{i}", text="a").SerializeToString()
        await running.refusal(GENERATE, data)
    assert set(await running.scrape()) == before


async def test_a_cancel_by_the_engine_is_cancelled_for_the_caller(start_server, monkeypatch):
    """An error that the engine makes has the status of the table, whoever made it."""
    running = await start_server()

    def cancelled(*args: object) -> None:
        raise RequestCancelledError("the request was cancelled")

    monkeypatch.setattr(running.model.engine, "submit", cancelled)
    error = await running.refusal(GENERATE, pb.GenerateRequest(text="a").SerializeToString())
    assert error.code() is grpc.StatusCode.CANCELLED


SLOW = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.lookahead_bytes", 1),  # the server may send no more than is being read
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


async def test_a_slow_reader_holds_up_nobody_and_keeps_no_more_than_its_answer(start_server):
    """Twenty read one event and stop. The engine goes on to their ends, others are answered, and nothing piles up."""
    running = await start_server(ScriptedRunner(num_slots=4))
    options = pb.DecodingOptions(num_top_tokens=8)
    request = pb.GenerateRequest(text="\n".join(["ab" * 30] * 4), options=options).SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.server.port}", options=SLOW) as channel:
        calls = [channel.unary_stream("/dragoman.v1.GenerationService/StreamGenerate")(request) for _ in range(20)]
        events = [[await call.read()] for call in calls]
        answers = await asyncio.gather(*(running.client.generate("abc") for _ in range(20)))
        assert {answer.text for answer in answers} == {"abc"}
        await running.model.engine.drained()  # all rows are free, though nobody has read the answers
        admission = running.server._admission
        assert admission.num_calls > 0
        for call, read in zip(calls, events, strict=True):
            while (event := await call.read()) is not grpc.aio.EOF:
                read.append(event)
        await running.server._router.idle()
    for read in events:
        last = pb.StreamGenerateResponse.FromString(read[-1])
        assert last.response.text == "\n".join(["ab" * 30] * 4)
    assert (admission.num_calls, admission.num_bytes) == (0, 0)


GARBAGE = {
    "nothing": b"",
    "noise": bytes(range(256)) * 8,
    "http/1.1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"\x00" * 160,
    "half a preface": b"PRI * HTTP/2.0\r\n",
    "a preface and noise": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
    "a frame that never ends": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00\xff\xff\xff",
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_on_the_port_and_half_open_connections_harm_nobody(start_server, name):
    """Some hang up, some stay silent; callers on other connections are answered, those there were and new ones."""
    running = await start_server()
    assert (await running.client.generate("abc")).text == "abc"
    sockets = []
    for port in (running.server.port, running.server.metrics_port):
        for _ in range(8):
            connection = socket.create_connection(("127.0.0.1", port), timeout=10)
            connection.sendall(GARBAGE[name])
            sockets.append(connection)
    for connection in sockets[::2]:
        connection.close()
    assert (await running.client.generate("abc")).text == "abc"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.server.port}", options=SLOW) as channel:
        reply = await channel.unary_unary(GENERATE)(pb.GenerateRequest(text="abc").SerializeToString())
    assert pb.GenerateResponse.FromString(reply).text == "abc"
    assert await running.value("dragoman_requests_total", model="scripted", method="Generate", code="ok") == 3
    for connection in sockets:
        connection.close()


@pytest.mark.parametrize("data", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], ids=["silent", "a preface alone"])
async def test_a_connection_that_says_nothing_is_hung_up_on(start_server, monkeypatch, data):
    """So that nobody can hold the server's files by connecting alone."""
    monkeypatch.setattr(dragoman.server, "_HANDSHAKE_SECONDS", 0.1)
    running = await start_server()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
    writer.write(data)
    await asyncio.wait_for(reader.read(), 60)  # returns when the other side has closed
    writer.close()
    assert (await running.client.generate("abc")).text == "abc"
