"""The sequences of one priority that wait: their callers take turns, however many sequences each has waiting.

Self-clocked fair queueing (Golestani, "A self-clocked fair queueing scheme for broadband applications", 1994). A clock
counts work. The turn of a caller's first sequence comes at the clock's time of when it became the first, plus its own
work; the earliest turn goes first and sets the clock. So callers that always wait get even shares of the work, a
newcomer goes before whoever has much more to ask for, and whoever waits is reached: no newcomer's turn comes before the
clock's time plus 1, and all that have an earlier one are fewer than the queue is long. A caller of whom nobody waits is
forgotten, and neither gains nor loses by it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count

from dragoman.engine.sequence import Sequence
from dragoman.engine.work import expected_work


@dataclass(slots=True, eq=False)
class _Caller:
    since: int  # the clock when the first of its sequences became the first
    sequences: OrderedDict[Sequence, int] = field(default_factory=OrderedDict)  # and their work, in order of arrival
    work: int = 0  # of all of them
    turn: tuple[int, int, _Caller] | None = None  # when the first one's comes, a number that is unique, itself


class Line:
    """Not thread-safe: the queue's lock is held around it."""

    def __init__(self, last_turn: int) -> None:
        self.last_turn = last_turn  # when this line was last served, or began: for ``Order`` to keep
        self.work = 0  # of all that wait here
        self._callers: dict[str, _Caller] = {}
        self._turns: list[tuple[int, int, _Caller]] = []  # a heap; one that is not its caller's any more is skipped
        self._clock = 0
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._callers)

    def put(self, sequence: Sequence) -> None:
        """Append to its caller's."""
        caller = self._callers.get(sequence.request.caller)
        if caller is None:
            caller = self._callers[sequence.request.caller] = _Caller(self._clock)
        work = expected_work(sequence)
        caller.sequences[sequence] = work
        caller.work += work
        self.work += work
        if caller.turn is None:
            self._give_turn(caller)

    def first(self) -> Sequence:
        """Whose turn it is. The line is not empty."""
        while self._turns[0] is not self._turns[0][2].turn:
            heapq.heappop(self._turns)
        return next(iter(self._turns[0][2].sequences))

    def take(self) -> Sequence:
        """Remove and return the first."""
        sequence = self.first()
        turn, _, caller = self._turns[0]
        # A first sequence that is cancelled may leave its caller a turn before the clock's time.
        self._clock = caller.since = max(self._clock, turn)
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take one out of the line, wherever it is; if it was its caller's first, the turn is the next one's."""
        caller = self._callers[sequence.request.caller]
        was_first = next(iter(caller.sequences)) is sequence
        work = caller.sequences.pop(sequence)
        caller.work -= work
        self.work -= work
        if not caller.sequences:
            caller.turn = None
            del self._callers[sequence.request.caller]
        elif was_first:
            self._give_turn(caller)

    def newest(self, caller: str) -> Sequence | None:
        """The last of this caller's, if any waits here."""
        return next(reversed(self._callers[caller].sequences)) if caller in self._callers else None

    def num_of(self, caller: str) -> int:
        """How many of this caller's wait here."""
        return len(self._callers[caller].sequences) if caller in self._callers else 0

    def work_before(self, caller: str, work: int) -> int:
        """How much is done before a sequence of so much work that this caller would append, as things stand."""
        own = self._callers[caller].work if caller in self._callers else 0
        return own + sum(min(c.work, own + work) for name, c in self._callers.items() if name != caller)

    def _give_turn(self, caller: _Caller) -> None:
        work = next(iter(caller.sequences.values()))
        caller.turn = (caller.since + work, next(self._numbers), caller)
        heapq.heappush(self._turns, caller.turn)
        if len(self._turns) > 2 * len(self._callers) + 16:  # more past turns than present ones
            self._turns = [turn for turn in self._turns if turn[2].turn is turn]
            heapq.heapify(self._turns)
