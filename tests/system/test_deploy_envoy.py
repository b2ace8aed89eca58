"""deploy/envoy/envoy.yaml in a real Envoy, before real servers: nothing but addresses and ports is changed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import yaml
from tests.system.deploy_tools import DEPLOY, fetch, serving, tool, until

from dragoman.client import AsyncClient
from dragoman.config import ServerConfig
from dragoman.metrics import ServerMetrics
from dragoman.model_table import ModelTable
from dragoman.retries import NO_RETRIES
from dragoman.server import Server
from dragoman.testing import ScriptedRunner, scripted_model
from dragoman.v1 import generation_pb2

NUM_CALLS = 1000
NUM_CALLERS = 16


class Envoy:
    """A running one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def _admin(self) -> str:
        file = self._folder / "admin"
        return file.read_text() if file.exists() else ""

    @property
    def target(self) -> str:
        """Where it listens; empty while it does not."""
        return fetch(f"http://{self._admin}/listeners").decode().strip().removeprefix("grpc::")

    def flags(self, port: int) -> str:
        """What it thinks of a server: "healthy", or what is wrong; empty while it knows none."""
        lines = fetch(f"http://{self._admin}/clusters").decode().splitlines()
        begin = f"dragoman::127.0.0.1:{port}::health_flags::"
        return next((line.removeprefix(begin) for line in lines if line.startswith(begin)), "")

    @property
    def log(self) -> str:
        """Its access log."""
        return (self._folder / "log").read_text()


@contextmanager
def balancing(folder: Path, *ports: int) -> Iterator[Envoy]:
    """The project's configuration, with these servers behind it, all of them found healthy."""
    program = tool("envoy")
    config = yaml.safe_load((DEPLOY / "envoy/envoy.yaml").read_text())
    config["admin"]["address"]["socket_address"]["port_value"] = 0
    (listener,), (cluster,) = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": 0}
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}} for port in ports
    ]
    (folder / "envoy.yaml").write_text(yaml.safe_dump(config))
    flags = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error", "--admin-address-path", "admin"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, "-c", "envoy.yaml", *flags], cwd=folder, stdout=log)
    try:
        envoy = Envoy(folder)
        until("Envoy listens", lambda: envoy.target)
        until("Envoy finds the servers healthy", lambda: all(envoy.flags(port) == "healthy" for port in ports))
        yield envoy
    finally:
        process.kill()
        process.wait()


async def test_a_killed_server_costs_no_call(tmp_path):
    """Two servers, one gone without a word in the middle of 1,000 calls of a client that does not retry."""
    tool("envoy")
    with ExitStack() as stack:
        (victim, one), (_, other) = stack.enter_context(serving()), stack.enter_context(serving())
        envoy = stack.enter_context(balancing(tmp_path, one["port"], other["port"]))
        answers: list[str] = []

        async def ask(client: AsyncClient) -> None:
            for _ in range(NUM_CALLS // NUM_CALLERS + 1):
                answers.append((await client.generate("queue")).text)
                if len(answers) == NUM_CALLS // 2:
                    victim.send_signal(signal.SIGKILL)

        async with AsyncClient(envoy.target, retries=NO_RETRIES) as client:
            await asyncio.gather(*(ask(client) for _ in range(NUM_CALLERS)))
        assert len(answers) >= NUM_CALLS
        assert set(answers) == {"K Y UW"}
        for ready in (one, other):  # both had a share
            assert f'"127.0.0.1:{ready["port"]}"' in envoy.log


class Held:
    """A server whose engine waits before each step until it is let go."""

    def __init__(self) -> None:
        self.metrics, runner = ServerMetrics(), ScriptedRunner()
        self.reached, self.let_go = threading.Event(), threading.Event()
        self.let_go.set()
        runner.before_decode = self._before
        model = scripted_model([runner], listener=self.metrics.listener("scripted"))
        config = ServerConfig(host="127.0.0.1", port=0, metrics_port=0, max_text_bytes=100)
        self.server = Server(ModelTable([model]), config, self.metrics)

    def _before(self) -> None:
        self.reached.set()
        assert self.let_go.wait(60)

    @property
    def num_calls(self) -> float:
        """How many calls of Generate it has begun."""
        samples = (sample for family in self.metrics.registry.collect() for sample in family.samples)
        return sum(
            sample.value
            for sample in samples
            if sample.name == "grpc_server_started_total" and sample.labels["grpc_method"] == "Generate"
        )


@asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[Held, Held]]:
    """In this process."""
    one, other = Held(), Held()
    for held in (one, other):
        await held.server.start()
    try:
        yield one, other
    finally:
        for held in (one, other):
            held.let_go.set()
            await held.server.close()


@asynccontextmanager
async def balancing_aside(folder: Path, *ports: int) -> AsyncIterator[Envoy]:
    """As ``balancing``, while servers of this thread's go on."""
    balanced = balancing(folder, *ports)
    envoy = await asyncio.to_thread(balanced.__enter__)
    try:
        yield envoy
    finally:
        await asyncio.to_thread(balanced.__exit__, None, None, None)


async def test_a_draining_server_ends_its_calls_and_gets_no_new_ones(tmp_path):
    """No call fails from the first moment of the drain, and once Envoy has seen it, none goes there."""
    tool("envoy")
    async with two_servers() as (one, other), balancing_aside(tmp_path, one.server.port, other.server.port) as envoy:
        target = await asyncio.to_thread(lambda: envoy.target)
        async with (
            AsyncClient(f"127.0.0.1:{one.server.port}", retries=NO_RETRIES) as direct,
            AsyncClient(target, retries=NO_RETRIES) as client,
        ):
            one.let_go.clear()
            held = asyncio.create_task(direct.generate("held"))
            assert await asyncio.to_thread(one.reached.wait, 60)
            draining = asyncio.create_task(one.server.drain())
            await asyncio.sleep(0)  # it has begun
            for _ in range(20):
                assert (await client.generate("word")).text == "word"
            await asyncio.to_thread(until, "Envoy sees the drain", lambda: "hc" in envoy.flags(one.server.port))
            num_calls = one.num_calls
            for _ in range(20):
                assert (await client.generate("word")).text == "word"
            assert one.num_calls == num_calls
            assert not held.done()
            one.let_go.set()
            assert (await held).text == "held"
            assert await draining


async def test_what_is_refused_is_not_asked_again_and_no_text_is_logged(tmp_path):
    """A request that is wrong is told so by the first server, once; the log has the method and the status."""
    tool("envoy")
    async with two_servers() as (one, other), balancing_aside(tmp_path, one.server.port, other.server.port) as envoy:
        target = await asyncio.to_thread(lambda: envoy.target)
        async with grpc.aio.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
            request = generation_pb2.GenerateRequest(text="secret" * 100).SerializeToString()
            generate = channel.unary_unary("/dragoman.v1.GenerationService/Generate", None, None)
            try:
                await generate(request)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert one.num_calls + other.num_calls == 1
        log = await asyncio.to_thread(until, "Envoy logs the call", lambda: envoy.log)
        assert '"/dragoman.v1.GenerationService/Generate"' in log
        assert "InvalidArgument" in log
        assert "secret" not in log


async def test_browsers_call_by_grpc_web(tmp_path):
    """A request over HTTP/1.1 is answered with the reply and its status as frames of the body."""
    tool("envoy")
    async with two_servers() as (one, other), balancing_aside(tmp_path, one.server.port, other.server.port) as envoy:
        target = await asyncio.to_thread(lambda: envoy.target)
        message = generation_pb2.GenerateRequest(text="word").SerializeToString()
        request = urllib.request.Request(
            f"http://{target}/dragoman.v1.GenerationService/Generate",
            data=b"\0" + len(message).to_bytes(4, "big") + message,
            headers={"Content-Type": "application/grpc-web+proto", "Origin": "http://localhost:3000"},
        )

        def answer() -> tuple[bytes, str]:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.read(), reply.headers["access-control-allow-origin"]

        body, allowed = await asyncio.to_thread(answer)
        assert allowed == "http://localhost:3000"
        size = int.from_bytes(body[1:5], "big")
        assert generation_pb2.GenerateResponse.FromString(body[5 : 5 + size]).text == "word"
        assert body[5 + size] == 0x80  # trailers
        assert b"grpc-status:0" in body[5 + size :]
