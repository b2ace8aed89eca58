"""The server: models behind gRPC, with health, reflection and metrics. Belongs to one event loop.

start: both ports, health NOT_SERVING -> models load, engines start -> health SERVING
    -> drain: health NOT_SERVING, running calls end -> close
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from dragoman.admission import Admission
from dragoman.certificates import Certificates
from dragoman.config import AuthConfig, ServerConfig, TlsConfig
from dragoman.errors import ConfigError, DragomanError
from dragoman.metrics import ServerMetrics
from dragoman.metrics_server import MetricsServer
from dragoman.model_loader import ModelLoader
from dragoman.model_table import ModelTable
from dragoman.observer import RequestObserver
from dragoman.served_model import ServedModel
from dragoman.servicers import generation, health, inference
from dragoman.servicers.generation import GenerationServicer
from dragoman.servicers.health import HealthServicer
from dragoman.servicers.inference import InferenceServicer
from dragoman.servicers.rpc import Call, Method, RpcRouter
from dragoman.tokens import Tokens

logger = logging.getLogger(__name__)

MESSAGE_SLACK_BYTES: Final = 1 << 20
"""gRPC's own limit is so far above ours, because our refusal names the value, the limit and the remedy."""

_CALLS_WITHOUT_MODELS: Final = 64
"""So many calls are let in while no model is there: each is told so."""

_MAX_PENDING: Final = 16_384
"""How many calls may wait to be seen at all; they take a few KiB each."""

_MAX_STREAMS: Final = 4_096
"""How many calls one connection may have at a time. More wait at the caller's end."""

_LAG_SECONDS: Final = 0.25
"""How often it is measured how late the event loop is."""

_HANDSHAKE_SECONDS: Final = 10.0
"""How long a new connection may take to say what HTTP/2, and TLS, begin with; whoever stays silent is hung up on."""

_LAST_STATUS_SECONDS: Final = 1.0
"""How long calls that have ended may take to get their status to the caller."""


class Server:
    """Serves what is in a table, and what a loader puts there. Closes all of it in the end."""

    def __init__(
        self,
        table: ModelTable,
        config: ServerConfig,
        metrics: ServerMetrics,
        loader: ModelLoader | None = None,
        *,
        tls: TlsConfig = TlsConfig(),  # noqa: B008  # frozen
        auth: AuthConfig = AuthConfig(),  # noqa: B008  # frozen
        observer: RequestObserver | None = None,
    ) -> None:
        """``loader``: for a table whose models are loaded while the server runs already; None where all are there.

        ``observer``: who is told of each request; by default it tells ``metrics`` alone.

        Raises ConfigError for files of ``tls`` and ``auth`` that cannot be used.
        """
        self._table = table
        self._loader = loader
        self._config = config
        self._metrics = metrics
        observer = observer or RequestObserver(metrics)
        services = (generation.SERVICE, inference.SERVICE)
        self._health = HealthServicer(table, services)
        self._certificates = Certificates(tls) if tls.certificate else None
        if auth.tokens and not tls.certificate:
            logger.warning("tokens and texts travel in the clear: give the server a certificate, or put TLS before it")
        control = loader if loader is not None and loader.callers_may_load else None
        self._admission = admission = Admission(config.max_calls or _CALLS_WITHOUT_MODELS, config.max_request_bytes)
        metrics.watch_calls(lambda: admission.num_calls, lambda: admission.num_bytes)
        self._router = RpcRouter(
            (
                *GenerationServicer(table, config, observer).methods(),
                *InferenceServicer(table, config, observer, self.is_ready, control).methods(),
                *self._health.methods(),
                _reflection((*services, health.SERVICE, reflection.SERVICE_NAME), is_open=auth.open_reflection),
            ),
            observer,
            config.max_message_bytes,
            admission,
            Tokens(auth.tokens) if auth.tokens else None,
        )
        self._grpc: grpc.aio.Server | None = None
        self._metrics_server: MetricsServer | None = None
        self._polling: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.port = 0
        """The port that it listens on, once started."""
        self.metrics_port = 0
        """The same for ``GET /metrics``."""

    @property
    def model_names(self) -> list[str]:
        """The names of the models that are served, the default first."""
        return list(dict.fromkeys(model.name for model in self._table.models))

    def is_ready(self) -> bool:
        """Whether requests should come here: not while models load, nor while it drains."""
        return self._health.is_serving

    async def start(self) -> None:
        """Bind both ports, load what there is to load, start the engines, say SERVING.

        Health answers as soon as the ports are bound, and requests are refused as ``NotReadyError`` until their model
        is there. Raises ConfigError when a port cannot be had or there is nothing to serve, and BundleError for a model
        that cannot be served.
        """
        config = self._config
        try:
            if self._loader is not None:
                await self._loader.announce()
            self._metrics_server = MetricsServer(
                self._metrics.registry, config.metrics_host or config.host, config.metrics_port
            )
            self.metrics_port = self._metrics_server.port
            self._grpc = grpc.aio.server(handlers=(self._router,), options=_options(config))
            self.port = _listen(self._grpc, config.host, config.port, self._certificates)
            await self._grpc.start()
            self._watching = asyncio.create_task(_watch_lag(self._metrics))
            self._table.start(self)
            if self._loader is not None:
                await self._loader.load_all()
                self._polling = self._loader.start_polling()
        except BaseException:
            await self.close()
            raise
        self._health.set_serving(True)

    async def reload(self) -> None:
        """Bring what is served up to date with the models' folders; what cannot be loaded changes nothing."""
        if self._loader is not None:
            await self._loader.reload()

    async def failed(self) -> DragomanError:
        """Return when an engine is dead. Health is NOT_SERVING by then, and the process should exit."""
        return await self._table.failed()

    async def drain(self) -> bool:
        """Say NOT_SERVING, refuse new calls, let running ones end. False when ``drain_seconds`` was too short."""
        self._health.set_serving(False)
        self._router.drain()
        if self._polling is not None:
            self._polling.cancel()
        try:
            await asyncio.wait_for(self._router.idle(), self._config.drain_seconds)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop. What still runs ends with UNAVAILABLE."""
        self._health.set_serving(False)
        self._router.drain()
        if self._polling is not None:
            self._polling.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if self._loader is not None:
            await self._loader.close()
        await self._table.close()
        self._health.close()
        if self._grpc is not None:
            await self._grpc.stop(_LAST_STATUS_SECONDS)
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)

    def on_ready(self, model: ServedModel) -> None:
        """See ``TableListener``."""
        graphs = model.graphs
        self._metrics.watch(model.name, model.version, graphs.precision, graphs.provider, model.engine.snapshot)

    def on_gone(self, model: ServedModel) -> None:
        """See ``TableListener``."""
        self._metrics.unwatch(model.engine.snapshot)

    def on_change(self) -> None:
        """See ``TableListener``."""
        if not self._config.max_calls:
            num_places = sum(model.engine.num_places for model in self._table.models)
            self._admission.max_calls = num_places or _CALLS_WITHOUT_MODELS
        self._health.tell()


async def _watch_lag(metrics: ServerMetrics) -> None:
    """Tell how late this thread is, for ever: what comes in while it is waits as long."""
    while True:
        due = time.monotonic() + _LAG_SECONDS
        await asyncio.sleep(_LAG_SECONDS)
        metrics.event_loop_lagged(max(0.0, time.monotonic() - due))


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    limit = config.max_message_bytes + MESSAGE_SLACK_BYTES
    return [
        ("grpc.so_reuseport", 0),  # two servers on one port would share its calls in silence
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.max_concurrent_streams", max(_MAX_STREAMS, 2 * config.max_calls)),
        # Calls that came in a burst and that Python has not seen yet. Beyond 1000 gRPC would drop some, ever more up to
        # 3000, as CANCELLED; we refuse them with a reason and the time to wait, as soon as each one's turn comes.
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING),
        ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_SECONDS * 1000)),
        # Clients may ping every 10 s, with or without calls: gRPC's default is to cut them off.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A peer that vanished without a word is found within 80 s, and its calls are cancelled.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _listen(server: grpc.aio.Server, host: str, port: int, certificates: Certificates | None) -> int:
    """Bind, with TLS where there are certificates. Raises ConfigError."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        _check_free(host, port)
        if certificates is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, certificates.credentials())
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


def _reflection(services: Sequence[str], *, is_open: bool) -> Method:
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
        is_open=is_open,
    )
