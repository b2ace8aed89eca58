"""What to do with the rows' scores after a step. Pure numpy, vectorised over rows, each row on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.types import FloatArray, IntArray


class Choice(NamedTuple):
    """One token a row."""

    tokens: IntArray  # (R,)
    usable: NDArray[np.bool_]  # (R,), False where the best logit is not a finite number
    scores: dict[int, float]  # log-probability of the chosen token, by row, where asked for


def greedy(logits: FloatArray, never_generated: IntArray, scored_rows: Sequence[int]) -> Choice:
    """The best token of each row.

    logits: (R, V), changed in place: ``never_generated`` ids become -inf, before probabilities are taken, so that
    scores are normalised over the tokens that can be generated. Ties go to the smaller id. NaN counts as the best, so
    that a row that holds one is reported as not usable.
    """
    logits[:, never_generated] = -np.inf
    tokens = logits.argmax(axis=1)
    best = logits[np.arange(len(logits)), tokens]
    scores = {row: log_probability(logits[row], int(tokens[row])) for row in scored_rows if np.isfinite(best[row])}
    return Choice(tokens, np.isfinite(best), scores)


def log_probability(logits: FloatArray, token: int) -> float:
    """log softmax(logits)[token] of one row (V,), in double precision."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(shifted[token] - np.log(np.exp(shifted).sum()))
