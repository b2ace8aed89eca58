"""What a request's constraints do to one row's logits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engine.steering import steer
from dragoman.types import GenerationRequest, Steering

NEVER = -np.inf
SIZE = 6
EOS = 2


def steered(logits, tokens=(), prefix=(), **steering):
    """A row (V,) after ``steer``; ``tokens`` come behind the prefix."""
    row = np.array(logits, np.float32)
    request = GenerationRequest((1,), 8, prefix=tuple(prefix), steering=Steering(**steering))
    steer(row, [*prefix, *tokens], request, EOS)
    return row.tolist()


ROW = [1.0, -1.0, 2.0, 4.0, -2.0, 0.0]


def test_a_request_without_steering_leaves_the_row_alone():
    """No option, no change; nor do the options' defaults change anything."""
    row = np.array(ROW, np.float32)
    steer(row, [3, 3, 3], GenerationRequest((1,), 8), EOS)
    assert row.tolist() == ROW
    assert steered(ROW, [3, 3, 3]) == ROW


@pytest.mark.parametrize(("tokens", "may_end"), [([], False), ([4], False), ([4, 5], True), ([4, 5, 4], True)])
def test_the_end_may_not_come_before_the_minimum(tokens, may_end):
    """With a minimum of 2, the end token is banned as the first and as the second token."""
    assert (steered(ROW, tokens, min_new_tokens=2)[EOS] == 2.0) is may_end


def test_the_minimum_counts_from_behind_the_prefix():
    """Three forced tokens are none of the two that must come."""
    assert steered(ROW, [5], prefix=[3, 4, 5], min_new_tokens=2)[EOS] == NEVER
    assert steered(ROW, [5, 5], prefix=[3, 4, 5], min_new_tokens=2)[EOS] == 2.0


@pytest.mark.parametrize("minimum", [0, 2])
def test_the_minimum_takes_nothing_from_a_prefix_that_is_scored(minimum):
    """While the prefix is fed, the end token keeps its logit: the scores of forced tokens do not change."""
    row = np.array(ROW, np.float32)
    steer(row, [3], GenerationRequest((1,), 8, prefix=(3, 4, 5), steering=Steering(min_new_tokens=minimum)), EOS)
    assert row.tolist() == ROW


def test_suppressed_tokens_never_come():
    """Each is banned, at any place; the others keep their logits."""
    assert steered(ROW, [], suppressed=(3, 5)) == [1.0, -1.0, 2.0, NEVER, -2.0, NEVER]
    assert steered(ROW, [3, 4], suppressed=(3, 5)) == [1.0, -1.0, 2.0, NEVER, -2.0, NEVER]


@pytest.mark.parametrize(
    ("prefix", "tokens", "banned"),
    [
        ([], [], [5]),  # a sequence of one token is banned everywhere
        ([], [3], [4, 5]),  # 3 4
        ([], [4, 3], [4, 5]),
        ([], [3, 0], [1, 5]),  # 3 0 1
        ([], [0], [5]),  # the head of 3 0 1 is not there in full
        ([], [3, 0, 4], [5]),  # it is there, but not at the end
        ([3], [], [4, 5]),  # the prefix is part of what came before
        ([4, 3], [0], [1, 5]),
    ],
)
def test_the_token_that_completes_a_suppressed_sequence_is_banned(prefix, tokens, banned):
    """Suppressed: 3 4, 3 0 1, and 5 alone."""
    row = steered(ROW, tokens, prefix, suppressed_sequences=((3, 4), (3, 0, 1), (5,)))
    assert row == [NEVER if token in banned else value for token, value in enumerate(ROW)]


def test_the_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones():
    """Worked example with a penalty of 2: 4 becomes 2, -2 becomes -4, 0 stays."""
    assert steered(ROW, [3, 4, 5], repetition_penalty=2.0) == [1.0, -1.0, 2.0, 2.0, -4.0, 0.0]
    assert steered(ROW, [3, 4, 5], repetition_penalty=0.5) == [1.0, -1.0, 2.0, 8.0, -1.0, 0.0]


def test_a_token_that_came_often_is_penalized_once():
    """Three times 3 count as one."""
    assert steered(ROW, [3, 3, 3], repetition_penalty=2.0)[3] == 2.0


def test_the_repetition_penalty_sees_the_prefix():
    """A forced token came before, too."""
    assert steered(ROW, [4], prefix=[3], repetition_penalty=2.0) == [1.0, -1.0, 2.0, 2.0, -4.0, 0.0]


@pytest.mark.parametrize(
    ("size", "prefix", "tokens", "banned"),
    [
        (1, [], [], []),
        (1, [], [3, 4, 3], [3, 4]),
        (2, [], [3], []),
        (2, [], [3, 4], []),
        (2, [], [3, 4, 3], [4]),  # 3 4 was there
        (2, [], [3, 4, 3, 5, 3], [4, 5]),
        (2, [], [3, 3], [3]),  # it overlaps itself
        (3, [], [3, 4, 5, 4, 3, 4], [5]),
        (3, [], [3, 4, 5, 3, 5], []),
        (3, [3, 4, 5], [3, 4], [5]),  # the prefix is part of what came before
        (3, [], [3, 3, 3], [3]),
        (9, [], [3, 4, 3, 4], []),
    ],
)
def test_no_ngram_comes_twice(size, prefix, tokens, banned):
    """The tokens that would complete a sequence of ``size`` that is there already are banned, and no others."""
    row = steered(ROW, tokens, prefix, no_repeat_ngram_size=size)
    assert row == [NEVER if token in banned else value for token, value in enumerate(ROW)]


def test_a_penalty_does_not_bring_back_what_is_banned():
    """A banned token came before (forced, or before it was banned): it stays banned, whatever the penalty's sign."""
    for penalty in (0.5, 2.0):
        assert steered(ROW, [], prefix=[3, 4], suppressed=(3, 4), repetition_penalty=penalty)[3:5] == [NEVER, NEVER]
    assert steered([NEVER, *ROW[1:]], [], prefix=[0], repetition_penalty=2.0)[0] == NEVER


def test_a_row_may_be_left_without_a_token():
    """Contradictory constraints leave nothing: the row says so, and no error is raised here."""
    assert steered(ROW, suppressed=(0, 1, 3, 4, 5), min_new_tokens=1) == [NEVER] * SIZE


def test_a_row_without_numbers_stays_one():
    """NaN and infinity pass through, so that the caller finds them."""
    row = steered([np.nan, np.inf, 0, 0, 0, 0], [0, 1], repetition_penalty=2.0, no_repeat_ngram_size=2)
    assert np.isnan(row[0])
    assert row[1] == np.inf


TOKENS = st.integers(0, SIZE - 1)
ANSWERS = st.lists(TOKENS, max_size=12)
LOGITS = st.lists(st.floats(-50, 50, width=32) | st.just(NEVER), min_size=SIZE, max_size=SIZE)
STEERINGS = st.builds(
    Steering,
    min_new_tokens=st.integers(0, 6),
    suppressed=st.lists(TOKENS, max_size=3).map(tuple),
    suppressed_sequences=st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.2, 3.0]),
    no_repeat_ngram_size=st.integers(0, 4),
)


def slow(logits, prefix, tokens, steering):
    """Each token by the definitions: what would the answer be if it came?"""
    before = [*prefix, *tokens]
    size = steering.no_repeat_ngram_size
    ngrams = [before[start : start + size] for start in range(len(before) - size + 1)]
    row = []
    for token, logit in enumerate(logits):
        after = [*before, token]
        forbidden = (
            (token == EOS and len(tokens) < steering.min_new_tokens)
            or token in steering.suppressed
            or any(after[-len(sequence) :] == list(sequence) for sequence in steering.suppressed_sequences)
            or (size > 0 and after[-size:] in ngrams)
        )
        value, penalty = np.float32(logit), np.float32(steering.repetition_penalty)
        if token in before:
            value = value * penalty if value < 0 else value / penalty
        row.append(NEVER if forbidden else float(value))
    return row


@given(LOGITS, ANSWERS, ANSWERS, STEERINGS)
def test_all_options_together_are_what_their_definitions_say(logits, prefix, tokens, steering):
    """Equal, bit for bit, to trying each token and asking whether it may come."""
    row = np.array(logits, np.float32)
    steer(row, [*prefix, *tokens], GenerationRequest((1,), 8, prefix=tuple(prefix), steering=steering), EOS)
    assert row.tolist() == slow(logits, prefix, tokens, steering)
