"""A request is a span in its caller's trace, with its time in queue, encoder and decoder below it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from dragoman import tracing
from dragoman.answer import TextResult
from dragoman.config import TracingConfig
from dragoman.errors import ConfigError, InvalidRequestError
from dragoman.metrics import ServerMetrics
from dragoman.observer import RequestObserver
from dragoman.servicers.rpc import Call
from dragoman.testing import scripted_model
from dragoman.types import Timing

SERVICE = "dragoman.v1.GenerationService"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CALL = Call("Generate", metadata={"traceparent": f"00-{TRACE}-{PARENT}-01", "binary-bin": b"x"}, service=SERVICE)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Whoever runs the tests may have a collector of their own."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def run(traces: tracing.Traces, call: Call = CALL, error: Exception | None = None) -> None:
    with RequestObserver(ServerMetrics(), traces).request(call, "r-1", "secret") as running:
        running.model = scripted_model()
        if error is not None:
            raise error
        running.results = (TextResult("geheim", (), 7, 5, Timing(0.0003, 0.0001, 0.0002, 0.001)),)


@pytest.fixture
def exported() -> Iterator[tuple[tracing.Traces, Any]]:
    """Traces that stay in memory, and where."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra [tracing] is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield tracing.Traces(provider), exporter
    provider.shutdown()


def test_a_request_is_a_span_of_its_callers_trace_with_its_phases_below_it(exported):
    """In the order in which they happened, as long as they took, and none of them outside of the request."""
    traces, exporter = exported
    run(traces)
    *phases, server = exporter.get_finished_spans()
    assert (server.name, server.kind.name) == (f"{SERVICE}/Generate", "SERVER")
    assert f"{server.context.trace_id:032x}" == TRACE and f"{server.parent.span_id:016x}" == PARENT
    assert dict(server.attributes) == {
        "rpc.system": "grpc",
        "rpc.service": SERVICE,
        "rpc.method": "Generate",
        "dragoman.code": "ok",
        "dragoman.model": "scripted",
        "dragoman.version": "1",
        "dragoman.source_tokens": 7,
        "dragoman.generated_tokens": 5,
        "dragoman.request_id": "r-1",
    }
    assert server.status.status_code.name == "UNSET"
    assert [span.name for span in phases] == ["queue", "encode", "decode"]
    ends = server.start_time
    for span in phases:
        assert span.parent.span_id == server.context.span_id and span.context.trace_id == server.context.trace_id
        assert ends <= span.start_time <= span.end_time <= server.end_time
        ends = span.end_time


def test_a_request_without_a_trace_begins_one(exported):
    """What is no traceparent counts as none."""
    traces, exporter = exported
    for metadata in ({}, {"traceparent": "nonsense"}, {"traceparent": b"\xff"}):
        exporter.clear()
        run(traces, Call("Generate", metadata=metadata, service=SERVICE))
        assert exporter.get_finished_spans()[-1].parent is None


def test_a_failed_request_says_its_code_and_nothing_of_its_text(exported):
    """An error's message may quote it."""
    traces, exporter = exported
    with pytest.raises(InvalidRequestError):
        run(traces, error=InvalidRequestError("'secret' is no word"))
    (server,) = exporter.get_finished_spans()
    assert (server.status.status_code.name, server.attributes["error.type"]) == ("ERROR", "invalid_request")
    assert "secret" not in server.to_json()


@dataclass
class Collector:
    """Takes spans by HTTP."""

    url: str
    requests: list[tuple[str, str, bytes]]  # path, header, body

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        messages = [ExportTraceServiceRequest.FromString(body) for *_, body in self.requests]
        return [span for m in messages for r in m.resource_spans for s in r.scope_spans for span in s.spans]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """On a free port of this machine."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra [tracing] is not installed")
    requests: list[tuple[str, str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, self.headers["x-key"], body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield Collector(f"http://127.0.0.1:{server.server_port}", requests)
        server.shutdown()
        thread.join()


def open_traces(endpoint: str, **settings: Any) -> tracing.Traces:
    traces = tracing.open_traces(TracingConfig(endpoint, **settings))
    assert traces is not None
    return traces


def test_spans_arrive_at_a_collector(collector):
    """By OTLP over HTTP, at the usual path, with the headers that were set; what is left is sent at the end."""
    traces = open_traces(collector.url, headers="x-key=a=b")
    run(traces)
    traces.close()
    assert [(path, key) for path, key, _ in collector.requests] == [("/v1/traces", "a=b")]
    assert {span.name for span in collector.spans()} == {"queue", "encode", "decode", f"{SERVICE}/Generate"}
    assert b"dragoman" in collector.requests[0][2]


def test_a_share_of_the_requests_can_be_traced_and_a_callers_trace_is_always_whole(collector):
    """With a ratio of 0, those that are part of a sampled trace alone."""
    traces = open_traces(collector.url, ratio=0.0)
    for _ in range(5):
        run(traces, Call("Generate", service=SERVICE))
    run(traces)
    traces.close()
    assert [span.trace_id.hex() for span in collector.spans()] == [TRACE] * 4


@pytest.mark.parametrize(
    ("endpoint", "environment", "wanted"),
    [
        ("", {}, False),
        ("http://c:4318", {}, True),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_traces_are_off_unless_there_is_a_collector(endpoint, environment, wanted):
    """By the setting, or by OpenTelemetry's own variables."""
    assert tracing.is_wanted(TracingConfig(endpoint), environment) is wanted


def test_without_a_collector_nothing_is_imported():
    """Nor does it have to be installed."""
    before = set(sys.modules)
    assert tracing.open_traces(TracingConfig()) is None
    assert not [name for name in set(sys.modules) - before if name.startswith("opentelemetry")]


def test_a_missing_package_is_named_with_the_extra(monkeypatch):
    """Before anything is served."""
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"opentelemetry\.sdk, which is not installed here: .*\[tracing\]"):
        tracing.check_tracing(TracingConfig("http://c:4318"))
    tracing.check_tracing(TracingConfig())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TracingConfig("collector:4318"), "otlp_endpoint is 'collector:4318'; it must be a URL"),
        (TracingConfig("http://"), "it must be a URL"),
        (TracingConfig("http://c", headers="hunter2"), r"otlp_headers \(hidden\)"),
        (TracingConfig("http://c", headers="=hunter2"), r"otlp_headers \(hidden\)"),
    ],
)
def test_bad_settings_are_refused_without_their_secrets(monkeypatch, config, message):
    """Whether the packages are installed or not."""
    monkeypatch.setattr(tracing, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=message) as caught:
        tracing.check_tracing(config)
    assert "hunter2" not in str(caught.value)
