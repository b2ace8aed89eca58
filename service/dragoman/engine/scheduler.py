"""Continuous batching for one replica: who enters, who runs, who leaves, at every step. Pure Python, no tensors.

The replica calls ``schedule`` before a step and ``update`` after it; both say which rows to move.

Equal requests share a run: one search on one set of rows, as long as any of them is there. A request waits for its turn
like any other, and is charged to its caller like any other; when it is admitted while an equal one runs, it takes no
rows, gets what was produced so far, and from then on what the other gets. That is safe because a request's answer is a
function of what makes requests equal: nothing is drawn by chance, and what else differs, such as its deadline, is kept
by each sequence itself. Requests of different callers are never equal: nobody's answer comes sooner or later by what
another asks for, so that nobody learns of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dragoman.engine.choice import Offers
from dragoman.engine.queue import Queue
from dragoman.engine.search import Hypothesis, Search, failure
from dragoman.engine.sequence import Delivery, Sequence, Status
from dragoman.engine.slots import Move, SlotTable
from dragoman.types import GenerationRequest, Steering


@dataclass(slots=True, eq=False)
class Run:
    """A search, its rows, and the sequences that it answers: one, or several whose requests are equal."""

    request: GenerationRequest
    search: Search
    rows: list[Hypothesis]
    sequences: list[Sequence]
    told: list[int] = field(default_factory=list)  # what each sequence has been told of its best answer


@dataclass(slots=True)
class Plan:
    """What happens before the next decoding step, in this order."""

    deliveries: list[Delivery]  # ends, and the first tokens of those that joined a run
    moves: list[Move]  # rows to copy, since rows were freed
    admitted: list[Run]  # to encode and install into their slots


@dataclass(slots=True)
class Update:
    """What a step did to all sequences, and what has to be copied for it, in this order."""

    deliveries: list[Delivery] = field(default_factory=list)
    forks: list[Move] = field(default_factory=list)  # of target prefixes alone
    moves: list[Move] = field(default_factory=list)


class Scheduler:
    """Owns the runs and the slot table of one replica."""

    def __init__(self, queue: Queue, num_slots: int, max_encode_tokens: int, *, shares: bool = True) -> None:
        """``shares``: whether equal requests share a run."""
        self._queue = queue
        self._max_encode_tokens = max_encode_tokens
        self._shares = shares
        self._slots = SlotTable(num_slots)
        self._runs: list[Run] = []  # in order of admission
        self._shared: dict[GenerationRequest, Run] = {}  # those that others may join
        self._num_running = 0

    @property
    def num_rows(self) -> int:
        """Rows of the next decoding step."""
        return self._slots.num_used

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def num_running(self) -> int:
        """Sequences that were admitted and have not ended."""
        return self._num_running

    @property
    def runs(self) -> list[Run]:
        """Those that own rows. The caller does not change the list."""
        return self._runs

    def schedule(self, now: float) -> Plan:
        """Drop what is cancelled or expired, then admit what waits, as far as slots and the encoder's budget go."""
        plan = Plan([dropped.sequence.ended(dropped.error, now) for dropped in self._queue.sweep(now)], [], [])
        for run in self._runs[:]:
            for sequence in run.sequences:
                if sequence.cancelled or sequence.stopped or now >= sequence.deadline:
                    self._interrupt(run, plan, now)
                    break
        for sequence in self._queue.take(self._num_running, self._slots.num_free, self._max_encode_tokens):
            self._admit(sequence, plan, now)
        return plan

    def reject(self, run: Run) -> list[Move]:
        """An admitted run could not be installed: free its rows. Its sequences are the caller's to end."""
        return self._end(run)

    def inputs(self) -> list[int]:
        """The token that each row feeds into the next step."""
        return [hypothesis.next_input for hypothesis in self._slots.rows]

    def steered(self) -> list[tuple[Hypothesis, GenerationRequest, Steering]]:
        """The rows that decide at the next step and whose request steers them."""
        return [
            (hypothesis, run.request, steering)
            for run in self._runs
            if (steering := run.request.steering) is not None
            for hypothesis in run.search.deciding()
        ]

    def update(self, offers: Offers, now: float) -> Update:
        """Let every search take its step, end what is complete, free slots. A request that cannot go on ends alone."""
        update, ended = Update(), []
        deliveries = update.deliveries
        released: list[Hypothesis] = []
        for run in self._runs:
            search = run.search
            try:
                progress = search.advance(offers)
            except Exception as error:  # whatever it was, it is this request's alone
                reason = failure(error)
                deliveries += [sequence.ended(reason, now) for sequence in run.sequences]
                ended.append(run)
                continue
            if progress.forks:
                update.forks += [Move(origin.slot, row.slot) for origin, row in progress.forks]
            if progress.released:
                released += progress.released
            tokens = progress.tokens
            run.told += tokens
            for sequence in run.sequences:
                if sequence.first_token is not None:
                    sequence.num_later_steps += 1
                elif progress.finished or search.num_tokens():
                    sequence.first_token = now
                if progress.finished:
                    deliveries.append(sequence.ended(sequence.result(now), now, tokens))
                elif tokens:
                    deliveries.append(Delivery(sequence, tokens))
            if progress.finished:
                ended.append(run)
        # Only now: until here, a row's number is its place in the step's logits.
        for hypothesis in released:
            update.moves += self._release(hypothesis)
        for run in ended:
            update.moves += self._end(run)
        return update

    def _admit(self, sequence: Sequence, plan: Plan, now: float) -> None:
        request = sequence.request
        sequence.status = Status.RUNNING
        sequence.admitted = sequence.encoded = now  # the latter is put right where it is encoded
        self._num_running += 1
        run = Run(request, sequence.search, sequence.search.rows[:], [sequence])
        if self._may_share(request) and (there := self._shared.setdefault(request, run)) is not run:
            sequence.search, sequence.shared = there.search, True
            there.sequences.append(sequence)
            if there.told:
                sequence.first_token = now
                plan.deliveries.append(Delivery(sequence, there.told[:]))
            return
        for hypothesis in run.rows:
            self._slots.take(hypothesis)
        self._runs.append(run)
        plan.admitted.append(run)

    def _may_share(self, request: GenerationRequest) -> bool:
        return self._shares and request.search.temperature == 0  # above it, requests without a seed differ by it

    def _interrupt(self, run: Run, plan: Plan, now: float) -> None:
        """End those of a run that must not go on, or have what they want."""
        going = []
        for sequence in run.sequences:
            error = sequence.interruption(now)
            if error is None:
                going.append(sequence)
            else:
                plan.deliveries.append(sequence.ended(error, now))
        if any(sequence.stopped for sequence in going):  # by texts that the others have, too
            run.search.stop()
            plan.deliveries += [sequence.ended(sequence.result(now), now) for sequence in going]
            going = []
        if going:
            self._leave(len(run.sequences) - len(going))
            run.sequences = going
        else:
            plan.moves += self._end(run)

    def _leave(self, num_sequences: int) -> None:
        self._num_running -= num_sequences
        self._queue.finished(num_sequences)

    def _release(self, hypothesis: Hypothesis) -> list[Move]:
        move = self._slots.release(hypothesis)
        return [] if move is None else [move]

    def _end(self, run: Run) -> list[Move]:
        """All its sequences have ended; what is left of its rows goes."""
        self._runs.remove(run)
        if self._may_share(run.request):
            del self._shared[run.request]
        self._leave(len(run.sequences))
        return [move for row in run.rows if row.slot >= 0 for move in self._release(row)]
