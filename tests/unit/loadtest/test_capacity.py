"""The search for the highest rate that holds."""

import pytest

from dragoman.loadtest.capacity import find_capacity, num_replicas


@pytest.mark.parametrize("true_capacity", [0.9, 7.0, 10.0, 93.0, 1000.0])
def test_the_capacity_is_found_within_the_precision(true_capacity):
    """Whether the first rate is below or above; in a few trials."""
    tried = []

    def holds(rate):
        tried.append(rate)
        return rate <= true_capacity

    found = find_capacity(holds, first_rate=10.0, max_rate=10_000.0, precision=0.05)

    assert true_capacity / 1.05 <= found <= true_capacity
    assert len(tried) < 30


def test_a_server_that_holds_the_highest_rate_is_not_asked_for_more():
    """No trial is above it."""
    tried = []
    found = find_capacity(lambda rate: tried.append(rate) or True, first_rate=10.0, max_rate=35.0, precision=0.05)

    assert (found, tried) == (35.0, [10.0, 20.0, 35.0])


def test_a_server_that_holds_nothing_has_no_capacity():
    """The search ends, with 0."""
    assert find_capacity(lambda rate: False, first_rate=10.0, max_rate=100.0, precision=0.05) == 0.0


def test_one_stray_miss_is_no_finding():
    """A trial that fails once, and holds when it is repeated, changes nothing."""
    missed = set()

    def holds(rate):
        stray = rate not in missed
        missed.add(rate)
        return rate <= 50.0 and not stray

    assert find_capacity(holds, first_rate=10.0, max_rate=1000.0, precision=0.05) == pytest.approx(50.0, rel=0.05)


@pytest.mark.parametrize(
    ("wanted", "capacity", "utilization", "expected"),
    [
        (500.0, 100.0, 1.0, 5),
        (501.0, 100.0, 1.0, 6),
        (500.0, 100.0, 0.7, 8),
        (70.0, 100.0, 0.7, 1),
        (1.0, 100.0, 0.7, 1),
    ],
)
def test_replicas_are_the_fewest_that_have_room(wanted, capacity, utilization, expected):
    """500 a second by servers of 100, each used to 70 %: 7.14, so 8."""
    assert num_replicas(wanted, capacity, utilization) == expected
