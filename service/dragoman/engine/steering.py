"""What may come next, as a request's constraints say: one row's logits, changed in place. Pure numpy.

The semantics are those of CTranslate2 (version 4: src/decoding.cc, src/decoding_utils.cc). What came before is the
whole answer so far, the forced prefix with it: it counts for the repetition penalty, for repeated n-grams and as the
beginning of a suppressed sequence. The penalty comes first, then the bans, so that no penalty brings back what is
banned.

Deliberate differences: the minimum length counts what comes behind the prefix (there the prefix counts); a banned token
is -inf (there the lowest float, so that a row without any other token produces one); and alternatives are steered with
the prefix in mind (there it is forgotten).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dragoman.types import FloatArray, GenerationRequest, Steering


def steer(logits: FloatArray, tokens: Sequence[int], request: GenerationRequest, eos: int) -> None:
    """Apply the request's ``steering``, if it has one, to one row (V,) of float32.

    ``tokens`` are all that the row has so far, ``request.prefix`` at their head. Ids must be below V, suppressed
    sequences not empty, the penalty above 0: none of this is checked here. Nor is whether a token is left that may
    come: where all are -inf, the caller finds out.
    """
    steering = request.steering
    if steering is None:
        return
    if steering.repetition_penalty != 1.0 and tokens:
        _penalize(logits, tokens, steering.repetition_penalty)
    # While the prefix is fed, and perhaps scored, it alone decides.
    if 0 <= len(tokens) - len(request.prefix) < steering.min_new_tokens:
        logits[eos] = -np.inf
    if steering.suppressed:
        logits[np.array(steering.suppressed)] = -np.inf
    for token in _banned(tokens, steering):
        logits[token] = -np.inf


def _penalize(logits: FloatArray, tokens: Sequence[int], penalty: float) -> None:
    """Make what came before less probable: once, however often it came (Keskar et al. 2019)."""
    places = np.asarray(tokens)
    values = logits[places]
    # A token that came twice is read twice and then written twice with the same value.
    logits[places] = np.where(values < 0, values * penalty, values / penalty)


def _banned(tokens: Sequence[int], steering: Steering) -> Iterator[int]:
    for sequence in steering.suppressed_sequences:
        size = len(sequence) - 1
        # Most fail at the first glance, which is cheaper than to take a part of both.
        if size and (size > len(tokens) or tokens[-1] != sequence[-2]):
            continue
        if tuple(tokens[len(tokens) - size :]) == sequence[:-1]:
            yield sequence[-1]
    if steering.no_repeat_ngram_size:
        yield from _repeating(tokens, steering.no_repeat_ngram_size)


def _repeating(tokens: Sequence[int], size: int) -> set[int]:
    """The tokens that would complete a sequence of ``size`` tokens that is there already."""
    if len(tokens) < size:
        return set()
    if size == 1:
        return set(tokens)
    last, tail = tokens[-1], tokens[len(tokens) - size + 1 :]
    return {
        tokens[end]
        for end in range(size - 1, len(tokens))
        if tokens[end - 1] == last and tokens[end - size + 1 : end] == tail
    }
