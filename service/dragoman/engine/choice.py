"""Which tokens a step offers, from the rows' logits; here in pure numpy, each row on its own.

All of a row's numbers are computed from that row alone, in arrays of that row's size: no sum, maximum or exponential is
taken over several rows at once, so that a row's choice is the same, bit for bit, whoever is beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from dragoman.engine.largest import largest
from dragoman.engine.sampling import Sampler
from dragoman.errors import DragomanError
from dragoman.types import FloatArray, TokenIds


class Ranked(NamedTuple):
    """Some tokens of one row, the most probable first; of equal ones, the smaller id first."""

    tokens: list[int]
    log_probs: list[float]


def best_tokens(logits: FloatArray) -> list[int]:
    """The best token of each row (R, V). Ties go to the smaller id; NaN counts as the best."""
    tokens: list[int] = logits.argmax(axis=1).tolist()
    return tokens


def log_normalizer(logits: FloatArray, largest: float) -> float:
    """log(sum(exp(logits))) of one row (V,), whose largest value is finite."""
    return largest + float(np.log(np.exp(logits - np.float32(largest)).sum(dtype=np.float64)))


def ranked(logits: FloatArray, count: int) -> Ranked:
    """The ``count`` most probable tokens of one row (V,), fewer where fewer are possible, with log-probabilities."""
    order = largest(logits, count)
    values = logits[order]
    possible = values > -np.inf
    if not possible.all():
        order, values = order[possible], values[possible]
        if not len(order):
            return Ranked([], [])
    scores = values.astype(np.float64) - log_normalizer(logits, float(values[0]))
    return Ranked(order.tolist(), scores.tolist())


def log_prob(logits: FloatArray, token: int, largest: float) -> float:
    """The log-probability of one token of one row (V,), whose largest value is finite."""
    return float(logits[token]) - log_normalizer(logits, largest)


class Offers(Protocol):
    """What a step's logits offer each row, computed when a search asks for it: where they lie is nobody's business."""

    def best(self, row: int) -> int:
        """The most probable token."""

    def value(self, row: int) -> float:
        """The best token's logit: NaN or infinite where the row cannot be used, -inf where no token may come."""

    def log_prob(self, row: int, token: int) -> float:
        """The log-probability of a token."""

    def ranked(self, row: int, count: int, without: int | None = None) -> Ranked:
        """The most probable tokens; ``without`` one, as if it could not come."""

    def draw(self, row: int, sampler: Sampler) -> int:
        """A token by chance."""

    def edit(self, row: int, allowed: TokenIds = ()) -> FloatArray:
        """The row's logits (V,), to be changed in place before anything is asked of any row.

        ``allowed`` are never-generated tokens that this row may produce all the same.
        """

    def fail(self, row: int, error: DragomanError) -> None:
        """What ``value`` raises from now on: the row's logits could not be changed as they should be."""


class HostOffers:
    """``Offers`` of logits in the host's memory."""

    def __init__(self, logits: FloatArray, never_generated: Sequence[slice] = ()) -> None:
        """``logits``: (R, V), changed here, and read as long as this object is asked. Slices: see ``as_slices``."""
        self._logits = logits
        self._never_generated = never_generated
        self._allowed: list[tuple[int, int]] = []  # rows and tokens to which that does not apply
        self._failures: dict[int, DragomanError] = {}
        self._best: list[int] = []  # of each row, once something was asked

    def best(self, row: int) -> int:
        return (self._best or self._prepared())[row]

    def value(self, row: int) -> float:
        if self._failures and row in self._failures:
            raise self._failures[row]
        value: float = self._logits.item(row, (self._best or self._prepared())[row])
        return value

    def log_prob(self, row: int, token: int) -> float:
        return log_prob(self._logits[row], token, self.value(row))

    def ranked(self, row: int, count: int, without: int | None = None) -> Ranked:
        logits = self._logits[row]
        if without is not None:
            logits = logits.copy()
            logits[without] = -np.inf
        return ranked(logits, count)

    def draw(self, row: int, sampler: Sampler) -> int:
        return sampler.draw(self._logits[row])

    def edit(self, row: int, allowed: TokenIds = ()) -> FloatArray:
        self._allowed += [(row, token) for token in allowed]
        logits: FloatArray = self._logits[row]
        return logits

    def fail(self, row: int, error: DragomanError) -> None:
        self._failures[row] = error

    def _prepared(self) -> list[int]:
        kept = [(row, token, self._logits.item(row, token)) for row, token in self._allowed]
        for part in self._never_generated:
            self._logits[:, part] = -np.inf
        for row, token, value in kept:
            self._logits[row, token] = value
        self._best = best_tokens(self._logits)
        return self._best


def as_slices(tokens: Sequence[int]) -> list[slice]:
    """The same ids as runs of neighbours, which numpy reaches several times faster than one by one."""
    slices: list[slice] = []
    for token in sorted(set(tokens)):
        if slices and slices[-1].stop == token:
            slices[-1] = slice(slices[-1].start, token + 1)
        else:
            slices.append(slice(token, token + 1))
    return slices
