"""Which deadlines have passed, told without looking at every sequence that waits."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container
from itertools import count

from dragoman.engine.sequence import Sequence


class Deadlines:
    """A heap that sequences leave lazily. Not thread-safe but for reading ``next``."""

    def __init__(self) -> None:
        self.next = math.inf  # no deadline passes before
        self._heap: list[tuple[float, int, Sequence]] = []
        self._numbers = count()
        self._limit = 64

    def put(self, sequence: Sequence, waiting: Container[Sequence]) -> None:
        """Watch a sequence, if it has a deadline. ``waiting``: those that are still worth watching."""
        if sequence.deadline == math.inf:
            return
        heapq.heappush(self._heap, (sequence.deadline, next(self._numbers), sequence))
        if len(self._heap) > self._limit:  # most of them may be over for long
            self._heap = [entry for entry in self._heap if entry[2] in waiting]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64
        self.next = self._heap[0][0]

    def passed(self, now: float) -> list[Sequence]:
        """Watch those no more whose deadline is now or before, and return them, earliest first."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heapq.heappop(self._heap)[2])
        self.next = self._heap[0][0] if self._heap else math.inf
        return passed
