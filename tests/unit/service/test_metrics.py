"""What the engine tells becomes what Prometheus reads."""

from __future__ import annotations

import itertools
import math
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dragoman.errors import ConfigError
from dragoman.metrics import SECONDS_BUCKETS, ServerMetrics
from dragoman.metrics_server import MetricsServer
from dragoman.types import EngineSnapshot, RequestStats, StepStats, Timing


def ended(code: str = "ok", finish_reason: str | None = "stop", *, expired: bool = False) -> RequestStats:
    return RequestStats(code, finish_reason, 7, 5, Timing(0.3, 0.1, 0.45, 0.85), 0.45, expired)


def test_a_sequence_that_ended_well_is_in_every_series_in_seconds():
    """Tokens, finish reason and all four times, from the same event."""
    metrics = ServerMetrics()
    metrics.listener("m").on_finished(ended())
    value = metrics.registry.get_sample_value
    assert value("dragoman_request_success_total", {"model": "m", "finish_reason": "stop"}) == 1
    assert value("dragoman_source_tokens_total", {"model": "m"}) == 7
    assert value("dragoman_generation_tokens_total", {"model": "m"}) == 5
    for name, seconds in (
        ("request_queue_time", 0.3),
        ("request_encode_time", 0.1),
        ("request_decode_time", 0.45),
        ("time_to_first_token", 0.45),
    ):
        assert value(f"dragoman_{name}_seconds_sum", {"model": "m"}) == pytest.approx(seconds)
        assert value(f"dragoman_{name}_seconds_count", {"model": "m"}) == 1


def test_a_sequence_that_failed_is_in_none_of_them():
    """One rule for all: tokens and times are those of sequences that ended well."""
    metrics = ServerMetrics()
    metrics.listener("m").on_finished(ended("cancelled", None))
    metrics.listener("m").on_finished(ended("deadline", None, expired=True))
    value = metrics.registry.get_sample_value
    assert value("dragoman_source_tokens_total", {"model": "m"}) == 0
    assert value("dragoman_request_queue_time_seconds_count", {"model": "m"}) == 0
    assert value("dragoman_requests_expired_in_queue_total", {"model": "m"}) == 1


def test_a_sequence_that_shared_the_rows_of_another_is_counted():
    """What was sent to its caller counts for it; that nothing was computed for it alone has a series of its own."""
    metrics = ServerMetrics()
    metrics.listener("m").on_finished(ended())
    metrics.listener("m").on_finished(replace(ended(), shared=True))
    value = metrics.registry.get_sample_value
    assert value("dragoman_requests_shared_total", {"model": "m"}) == 1
    assert value("dragoman_generation_tokens_total", {"model": "m"}) == 10


def test_padding_is_told_apart_from_tokens():
    """A batch of 10 real tokens in 16 places has 6 of padding."""
    metrics = ServerMetrics()
    metrics.listener("m").on_step(StepStats("encode", 0.004, 2, 10, 16))
    labels = {"model": "m", "phase": "encode"}
    value = metrics.registry.get_sample_value
    assert value("dragoman_step_tokens_total", labels) == 10
    assert value("dragoman_step_padding_tokens_total", labels) == 6
    assert value("dragoman_batch_size_sum", labels) == 2
    assert value("dragoman_step_duration_seconds_bucket", {**labels, "le": "0.005"}) == 1


@pytest.mark.parametrize("seconds", [0.004, 25.0])
def test_short_and_long_times_fall_in_finite_buckets(seconds):
    """4 ms and 25 s can be told from their neighbours."""
    assert any(low < seconds <= high for low, high in itertools.pairwise(SECONDS_BUCKETS))


def test_two_servers_in_one_process_count_apart():
    """No registry is shared."""
    first, second = ServerMetrics(), ServerMetrics()
    first.request_finished("m", "Generate", "ok", 0.1)
    labels = {"model": "m", "method": "Generate", "code": "ok"}
    assert first.registry.get_sample_value("dragoman_requests_total", labels) == 1
    assert second.registry.get_sample_value("dragoman_requests_total", labels) is None


def get(port: int, path: str, accept: str = "") -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.headers["Content-Type"], response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", ""


def test_metrics_are_served_at_their_path_alone():
    """GET /metrics can be parsed; every other path is not found; gauges are read at that moment."""
    metrics = ServerMetrics()
    state = [EngineSnapshot(3, 2, 2, 8, 4096, 1)]
    metrics.watch("m", lambda: state[0])
    server = MetricsServer(metrics.registry, "127.0.0.1", 0)
    try:
        status, content_type, text = get(server.port, "/metrics")
        assert status == 200 and content_type.startswith("text/plain")
        gauges = {
            s.name: s.value
            for f in text_string_to_metric_families(text)
            for s in f.samples
            if s.labels == {"model": "m"}
        }
        assert gauges == {
            "dragoman_num_requests_waiting": 3,
            "dragoman_num_callers_waiting": 1,
            "dragoman_num_requests_running": 2,
            "dragoman_slots_used": 2,
            "dragoman_slots_total": 8,
            "dragoman_kv_cache_bytes": 4096,
        }
        state[0] = EngineSnapshot(0, 0, 0, 8, 4096)
        assert 'dragoman_num_requests_waiting{model="m"} 0.0' in get(server.port, "/metrics")[2]
        assert get(server.port, "/metrics", "application/openmetrics-text")[1].startswith(
            "application/openmetrics-text"
        )
        assert [get(server.port, path)[0] for path in ("/", "/favicon.ico", "/metrics/x")] == [404] * 3
    finally:
        server.close()


def test_a_metrics_port_in_use_is_a_clear_error():
    """The message names host and port."""
    server = MetricsServer(ServerMetrics().registry, "127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{server.port}.*in use"):
            MetricsServer(ServerMetrics().registry, "127.0.0.1", server.port)
    finally:
        server.close()


def test_every_name_follows_the_conventions():
    """Prefix, base units, no colon, finite labels."""
    metrics = ServerMetrics()
    metrics.listener("m")
    allowed = {"model", "version", "method", "code", "finish_reason", "phase", "reason", "precision", "provider"}
    allowed |= {"le", "python_version", "grpc_type", "grpc_service", "grpc_method", "grpc_code"}
    for family in metrics.registry.collect():
        assert family.name.startswith(("dragoman_", "grpc_server_", "process_")), family.name
        assert ":" not in family.name and not family.name.endswith("_ms")
        for sample in family.samples:
            assert set(sample.labels) <= allowed
            assert not math.isnan(sample.value)
