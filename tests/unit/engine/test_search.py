"""From scores to tokens, each row on its own."""

import math

import numpy as np
import pytest

from dragoman.engine.search import greedy

NEVER = np.array([0, 1, 3])  # padding, start, unknown


def logits(*rows):
    return np.array(rows, np.float32)


@pytest.mark.parametrize("forbidden", NEVER.tolist())
def test_special_tokens_are_never_chosen(forbidden):
    """A forbidden token with the highest score loses to the best allowed one, and takes no probability with it."""
    row = [0.0, 0.0, 1.0, 0.0, 2.0]
    row[forbidden] = 50.0
    choice = greedy(logits(row), NEVER, [0])
    assert choice.tokens.tolist() == [4]
    assert choice.scores[0] == pytest.approx(2.0 - math.log(math.exp(1) + math.exp(2)))


def test_a_row_of_nan_is_unusable_and_its_neighbours_are_not():
    """NaN or infinity in one row is reported for that row alone."""
    nan, inf = float("nan"), float("inf")
    choice = greedy(logits([0, 0, 1, 0, 2], [0, 0, nan, 0, 2], [0, 0, 3, 0, inf], [0, 0, 2, 0, 1]), NEVER, [1, 3])
    assert choice.usable.tolist() == [True, False, False, True]
    assert choice.tokens[[0, 3]].tolist() == [4, 2]
    assert list(choice.scores) == [3]


def test_a_row_without_an_allowed_token_is_unusable():
    """If everything else is minus infinity there is no answer, not a forbidden one."""
    inf = float("inf")
    assert greedy(logits([5, 5, -inf, 5, -inf]), NEVER, []).usable.tolist() == [False]


def test_scores_do_not_depend_on_the_other_rows():
    """The same row alone and among others: the same token and bit-equal score."""
    rows = np.random.default_rng(1).normal(size=(37, 50)).astype(np.float32)
    together = greedy(rows.copy(), NEVER, range(37))
    for index in range(37):
        alone = greedy(rows[index : index + 1].copy(), NEVER, [0])
        assert alone.tokens[0] == together.tokens[index]
        assert alone.scores[0] == together.scores[index]


def test_ties_go_to_the_smaller_id():
    """Equal logits: the first."""
    assert greedy(logits([0, 0, 7, 0, 7]), NEVER, []).tokens.tolist() == [2]
