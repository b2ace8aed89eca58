"""Start, health, drain, ports, and the death of an engine."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from dragoman.client import ServedResult
from dragoman.config import EngineConfig, ServerConfig
from dragoman.errors import ConfigError, EngineDeadError, NotReadyError
from dragoman.metrics import ServerMetrics
from dragoman.model_table import ModelTable
from dragoman.server import Server
from dragoman.testing import ALPHABET, ScriptedRunner, copy_script, scripted_model

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING
GENERATION = "dragoman.v1.GenerationService"


async def check(running: Any, service: str = "") -> int:
    data = HealthCheckRequest(service=service).SerializeToString()
    reply = await running.call("/grpc.health.v1.Health/Check", data)
    return int(HealthCheckResponse.FromString(reply).status)


def watch(running: Any, service: str = "") -> AsyncIterator[HealthCheckResponse]:
    call = running.channel.unary_stream(
        "/grpc.health.v1.Health/Watch", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
    )
    return aiter(call(HealthCheckRequest(service=service)))


async def test_health_is_serving_while_it_serves_and_not_while_it_drains(start_server):
    """Check answers for the server and the service; Watch tells of the change by itself, to every watcher."""
    running = await start_server()
    assert await check(running) == await check(running, GENERATION) == SERVING
    watchers = [watch(running), watch(running, GENERATION), watch(running)]
    assert [(await anext(w)).status for w in watchers] == [SERVING] * 3
    gate = running.gate()
    call = asyncio.create_task(running.client.generate("abc"))
    await gate.wait_reached()
    drain = asyncio.create_task(running.server.drain())
    assert [(await anext(w)).status for w in watchers] == [NOT_SERVING] * 3
    assert await check(running) == NOT_SERVING
    assert await check(running, f"{GENERATION}/scripted") == NOT_SERVING
    assert await check(running, "liveness") == SERVING
    with pytest.raises(NotReadyError, match="draining"):
        await running.client.generate("abc")
    gate.open()
    assert (await call).text == "abc"
    assert await drain is True


async def test_a_watcher_that_leaves_takes_no_other_with_it(start_server):
    """The watchers that stay are told of the next change."""
    running = await start_server()
    leaving = running.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
    staying = watch(running)
    await anext(aiter(leaving))
    await anext(staying)
    leaving.cancel()
    while (
        await running.value(
            "grpc_server_handled_total",
            grpc_type="server_stream",
            grpc_service="grpc.health.v1.Health",
            grpc_method="Watch",
            grpc_code="CANCELLED",
        )
        < 1
    ):
        await check(running)
    running.server._health.set_serving(False)
    assert (await anext(staying)).status == NOT_SERVING


async def test_watching_an_unknown_service_says_so_and_goes_on(start_server):
    """SERVICE_UNKNOWN is a status, not an error, as the protocol wants it."""
    running = await start_server()
    assert (await anext(watch(running, "other"))).status == HealthCheckResponse.SERVICE_UNKNOWN


async def test_requests_that_outlast_the_drain_fail_as_unavailable(start_server):
    """Drain gives up after drain_seconds, and close ends what is left."""
    running = await start_server(ScriptedRunner(), drain_seconds=0.0)
    gate = running.gate()
    call = asyncio.create_task(running.client.generate("a" * 60))
    await gate.wait_reached()
    assert await running.server.drain() is False
    close = asyncio.create_task(running.server.close())
    await asyncio.sleep(0)  # one turn of the loop: the engine is told to stop before its step ends
    gate.open()
    with pytest.raises(NotReadyError):
        await call
    await close


async def test_a_stream_that_runs_during_the_drain_ends_as_it_would_have(start_server):
    """Its last item is the whole answer."""
    running = await start_server()
    gate = running.gate()
    items = running.client.stream("abc")
    first = asyncio.ensure_future(anext(items))
    await gate.wait_reached()
    drain = asyncio.create_task(running.server.drain())
    gate.open()
    await first
    *_, whole = [item async for item in items]
    assert whole.text == "abc"
    assert await drain is True


async def test_each_call_that_runs_or_waits_during_the_drain_ends_as_it_would_have(start_server):
    """Streams that fail end with their own status, the others and those that wait with their answers; none is new."""
    broken = ("aaa", "aab")

    def script(source, fed):
        letters = "".join(ALPHABET[index - 4] for index in source[:-1])
        return [float("nan")] * 30 if letters in broken and len(fed) > 1 else copy_script(source, fed)

    running = await start_server(ScriptedRunner(script, num_slots=5))
    gate = running.gate()

    async def stream(text: str) -> str:
        *_, whole = [item async for item in running.client.stream(text)]
        assert isinstance(whole, ServedResult)
        return whole.text

    texts = (*broken, "bcd", "cde", "def")
    streams = [asyncio.create_task(stream(text)) for text in texts]
    await gate.wait_reached()
    waiting = [asyncio.create_task(running.client.generate(f"x{letter}")) for letter in ALPHABET[:10]]
    while running.model.engine.snapshot().num_waiting + running.model.engine.snapshot().num_running < 15:
        await check(running)
    drain = asyncio.create_task(running.server.drain())
    while await check(running) == SERVING:
        pass
    with pytest.raises(NotReadyError, match="draining"):
        await running.client.generate("abc")
    gate.open()
    ends = await asyncio.gather(*streams, return_exceptions=True)
    assert [end if isinstance(end, str) else end.code for end in ends] == ["internal"] * 2 + list(texts[2:])
    assert [(await call).text for call in waiting] == [f"x{letter}" for letter in ALPHABET[:10]]
    assert await drain is True


@pytest.mark.parametrize("which", ["port", "metrics_port"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
async def test_a_port_in_use_is_a_clear_error(host, which):
    """Never a port that is shared in silence; the message names host and port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = ServerConfig(**{"host": host, "port": 0, "metrics_port": 0, which: port})
        server = Server(ModelTable([scripted_model()]), config, ServerMetrics())
        with pytest.raises(ConfigError, match=rf"{host}:{port}.*in use"):
            await server.start()


async def test_a_second_server_cannot_have_the_port_of_the_first(start_server):
    """Not even one that is made the same way."""
    running = await start_server()
    for which, port in (("port", running.server.port), ("metrics_port", running.server.metrics_port)):
        with pytest.raises(ConfigError, match=str(port)):
            await start_server(**{which: port})
    assert (await running.client.generate("abc")).text == "abc"


async def test_the_same_model_twice_is_refused():
    """Names and versions route requests, so they must differ."""
    with pytest.raises(ConfigError, match="scripted version 1"):
        ModelTable([scripted_model(), scripted_model()])


async def test_a_runner_that_raises_fails_every_call_and_turns_health(start_server):
    """Running and waiting calls get UNAVAILABLE, later ones too, and the server reports its failure."""
    running = await start_server(ScriptedRunner(num_slots=1))

    def explode() -> None:
        raise RuntimeError("secret")

    running.runner.before_decode = explode
    failed = asyncio.create_task(running.server.failed())
    calls = [asyncio.create_task(running.client.generate("abc")) for _ in range(3)]
    for call in calls:
        with pytest.raises(EngineDeadError) as caught:
            await call
        assert "secret" not in str(caught.value)
    assert isinstance(await failed, EngineDeadError)
    assert await check(running) == await check(running, "liveness") == NOT_SERVING
    with pytest.raises(EngineDeadError):
        await running.client.generate("abc")


async def test_a_step_that_hangs_is_found_and_fails_every_call(start_server):
    """A live thread that computes for ever is as dead as one that raised."""
    running = await start_server(ScriptedRunner(), EngineConfig(stuck_seconds=0.2))
    gate = running.gate()
    failed = asyncio.create_task(running.server.failed())
    call = asyncio.create_task(running.client.generate("abc"))
    await gate.wait_reached()
    with pytest.raises(EngineDeadError):
        await call
    assert isinstance(await failed, EngineDeadError)
    assert await check(running, GENERATION) == await check(running, "liveness") == NOT_SERVING


SERVE = """
import asyncio, sys, threading, time
from dragoman.cli.serve import serve
from dragoman.config import EngineConfig, ServerConfig
from dragoman.metrics import ServerMetrics
from dragoman.model_table import ModelTable
from dragoman.server import Server
from dragoman.testing import ScriptedRunner, scripted_model

runner = ScriptedRunner(num_slots=4)
def fault():
    {fault}
runner.before_decode = fault
model = scripted_model([runner], EngineConfig(stuck_seconds={stuck_seconds}))
config = ServerConfig(host="127.0.0.1", port=0, metrics_port=0)
async def main():
    return await serve(Server(ModelTable([model]), config, ServerMetrics()))
sys.exit(asyncio.run(main()))
"""


class Process:
    """``serve`` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0

    async def ready(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        ready = json.loads(line)
        assert isinstance(ready, dict)
        self.port = ready["port"]
        return ready

    async def status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 60)

    def call(self, text: bytes) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
        """A call whose channel lives as long as the call."""
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=[("grpc.enable_http_proxy", 0)])
        data = b"\x1a" + bytes([len(text)]) + text
        generate = self._channel.unary_unary("/dragoman.v1.GenerationService/Generate", None, None)
        return generate(data, wait_for_ready=True)


@pytest.fixture
async def start_process():
    """Starts ``serve`` with a fault in each step; it is gone with the test."""
    started: list[Process] = []

    async def start(fault: str = "pass", stuck_seconds: float = 0.5) -> Process:
        code = SERVE.format(fault=fault, stuck_seconds=stuck_seconds)
        pipe = asyncio.subprocess.PIPE
        process = Process(await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=pipe, stderr=pipe))
        started.append(process)
        return process

    yield start
    for process in started:
        if process.process.returncode is None:
            process.process.kill()
        await process.process.communicate()
        if process.port and hasattr(process, "_channel"):
            await process._channel.close(None)


async def test_serve_says_where_it_is_and_ends_well_on_sigterm(start_process):
    """One JSON line when ready, calls answered, exit status 0."""
    process = await start_process()
    ready = await process.ready()
    assert set(ready) == {"port", "metrics_port", "models"} and ready["models"] == ["scripted"]
    assert b"abc" in await process.call(b"abc")
    process.process.terminate()
    assert await process.status() == 0
    assert await process.process.stdout.read() == b""


@pytest.mark.parametrize("fault", ["raise RuntimeError('broken')", "threading.Event().wait()"], ids=["raises", "hangs"])
async def test_serve_exits_70_when_its_engine_dies(start_process, fault):
    """Never a live port before a dead engine, whether the engine raised or hangs."""
    process = await start_process(fault)
    await process.ready()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await process.call(b"abc")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await process.status() == 70


async def test_a_second_signal_ends_serve_at_once(start_process):
    """It says so, and the exit status tells that requests were lost."""
    process = await start_process("time.sleep(0.4)", stuck_seconds=60)
    await process.ready()
    call = process.call(b"a" * 60)
    health = process._channel.unary_unary("/grpc.health.v1.Health/Check")
    await health(b"", wait_for_ready=True)
    process.process.terminate()
    while (await health(b"")) == HealthCheckResponse(status=SERVING).SerializeToString():
        pass
    process.process.terminate()
    assert await process.status() == 1
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    assert b"SIGTERM again" in await process.process.stderr.read()


LOAD_FOR_EVER = """
import asyncio, sys, threading
from pathlib import Path
from dragoman.cli.serve import serve
from dragoman.config import RepositoryConfig, ServerConfig, embedded_bundle
from dragoman.metrics import ServerMetrics
from dragoman.model_loader import ModelLoader
from dragoman.model_repository import ModelRepository
from dragoman.model_table import ModelTable
from dragoman.server import Server

def load(path):
    print("loading", flush=True)
    threading.Event().wait()

async def main():
    table = ModelTable()
    loader = ModelLoader(table, ModelRepository([embedded_bundle("g2p-en")]), load, RepositoryConfig(), 30.0)
    config = ServerConfig(host="127.0.0.1", port=0, metrics_port=0)
    return await serve(Server(table, config, ServerMetrics(), loader))
sys.exit(asyncio.run(main()))
"""


async def test_a_signal_while_models_load_ends_serve_at_once():
    """However long the load would have taken: nothing was promised to anybody, and the exit status is 0."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", LOAD_FOR_EVER, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"loading\n"
    process.terminate()
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out) == (0, b"")
