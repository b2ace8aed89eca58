"""The server: models behind gRPC, with health, reflection and metrics. Belongs to one event loop.

load models -> start: both ports, engines, health SERVING
    -> drain: health NOT_SERVING, running calls end -> close
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from dragoman.config import ServerConfig
from dragoman.errors import ConfigError, DragomanError
from dragoman.metrics import ServerMetrics
from dragoman.metrics_server import MetricsServer
from dragoman.served_model import ServedModel
from dragoman.servicers import generation, health
from dragoman.servicers.generation import GenerationServicer
from dragoman.servicers.health import HealthServicer
from dragoman.servicers.rpc import Call, Method, RpcRouter

MESSAGE_SLACK_BYTES: Final = 1 << 20
"""gRPC's own limit is so far above ours, because our refusal names the value, the limit and the remedy."""

_LAST_STATUS_SECONDS: Final = 1.0
"""How long calls that have ended may take to get their status to the caller."""


class Server:
    """Serves models that are loaded but not started; it starts and closes them."""

    def __init__(self, models: Sequence[ServedModel], config: ServerConfig, metrics: ServerMetrics) -> None:
        """The first model is the default. Raises ConfigError and BundleError for models that cannot be served."""
        self._models = tuple(models)
        self._config = config
        self._metrics = metrics
        self._health = HealthServicer((generation.SERVICE,))
        self._router = RpcRouter(
            (
                *GenerationServicer(models, config, metrics).methods(),
                *self._health.methods(),
                _reflection((generation.SERVICE, health.SERVICE, reflection.SERVICE_NAME)),
            ),
            metrics,
            config.max_message_bytes,
        )
        self._grpc: grpc.aio.Server | None = None
        self._metrics_server: MetricsServer | None = None
        self.port = 0
        """The port that it listens on, once started."""
        self.metrics_port = 0
        """The same for ``GET /metrics``."""

    async def start(self) -> None:
        """Bind both ports, start the engines, say SERVING. Raises ConfigError when a port cannot be had."""
        config = self._config
        try:
            self._metrics_server = MetricsServer(self._metrics.registry, config.host, config.metrics_port)
            self.metrics_port = self._metrics_server.port
            self._grpc = grpc.aio.server(handlers=(self._router,), options=_options(config))
            self.port = _listen(self._grpc, config.host, config.port)
            for model in self._models:
                model.start()
                self._metrics.watch(model.name, model.engine.snapshot)
                self._metrics.set_model_info(model.name, model.version, model.graphs.precision, model.graphs.provider)
            await self._grpc.start()
        except BaseException:
            await self.close()
            raise
        self._health.set_serving(True)

    async def failed(self) -> DragomanError:
        """Return when an engine is dead. Health is NOT_SERVING by then, and the process should exit."""
        waits = [asyncio.ensure_future(model.engine.failed()) for model in self._models]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            self._health.set_serving(False)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()

    async def drain(self) -> bool:
        """Say NOT_SERVING, refuse new calls, let running ones end. False when ``drain_seconds`` was too short."""
        self._health.set_serving(False)
        self._router.drain()
        try:
            await asyncio.wait_for(self._router.idle(), self._config.drain_seconds)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop. What still runs ends with UNAVAILABLE."""
        self._health.set_serving(False)
        self._router.drain()
        for model in self._models:
            await model.close()
        self._health.close()
        if self._grpc is not None:
            await self._grpc.stop(_LAST_STATUS_SECONDS)
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    limit = config.max_message_bytes + MESSAGE_SLACK_BYTES
    return [
        ("grpc.so_reuseport", 0),  # two servers on one port would share its calls in silence
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        # Clients may ping every 10 s, with or without calls: gRPC's default is to cut them off.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A peer that vanished without a word is found within 80 s, and its calls are cancelled.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind. Raises ConfigError."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        _check_free(host, port)
        bound = server.add_insecure_port(address)
        if bound == 0:  # what older gRPC does instead of raising
            raise RuntimeError("gRPC could not bind it")
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"cannot listen on {address}: {reason}: choose another --port (0: a free one)") from error
    return bound


def _check_free(host: str, port: int) -> None:
    """gRPC takes a name with two addresses if one of them is free, and says little about why it could not bind."""
    if port == 0:
        return
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                probe.listen(1)
        except OSError as error:
            # A name may stand for an address that this machine lacks, often ::1; gRPC then takes the others.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise


def _reflection(services: Sequence[str]) -> Method:
    # The stubs know the synchronous servicer alone. Both ignore the context.
    servicer: Any = reflection.aio.ReflectionServicer(services)  # type: ignore[attr-defined]  # not in the stubs

    async def behaviour(
        requests: AsyncIterator[ServerReflectionRequest], call: Call
    ) -> AsyncGenerator[ServerReflectionResponse]:
        async for response in servicer.ServerReflectionInfo(requests, call):
            yield response

    return Method(
        reflection.SERVICE_NAME,
        "ServerReflectionInfo",
        ServerReflectionRequest,
        behaviour,
        stream_request=True,
        stream_reply=True,
    )
