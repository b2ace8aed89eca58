"""The schedule of an open-loop load."""

import math
import statistics
from itertools import pairwise

import pytest

from dragoman.loadtest.arrivals import poisson_arrivals


def test_arrivals_ascend_within_the_duration():
    """Every time lies within the duration, each after the one before."""
    times = list(poisson_arrivals(rate=200.0, duration_seconds=5.0, seed=1))

    assert all(a < b for a, b in pairwise([0.0, *times, 5.0]))


def test_the_same_seed_gives_the_same_times_and_another_seed_others():
    """A load test can be repeated exactly."""
    once, again, other = (list(poisson_arrivals(50.0, 2.0, seed)) for seed in (7, 7, 8))

    assert once == again
    assert once != other


@pytest.mark.parametrize("rate", [0.5, 20.0, 1000.0])
def test_gaps_are_exponential_with_the_rate_asked_for(rate):
    """Mean and standard deviation of the gaps are both 1 / rate: random arrivals, not evenly spaced ones."""
    count = 20_000
    times = list(poisson_arrivals(rate, count / rate, seed=3))
    gaps = [b - a for a, b in pairwise(times)]

    assert len(times) == pytest.approx(count, abs=5 * math.sqrt(count))
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / rate, rel=0.05)
