"""A real gRPC server on a free port, over a model that follows a script."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dragoman.alignment import ForcedPass
from dragoman.client import AsyncClient
from dragoman.client_credentials import PLAIN, ClientCredentials, open_async_channel
from dragoman.config import AuthConfig, EngineConfig, ServerConfig, TlsConfig
from dragoman.metrics import ServerMetrics
from dragoman.model_table import ModelTable
from dragoman.observer import RequestObserver
from dragoman.pipeline import TextLimits
from dragoman.retries import NO_RETRIES
from dragoman.served_model import ServedModel
from dragoman.server import Server
from dragoman.testing import ScriptedRunner, scripted_model

SERVICE = "/dragoman.v1.GenerationService/"


class Gate:
    """Stops an engine thread in a step until it is opened: tests say when time passes, not the clock."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._open.wait(60), "the test forgot to open the gate"

    def open(self) -> None:
        self._open.set()

    async def wait_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 60)


@dataclass
class Running:
    """A server that runs, and a client of it."""

    server: Server
    model: ServedModel
    runner: ScriptedRunner
    metrics: ServerMetrics
    client: AsyncClient
    channel: grpc.aio.Channel
    gates: list[Gate] = field(default_factory=list)

    def gate(self) -> Gate:
        """Stop the engine at its next decoding step."""
        gate = Gate()
        self.gates.append(gate)
        self.runner.before_decode = gate
        return gate

    async def call(self, method: str, data: bytes, **options: Any) -> bytes:
        """A unary call of raw bytes."""
        reply = await self.channel.unary_unary(method, None, None)(data, **options)
        assert isinstance(reply, bytes)
        return reply

    async def refusal(self, method: str, data: bytes) -> grpc.aio.AioRpcError:
        """How a unary call of raw bytes fails."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(method, data)
        return caught.value

    async def scrape(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """All samples by name and labels, as Prometheus would read them."""
        url = f"http://127.0.0.1:{self.server.metrics_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def value(self, name: str, **labels: str) -> float:
        """One sample; 0 if it is not there."""
        return (await self.scrape()).get((name, frozenset(labels.items())), 0.0)


StartServer = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """Starts a server; it ends with the test. Other keyword arguments are ServerConfig's."""
    started: list[Running] = []

    async def start(
        runner: ScriptedRunner | None = None,
        engine: EngineConfig | None = None,
        forced_pass: ForcedPass | None = None,
        coverage: ForcedPass | None = None,
        tls: TlsConfig = TlsConfig(),  # noqa: B008  # frozen
        auth: AuthConfig = AuthConfig(),  # noqa: B008  # frozen
        credentials: ClientCredentials = PLAIN,
        observer: Callable[[ServerMetrics], RequestObserver] = RequestObserver,
        **settings: Any,
    ) -> Running:
        config = ServerConfig(**{"host": "127.0.0.1", "port": 0, "metrics_port": 0, "drain_seconds": 30.0, **settings})
        runner = runner or ScriptedRunner()
        metrics = ServerMetrics()
        limits = TextLimits(config.max_text_bytes, config.max_segments)
        model = scripted_model(
            [runner], engine, limits, metrics.listener("scripted"), forced_pass=forced_pass, coverage=coverage
        )
        server = Server(ModelTable([model]), config, metrics, tls=tls, auth=auth, observer=observer(metrics))
        await server.start()
        target = f"127.0.0.1:{server.port}"
        channel = open_async_channel(target, credentials, [("grpc.enable_http_proxy", 0)])
        client = AsyncClient(target, credentials=credentials, retries=NO_RETRIES)  # a refusal is to be seen
        running = Running(server, model, runner, metrics, client, channel)
        started.append(running)
        return running

    yield start
    for running in started:
        for gate in running.gates:
            gate.open()
        await running.client.close()
        await running.channel.close(None)
        await running.server.close()
