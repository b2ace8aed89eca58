"""Counters and histograms that cost little to add to; the client library's own cost three times as much.

They are exposed by the client library as its own would be, but for the ``_created`` series, which it lacks here.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """One series of a counter. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add so much, which is not below 0."""
        with self._lock:
            self.value += amount


class Distribution:
    """One series of a histogram. Thread-safe."""

    def __init__(self, ends: Sequence[float]) -> None:
        """``ends``: the buckets' upper ends, which belong to them, rising; the last bucket has none."""
        self._ends = ends
        self._lock = threading.Lock()
        self._counts = [0] * (len(ends) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Take in one value."""
        index = bisect_left(self._ends, value)
        with self._lock:
            self._counts[index] += 1
            self._sum += value

    def read(self) -> tuple[list[int], float]:
        """How many values are up to each end, and up to infinity; and their sum."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum


S = TypeVar("S", Count, Distribution)


class _Family(Collector, Generic[S]):
    """The series of one metric by their labels. Without labels there is one, from the start."""

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...]) -> None:
        self._name = name
        self._help = help_text
        self._labels = labels
        self._series: dict[tuple[str, ...], S] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> S:
        """The series of these labels' values."""
        found = self._series.get(values)
        if found is None:
            assert len(values) == len(self._labels), f"{self._name} has the labels {self._labels}"
            found = self._series.setdefault(values, self._new())  # one of two threads wins
        return found

    def _new(self) -> S:
        raise NotImplementedError


class CounterFamily(_Family[Count]):
    """A counter; its name is without ``_total``."""

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, series in self._series.copy().items():
            family.add_metric(values, series.value)
        yield family

    def _new(self) -> Count:
        return Count()


class HistogramFamily(_Family[Distribution]):
    """A histogram."""

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...], ends: Sequence[float]) -> None:
        self._ends = [float(end) for end in ends]
        super().__init__(name, help_text, labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        words = [*map(floatToGoString, self._ends), "+Inf"]
        for values, series in self._series.copy().items():
            counts, total = series.read()
            family.add_metric(values, list(zip(words, counts, strict=True)), total)
        yield family

    def _new(self) -> Distribution:
        return Distribution(self._ends)
