"""What a load test found, from the outcome of each request. No clock and no network here."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from dragoman.errors import ConfigError

OK = "OK"
CLIENT_LIMIT = "client_limit"
"""Status of a request that was never sent, because too many were in flight; no gRPC status has this name."""
CANCELLED_HERE = "cancelled_here"
"""Status of a request that this side cancelled because the scenario wants it: neither an answer nor an error."""

MAX_MOMENTS = 120  # of a timeline: as many as a plot can show


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one request. Times are in seconds from the start of the load, behind the warm-up."""

    intended_seconds: float  # when the schedule wanted it sent
    sent_seconds: float  # when it was sent; later when this machine was too busy
    done_seconds: float
    status: str  # OK, the name of a gRPC status, CLIENT_LIMIT or CANCELLED_HERE
    first_seconds: float | None = None  # when a stream's first piece of text came
    part: str = ""  # of the mix

    @property
    def latency_seconds(self) -> float:
        """What a caller who wanted to send at the intended time waited."""
        return self.done_seconds - self.intended_seconds

    @property
    def first_latency_seconds(self) -> float | None:
        """The same until the first piece."""
        return None if self.first_seconds is None else self.first_seconds - self.intended_seconds


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level to hold. None: no such limit. Raises ConfigError for a limit that is none."""

    max_p99_ms: float | None = None  # of the latency of OK answers
    max_p99_first_ms: float | None = None  # of the time to their first piece, of streams
    max_error_rate: float | None = None  # errors by requests that were not cancelled here

    def __post_init__(self) -> None:
        for name in ("max_p99_ms", "max_p99_first_ms"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be above 0")
        if self.max_error_rate is not None and not 0 <= self.max_error_rate <= 1:
            raise ConfigError(f"max_error_rate is {self.max_error_rate}; it must be from 0 to 1")

    def is_good(self, outcome: Outcome) -> bool:
        """Whether a request ended OK and in the time that 99 of 100 may take."""
        first = outcome.first_latency_seconds
        return (
            outcome.status == OK
            and (self.max_p99_ms is None or outcome.latency_seconds * 1000 <= self.max_p99_ms)
            and (self.max_p99_first_ms is None or first is None or first * 1000 <= self.max_p99_first_ms)
        )


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the OK answers alone, in milliseconds."""

    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all requests of a load, or of a part of its mix. Rates are a second, from the start to the last answer."""

    requests: int
    ok: int
    cancelled: int  # by this side, as the scenario wants it
    errors: dict[str, int]  # by status
    achieved_rate: float  # OK answers
    goodput: float  # OK answers in the time that the service level allows
    latency_ms: Latency | None  # None without an OK answer
    first_ms: Latency | None  # to the first piece of streams; None without an OK one

    @property
    def num_errors(self) -> int:
        """Of every status."""
        return sum(self.errors.values())

    @property
    def error_rate(self) -> float:
        """The part of the requests that were not cancelled here that did not end OK; 0 without requests."""
        counted = self.requests - self.cancelled
        return self.num_errors / counted if counted else 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """What became of the requests that were due within a piece of the load."""

    seconds: float  # where it begins
    due: int
    ok: int
    errors: int
    p50_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one load test."""

    asked_rate: float | None  # requests a second; None for a closed loop, which asks for none
    duration_seconds: float  # from the start to the last answer
    all: Figures
    parts: dict[str, Figures]  # of a mix of several, by name
    max_send_lag_ms: float  # how late this machine sent; a large one means that the load test itself is the bottleneck
    moment_seconds: float  # how long a moment of the timeline is
    timeline: tuple[Moment, ...]
    percentiles_ms: tuple[tuple[float, float], ...]  # percent and latency of OK answers, ascending
    slo: Slo

    def exceeded(self) -> list[str]:
        """A sentence for each limit that is broken; without an OK answer there is no p99 to keep a limit."""
        figures, slo = self.all, self.slo
        broken = []
        if slo.max_error_rate is not None and figures.error_rate > slo.max_error_rate:
            broken.append(f"the error rate is {figures.error_rate:.4f}; the limit is {slo.max_error_rate}")
        if slo.max_p99_ms is not None:
            if figures.latency_ms is None:
                broken.append(f"no request ended OK, so there is no p99; the limit is {slo.max_p99_ms} ms")
            elif figures.latency_ms.p99 > slo.max_p99_ms:
                broken.append(f"p99 is {figures.latency_ms.p99:.1f} ms; the limit is {slo.max_p99_ms} ms")
        if slo.max_p99_first_ms is not None:
            if figures.first_ms is None:
                broken.append(f"no stream ended OK, so there is no first piece; its limit is {slo.max_p99_first_ms} ms")
            elif figures.first_ms.p99 > slo.max_p99_first_ms:
                broken.append(
                    f"p99 to the first piece is {figures.first_ms.p99:.1f} ms; the limit is {slo.max_p99_first_ms} ms"
                )
        return broken

    def to_json(self) -> str:
        """One JSON object with every figure: those of all requests at its top, those of parts under their names."""
        data = asdict(self)
        figures, parts = data.pop("all"), data.pop("parts")
        return (
            json.dumps(
                {
                    **figures,
                    "error_rate": self.all.error_rate,
                    **data,
                    "parts": {n: {**part, "error_rate": self.parts[n].error_rate} for n, part in parts.items()},
                    "exceeded": self.exceeded(),
                },
                indent=2,
            )
            + "\n"
        )

    def __str__(self) -> str:
        """For people: a few lines, and a table where the mix has parts."""
        figures = self.all
        asked = "closed loop" if self.asked_rate is None else f"asked {self.asked_rate:g}/s"
        errors = ", ".join(f"{count} {status}" for status, count in sorted(figures.errors.items())) or "none"
        cancelled = f", {figures.cancelled} cancelled here" if figures.cancelled else ""
        lines = [
            f"rate      {asked}, achieved {figures.achieved_rate:.1f}/s, good {figures.goodput:.1f}/s",
            f"duration  {self.duration_seconds:.1f} s",
            f"requests  {figures.requests}: {figures.ok} OK, {figures.num_errors} errors ({figures.error_rate:.2%})"
            + cancelled,
            f"errors    {errors}",
            f"latency   {_line(figures.latency_ms) or 'none: no request ended OK'}",
        ]
        if figures.first_ms:
            lines.append(f"first     {_line(figures.first_ms)}")
        lines.append(f"send lag  {self.max_send_lag_ms:.1f} ms at most")
        return "\n".join([*lines, *(["", *self._table()] if self.parts else [])])

    def _table(self) -> list[str]:
        head = ["part", "requests", "OK", "errors", "cancelled", "good/s", "p50 ms", "p99 ms", "first p50", "first p99"]
        rows = [head]
        for name, part in self.parts.items():
            counts = map(str, (part.requests, part.ok, part.num_errors, part.cancelled))
            times = [*_ends(part.latency_ms), *_ends(part.first_ms)]
            rows.append([name, *counts, f"{part.goodput:.1f}", *times])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]


def _ends(latency: Latency | None) -> list[str]:
    return ["-", "-"] if latency is None else [f"{latency.p50:.1f}", f"{latency.p99:.1f}"]


def _line(latency: Latency | None) -> str:
    if latency is None:
        return ""
    return ", ".join(f"{name} {value:.1f} ms" for name, value in asdict(latency).items()) + " (OK only)"


def summarize(outcomes: Sequence[Outcome], asked_rate: float | None, slo: Slo = Slo()) -> Report:
    """The report of a load; the order of the outcomes does not matter."""
    duration = max((outcome.done_seconds for outcome in outcomes), default=0.0)
    parts: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        parts.setdefault(outcome.part, []).append(outcome)
    moment = max(1.0, math.ceil(max((o.intended_seconds for o in outcomes), default=0.0) / MAX_MOMENTS))
    return Report(
        asked_rate=asked_rate,
        duration_seconds=duration,
        all=_figures(outcomes, duration, slo),
        parts={name: _figures(parts[name], duration, slo) for name in sorted(parts)} if len(parts) > 1 else {},
        max_send_lag_ms=max((o.sent_seconds - o.intended_seconds for o in outcomes), default=0.0) * 1000,
        moment_seconds=moment,
        timeline=tuple(_timeline(outcomes, moment)),
        percentiles_ms=_percentiles(_latencies(outcomes)),
        slo=slo,
    )


def _latencies(outcomes: Iterable[Outcome]) -> list[float]:
    return sorted(outcome.latency_seconds * 1000 for outcome in outcomes if outcome.status == OK)


def _figures(outcomes: Sequence[Outcome], duration: float, slo: Slo) -> Figures:
    latencies = _latencies(outcomes)
    firsts = sorted(first * 1000 for o in outcomes if o.status == OK and (first := o.first_latency_seconds) is not None)
    codes = Counter(outcome.status for outcome in outcomes)
    good = sum(map(slo.is_good, outcomes))
    return Figures(
        requests=len(outcomes),
        ok=codes[OK],
        cancelled=codes[CANCELLED_HERE],
        errors={status: count for status, count in codes.items() if status not in (OK, CANCELLED_HERE)},
        achieved_rate=len(latencies) / duration if duration else 0.0,
        goodput=good / duration if duration else 0.0,
        latency_ms=_latency(latencies) if latencies else None,
        first_ms=_latency(firsts) if firsts else None,
    )


def _timeline(outcomes: Sequence[Outcome], moment: float) -> list[Moment]:
    buckets: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        buckets.setdefault(int(outcome.intended_seconds / moment), []).append(outcome)
    moments = []
    for number in range(max(buckets, default=-1) + 1):
        due = buckets.get(number, [])
        latencies = _latencies(due)
        cancelled = sum(outcome.status == CANCELLED_HERE for outcome in due)
        moments.append(
            Moment(
                seconds=number * moment,
                due=len(due),
                ok=len(latencies),
                errors=len(due) - len(latencies) - cancelled,
                p50_ms=percentile(latencies, 50) if latencies else None,
                p99_ms=percentile(latencies, 99) if latencies else None,
            )
        )
    return moments


def _percentiles(sorted_ms: Sequence[float]) -> tuple[tuple[float, float], ...]:
    if not sorted_ms:
        return ()
    percents = (*range(1, 99), 99, 99.5, 99.9, 100)
    return tuple((float(percent), percentile(sorted_ms, percent)) for percent in percents)


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
