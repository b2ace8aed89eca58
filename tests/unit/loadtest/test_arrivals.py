"""When a load sends, and how many callers it has."""

import math
import statistics
from itertools import pairwise

import pytest

from dragoman.loadtest.arrivals import Arrivals, Stage, arrival_times, caller_changes


def steady(rate: float, seconds: float, seed: int) -> list[float]:
    """A Poisson process of one rate."""
    return list(arrival_times([Stage(seconds, rate, rate)], Arrivals.POISSON, seed))


def test_arrivals_ascend_within_the_duration():
    """Every time lies within the duration, each after the one before."""
    times = steady(200.0, 5.0, seed=1)

    assert all(a < b for a, b in pairwise([0.0, *times, 5.0]))


def test_the_same_seed_gives_the_same_times_and_another_seed_others():
    """A load test can be repeated exactly."""
    once, again, other = (steady(50.0, 2.0, seed) for seed in (7, 7, 8))

    assert once == again
    assert once != other


@pytest.mark.parametrize("rate", [0.5, 20.0, 1000.0])
def test_gaps_are_exponential_with_the_rate_asked_for(rate):
    """Mean and standard deviation of the gaps are both 1 / rate: random arrivals, not evenly spaced ones."""
    count = 20_000
    times = steady(rate, count / rate, seed=3)
    gaps = [b - a for a, b in pairwise(times)]

    assert len(times) == pytest.approx(count, abs=5 * math.sqrt(count))
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / rate, rel=0.05)


def test_constant_arrivals_are_evenly_spaced():
    """At a rate of 4, one each quarter of a second, the first half a gap behind the start."""
    assert list(arrival_times([Stage(1.0, 4.0, 4.0)], Arrivals.CONSTANT, seed=0)) == [0.125, 0.375, 0.625, 0.875]


def test_a_ramp_has_the_requests_that_its_rates_make():
    """From 0 to 100 a second in 10 s: 500 requests, of them a quarter in the first half, due where t² / 2 x 10 says."""
    times = list(arrival_times([Stage(10.0, 0.0, 100.0)], Arrivals.CONSTANT, seed=0))

    assert len(times) == 500
    assert sum(time < 5.0 for time in times) == 125
    assert times[::100] == pytest.approx([math.sqrt((n + 0.5) / 5) for n in range(0, 500, 100)])


@pytest.mark.parametrize("kind", list(Arrivals))
def test_stages_follow_each_other(kind):
    """Up, level, down and a pause: each stage has about the requests of its mean rate, in its time."""
    stages = [Stage(10.0, 0.0, 400.0), Stage(5.0, 400.0, 400.0), Stage(10.0, 0.0, 0.0), Stage(10.0, 400.0, 0.0)]
    times = list(arrival_times(stages, kind, seed=5))
    counts = [sum(low <= time < high for time in times) for low, high in pairwise((0, 10, 15, 25, 35))]

    assert times == sorted(times)
    assert counts == pytest.approx([2000, 2000, 0, 2000], abs=5 * math.sqrt(2000) if kind == Arrivals.POISSON else 1)


def test_callers_come_and_go_one_by_one():
    """To four callers in 2 s, four for 1 s, then down to two in 1 s."""
    changes = list(caller_changes([Stage(2.0, 0, 4), Stage(1.0, 4, 4), Stage(1.0, 4, 2)]))

    assert changes == [(0.0, 0), (0.0, 1), (0.5, 2), (1.0, 3), (1.5, 4), (2.0, 4), (3.0, 4), (3.0, 3), (3.5, 2)]
