"""What happened, as Prometheus sees it. The engine does not know that Prometheus exists: it tells a ``StatsListener``.

Two things are counted, and their names tell them apart. A *request* is one text from a caller, counted once when it
ends, whichever way, by ``requests_total``. Each of its segments is one *sequence* of the engine: the counters of tokens
and of finish reasons and the histograms of queue, encode, decode and first-token time are about sequences that ended
well. What the model computed for others too is in ``step_tokens_total``.

All labels come from fixed sets: served models, methods, codes. Nothing that a caller makes up becomes one. Counters and
histograms are of a model, all its versions together, and stay when it is unloaded: they never go down. Gauges are read
from what is served when they are asked for, and vanish with it. ``model_info`` says which versions are served.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import dragoman
from dragoman.config import MetricsConfig
from dragoman.series import CounterFamily, HistogramFamily
from dragoman.types import EngineSnapshot, RequestStats, StepStats

OTHER: Final = "other"
"""The label of a model or method that is not served here."""

ROWS_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
RATIO_BUCKETS: Final = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

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
        "unauthenticated",
    )
)


@dataclass(frozen=True, slots=True)
class Description:
    """What there is to know about a metric before anything happens."""

    name: str  # as it is asked for; of a histogram without _bucket, _sum, _count
    kind: str
    labels: tuple[str, ...]
    help: str


@dataclass(frozen=True, slots=True)
class _EngineGauge:
    name: str
    help: str
    value: Callable[[EngineSnapshot], float]


_ENGINE_GAUGES: Final = (
    _EngineGauge("num_requests_waiting", "Sequences that wait for a slot.", lambda s: s.num_waiting),
    _EngineGauge("num_callers_waiting", "Callers of whom a sequence waits.", lambda s: s.num_callers_waiting),
    _EngineGauge("num_requests_running", "Sequences that are being decoded.", lambda s: s.num_running),
    _EngineGauge("slots_used", "KV rows in use.", lambda s: s.slots_used),
    _EngineGauge("slots_total", "KV rows there are.", lambda s: s.slots_total),
    _EngineGauge("kv_cache_bytes", "Memory that the KV rows take.", lambda s: s.kv_cache_bytes),
)
_USAGE: Final = Description(
    "dragoman_kv_cache_usage_ratio", "gauge", ("model",), "Share of the KV rows that is in use, from 0 to 1."
)
_INFO: Final = Description(
    "dragoman_model_info", "gauge", ("model", "version", "precision", "provider"), "1 for each served version."
)


class ServerMetrics:
    """All metrics of one server, in a registry of their own. Thread-safe."""

    def __init__(self, config: MetricsConfig = MetricsConfig()) -> None:  # noqa: B008  # frozen
        self.registry = CollectorRegistry()
        self.descriptions: list[Description] = []
        """Of all but ``process_*``, which are the client library's."""
        self._seconds_buckets = config.latency_buckets
        ProcessCollector(registry=self.registry)
        self._snapshots = _SnapshotCollector()
        self.registry.register(self._snapshots)
        self.descriptions += self._snapshots.descriptions

        self._requests = self._counter("requests", "Requests that ended, by outcome.", "model", "method", "code")
        self._rejected = self._counter("requests_rejected", "Requests refused as they came.", "model", "reason")
        self._cancelled = self._counter("requests_cancelled", "Requests whose caller went away.", "model")
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to answer, of requests that ended well.", "model"
        )
        self._calls = self._gauge("calls_in_progress", "Calls that make text and are inside: waiting or running.")
        self._call_bytes = self._gauge("call_bytes_in_progress", "Size of their requests.")
        self._lag = self._histogram(
            "event_loop_lag_seconds",
            "How late the thread that takes calls in is: about what they wait before it, which no other time has.",
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
        self._source_lengths = self._histogram(
            "request_source_tokens", "Source tokens of one sequence.", "model", buckets=TOKENS_BUCKETS
        )
        self._generation_lengths = self._histogram(
            "request_generation_tokens", "Tokens generated for one sequence.", "model", buckets=TOKENS_BUCKETS
        )
        self._queue_time = self._histogram("request_queue_time_seconds", "Waiting for a slot.", "model")
        self._encode_time = self._histogram("request_encode_time_seconds", "Encoding the source.", "model")
        self._decode_time = self._histogram("request_decode_time_seconds", "First to last decoding step.", "model")
        self._inference_time = self._histogram(
            "request_inference_time_seconds", "Encoding and decoding together.", "model"
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", "model")
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "From a token to the next one, on average over a sequence.", "model"
        )

        self._step_time = self._histogram("step_duration_seconds", "One run of a graph.", "model", "phase")
        self._batch_size = self._histogram(
            "batch_size", "Rows of one run of a graph.", "model", "phase", buckets=ROWS_BUCKETS
        )
        self._step_tokens = self._counter("step_tokens", "Tokens that the model computed.", "model", "phase")
        self._padded_tokens = self._counter(
            "step_padding_tokens", "Padding that the model computed beside them.", "model", "phase"
        )
        self._padding_ratio = self._histogram(
            "batch_padding_ratio", "Share of padding in one run of a graph.", "model", "phase", buckets=RATIO_BUCKETS
        )

        rpc = ("grpc_type", "grpc_service", "grpc_method")
        self._rpc_started = self._counter("grpc_server_started", "RPCs started.", *rpc, prefix="")
        self._rpc_handled = self._counter("grpc_server_handled", "RPCs completed.", *rpc, "grpc_code", prefix="")
        self._rpc_received = self._counter("grpc_server_msg_received", "Messages received.", *rpc, prefix="")
        self._rpc_sent = self._counter("grpc_server_msg_sent", "Messages sent.", *rpc, prefix="")
        self._rpc_seconds = self._histogram("grpc_server_handling_seconds", "Time in the handler.", *rpc, prefix="")

        build = self._gauge("build_info", "1; the labels tell what runs.", "version", "python_version")
        build.labels(dragoman.__version__, platform.python_version()).set(1)

    def listener(self, model: str) -> ModelMetrics:
        """The listener to give to a model's engine. Its series start at zero from here on."""
        return ModelMetrics(self, model)

    def watch(
        self, model: str, version: str, precision: str, provider: str, snapshot: Callable[[], EngineSnapshot]
    ) -> None:
        """A version is served: read its model's gauges from its engine, too, whenever they are asked for."""
        self._snapshots.served[snapshot] = (model, version, precision, provider)

    def unwatch(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        """What was watched is served no longer."""
        self._snapshots.served.pop(snapshot, None)

    def request_finished(self, model: str, method: str, code: str, seconds: float) -> None:
        """One request ended; ``code`` is "ok" or its error's, ``seconds`` its time in the server."""
        self._requests.labels(model, method, code).inc()
        if code == "ok":
            self._latency.labels(model).observe(seconds)
        elif code == "cancelled":
            self._cancelled.labels(model).inc()
        elif code in _REJECTIONS:
            self._rejected.labels(model, code).inc()

    def watch_calls(self, num_calls: Callable[[], int], num_bytes: Callable[[], int]) -> None:
        """Read how many calls are inside, and the size of their requests, whenever that is asked for."""
        self._calls.set_function(num_calls)
        self._call_bytes.set_function(num_bytes)

    def event_loop_lagged(self, seconds: float) -> None:
        """What was due on the event loop came so late."""
        self._lag.labels().observe(seconds)

    def rpc(self, kind: str, service: str, method: str) -> RpcMetrics:
        """The metrics of one RPC method; ``kind`` is "unary", "server_stream" or "bidi_stream"."""
        return RpcMetrics(self, (kind, service, method))

    def _counter(self, name: str, help_text: str, *labels: str, prefix: str = "dragoman_") -> CounterFamily:
        self.descriptions.append(Description(f"{prefix}{name}_total", "counter", labels, help_text))
        family = CounterFamily(prefix + name, help_text, labels)
        self.registry.register(family)
        return family

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        self.descriptions.append(Description(f"dragoman_{name}", "gauge", labels, help_text))
        return Gauge("dragoman_" + name, help_text, labels, registry=self.registry)

    def _histogram(
        self,
        name: str,
        help_text: str,
        *labels: str,
        prefix: str = "dragoman_",
        buckets: tuple[float, ...] | None = None,
    ) -> HistogramFamily:
        self.descriptions.append(Description(prefix + name, "histogram", labels, help_text))
        ends = self._seconds_buckets if buckets is None else buckets
        family = HistogramFamily(prefix + name, help_text, labels, ends)
        self.registry.register(family)
        return family


def metrics_table() -> str:
    """All metrics as a table in Markdown."""
    lines = ["| metric | type | labels | |", "|---|---|---|---|"]
    for it in ServerMetrics().descriptions:
        labels = ", ".join(f"`{label}`" for label in it.labels)
        lines.append(f"| `{it.name}` | {it.kind} | {labels} | {it.help} |")
    lines.append("| `process_*` | | | CPU seconds, memory, file descriptors and start time of the process. |")
    return "\n".join(lines)


class ModelMetrics:
    """The ``StatsListener`` of one model."""

    def __init__(self, metrics: ServerMetrics, model: str) -> None:
        # Looked up once: each lookup takes a lock, and on_step runs between two steps.
        phases = ("encode", "decode")
        self._step_time = {phase: metrics._step_time.labels(model, phase) for phase in phases}
        self._batch_size = {phase: metrics._batch_size.labels(model, phase) for phase in phases}
        self._step_tokens = {phase: metrics._step_tokens.labels(model, phase) for phase in phases}
        self._padded_tokens = {phase: metrics._padded_tokens.labels(model, phase) for phase in phases}
        self._padding_ratio = metrics._padding_ratio.labels(model, "encode")  # decoding steps have no padding
        self._expired = metrics._expired.labels(model)
        self._shared = metrics._shared.labels(model)
        self._source_tokens = metrics._source_tokens.labels(model)
        self._generation_tokens = metrics._generation_tokens.labels(model)
        self._source_lengths = metrics._source_lengths.labels(model)
        self._generation_lengths = metrics._generation_lengths.labels(model)
        self._queue_time = metrics._queue_time.labels(model)
        self._encode_time = metrics._encode_time.labels(model)
        self._decode_time = metrics._decode_time.labels(model)
        self._inference_time = metrics._inference_time.labels(model)
        self._first_token = metrics._first_token.labels(model)
        self._inter_token = metrics._inter_token.labels(model)
        self._success = metrics._success
        self._model = model
        metrics._latency.labels(model)
        metrics._cancelled.labels(model)

    def on_step(self, stats: StepStats) -> None:
        """An engine thread ran a graph."""
        self._step_time[stats.phase].observe(stats.seconds)
        self._batch_size[stats.phase].observe(stats.num_rows)
        self._step_tokens[stats.phase].inc(stats.num_tokens)
        if stats.phase == "encode":
            num_padding = stats.num_padded_tokens - stats.num_tokens
            self._padded_tokens[stats.phase].inc(num_padding)
            self._padding_ratio.observe(num_padding / stats.num_padded_tokens)

    def on_finished(self, stats: RequestStats) -> None:
        """A sequence ended."""
        if stats.expired_in_queue:
            self._expired.inc()
        if stats.code != "ok":
            return
        assert stats.finish_reason is not None, "whatever ended well has a reason"
        self._success.labels(self._model, stats.finish_reason).inc()
        if stats.shared:
            self._shared.inc()
        self._source_tokens.inc(stats.num_source_tokens)
        self._generation_tokens.inc(stats.num_generated_tokens)
        self._source_lengths.observe(stats.num_source_tokens)
        self._generation_lengths.observe(stats.num_generated_tokens)
        self._queue_time.observe(stats.timing.queue_seconds)
        self._encode_time.observe(stats.timing.encode_seconds)
        self._decode_time.observe(stats.timing.decode_seconds)
        self._inference_time.observe(stats.timing.encode_seconds + stats.timing.decode_seconds)
        if stats.time_to_first_token_seconds is not None:
            self._first_token.observe(stats.time_to_first_token_seconds)
        if stats.inter_token_seconds is not None:
            self._inter_token.observe(stats.inter_token_seconds)


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
        self.served: dict[Callable[[], EngineSnapshot], tuple[str, str, str, str]] = {}
        self.descriptions = [
            _INFO,
            *(Description(f"dragoman_{gauge.name}", "gauge", ("model",), gauge.help) for gauge in _ENGINE_GAUGES),
            _USAGE,
        ]

    def collect(self) -> Iterable[Metric]:
        served = dict(self.served)  # the event loop changes it meanwhile
        info = _family(_INFO)
        for labels in sorted(set(served.values())):
            info.add_metric(labels, 1)
        yield info
        by_model: dict[str, list[EngineSnapshot]] = {}  # all versions of a model together
        for snapshot, (model, *_) in served.items():
            by_model.setdefault(model, []).append(snapshot())
        for gauge in _ENGINE_GAUGES:
            family = GaugeMetricFamily("dragoman_" + gauge.name, gauge.help, labels=("model",))
            for model, snapshots in sorted(by_model.items()):
                family.add_metric((model,), sum(map(gauge.value, snapshots)))
            yield family
        usage = _family(_USAGE)
        for model, snapshots in sorted(by_model.items()):
            used, total = (sum(getattr(s, name) for s in snapshots) for name in ("slots_used", "slots_total"))
            usage.add_metric((model,), used / total if total else 0.0)
        yield usage


def _family(description: Description) -> GaugeMetricFamily:
    return GaugeMetricFamily(description.name, description.help, labels=description.labels)
