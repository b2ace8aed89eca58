"""Counters and histograms of our own say what the client library's would."""

from __future__ import annotations

import random
import sys
import threading

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from dragoman.series import Count, CounterFamily, Distribution, HistogramFamily

ENDS = (0.001, 0.5, 1.0, 30)


def exposed(registry: CollectorRegistry) -> list[str]:
    """Both forms, without the series that tell when a series began."""
    text = generate_latest(registry).decode() + generate_openmetrics(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]


def test_they_are_exposed_as_the_client_librarys_own():
    """Values on a bucket's end, beyond the last one, and below the first; labels that need quoting."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counters = CounterFamily("a", 'A "b".', ("x", "y")), Counter("a", 'A "b".', ("x", "y"), registry=theirs)
    histograms = HistogramFamily("h", "H.", ("x",), ENDS), Histogram("h", "H.", ("x",), registry=theirs, buckets=ENDS)
    bare = HistogramFamily("z", "Z.", (), ENDS), Histogram("z", "Z.", registry=theirs, buckets=ENDS)
    for family in (counters[0], histograms[0], bare[0]):
        ours.register(family)
    assert exposed(ours) == exposed(theirs)  # with nothing counted yet
    noise = random.Random(1)
    for value in (*ENDS, 0.0, -1.0, 31.0, *(noise.expovariate(2) for _ in range(100))):
        for histogram in histograms:
            histogram.labels('a\n"\\').observe(value)
        for counter in counters:
            counter.labels('a\n"\\', "b").inc(abs(value))
    for counter in counters:
        counter.labels("0", "c").inc()
    bare[0].labels().observe(0.7)
    bare[1].observe(0.7)
    assert exposed(ours) == exposed(theirs)


def test_no_count_is_lost_between_threads():
    """Engine threads and the event loop add to the same series."""
    count, distribution = Count(), Distribution([1.0])
    interval = sys.getswitchinterval()

    def add() -> None:
        for _ in range(5000):
            count.inc()
            distribution.observe(2.0)

    threads = [threading.Thread(target=add) for _ in range(4)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert count.value == 20000 and distribution.read() == ([0, 20000], 40000.0)
