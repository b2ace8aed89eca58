"""Which attention shows an alignment, chosen by what is surely aligned."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the runtime alone has no tools of the export")

from dragoman_export.alignment import MIN_COPIED, Choice, Scores, copied_tokens

LENGTH = 10


def attention(layers=3, heads=4, seed=0):
    """Each head sure of itself, without any order; a row more than there are target tokens."""
    places = np.random.default_rng(seed).integers(LENGTH, size=(layers, heads, LENGTH + 1))
    return np.eye(LENGTH, dtype=np.float32)[places]


def follow(weights, layer, head, places, shift):
    """Let one head look at the given source place of each target token."""
    rows = np.eye(LENGTH, dtype=np.float32)[places]
    weights[layer, head, shift : shift + len(places)] = rows


def scored(weights, copied, answers=10):
    scores = Scores(*weights.shape[:2])
    for _ in range(answers):
        scores.add(weights, copied)
    return scores.choice()


@pytest.mark.parametrize("shift", [0, 1])
def test_the_head_that_aligns_copied_tokens_with_themselves_is_chosen(shift):
    """At the step that produces a token, or at the one that reads it; the diagonal has no say."""
    places = list(reversed(range(LENGTH)))
    weights = attention()
    follow(weights, 1, 2, places, shift)
    follow(weights, 0, 0, range(LENGTH), 0)  # a perfect diagonal
    copied = [(places[target], target) for target in (0, 2, 3, 7, 8)]
    assert scored(weights, copied) == Choice(1, 2, shift, "copied", 1.0, 50)


def test_the_mean_of_all_heads_is_chosen_where_no_head_does_it_alone():
    """Each of two heads aligns one half of the target, and is even about the rest."""
    weights = np.full((2, 2, LENGTH + 1, LENGTH), 1 / LENGTH, np.float32)
    places = [3, 1, 4, 0, 9, 2, 6, 5, 8, 7]
    rows = np.eye(LENGTH, dtype=np.float32)[places]
    weights[1, 0, :5], weights[1, 1, 5:10] = rows[:5], rows[5:]
    choice = scored(weights, [(source, target) for target, source in enumerate(places)])
    assert (choice.layer, choice.head, choice.shift, choice.score) == (1, None, 0, 1.0)


def test_of_equal_candidates_the_lowest_layer_is_taken():
    """Which costs the least; and the mean of its heads."""
    weights = np.broadcast_to(np.eye(LENGTH + 1, LENGTH, dtype=np.float32), (3, 2, LENGTH + 1, LENGTH))
    choice = scored(weights, [(target, target) for target in range(LENGTH)])
    assert (choice.layer, choice.head, choice.shift) == (0, None, 0)


def test_a_model_that_copies_too_little_is_judged_by_the_diagonal():
    """One copied token less than it takes: the score is 1 less the mean distance."""
    weights = attention()
    places = list(reversed(range(LENGTH)))
    follow(weights, 2, 3, range(LENGTH), 1)
    follow(weights, 1, 1, places, 0)
    copied = [(places[target], target) for target in range(7)]
    assert (MIN_COPIED - 1) % len(copied) == 0
    answers = (MIN_COPIED - 1) // len(copied)
    choice = scored(weights, copied, answers)
    assert (choice.layer, choice.head, choice.shift, choice.basis) == (2, 3, 1, "diagonal")
    assert choice.score == pytest.approx(1.0) and choice.num_tokens == LENGTH * answers
    choice = scored(weights, copied, answers + 1)
    assert (choice.layer, choice.head, choice.shift, choice.basis) == (1, 1, 0, "copied")


def test_the_diagonal_of_unlike_lengths_is_stretched():
    """A target twice as long as its source follows it at half the pace: worked by hand, 1/12 off at every token."""
    weights = np.zeros((1, 1, 7, 3), np.float32)
    weights[0, 0, range(6), [0, 0, 1, 1, 2, 2]] = 1
    weights[0, 0, 6, 0] = 1
    assert scored(weights, [], answers=1).score == pytest.approx(1 - 1 / 12)


def test_a_choice_takes_its_rows():
    """The steps that read a token are one row on; without a head, the mean."""
    weights = attention()
    assert np.array_equal(Choice(2, 1, 1, "copied", 1.0, 9).weights(weights), weights[2, 1, 1:])
    np.testing.assert_allclose(Choice(0, None, 0, "copied", 1.0, 9).weights(weights), weights[0, :, :-1].mean(axis=0))


@pytest.mark.parametrize(
    ("source", "target", "pairs"),
    [
        ([" In", " 2019", " Anna", " Smith"], [" Anna", " Smith", " war", " 2019"], [(2, 0), (3, 1), (1, 3)]),
        (["a", "b", "a"], ["B", "A"], [(1, 0)]),  # twice on one side: which of them?
        (["a", "b"], ["b", "x", "b"], []),
        ([" ja", ".", " ", "", "!"], [".", " ", "", "!"], []),  # marks, blanks and bytes
    ],
)
def test_tokens_that_are_alike_and_alone_are_surely_aligned(source, target, pairs):
    """Case and blanks do not count."""
    assert copied_tokens(source, target) == pairs
