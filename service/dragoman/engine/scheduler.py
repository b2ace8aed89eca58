"""Continuous batching for one replica: who enters, who runs, who leaves, at every step. Pure Python, no tensors.

The engine calls ``schedule`` before a step and ``update`` after it; both say which rows to move.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from dragoman.engine.queue import Dropped, Queue
from dragoman.engine.sequence import Hypothesis, Sequence, Status
from dragoman.engine.slots import Move, SlotTable
from dragoman.errors import DragomanError, RowError
from dragoman.types import FinishReason


@dataclass(slots=True)
class Plan:
    """What happens before the next decoding step, in this order."""

    dropped: list[Dropped]  # ended without an answer: cancelled or expired
    moves: list[Move]  # rows to copy, since rows were freed
    admitted: list[Sequence]  # to encode and install into their slots


@dataclass(slots=True)
class Advance:
    """What one decoding step did to one sequence: new tokens, an end, or an error."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    error: DragomanError | None = None


class Scheduler:
    """Owns the running sequences and the slot table of one replica."""

    def __init__(self, queue: Queue, num_slots: int, max_encode_tokens: int, eos: int) -> None:
        self._queue = queue
        self._max_encode_tokens = max_encode_tokens
        self._eos = eos
        self._slots = SlotTable(num_slots)
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._sequence_of: dict[Hypothesis, Sequence] = {}

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
        for sequence in list(self._running):
            error = sequence.interruption(now)
            if error is not None:
                dropped.append(Dropped(sequence, error))
                moves += self._end(sequence)
        admitted = self._queue.take(self.num_running, self._slots.num_free, self._max_encode_tokens)
        for sequence in admitted:
            sequence.status = Status.RUNNING
            sequence.admitted = now
            self._running[sequence] = None
            for hypothesis in sequence.hypotheses:
                self._slots.take(hypothesis)
                self._sequence_of[hypothesis] = sequence
        return Plan(dropped, moves, admitted)

    def reject(self, sequence: Sequence) -> list[Move]:
        """An admitted sequence could not be installed: free its slots."""
        return self._end(sequence)

    def inputs(self) -> list[int]:
        """The token that each row feeds into the next step."""
        return [hypothesis.next_input for hypothesis in self._slots.rows]

    def scored_rows(self) -> list[int]:
        """Rows whose request wants scores."""
        return [row for row, h in enumerate(self._slots.rows) if self._sequence_of[h].request.return_scores]

    def update(
        self, tokens: Rows[int], usable: Rows[bool], scores: dict[int, float], now: float
    ) -> tuple[list[Advance], list[Move]]:
        """Append each row's chosen token, end what is complete, free its slots.

        tokens, usable: one a row; a row that is not usable had no finite logit. scores: by row, for the scored ones.
        """
        advances: list[Advance] = []
        moves: list[Move] = []
        for row, hypothesis in enumerate(list(self._slots.rows)):
            sequence = self._sequence_of[hypothesis]
            if not usable[row]:
                error = RowError(
                    f"the model gave no finite score after {len(hypothesis.tokens)} tokens of this request"
                )
                advances.append(Advance(sequence, finished=True, error=error))
            else:
                advances.append(self._append(sequence, hypothesis, tokens[row], scores.get(row), now))
        for advance in advances:
            if advance.finished:
                moves += self._end(advance.sequence)
        return advances, moves

    def _append(
        self, sequence: Sequence, hypothesis: Hypothesis, token: int, score: float | None, now: float
    ) -> Advance:
        if sequence.first_token is None:
            sequence.first_token = now
        if score is not None:
            hypothesis.token_scores.append(score)
        if token == self._eos:
            hypothesis.finish_reason = FinishReason.STOP
            return Advance(sequence, finished=True)
        hypothesis.tokens.append(token)
        hypothesis.next_input = token
        if len(hypothesis.tokens) >= sequence.request.max_new_tokens:
            hypothesis.finish_reason = FinishReason.LENGTH
            return Advance(sequence, [token], finished=True)
        return Advance(sequence, [token])

    def _end(self, sequence: Sequence) -> list[Move]:
        sequence.status = Status.FINISHED
        del self._running[sequence]
        moves = []
        for hypothesis in sequence.hypotheses:
            del self._sequence_of[hypothesis]
            move = self._slots.release(hypothesis)
            if move is not None:
                moves.append(move)
        self._queue.finished(1)
        return moves
