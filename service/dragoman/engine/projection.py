"""The columns of the output projection that a replica's rows need, side by side for one product. Pure numpy.

A step with a shortlist multiplies by the columns of all tokens that any row may produce, and each row takes the logits
of its own candidates: a whole number's product is exact, so that they are, bit for bit, those of the full product, and
no row feels who else is there. Columns are put in place when rows begin, never in a step. What is no longer needed
stays until its place is.

Weights are unsigned with the zero point 128, where those of other products are signed: on CPUs without VNNI, sums of
unsigned by signed products saturate, but for constants, which ONNX Runtime converts when it opens a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dragoman.bundle import ModelShape
from dragoman.engine.candidates import Arrays, array_of
from dragoman.types import FloatArray, IntArray

STEP = 128
"""Columns come and go in multiples of this: the kernels like such sizes, and most new rows fit without a rebuild."""
HEADROOM = 1.125


@dataclass(frozen=True, eq=False)
class Projection:
    """The output projection of V tokens from D values, in 8 bits: token v is (weights[v] - 128) * scales[v]."""

    weights: NDArray[np.uint8]  # (V, D)
    scales: FloatArray  # (V,)
    bias: FloatArray | None  # (V,)

    @classmethod
    def checked(cls, arrays: Arrays, shape: ModelShape, *, has_bias: bool) -> Self:
        """That in a file's arrays. Raises BundleError where it is not that of such a model."""
        size = shape.target_vocab_size
        weights = array_of(arrays, "weights", (size, shape.d_model), np.uint8)
        scales = array_of(arrays, "scales", (size,), np.float32)
        return cls(weights, scales, array_of(arrays, "bias", (size,), np.float32) if has_bias else None)


class Columns:
    """Whose candidates are whose, by slot, and the K columns for all of them; K changes at a rebuild alone.

    Tokens are counted by the rows that may produce them; a column whose token nobody counts is free. Of the products of
    free columns nobody reads anything.
    """

    def __init__(self, projection: Projection, num_slots: int) -> None:
        self._projection = projection
        self._size = len(projection.scales)  # V, which in _tokens means: none
        self._candidates: list[IntArray | None] = [None] * num_slots
        self._places: list[IntArray | None] = [None] * num_slots  # of each candidate, its column
        self._shown: list[IntArray | None] = [None] * num_slots  # whose logits a row of the output holds
        self._uses: IntArray = np.zeros(self._size + 1, np.int64)  # by token
        self._column: IntArray = np.full(self._size + 1, -1, np.int64)  # by token; -1: it has none
        self._tokens: IntArray = np.zeros(0, np.int64)  # by column
        self._num_rows = 0  # above it, no slot has candidates
        self.generation = 0  # changes when the arrays are replaced, so that whoever bound their addresses binds again
        self.weights: NDArray[np.uint8]  # (D, K)
        self.scales: FloatArray  # (K,)
        self.bias: FloatArray | None = None  # (K,)
        self.logits: FloatArray  # (slots, K), written by the graph
        self._rebuild()

    @property
    def capacity(self) -> int:
        """K."""
        return len(self._tokens)

    def install(self, slot: int, candidates: IntArray) -> None:
        """Start a row: from here on it may produce these, ascending and each once."""
        self._release(slot)
        self._take(slot, candidates)
        missing = candidates[self._column[candidates] < 0]
        free = np.flatnonzero(self._uses[self._tokens] == 0)[: len(missing)]
        if len(free) < len(missing):
            self._rebuild()
            return
        self._column[self._tokens[free]] = -1
        self._put(free, missing)
        self._places[slot] = self._column[candidates]

    def move(self, source: int, target: int) -> None:
        """Let a row have another's candidates."""
        candidates, places = self._candidates[source], self._places[source]
        assert candidates is not None
        self._release(target)
        self._take(target, candidates)
        self._places[target] = places

    def keep(self, num_rows: int) -> None:
        """Forget the rows of all slots from ``num_rows`` on; where few columns are left in use, have fewer."""
        if num_rows >= self._num_rows:
            return
        for slot in range(num_rows, self._num_rows):
            self._release(slot)
        self._num_rows = num_rows
        if self.capacity > 2 * _capacity_for(int(np.count_nonzero(self._uses))):
            self._rebuild()

    def spread(self, logits: FloatArray) -> None:
        """The rows' logits (R, V), -inf but for each row's candidates; the same memory in every step."""
        for row in range(len(logits)):
            candidates, places = self._candidates[row], self._places[row]
            assert candidates is not None and places is not None
            if self._shown[row] is not candidates:
                logits[row] = -np.inf
                self._shown[row] = candidates
            logits[row][candidates] = self.logits[row].take(places)

    def _take(self, slot: int, candidates: IntArray) -> None:
        self._candidates[slot] = candidates
        self._uses[candidates] += 1
        self._num_rows = max(self._num_rows, slot + 1)

    def _release(self, slot: int) -> None:
        if (candidates := self._candidates[slot]) is not None:
            self._uses[candidates] -= 1
            self._candidates[slot] = self._places[slot] = None

    def _put(self, columns: IntArray, tokens: IntArray) -> None:
        """Fill columns with these tokens'."""
        self._tokens[columns] = tokens
        self._column[tokens] = columns
        self.weights.T[columns] = self._projection.weights[tokens]
        self.scales[columns] = self._projection.scales[tokens]
        if self.bias is not None and self._projection.bias is not None:
            self.bias[columns] = self._projection.bias[tokens]

    def _rebuild(self) -> None:
        """All columns anew: those in use, and some to spare."""
        projection = self._projection
        used = np.flatnonzero(self._uses)
        capacity = _capacity_for(len(used))
        self.weights = np.zeros((projection.weights.shape[1], capacity), np.uint8)
        self.scales = np.zeros(capacity, np.float32)
        self.bias = None if projection.bias is None else np.zeros(capacity, np.float32)
        self.logits = np.zeros((len(self._candidates), capacity), np.float32)
        self._tokens = np.full(capacity, self._size, np.int64)
        self._column[:] = -1
        self._put(np.arange(len(used)), used)
        for slot, candidates in enumerate(self._candidates):
            if candidates is not None:
                self._places[slot] = self._column[candidates]
        self.generation += 1


def _capacity_for(num_tokens: int) -> int:
    """So many columns, and some to spare, in whole steps."""
    return max(1, -(-int(num_tokens * HEADROOM) // STEP)) * STEP
