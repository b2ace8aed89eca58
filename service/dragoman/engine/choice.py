"""Which tokens a step offers, from the rows' logits. Pure numpy; each row on its own.

All of a row's numbers are computed from that row alone, in arrays of that row's size: no sum, maximum or exponential is
taken over several rows at once, so that a row's choice is the same, bit for bit, whoever is beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dragoman.engine.largest import largest
from dragoman.engine.sampling import Sampler
from dragoman.types import FloatArray


class Ranked(NamedTuple):
    """Some tokens of one row, the most probable first; of equal ones, the smaller id first."""

    tokens: list[int]
    log_probs: list[float]


def best_tokens(logits: FloatArray) -> tuple[list[int], list[float]]:
    """The best token of each row (R, V) and its logit. Ties go to the smaller id; NaN counts as the best."""
    tokens = logits.argmax(axis=1)
    return tokens.tolist(), logits[np.arange(len(logits)), tokens].tolist()


def log_normalizer(logits: FloatArray) -> float:
    """log(sum(exp(logits))) of one row (V,), whose largest value is finite."""
    largest = logits.max()
    return float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))


def ranked(logits: FloatArray, count: int) -> Ranked:
    """The ``count`` most probable tokens of one row (V,), fewer where fewer are possible, with log-probabilities."""
    if logits.max() == -np.inf:
        return Ranked([], [])
    order = largest(logits, count)
    values = logits[order]
    possible = values > -np.inf
    scores = values[possible].astype(np.float64) - log_normalizer(logits)
    return Ranked(order[possible].tolist(), scores.tolist())


def log_prob(logits: FloatArray, token: int) -> float:
    """The log-probability of one token of one row (V,)."""
    return float(logits[token]) - log_normalizer(logits)


class Offers:
    """What a step's logits offer each row, computed when a search asks for it."""

    def __init__(self, logits: FloatArray) -> None:
        """``logits``: (R, V), with what may not come at -inf; read as long as this object is asked."""
        self._logits = logits
        self._tokens, self._values = best_tokens(logits)

    def best(self, row: int) -> int:
        """The most probable token."""
        return self._tokens[row]

    def value(self, row: int) -> float:
        """The best token's logit: NaN or infinite where the row cannot be used, -inf where no token may come."""
        return self._values[row]

    def log_prob(self, row: int, token: int) -> float:
        """The log-probability of a token."""
        return log_prob(self._logits[row], token)

    def ranked(self, row: int, count: int, without: int | None = None) -> Ranked:
        """The most probable tokens; ``without`` one, as if it could not come."""
        logits = self._logits[row]
        if without is not None:
            logits = logits.copy()
            logits[without] = -np.inf
        return ranked(logits, count)

    def draw(self, row: int, sampler: Sampler) -> int:
        """A token by chance."""
        return sampler.draw(self._logits[row])
