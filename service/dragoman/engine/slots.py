"""Which KV rows are used, and by which hypothesis. No tensors: it says what to move, ``KvStore`` moves it.

Used rows are always 0..num_used-1, because the last one moves into a freed one: a step then runs over one contiguous
slice of the buffers.
"""

from __future__ import annotations

from typing import NamedTuple

from dragoman.engine.search import Hypothesis


class Move(NamedTuple):
    """Copy the state of row ``source`` over row ``target``. Moves are carried out in the order they were given."""

    source: int
    target: int


class SlotTable:
    """A fixed number of rows, each free or owned by one hypothesis."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._owners: list[Hypothesis] = []

    @property
    def num_used(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._owners)

    @property
    def rows(self) -> list[Hypothesis]:
        """The owners, by row. The caller does not change the list."""
        return self._owners

    def take(self, hypothesis: Hypothesis) -> int:
        """Give the hypothesis the first free row. The caller has checked ``num_free``."""
        assert hypothesis.slot == -1 and self.num_free > 0
        hypothesis.slot = len(self._owners)
        self._owners.append(hypothesis)
        return hypothesis.slot

    def release(self, hypothesis: Hypothesis) -> Move | None:
        """Free the hypothesis' row; returns the move that keeps the used rows dense, if one is needed."""
        freed, last = hypothesis.slot, len(self._owners) - 1
        assert self._owners[freed] is hypothesis
        mover = self._owners.pop()
        hypothesis.slot = -1
        if freed == last:
            return None
        self._owners[freed] = mover
        mover.slot = freed
        return Move(last, freed)
