"""``ModelStatistics`` of the Open Inference Protocol, read from the metrics: there is one count of everything."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from dragoman.oip import inference_pb2 as pb


def model_statistics(registry: CollectorRegistry, name: str, version: str) -> pb.ModelStatistics:
    """What a model computed since the server started, all its versions together. Zero for one that has no metrics."""
    samples = [
        (sample.name.removeprefix("dragoman_"), sample.labels, sample.value)
        for family in registry.collect()
        for sample in family.samples
        if sample.labels.get("model") == name
    ]

    def total(metric: str, **labels: str) -> float:
        return sum(value for found, own, value in samples if found == metric and labels.items() <= own.items())

    def duration(histogram: str) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=int(total(f"{histogram}_count")), ns=int(total(f"{histogram}_sum") * 1e9))

    success = duration("e2e_request_latency_seconds")
    requests, good = total("requests_total"), total("requests_total", code="ok")
    return pb.ModelStatistics(
        name=name,
        version=version,
        inference_count=int(total("request_success_total")),
        execution_count=int(total("step_duration_seconds_count", phase="encode")),
        inference_stats=pb.InferStatistics(
            success=success,
            fail=pb.StatisticDuration(count=int(requests - good)),
            queue=duration("request_queue_time_seconds"),
            compute_input=duration("request_encode_time_seconds"),
            compute_infer=duration("request_decode_time_seconds"),
        ),
    )
