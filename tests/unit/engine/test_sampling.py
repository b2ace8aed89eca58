"""Tokens by chance: the right distribution, and the same draw for the same seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engine.sampling import FIRST_CANDIDATES, Sampler
from dragoman.types import SearchOptions


def sampler(number=0, **options):
    return Sampler(SearchOptions(**{"temperature": 1.0, "seed": 3, **options}), number)


def frequencies(logits, draws=4000, **options):
    drawn = sampler(**options)
    return np.bincount([drawn.draw(logits) for _ in range(draws)], minlength=len(logits)) / draws


def kept(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution by its definition, over the whole vocabulary, in plain Python."""
    probabilities = np.exp(logits.astype(np.float64) / temperature)
    probabilities /= probabilities.sum()
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    mass, total, chosen = 0.0, sum(probabilities[i] for i in order), []
    for i in order:
        if chosen and top_p < 1 and mass >= top_p * total:
            break
        chosen.append(i)
        mass += probabilities[i]
    chosen = [i for i in chosen if probabilities[i] >= min_p * probabilities[order[0]]]
    result = np.zeros(len(logits))
    result[chosen] = probabilities[chosen]
    return result / result.sum()


LOGITS = np.array([2.0, -np.inf, 1.0, 0.5, 0.5, -1.0, 3.0], np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
        {"top_p": 0.01},
    ],
)
def test_draws_follow_the_distribution(options):
    """Each token as often as temperature, top-k, top-p and min-p say; what may not come never comes."""
    expected = kept(LOGITS, **options)
    found = frequencies(LOGITS, **options)
    assert (found[expected == 0] == 0).all()
    np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(0.25 / 4000))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.floats(0.05, 0.999), st.sampled_from([0.1, 1.0, 5.0]))
def test_top_p_of_a_flat_distribution_looks_beyond_the_first_candidates(seed, top_p, temperature):
    """However many tokens the mass takes: none outside of them is drawn."""
    size = 5 * FIRST_CANDIDATES
    logits = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    allowed = kept(logits, temperature=temperature, top_p=top_p) > 0
    drawn = sampler(seed=seed, top_p=top_p, temperature=temperature)
    assert all(allowed[drawn.draw(logits)] for _ in range(20))


def test_the_same_seed_draws_the_same_and_another_does_not():
    """Whatever was drawn for others in between; hypotheses of one request differ from each other."""
    logits = np.random.default_rng(0).normal(size=100).astype(np.float32)

    def sequence(**options):
        drawn = sampler(**options)
        return [drawn.draw(logits) for _ in range(20)]

    assert sequence() == sequence()
    assert sequence(seed=4) != sequence()
    assert sequence(number=1) != sequence()
    assert sequence(seed=2**64 - 1) == sequence(seed=2**64 - 1)
