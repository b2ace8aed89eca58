"""What a step's logits offer each row: exact, ordered, and blind to the other rows."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engine.choice import HostOffers, log_normalizer, ranked
from dragoman.engine.largest import BLOCK, largest


def logits(*rows):
    return np.array(rows, np.float32)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 5, 63, 64, 65, 640, 1000, 4099]), st.integers(1, 70), st.booleans())
def test_the_largest_are_those_of_a_full_sort(seed, size, count, is_coarse):
    """Also where many values are equal, of which the smaller places come first, and where most are impossible."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size).astype(np.float32)
    if is_coarse:
        values = np.round(values)
    values[rng.random(size) < 0.3] = -np.inf
    expected = sorted(range(size), key=lambda i: (-values[i], i))[:count]
    assert largest(values, count).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([129, 1000, 4099]), st.floats(0, 1), st.booleans())
def test_many_of_the_largest_are_those_of_a_full_sort(seed, size, share, is_coarse):
    """Up to all of them: values of either sign, zeros of both signs, infinities."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size).astype(np.float32)
    if is_coarse:
        values = np.round(values) * np.float32(rng.choice([-1, 1]))  # of which some are -0.0
    values[rng.random(size) < 0.1] = -np.inf
    values[rng.random(size) < 0.01] = np.inf
    count = max(1, round(share * size))
    expected = sorted(range(size), key=lambda i: (-values[i], i))[:count]
    assert largest(values, count).tolist() == expected


def test_the_largest_at_the_borders_of_blocks():
    """First and last of a block, and the rest that fills no block."""
    values = np.zeros(3 * BLOCK + 7, np.float32)
    for place in (0, BLOCK - 1, BLOCK, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 6):
        values[place] = 1 + place
    assert largest(values, 2).tolist() == [3 * BLOCK + 6, 3 * BLOCK]


def test_log_probabilities_are_over_what_may_come():
    """Worked example: what is at minus infinity takes no probability, and is never offered."""
    inf = float("inf")
    found = ranked(logits([-inf, 1.0, 2.0, -inf])[0], 4)
    assert found.tokens == [2, 1]
    total = math.log(math.exp(1) + math.exp(2))
    assert found.log_probs == pytest.approx([2 - total, 1 - total])


def test_large_logits_do_not_overflow():
    """A thousand is no problem for float32's exponential."""
    assert log_normalizer(logits([1000.0, 1000.0])[0], 1000.0) == pytest.approx(1000 + math.log(2))


def test_the_best_of_each_row_and_its_value():
    """Ties go to the smaller id; NaN is reported as such, for its row alone."""
    nan, inf = float("nan"), float("inf")
    offers = HostOffers(logits([0, 7, 7], [0, nan, 2], [3, inf, 0], [-inf, -inf, -inf]))
    assert [offers.best(0), offers.value(0)] == [1, 7.0]
    assert math.isnan(offers.value(1))
    assert [offers.value(2), offers.value(3)] == [inf, -inf]


def test_a_rows_offers_do_not_depend_on_the_other_rows():
    """Alone and among others: the same tokens and bit-equal log-probabilities."""
    rows = np.random.default_rng(1).normal(size=(37, 501)).astype(np.float32)
    together = HostOffers(rows)
    for index in range(37):
        alone = HostOffers(rows[index : index + 1].copy())
        assert alone.best(0) == together.best(index)
        assert alone.ranked(0, 9) == together.ranked(index, 9)
        assert alone.log_prob(0, 5) == together.log_prob(index, 5)
