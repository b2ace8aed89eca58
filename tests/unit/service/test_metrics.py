"""What the engine tells becomes what Prometheus reads."""

from __future__ import annotations

import itertools
import math
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dragoman.config import EngineConfig, MetricsConfig
from dragoman.engine.queue import Queue
from dragoman.engine.replica import Replica
from dragoman.errors import ConfigError
from dragoman.metrics import ServerMetrics, metrics_table
from dragoman.metrics_server import MetricsServer
from dragoman.served_model import token_rules
from dragoman.testing import ScriptedRunner, scripted_manifest
from dragoman.types import (
    EngineSnapshot,
    FloatArray,
    GenerationRequest,
    IntArray,
    RequestStats,
    StepStats,
    Timing,
)
from dragoman.vocabulary import EOS_ID


def ended(code: str = "ok", finish_reason: str | None = "stop", *, expired: bool = False) -> RequestStats:
    return RequestStats(code, finish_reason, 7, 5, Timing(0.3, 0.1, 0.45, 0.85), 0.45, expired, inter_token_seconds=0.1)


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
        ("request_inference_time", 0.55),
        ("time_to_first_token", 0.45),
        ("inter_token_latency", 0.1),
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
    assert value("dragoman_batch_padding_ratio_sum", labels) == 6 / 16
    assert value("dragoman_step_duration_seconds_bucket", {**labels, "le": "0.005"}) == 1


@pytest.mark.parametrize("seconds", [0.004, 25.0])
def test_short_and_long_times_fall_in_finite_buckets(seconds):
    """4 ms and 25 s can be told from their neighbours."""
    assert any(low < seconds <= high for low, high in itertools.pairwise(MetricsConfig().latency_buckets))


def test_the_buckets_of_times_can_be_chosen_and_those_of_counts_stay():
    """All histograms of seconds have them."""
    metrics = ServerMetrics(MetricsConfig(latency_buckets=(0.02, 0.7)))
    metrics.request_finished("m", "Generate", "ok", 0.5)
    metrics.listener("m").on_finished(ended())
    ends: dict[str, list[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                ends.setdefault(family.name, []).append(sample.labels["le"])
    assert (
        ends["dragoman_e2e_request_latency_seconds"]
        == ends["dragoman_time_to_first_token_seconds"]
        == [
            "0.02",
            "0.7",
            "+Inf",
        ]
    )
    assert len(ends["dragoman_request_source_tokens"]) > 3


@pytest.mark.parametrize("buckets", [(), (1.0, 1.0), (2.0, 1.0), (math.nan,), (-1.0, 1.0)])
def test_buckets_that_do_not_rise_are_refused(buckets):
    """Before a metric is made of them."""
    with pytest.raises(ConfigError, match="latency_buckets is"):
        MetricsConfig(latency_buckets=buckets)


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
    metrics.watch("m", "1", "fp32", "cpu", lambda: state[0])
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
            "dragoman_kv_cache_usage_ratio": 0.25,
        }
        assert 'dragoman_model_info{model="m",precision="fp32",provider="cpu",version="1"} 1.0' in text
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


def test_gauges_of_an_unloaded_model_vanish_and_its_counters_stay():
    """Two versions of a model are summed; counters of a model that comes back go on from where they were."""
    metrics = ServerMetrics()

    def old() -> EngineSnapshot:
        return EngineSnapshot(1, 2, 3, 8, 100)

    def new() -> EngineSnapshot:
        return EngineSnapshot(10, 20, 5, 8, 1000)

    def read(name: str, **labels: str) -> float | None:
        value: float | None = metrics.registry.get_sample_value(f"dragoman_{name}", {"model": "m", **labels})
        return value

    metrics.watch("m", "1", "fp32", "cpu", old)
    metrics.listener("m").on_finished(ended())
    metrics.watch("m", "2", "fp32", "cpu", new)
    assert (read("num_requests_waiting"), read("slots_used"), read("slots_total")) == (11, 8, 16)
    assert read("kv_cache_usage_ratio") == 0.5
    metrics.unwatch(old)
    metrics.listener("m").on_finished(ended())
    assert read("num_requests_waiting") == 10
    assert read("model_info", version="1", precision="fp32", provider="cpu") is None
    assert read("model_info", version="2", precision="fp32", provider="cpu") == 1
    metrics.unwatch(new)
    assert read("num_requests_waiting") is None and read("kv_cache_usage_ratio") is None
    assert read("source_tokens_total") == 14


def test_every_metric_is_described_as_it_is():
    """The table that people read is made from these."""
    metrics = ServerMetrics()
    described = {(it.name, it.kind, it.help) for it in metrics.descriptions}
    families = {
        (f"{f.name}_total" if f.type == "counter" else f.name, f.type, f.documentation)
        for f in metrics.registry.collect()
    }
    assert described == {family for family in families if not family[0].startswith("process_")}
    metrics.request_finished("m", "Generate", "ok", 0.1)
    metrics.listener("m").on_step(StepStats("encode", 0.004, 2, 10, 16))
    by_name = {it.name: set(it.labels) for it in metrics.descriptions}
    for family in metrics.registry.collect():
        for sample in family.samples:
            name = family.name + ("_total" if family.type == "counter" else "")
            assert family.name.startswith("process_") or set(sample.labels) - {"le"} == by_name[name], sample


def test_the_readme_has_the_table_of_all_metrics():
    """Made by: dragoman serve --list-metrics."""
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    begin, end = "<!-- metrics: dragoman serve --list-metrics -->\n", "\n<!-- metrics end -->"
    assert text.partition(begin)[2].partition(end)[0] == metrics_table()


def test_a_scripted_request_has_its_times_to_the_millisecond(monkeypatch):
    """0.3 s in the queue, 0.1 s in the encoder, ten steps of 0.05 s: each histogram has exactly its part."""
    now = 100.0

    class Runner(ScriptedRunner):
        def admit(self, *args: Any) -> None:
            nonlocal now
            now += 0.1
            super().admit(*args)

        def decode(self, tokens: IntArray) -> FloatArray:
            nonlocal now
            now += 0.05
            return super().decode(tokens)

    monkeypatch.setattr("dragoman.engine.replica.time", SimpleNamespace(monotonic=lambda: now))
    metrics = ServerMetrics()
    runner, rules = Runner(), token_rules(scripted_manifest())
    queue = Queue(max_waiting=1, num_replicas=1, num_slots=runner.num_slots)
    replica = Replica(runner, queue, rules, EngineConfig(), metrics.listener("m"))
    queue.put(rules.sequence(GenerationRequest((*range(4, 13), EOS_ID), 20)))
    now += 0.3
    while not (ends := [delivery.stats for delivery in replica.step() if delivery.stats is not None]):
        pass
    metrics.listener("m").on_finished(ends[0])
    value = metrics.registry.get_sample_value
    for name, seconds in (
        ("request_queue_time", 0.3),
        ("request_encode_time", 0.1),
        ("request_decode_time", 0.5),
        ("request_inference_time", 0.6),
        ("time_to_first_token", 0.45),
        ("inter_token_latency", 0.05),
    ):
        assert value(f"dragoman_{name}_seconds_sum", {"model": "m"}) == pytest.approx(seconds), name
    steps = {"model": "m", "phase": "decode"}
    assert value("dragoman_step_duration_seconds_count", steps) == 10
    assert value("dragoman_step_duration_seconds_sum", steps) == pytest.approx(0.5)
