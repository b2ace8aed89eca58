"""The one queue of a model: bounded, first come first served, shared by all of its replicas.

Thread-safe: the event loop puts, engine threads take. A sequence that is cancelled or whose deadline passes while it
waits is handed out by ``sweep`` and never reaches a model.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import NamedTuple

from dragoman.engine.sequence import Sequence, Status
from dragoman.errors import OverloadedError, RequestError


class Dropped(NamedTuple):
    """A sequence that ended without an answer, and why."""

    sequence: Sequence
    error: RequestError


class Queue:
    """Sequences that wait, and how many run, so that replicas share the work evenly."""

    def __init__(self, max_waiting: int, num_replicas: int) -> None:
        self._max_waiting = max_waiting
        self._num_replicas = num_replicas
        self._waiting: deque[Sequence] = deque()
        self._num_running = 0
        self._sweep_at = math.inf  # the earliest moment at which a sweep can find something
        self._closed = False
        self._changed = threading.Condition()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check_room(self, num_sequences: int) -> None:
        """Raises OverloadedError when so many more would not fit into the queue."""
        if len(self._waiting) + num_sequences > self._max_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} requests wait already, the limit is {self._max_waiting}: retry later"
            )

    def put(self, sequence: Sequence) -> None:
        """Append. Raises OverloadedError when ``max_waiting`` sequences wait already."""
        with self._changed:
            self.check_room(1)
            self._waiting.append(sequence)
            if sequence.request.deadline is not None:
                self._sweep_at = min(self._sweep_at, sequence.request.deadline)
            self._changed.notify()

    def wait(self) -> bool:
        """Block until a sequence waits (True) or the queue is closed (False)."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return not self._closed

    def close(self) -> None:
        """Wake every waiter for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def cancelled(self) -> None:
        """Some sequence, perhaps a waiting one, was cancelled: the next sweep must look."""
        with self._changed:
            self._sweep_at = -math.inf

    def sweep(self, now: float) -> list[Dropped]:
        """Remove and return the waiting sequences that are cancelled or past their deadline."""
        if now < self._sweep_at:
            return []
        with self._changed:
            checked = [(sequence, sequence.interruption(now)) for sequence in self._waiting]
            dropped = [Dropped(sequence, error) for sequence, error in checked if error is not None]
            self._waiting = deque(sequence for sequence, error in checked if error is None)
            deadlines = (s.request.deadline for s in self._waiting)
            self._sweep_at = min((d for d in deadlines if d is not None), default=math.inf)
        for sequence, _ in dropped:
            sequence.status = Status.FINISHED
        return dropped

    def take(self, num_running: int, num_free: int, max_encode_tokens: int) -> list[Sequence]:
        """Remove and return, in order, the sequences that a replica should admit now.

        ``num_running`` and ``num_free`` are the replica's own; it never takes more than its even share of all work.
        The taken sources, padded to the longest, stay within ``max_encode_tokens`` (a lone source may exceed it).
        """
        if not self._waiting:
            return []
        taken: list[Sequence] = []
        longest = 0
        with self._changed:
            share = -(-(len(self._waiting) + self._num_running) // self._num_replicas)
            while self._waiting and num_running + len(taken) < share:
                sequence = self._waiting[0]
                longest = max(longest, len(sequence.request.source))
                over_budget = longest * (len(taken) + 1) > max_encode_tokens
                if len(sequence.hypotheses) > num_free or (taken and over_budget):
                    break
                taken.append(self._waiting.popleft())
                num_free -= len(sequence.hypotheses)
            self._num_running += len(taken)
        return taken

    def finished(self, count: int) -> None:
        """So many taken sequences run no longer."""
        with self._changed:
            self._num_running -= count
