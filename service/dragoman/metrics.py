"""What happened, as Prometheus sees it. The engine does not know that Prometheus exists: it tells a ``StatsListener``.

Two things are counted, and their names tell them apart. A *request* is one text from a caller, counted once when it
ends, whichever way, by ``requests_total``. Each of its segments is one *sequence* of the engine: the counters of tokens
and of finish reasons and the histograms of queue, encode, decode and first-token time are about sequences that ended
well. What the model computed for others too is in ``step_tokens_total``.

All labels come from fixed sets: served models, methods, codes. Nothing that a caller makes up becomes one.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import dragoman
from dragoman.types import EngineSnapshot, RequestStats, StepStats

OTHER: Final = "other"
"""The label of a model or method that is not served here."""

SECONDS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

_REJECTIONS: Final = frozenset(
    (
        "invalid_request",
        "source_too_long",
        "model_not_found",
        "unsupported",
        "model_unsupported",
        "overloaded",
        "too_late",
        "not_ready",
    )
)


class ServerMetrics:
    """All metrics of one server, in a registry of their own. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._snapshots = _SnapshotCollector()
        self.registry.register(self._snapshots)

        self._requests = self._counter("requests", "Requests that ended, by outcome.", "model", "method", "code")
        self._rejected = self._counter("requests_rejected", "Requests refused as they came.", "model", "reason")
        self._cancelled = self._counter("requests_cancelled", "Requests whose caller went away.", "model")
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to answer, of requests that ended well.", "model"
        )

        self._success = self._counter("request_success", "Sequences that ended well.", "model", "finish_reason")
        self._expired = self._counter(
            "requests_expired_in_queue", "Sequences whose deadline passed before they reached the model.", "model"
        )
        self._shared = self._counter(
            "requests_shared", "Sequences that ended well on rows of an equal one that was being decoded.", "model"
        )
        self._source_tokens = self._counter("source_tokens", "Source tokens of sequences that ended well.", "model")
        self._generation_tokens = self._counter(
            "generation_tokens", "Tokens generated for sequences that ended well.", "model"
        )
        self._queue_time = self._histogram("request_queue_time_seconds", "Waiting for a slot.", "model")
        self._encode_time = self._histogram("request_encode_time_seconds", "Encoding the source.", "model")
        self._decode_time = self._histogram("request_decode_time_seconds", "First to last decoding step.", "model")
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", "model")

        self._step_time = self._histogram("step_duration_seconds", "One run of a graph.", "model", "phase")
        self._batch_size = self._histogram(
            "batch_size", "Rows of one run of a graph.", "model", "phase", buckets=ROWS_BUCKETS
        )
        self._step_tokens = self._counter("step_tokens", "Tokens that the model computed.", "model", "phase")
        self._padded_tokens = self._counter(
            "step_padding_tokens", "Padding that the model computed beside them.", "model", "phase"
        )

        rpc = ("grpc_type", "grpc_service", "grpc_method")
        self._rpc_started = self._counter("grpc_server_started", "RPCs started.", *rpc, prefix="")
        self._rpc_handled = self._counter("grpc_server_handled", "RPCs completed.", *rpc, "grpc_code", prefix="")
        self._rpc_received = self._counter("grpc_server_msg_received", "Messages received.", *rpc, prefix="")
        self._rpc_sent = self._counter("grpc_server_msg_sent", "Messages sent.", *rpc, prefix="")
        self._rpc_seconds = self._histogram("grpc_server_handling_seconds", "Time in the handler.", *rpc, prefix="")

        self._model_info = self._gauge(
            "model_info", "1 for each served model.", "model", "version", "precision", "provider"
        )
        build = self._gauge("build_info", "1; the labels tell what runs.", "version", "python_version")
        build.labels(dragoman.__version__, platform.python_version()).set(1)

    def listener(self, model: str) -> ModelMetrics:
        """The listener to give to a model's engine. Its series start at zero from here on."""
        return ModelMetrics(self, model)

    def watch(self, model: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        """Read a model's gauges from its engine whenever they are asked for."""
        self._snapshots.models[model] = snapshot

    def set_model_info(self, model: str, version: str, precision: str, provider: str) -> None:
        """Say what is served."""
        self._model_info.labels(model, version, precision, provider).set(1)

    def request_finished(self, model: str, method: str, code: str, seconds: float) -> None:
        """One request ended; ``code`` is "ok" or its error's, ``seconds`` its time in the server."""
        self._requests.labels(model, method, code).inc()
        if code == "ok":
            self._latency.labels(model).observe(seconds)
        elif code == "cancelled":
            self._cancelled.labels(model).inc()
        elif code in _REJECTIONS:
            self._rejected.labels(model, code).inc()

    def rpc(self, kind: str, service: str, method: str) -> RpcMetrics:
        """The metrics of one RPC method; ``kind`` is "unary", "server_stream" or "bidi_stream"."""
        return RpcMetrics(self, (kind, service, method))

    def _counter(self, name: str, help_text: str, *labels: str, prefix: str = "dragoman_") -> Counter:
        return Counter(prefix + name, help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge("dragoman_" + name, help_text, labels, registry=self.registry)

    def _histogram(
        self,
        name: str,
        help_text: str,
        *labels: str,
        prefix: str = "dragoman_",
        buckets: tuple[float, ...] = SECONDS_BUCKETS,
    ) -> Histogram:
        return Histogram(prefix + name, help_text, labels, registry=self.registry, buckets=buckets)


class ModelMetrics:
    """The ``StatsListener`` of one model."""

    def __init__(self, metrics: ServerMetrics, model: str) -> None:
        # Looked up once: each lookup takes a lock, and on_step runs between two steps.
        phases = ("encode", "decode")
        self._step_time = {phase: metrics._step_time.labels(model, phase) for phase in phases}
        self._batch_size = {phase: metrics._batch_size.labels(model, phase) for phase in phases}
        self._step_tokens = {phase: metrics._step_tokens.labels(model, phase) for phase in phases}
        self._padded_tokens = {phase: metrics._padded_tokens.labels(model, phase) for phase in phases}
        self._expired = metrics._expired.labels(model)
        self._shared = metrics._shared.labels(model)
        self._source_tokens = metrics._source_tokens.labels(model)
        self._generation_tokens = metrics._generation_tokens.labels(model)
        self._queue_time = metrics._queue_time.labels(model)
        self._encode_time = metrics._encode_time.labels(model)
        self._decode_time = metrics._decode_time.labels(model)
        self._first_token = metrics._first_token.labels(model)
        self._success = metrics._success
        self._model = model
        metrics._latency.labels(model)
        metrics._cancelled.labels(model)

    def on_step(self, stats: StepStats) -> None:
        """An engine thread ran a graph."""
        self._step_time[stats.phase].observe(stats.seconds)
        self._batch_size[stats.phase].observe(stats.num_rows)
        self._step_tokens[stats.phase].inc(stats.num_tokens)
        self._padded_tokens[stats.phase].inc(stats.num_padded_tokens - stats.num_tokens)

    def on_finished(self, stats: RequestStats) -> None:
        """A sequence ended."""
        if stats.expired_in_queue:
            self._expired.inc()
        if stats.code != "ok":
            return
        self._success.labels(self._model, stats.finish_reason).inc()
        if stats.shared:
            self._shared.inc()
        self._source_tokens.inc(stats.num_source_tokens)
        self._generation_tokens.inc(stats.num_generated_tokens)
        self._queue_time.observe(stats.timing.queue_seconds)
        self._encode_time.observe(stats.timing.encode_seconds)
        self._decode_time.observe(stats.timing.decode_seconds)
        if stats.time_to_first_token_seconds is not None:
            self._first_token.observe(stats.time_to_first_token_seconds)


class RpcMetrics:
    """The usual ``grpc_server_*`` metrics of one RPC method."""

    def __init__(self, metrics: ServerMetrics, labels: tuple[str, str, str]) -> None:
        self._labels = labels
        self._handled = metrics._rpc_handled
        self._started = metrics._rpc_started.labels(*labels)
        self._received = metrics._rpc_received.labels(*labels)
        self._sent = metrics._rpc_sent.labels(*labels)
        self._seconds = metrics._rpc_seconds.labels(*labels)

    def started(self) -> None:
        """A call began."""
        self._started.inc()

    def received(self) -> None:
        """A message came in."""
        self._received.inc()

    def sent(self) -> None:
        """A message went out."""
        self._sent.inc()

    def handled(self, code: str, seconds: float) -> None:
        """A call ended; ``code`` is the name of its gRPC status code."""
        self._handled.labels(*self._labels, code).inc()
        self._seconds.observe(seconds)


class _SnapshotCollector(Collector):
    """Gauges that are read when they are scraped, and so can never drift from the truth."""

    def __init__(self) -> None:
        self.models: dict[str, Callable[[], EngineSnapshot]] = {}

    def collect(self) -> Iterable[Metric]:
        snapshots = {model: snapshot() for model, snapshot in list(self.models.items())}
        gauges: tuple[tuple[str, str, Callable[[EngineSnapshot], float]], ...] = (
            ("num_requests_waiting", "Sequences that wait for a slot.", lambda s: s.num_waiting),
            ("num_callers_waiting", "Callers of whom a sequence waits.", lambda s: s.num_callers_waiting),
            ("num_requests_running", "Sequences that are being decoded.", lambda s: s.num_running),
            ("slots_used", "KV rows in use.", lambda s: s.slots_used),
            ("slots_total", "KV rows there are.", lambda s: s.slots_total),
            ("kv_cache_bytes", "Memory that the KV rows take.", lambda s: s.kv_cache_bytes),
        )
        for name, help_text, value in gauges:
            family = GaugeMetricFamily("dragoman_" + name, help_text, labels=("model",))
            for model, snapshot in snapshots.items():
                family.add_metric((model,), value(snapshot))
            yield family
