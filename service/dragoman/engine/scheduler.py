"""Continuous batching for one replica: who enters, who runs, who leaves, at every step. Pure Python, no tensors.

The engine calls ``schedule`` before a step and ``update`` after it; both say which rows to move.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from dragoman.engine.choice import Offers
from dragoman.engine.queue import Dropped, Queue
from dragoman.engine.search import Hypothesis
from dragoman.engine.sequence import Sequence, Status
from dragoman.engine.slots import Move, SlotTable
from dragoman.errors import DragomanError, RowError


@dataclass(slots=True)
class Plan:
    """What happens before the next decoding step, in this order."""

    dropped: list[Dropped]  # ended without an answer: cancelled or expired
    stopped: list[Sequence]  # ended with an answer, as they were asked to
    moves: list[Move]  # rows to copy, since rows were freed
    admitted: list[Sequence]  # to encode and install into their slots


@dataclass(slots=True)
class Advance:
    """What one decoding step did to one sequence: new tokens, an end, or an error."""

    sequence: Sequence
    tokens: list[int]
    finished: bool = False
    error: DragomanError | None = None


@dataclass(slots=True)
class Update:
    """What a step did to all sequences, and what has to be copied for it, in this order."""

    advances: list[Advance] = field(default_factory=list)
    forks: list[Move] = field(default_factory=list)  # of target prefixes alone
    moves: list[Move] = field(default_factory=list)


logger = logging.getLogger(__name__)


def failure(error: Exception) -> DragomanError:
    """What the caller of a request is told that failed by an exception of its own."""
    if isinstance(error, DragomanError):
        return error
    logger.error("a request failed", exc_info=error)
    return RowError("decoding this request failed by an error of the server, which its log has")


class Scheduler:
    """Owns the running sequences and the slot table of one replica."""

    def __init__(self, queue: Queue, num_slots: int, max_encode_tokens: int) -> None:
        self._queue = queue
        self._max_encode_tokens = max_encode_tokens
        self._slots = SlotTable(num_slots)
        self._running: dict[Sequence, list[Hypothesis]] = {}  # in order of admission, with the rows that each got

    @property
    def num_rows(self) -> int:
        """Rows of the next decoding step."""
        return self._slots.num_used

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def num_running(self) -> int:
        """Sequences that own rows."""
        return len(self._running)

    def schedule(self, now: float) -> Plan:
        """Drop what is cancelled or expired, then admit what waits, as far as slots and the encoder's budget go."""
        dropped = self._queue.sweep(now)
        moves: list[Move] = []
        stopped: list[Sequence] = []
        for sequence in list(self._running):
            error = sequence.interruption(now)
            if error is not None:
                dropped.append(Dropped(sequence, error))
                moves += self._end(sequence)
            elif sequence.stopped:
                sequence.search.stop()
                stopped.append(sequence)
                moves += self._end(sequence)
        admitted = self._queue.take(self.num_running, self._slots.num_free, self._max_encode_tokens)
        for sequence in admitted:
            sequence.status = Status.RUNNING
            sequence.admitted = now
            self._running[sequence] = list(sequence.hypotheses)
            for hypothesis in sequence.hypotheses:
                self._slots.take(hypothesis)
        return Plan(dropped, stopped, moves, admitted)

    def reject(self, sequence: Sequence) -> list[Move]:
        """An admitted sequence could not be installed: free its slots."""
        return self._end(sequence)

    def inputs(self) -> list[int]:
        """The token that each row feeds into the next step."""
        return [hypothesis.next_input for hypothesis in self._slots.rows]

    def steered(self) -> list[tuple[Sequence, Hypothesis]]:
        """The rows that decide at the next step and whose request steers them."""
        return [
            (sequence, hypothesis)
            for sequence in self._running
            if sequence.request.steering is not None
            for hypothesis in sequence.search.deciding()
        ]

    def update(self, offers: Offers, failures: Mapping[Sequence, DragomanError], now: float) -> Update:
        """Let every search take its step, end what is complete, free slots. A request that cannot go on ends alone.

        ``failures``: those that cannot take it, and why.
        """
        update = Update()
        released: list[Hypothesis] = []
        for sequence in self._running:
            try:
                if sequence in failures:
                    raise failures[sequence]
                progress = sequence.search.advance(offers)
            except Exception as error:  # whatever it was, it is this request's alone
                # What a text that has its end already does next does not matter.
                if stopped := sequence.stopped:
                    sequence.search.stop()
                reason = None if stopped else failure(error)
                update.advances.append(Advance(sequence, [], finished=True, error=reason))
                continue
            if sequence.first_token is None and (progress.finished or sequence.search.num_tokens()):
                sequence.first_token = now
            update.forks += [Move(origin.slot, row.slot) for origin, row in progress.forks]
            released += progress.released
            if progress.tokens or progress.finished:
                update.advances.append(Advance(sequence, progress.tokens, progress.finished))
        # Only now: until here, a row's number is its place in the step's logits.
        for hypothesis in released:
            update.moves += self._release(hypothesis)
        for advance in update.advances:
            if advance.finished:
                update.moves += self._end(advance.sequence)
        return update

    def _release(self, hypothesis: Hypothesis) -> list[Move]:
        move = self._slots.release(hypothesis)
        return [] if move is None else [move]

    def _end(self, sequence: Sequence) -> list[Move]:
        """What is left of its rows goes."""
        sequence.status = Status.FINISHED
        rows = self._running.pop(sequence)
        moves = [move for row in rows if row.slot >= 0 for move in self._release(row)]
        self._queue.finished(1)
        return moves
