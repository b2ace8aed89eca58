"""What a load test found, from the outcome of each request. No clock and no network here."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

OK = "OK"
CLIENT_LIMIT = "client_limit"
"""Status of a request that was never sent, because too many were in flight; no gRPC status has this name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one request. Times are in seconds from the start of the load."""

    intended_seconds: float  # when the schedule wanted it sent
    sent_seconds: float  # when it was sent; later when this machine was too busy
    done_seconds: float
    status: str  # OK, the name of a gRPC status, or CLIENT_LIMIT

    @property
    def latency_seconds(self) -> float:
        """What a caller who wanted to send at the intended time waited."""
        return self.done_seconds - self.intended_seconds


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the OK answers alone, in milliseconds."""

    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one load test."""

    asked_rate: float  # requests a second
    achieved_rate: float  # OK answers a second, from the start to the last answer
    duration_seconds: float  # from the start to the last answer
    requests: int
    ok: int
    errors: dict[str, int]  # by status
    latency_ms: Latency | None  # None without an OK answer
    max_send_lag_ms: float  # how late this machine sent; a large one means that the load test itself is the bottleneck

    @property
    def error_rate(self) -> float:
        """The part of all requests that did not end OK; 0 without requests."""
        return (self.requests - self.ok) / self.requests if self.requests else 0.0

    def exceeded(self, max_error_rate: float | None, max_p99_ms: float | None) -> list[str]:
        """A sentence for each limit that this report breaks; without an OK answer there is no p99 to keep a limit."""
        broken = []
        if max_error_rate is not None and self.error_rate > max_error_rate:
            broken.append(f"the error rate is {self.error_rate:.4f}; the limit is {max_error_rate}")
        if max_p99_ms is not None:
            if self.latency_ms is None:
                broken.append(f"no request ended OK, so there is no p99; the limit is {max_p99_ms} ms")
            elif self.latency_ms.p99 > max_p99_ms:
                broken.append(f"p99 is {self.latency_ms.p99:.1f} ms; the limit is {max_p99_ms} ms")
        return broken

    def to_json(self) -> str:
        """One JSON object with every figure."""
        return json.dumps({**asdict(self), "error_rate": self.error_rate}, indent=2) + "\n"

    def __str__(self) -> str:
        """For people: a few lines."""
        errors = ", ".join(f"{count} {status}" for status, count in sorted(self.errors.items())) or "none"
        lines = [
            f"rate      asked {self.asked_rate:g}/s, achieved {self.achieved_rate:.1f}/s",
            f"duration  {self.duration_seconds:.1f} s",
            f"requests  {self.requests}: {self.ok} OK, {self.requests - self.ok} errors ({self.error_rate:.2%})",
            f"errors    {errors}",
        ]
        if self.latency_ms:
            figures = asdict(self.latency_ms).items()
            lines.append("latency   " + ", ".join(f"{name} {value:.1f} ms" for name, value in figures) + " (OK only)")
        else:
            lines.append("latency   none: no request ended OK")
        lines.append(f"send lag  {self.max_send_lag_ms:.1f} ms at most")
        return "\n".join(lines)


def summarize(outcomes: Sequence[Outcome], asked_rate: float) -> Report:
    """The report of a load; the order of the outcomes does not matter."""
    latencies = sorted(outcome.latency_seconds * 1000 for outcome in outcomes if outcome.status == OK)
    duration = max((outcome.done_seconds for outcome in outcomes), default=0.0)
    return Report(
        asked_rate=asked_rate,
        achieved_rate=len(latencies) / duration if duration else 0.0,
        duration_seconds=duration,
        requests=len(outcomes),
        ok=len(latencies),
        errors=dict(Counter(outcome.status for outcome in outcomes if outcome.status != OK)),
        latency_ms=_latency(latencies) if latencies else None,
        max_send_lag_ms=max((o.sent_seconds - o.intended_seconds for o in outcomes), default=0.0) * 1000,
    )


def _latency(sorted_ms: Sequence[float]) -> Latency:
    return Latency(
        p50=percentile(sorted_ms, 50),
        p95=percentile(sorted_ms, 95),
        p99=percentile(sorted_ms, 99),
        max=sorted_ms[-1],
    )


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed (nearest rank: a measured one)."""
    rank = math.ceil(len(sorted_values) * percent / 100)
    return sorted_values[max(rank, 1) - 1]
