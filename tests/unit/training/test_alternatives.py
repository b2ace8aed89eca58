"""Alternatives at a position, by hand and against greedy search behind each of them."""

import math
from collections.abc import Callable

import pytest
from tests.unit.training.conftest import SCRIPTED_VOCABULARY, Script, Scripted

from dragoman_training.alternatives import alternatives
from dragoman_training.decode import greedy
from dragoman_training.errors import DecodingError
from dragoman_training.model import Transformer
from dragoman_training.steering import Steering
from dragoman_training.tokenizer import SPECIAL_IDS

EOS = SPECIAL_IDS.eos
A, B, C = 4, 5, 6
SOURCE = [4, EOS]


def by_length(tokens: tuple[int, ...]) -> list[float]:
    """First A 0.5, B 0.3, C 0.1, the end 0.1; behind A another A or the end, evenly; behind all else the end."""
    logits = [-math.inf] * SCRIPTED_VOCABULARY
    if len(tokens) == 1:
        probabilities = {A: 0.5, B: 0.3, C: 0.1, EOS: 0.1}
    else:
        probabilities = {A: 0.6, EOS: 0.4} if tokens[-1] == A else {EOS: 1.0}
    for token, probability in probabilities.items():
        logits[token] = math.log(probability)
    return logits


def test_they_come_in_the_order_of_the_first_token(scripted: Callable[[Script], Scripted]) -> None:
    """A is the most probable token, though the best of what becomes of it is worse than B. The end is no alternative:
    the others share its probability."""
    found = alternatives(scripted(by_length), SOURCE, 3, 3)
    assert [(h.tokens, h.finish_reason) for h in found] == [([A, A, A], "length"), ([B], "stop"), ([C], "stop")]
    assert [h.score for h in found] == pytest.approx(
        [math.log(p) for p in (0.5 / 0.9 * 0.6 * 0.6, 0.3 / 0.9, 0.1 / 0.9)]
    )
    assert found[1].log_probs == pytest.approx([math.log(0.3 / 0.9), 0.0])


def test_there_are_no_more_than_may_come(scripted: Callable[[Script], Scripted]) -> None:
    """Five asked for, three there; behind A only A, behind B nothing but the end."""
    model = scripted(by_length)
    assert len(alternatives(model, SOURCE, 5, 3)) == 3
    assert [h.tokens for h in alternatives(model, SOURCE, 5, 1, prefix=[A])] == [[A, A]]
    with pytest.raises(DecodingError, match="no token may come at position 1"):
        alternatives(model, SOURCE, 5, 3, prefix=[B])


def test_limits_and_steering_count_from_the_alternative(scripted: Callable[[Script], Scripted]) -> None:
    """A limit of one leaves the alternatives alone; a minimum holds for them and what follows together; what may not be
    repeated includes the prefix."""
    model = scripted(by_length)
    assert [(h.tokens, h.finish_reason) for h in alternatives(model, SOURCE, 2, 1)] == [
        ([A], "length"),
        ([B], "length"),
    ]
    model = scripted(lambda tokens: [0.0, 0.0, 3.0, 0.0, 2.0, 1.0, 0.5])
    steering = Steering(min_new_tokens=2, no_repeat_ngram_size=1)
    found = alternatives(model, SOURCE, 2, 3, prefix=[A], steering=steering)
    assert [h.tokens for h in found] == [[A, B, C], [A, C, B]]
    with pytest.raises(ValueError, match="min_new_tokens is 4"):
        alternatives(model, SOURCE, 2, 3, steering=Steering(min_new_tokens=4))


def test_each_is_what_greedy_search_makes_of_it(make_model: Callable[..., Transformer]) -> None:
    """With a real model: prefix and alternative as a prefix."""
    model = make_model()
    source, prefix = [4, 5, 6, 7, EOS], [5, 8]
    found = alternatives(model, source, 4, 8, prefix=prefix)
    assert len({h.tokens[2] for h in found}) == 4
    for hypothesis in found:
        rest = greedy(model, [source], 7, prefixes=[hypothesis.tokens[:3]])[0]
        assert (rest.tokens, rest.finish_reason) == (hypothesis.tokens, hypothesis.finish_reason)
        assert hypothesis.log_probs[1:] == pytest.approx(rest.log_probs, abs=1e-5)
        assert hypothesis.score == pytest.approx(sum(hypothesis.log_probs))
