"""OpenTelemetry spans of requests, where they are asked for: a request's, and its time in queue, encoder and decoder.

A request's spans are made when it ends, from times that are measured anyway; they go to a collector from a thread of
OpenTelemetry's own, which drops them where it cannot keep up. A ``traceparent`` that came with the call makes them part
of the caller's trace. Needs the extra ``tracing``, and imports it only where spans are wanted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import dragoman
from dragoman.config import TracingConfig
from dragoman.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

    from dragoman.observer import FinishedRequest

logger = logging.getLogger(__name__)

_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_OFF_VARIABLE: Final = "OTEL_SDK_DISABLED"
_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_PATH: Final = "/v1/traces"
_PHASES: Final = ("queue", "encode", "decode")


def is_wanted(config: TracingConfig, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether there is somewhere to send spans to."""
    if environment.get(_OFF_VARIABLE, "").lower() == "true":
        return False
    return bool(config.endpoint) or any(environment.get(name) for name in _ENDPOINT_VARIABLES)


def check_tracing(config: TracingConfig) -> None:
    """Raises ConfigError where spans are wanted and cannot be made."""
    if not is_wanted(config):
        return
    for package in _PACKAGES:
        try:
            found = find_spec(package) is not None
        except ModuleNotFoundError:  # not even what it is in
            found = False
        if not found:
            raise ConfigError(
                f"traces need {package}, which is not installed here: install this project with the extra [tracing], "
                f"or set {_OFF_VARIABLE}=true"
            )
    _headers(config)
    _url(config)


def open_traces(config: TracingConfig) -> Traces | None:
    """Where spans go; None where nobody wants them. Raises ConfigError as ``check_tracing``."""
    check_tracing(config)
    if not is_wanted(config):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource.create({"service.name": "dragoman", "service.version": dragoman.__version__})
    if name := os.environ.get("OTEL_SERVICE_NAME"):
        resource = resource.merge(Resource({"service.name": name}))
    # Without one, the provider reads OTEL_TRACES_SAMPLER.
    sampler = None if config.ratio == 1 else ParentBased(TraceIdRatioBased(config.ratio))
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=_url(config) or None, headers=_headers(config) or None)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    logger.info("spans of requests go to a collector by OTLP")
    return Traces(provider)


class Traces:
    """Makes the spans of one server. Thread-safe."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("dragoman", dragoman.__version__)

    def add(self, request: FinishedRequest) -> None:
        """The spans of a request that has just ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name: text for name, text in request.metadata.items() if isinstance(text, str)}
        attributes: dict[str, str | int] = {
            "rpc.system": "grpc",
            "rpc.service": request.service,
            "rpc.method": request.method,
            "dragoman.code": request.code,
            "dragoman.model": request.model,
            "dragoman.version": request.version,
            "dragoman.source_tokens": request.num_source_tokens,
            "dragoman.generated_tokens": request.num_generated_tokens,
        }
        if request.request_id:
            attributes["dragoman.request_id"] = request.request_id
        ended = request.started_ns + int(request.seconds * 1e9)
        span = self._tracer.start_span(
            f"{request.service}/{request.method}",
            TraceContextTextMapPropagator().extract(headers),
            SpanKind.SERVER,
            attributes,
            start_time=request.started_ns,
        )
        if request.code != "ok":
            span.set_attribute("error.type", request.code)
            span.set_status(Status(StatusCode.ERROR))
        if request.timing is not None and span.is_recording():
            timing = request.timing
            seconds = (timing.queue_seconds, timing.encode_seconds, timing.decode_seconds)
            # What came before the queue is what is left; what comes behind the decoder goes on beside it.
            begins = max(request.started_ns, ended - int(sum(seconds) * 1e9))
            inside = set_span_in_context(span)
            for phase, duration in zip(_PHASES, seconds, strict=True):
                ends = min(ended, begins + int(duration * 1e9))
                self._tracer.start_span(phase, inside, start_time=begins).end(ends)
                begins = ends
        span.end(ended)

    def close(self) -> None:
        """Send what is left; takes seconds where the collector does not answer."""
        self._provider.shutdown()


def _url(config: TracingConfig) -> str:
    """Raises ConfigError."""
    if not config.endpoint:
        return ""
    parts = urlsplit(config.endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"otlp_endpoint is {config.endpoint!r}; it must be a URL, such as http://collector:4318")
    return config.endpoint if parts.path.strip("/") else config.endpoint.rstrip("/") + _PATH


def _headers(config: TracingConfig) -> dict[str, str]:
    """Raises ConfigError; its message does not hold them."""
    headers = {}
    for item in filter(None, (part.strip() for part in config.headers.split(","))):
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise ConfigError("otlp_headers (hidden) is not of the form NAME=VALUE,NAME=VALUE")
        headers[name.strip()] = value.strip()
    return headers
