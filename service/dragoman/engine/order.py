"""Whose turn it is among all that wait: the higher priority first, within one the callers in turn.

A low priority is never starved: of ``LOW_TURN`` turns, one goes to the priority that has gone longest without. So with
P priorities waiting, each is served at least once in ``LOW_TURN`` x P turns. Turns are counted, not seconds: in
overload, when everybody has waited for long, priorities that rise with the time would all be the same.
"""

from __future__ import annotations

from typing import Final

from dragoman.engine.line import Line
from dragoman.engine.sequence import Sequence
from dragoman.engine.work import expected_work

LOW_TURN: Final = 4
"""Every so manieth turn does not ask for the priority."""


class Order:
    """Not thread-safe: the queue's lock is held around it. It keeps nothing of who does not wait."""

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}  # by priority; none is empty
        self._turn = 0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def put(self, sequence: Sequence) -> None:
        """Append to the line of its priority."""
        line = self._lines.get(sequence.request.priority)
        if line is None:
            line = self._lines[sequence.request.priority] = Line(self._turn)
        line.put(sequence)

    def first(self) -> Sequence:
        """Whose turn it is. Somebody waits."""
        return self._line().first()

    def take(self) -> Sequence:
        """Remove and return the first."""
        line = self._line()
        self._turn += 1
        line.last_turn = self._turn
        sequence = line.take()
        self._forget_empty(sequence.request.priority)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take one out, wherever it is."""
        self._lines[sequence.request.priority].remove(sequence)
        self._forget_empty(sequence.request.priority)

    def newest(self, caller: str) -> Sequence:
        """The last of this caller's in its lowest priority. The caller has one waiting."""
        found = (self._lines[priority].newest(caller) for priority in sorted(self._lines))
        return next(sequence for sequence in found if sequence is not None)

    def num_below(self, caller: str, priority: int) -> int:
        """How many of this caller's wait in lower priorities."""
        return sum(line.num_of(caller) for below, line in self._lines.items() if below < priority)

    def work_before(self, sequence: Sequence) -> int:
        """How much goes before a sequence that is not put yet, as things stand; lower priorities are not counted."""
        request = sequence.request
        higher = sum(line.work for priority, line in self._lines.items() if priority > request.priority)
        line = self._lines.get(request.priority)
        return higher + (0 if line is None else line.work_before(request.caller, expected_work(sequence)))

    def _line(self) -> Line:
        if self._turn % LOW_TURN == LOW_TURN - 1:
            return min(self._lines.values(), key=lambda line: line.last_turn)
        return self._lines[max(self._lines)]

    def _forget_empty(self, priority: int) -> None:
        if not self._lines[priority]:
            del self._lines[priority]
