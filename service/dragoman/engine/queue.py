"""The one queue of a model, shared by all of its replicas: bounded, fair, and it starves nobody.

- *Order*: the higher priority first, but for every fourth turn; within a priority, callers take turns by the work they
  ask for; of one caller, first come first served (``order.py``, ``line.py``).
- *Room*: when all places are taken, a caller that holds fewer than its even share of them gets a place of whoever holds
  the most; that one's newest request ends with OverloadedError. So nobody can shut the others out. A caller that may
  have no more places gets one of its own for a request of a higher priority: the newest of its lowest ends so. No other
  caller's: a priority is what a caller says of its own requests, and would take places from all who say less.
- *Tokens*: the sources of those that wait have at most ``max_waiting_tokens`` together; a lone one may have more. Where
  there is no room for them, a caller that stays within its even share of tokens gets that of whoever holds the most.
- *Several rows*: a sequence whose turn has come and that needs more rows than are free is set aside, one at a time, and
  goes before all others as soon as a replica has the rows. Until then those behind it pass, but never hold more rows at
  a time than it leaves of a replica's. So once it is set aside, it waits no longer than the longest of the runs that go
  on at that moment; small ones wait for it only where it needs nearly all rows, and no longer than that either.
- *Steps*: what a replica takes before one decoding step is at most one encoder run of ``max_encode_tokens``, padding
  included (a lone longer source still goes): that bounds how long admissions hold up the running rows. And as it takes
  before every step, decoding never holds up admissions while rows are free.

Thread-safe: the event loop puts, engine threads take. A sequence that is cancelled or whose deadline passes while it
waits is handed out by ``sweep`` and never reaches a model.
"""

from __future__ import annotations

import sys
import threading
from typing import NamedTuple

from dragoman.engine.deadlines import Deadlines
from dragoman.engine.order import Order
from dragoman.engine.sequence import Sequence, Status
from dragoman.engine.work import expected_work
from dragoman.errors import InvalidRequestError, OverloadedError, RequestError


class Dropped(NamedTuple):
    """A sequence that ended without an answer, and why."""

    sequence: Sequence
    error: RequestError


class Queue:
    """Sequences that wait, and how many run, so that replicas share the work evenly."""

    def __init__(
        self, max_waiting: int, num_replicas: int, num_slots: int, *, max_waiting_tokens: int = sys.maxsize
    ) -> None:
        """``num_slots``: rows of each replica."""
        self._max_waiting = max_waiting
        self._max_tokens = max_waiting_tokens
        self._num_replicas = num_replicas
        self._num_slots = num_slots
        self._waiting: set[Sequence] = set()
        self._num_held: dict[str, int] = {}  # by caller: how many of those that wait are its own; never 0
        self._tokens_held: dict[str, int] = {}  # their source tokens
        self._num_tokens = 0
        self._work = 0  # row-steps of all of them
        self._order = Order()  # of all of them but the one that is set aside
        self._aside: Sequence | None = None
        self._passed: list[Sequence] = []  # taken since, and perhaps still running
        self._deadlines = Deadlines()
        self._cancelled: list[Sequence] = []  # for the next sweep to drop
        self._displaced: list[Dropped] = []  # for the next sweep to hand out
        self._num_running = 0
        self._closed = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Source tokens of those that wait."""
        return self._num_tokens

    @property
    def work(self) -> int:
        """Row-steps that those that wait are expected to take."""
        return self._work

    @property
    def num_callers(self) -> int:
        """Callers of whom a sequence waits."""
        return len(self._num_held)

    def check_room(self, num_sequences: int, caller: str = "", priority: int = 0) -> None:
        """Raises OverloadedError when so many more of this caller's would not fit into the queue."""
        with self._lock:  # reentrant; without it, the last one of this caller's may be taken between two looks
            room = self._room(caller)
            if num_sequences > room and num_sequences > room + self._order.num_below(caller, priority):
                raise OverloadedError(
                    f"{len(self._waiting)} requests wait already, the limit is {self._max_waiting}: retry later"
                )

    def work_before(self, sequence: Sequence) -> int:
        """How many row-steps are expected to go before a sequence that is not put yet, as things stand."""
        if not self._waiting:
            return 0
        with self._lock:
            aside = 0 if self._aside is None else expected_work(self._aside)
            return aside + self._order.work_before(sequence)

    def put(self, sequence: Sequence) -> None:
        """Append.

        Raises OverloadedError when there is no room, InvalidRequestError when the sequence needs more rows than a
        replica has.
        """
        num_rows = len(sequence.hypotheses)
        if num_rows > self._num_slots:
            raise InvalidRequestError(
                f"the request needs {num_rows} rows (beam_size or num_hypotheses); this server decodes "
                f"{self._num_slots} at a time: ask for fewer"
            )
        caller, num_tokens = sequence.request.caller, len(sequence.request.source)
        with self._lock:
            self._check_tokens(num_tokens, caller)
            if len(self._waiting) >= self._max_waiting:
                self.check_room(1, caller, sequence.request.priority)
                self._displace(caller)
            self._make_room_for(num_tokens)
            self._waiting.add(sequence)
            self._num_held[caller] = self._num_held.get(caller, 0) + 1
            self._tokens_held[caller] = self._tokens_held.get(caller, 0) + num_tokens
            self._num_tokens += num_tokens
            self._work += expected_work(sequence)
            self._order.put(sequence)
            self._deadlines.put(sequence, self._waiting)
            self._changed.notify()

    def wait(self) -> bool:
        """Block until there is something to take or sweep (True) or the queue is closed (False)."""
        with self._lock:
            while not (self._waiting or self._displaced or self._closed):
                self._changed.wait()
            return not self._closed

    def close(self) -> None:
        """Wake every waiter for good."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def cancelled(self, sequence: Sequence) -> None:
        """This sequence was cancelled: if it waits here, the next sweep drops it. Where else it is does not matter."""
        with self._lock:
            self._cancelled.append(sequence)

    def sweep(self, now: float) -> list[Dropped]:
        """Remove and return the waiting sequences that are cancelled, past their deadline, or displaced by others."""
        if now < self._deadlines.next and not self._cancelled and not self._displaced:
            return []
        with self._lock:
            dropped, self._displaced = self._displaced, []
            over, self._cancelled = self._cancelled + self._deadlines.passed(now), []
            for sequence in over:
                error = sequence.interruption(now)
                if sequence in self._waiting and error is not None:
                    self._remove(sequence)
                    dropped.append(Dropped(sequence, error))
        for sequence, _ in dropped:
            sequence.status = Status.FINISHED
        return dropped

    def take(self, num_running: int, num_free: int, max_encode_tokens: int) -> list[Sequence]:
        """Remove and return, in order, the sequences that a replica should admit now.

        ``num_running`` and ``num_free`` are the replica's own; it never takes more than its even share of all work.
        The taken sources, padded to the longest, stay within ``max_encode_tokens`` (a lone source may exceed it).
        """
        if not self._waiting or not num_free:
            return []
        taken: list[Sequence] = []
        longest = 0
        with self._lock:
            share = -(-(len(self._waiting) + self._num_running) // self._num_replicas)
            while (sequence := self._next(num_free, num_running + len(taken) < share)) is not None:
                longest = max(longest, len(sequence.request.source))
                if taken and longest * (len(taken) + 1) > max_encode_tokens:
                    break
                self._admit(sequence)
                taken.append(sequence)
                num_free -= len(sequence.hypotheses)
            self._num_running += len(taken)
        return taken

    def finished(self, count: int) -> None:
        """So many taken sequences run no longer."""
        with self._lock:
            self._num_running -= count

    def _next(self, num_free: int, within_share: bool) -> Sequence | None:
        """The next one to admit where so many rows are free. One that does not fit may be set aside."""
        # Its rows may come free at any replica: the one set aside does not ask for shares.
        if self._aside is not None and len(self._aside.hypotheses) <= num_free:
            return self._aside
        if not (within_share and num_free and self._order):
            return None
        sequence = self._order.first()
        num_rows = len(sequence.hypotheses)
        if self._aside is not None:
            return sequence if num_rows <= num_free and self._may_pass(num_rows, self._aside) else None
        if num_rows <= num_free:
            return sequence
        self._aside = self._order.take()
        return self._next(num_free, within_share)

    def _may_pass(self, num_rows: int, aside: Sequence) -> bool:
        """Whether all that pass the one set aside leave its rows alone, so many more included."""
        self._passed = [sequence for sequence in self._passed if sequence.status is not Status.FINISHED]
        num_passed = sum(len(sequence.hypotheses) for sequence in self._passed)
        return num_passed + num_rows + len(aside.hypotheses) <= self._num_slots

    def _admit(self, sequence: Sequence) -> None:
        """It is what ``_next`` told."""
        if sequence is self._aside:
            self._aside, self._passed = None, []
        else:
            self._order.take()
            if self._aside is not None:
                self._passed.append(sequence)
        self._forget(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """It leaves without having been admitted."""
        if sequence is self._aside:
            self._aside, self._passed = None, []
        else:
            self._order.remove(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        caller = sequence.request.caller
        self._waiting.remove(sequence)
        self._num_held[caller] -= 1
        self._tokens_held[caller] -= len(sequence.request.source)
        self._num_tokens -= len(sequence.request.source)
        self._work -= expected_work(sequence)
        if not self._num_held[caller]:
            del self._num_held[caller], self._tokens_held[caller]

    def _room(self, caller: str) -> int:
        """So many places are free, or others hold them beyond an even share that this caller has not got."""
        held = self._num_held.get(caller, 0)
        share = self._max_waiting // (len(self._num_held) + (held == 0))
        return max(self._max_waiting - len(self._waiting), share - held)

    def _displace(self, caller: str) -> None:
        """Make room for this caller's: of whoever holds the most, or where that would be unfair, of its own."""
        if self._room(caller) > 0:
            sequence = self._order.newest(max(self._num_held, key=self._num_held.__getitem__))
            whose = "most of them this caller's: the newest of these made room for another caller's"
        else:
            sequence = self._order.newest(caller)
            whose = "and this one made room for one of the same caller's with a higher priority"
        self._drop(sequence, f"{self._max_waiting} requests wait, which is the limit, {whose}: retry later")

    def _check_tokens(self, num_tokens: int, caller: str) -> None:
        """Raises OverloadedError where there is no room for a source of so many tokens, nor an even share left."""
        if not self._waiting or self._num_tokens + num_tokens <= self._max_tokens:
            return
        share = self._max_tokens // (len(self._num_held) + (caller not in self._num_held))
        if self._tokens_held.get(caller, 0) + num_tokens > share:
            raise OverloadedError(
                f"requests of {self._num_tokens} source tokens wait already and this one has {num_tokens}, the limit "
                f"is {self._max_tokens}: retry later"
            )

    def _make_room_for(self, num_tokens: int) -> None:
        """Drop the newest of whoever holds the most tokens, as often as it takes; never the one set aside."""
        while self._order and self._num_tokens + num_tokens > self._max_tokens:
            held = self._tokens_held.copy()
            if self._aside is not None:
                held[self._aside.request.caller] -= len(self._aside.request.source)
            self._drop(
                self._order.newest(max(held, key=held.__getitem__)),
                f"requests of {self._num_tokens} source tokens wait, the limit is {self._max_tokens}, and most of them "
                "this caller's: the newest of these made room for another caller's: retry later",
            )

    def _drop(self, sequence: Sequence, reason: str) -> None:
        """It ends with an OverloadedError."""
        self._remove(sequence)
        self._displaced.append(Dropped(sequence, OverloadedError(reason)))
