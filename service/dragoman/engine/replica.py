"""One replica: a scheduler and a runner that advance together, one step at a time, in one thread.

It knows neither threads nor asyncio: ``Engine`` runs it on a thread of its own, ``generate_all`` in the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from dragoman.config import EngineConfig
from dragoman.engine.beam import BeamSearch
from dragoman.engine.choice import Offers
from dragoman.engine.queue import Dropped, Queue
from dragoman.engine.scheduler import Scheduler, failure
from dragoman.engine.search import TokenSearch
from dragoman.engine.sequence import Sequence
from dragoman.engine.slots import Move
from dragoman.engine.steering import steer
from dragoman.errors import DragomanError, InvalidRequestError, OverloadedError
from dragoman.types import (
    GenerationRequest,
    GenerationResult,
    IntArray,
    RequestStats,
    Runner,
    StatsListener,
    StepStats,
)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The target-side ids that steer decoding."""

    decoder_start: int
    eos: int
    never_generated: tuple[int, ...]

    def sequence(self, request: GenerationRequest) -> Sequence:
        """A request that arrives now."""
        search = BeamSearch if request.search.beam_size > 1 else TokenSearch
        return Sequence(request, search(request, self.decoder_start, self.eos), arrived=time.monotonic())


@dataclass(slots=True)
class Delivery:
    """What one step did to one sequence. An end comes with its outcome and its stats."""

    sequence: Sequence
    tokens: list[int]
    outcome: GenerationResult | DragomanError | None = None
    stats: RequestStats | None = None
    partial: GenerationResult | None = None  # with an error: what was there before it


class Replica:
    """Takes sequences from the queue, runs them together, and hands over what each step produced."""

    def __init__(
        self,
        runner: Runner,
        queue: Queue,
        rules: TokenRules,
        config: EngineConfig,
        listener: StatsListener | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(queue, runner.num_slots, config.max_encode_tokens)
        self._rules = rules
        self._never_generated: IntArray = np.array(rules.never_generated, np.int64)
        self._listener = listener
        self._deliveries: list[Delivery] = []

    def step(self) -> list[Delivery]:
        """Drop what is over, admit and encode what waits, decode one token a row."""
        plan = self.scheduler.schedule(time.monotonic())
        for dropped in plan.dropped:
            self._end(dropped.sequence, dropped.error)
        for sequence in plan.stopped:
            self._end(sequence, sequence.result(time.monotonic()))
        self._move(plan.moves)
        if plan.admitted:
            self._encode(plan.admitted)
        if self.scheduler.num_rows:
            self._decode()
        deliveries, self._deliveries = self._deliveries, []
        return deliveries

    def _encode(self, admitted: list[Sequence]) -> None:
        installed: list[Sequence] = []
        rejected: list[Dropped] = []
        for sequence in admitted:
            try:
                request = sequence.request
                self.runner.reserve(len(request.source), len(request.prefix) + request.max_new_tokens)
                installed.append(sequence)
            except OverloadedError as error:
                rejected.append(Dropped(sequence, error))
        for sequence, reason in rejected:
            # The rows that move here were admitted a moment ago and hold nothing yet: they are installed below.
            self._move(self.scheduler.reject(sequence))
            self._end(sequence, reason)
        if not installed:
            return
        started = time.monotonic()
        sources = [sequence.request.source for sequence in installed]
        self.runner.admit(
            sources,
            [[row.slot for row in sequence.hypotheses] for sequence in installed],
            [sequence.request.prefix for sequence in installed],
        )
        ended = time.monotonic()
        for sequence in installed:
            sequence.encoded = ended
            sequence.encode_seconds = ended - started
        tokens = sum(map(len, sources))
        padded = len(sources) * max(map(len, sources))
        self._tell(StepStats("encode", ended - started, len(sources), tokens, padded))

    def _decode(self) -> None:
        started = time.monotonic()
        inputs = np.array(self.scheduler.inputs(), np.int64)  # (R,)
        logits = self.runner.decode(inputs)  # (R, V)
        logits[:, self._never_generated] = -np.inf
        failures: dict[Sequence, DragomanError] = {}
        for sequence, row in self.scheduler.steered():
            try:
                steer(logits[row.slot], row.tokens, sequence.request, self._rules.eos)
            except Exception as error:  # a request's options must not harm another's
                failures[sequence] = failure(error)
        update = self.scheduler.update(Offers(logits), failures, ended := time.monotonic())
        for fork in update.forks:
            self.runner.fork(fork.source, fork.target)
        self._move(update.moves)
        for advance in update.advances:
            if advance.error is not None:
                self._end(advance.sequence, advance.error, partial=advance.sequence.partial(ended))
            elif advance.finished:
                self._end(advance.sequence, advance.sequence.result(ended), advance.tokens)
            else:
                self._deliveries.append(Delivery(advance.sequence, advance.tokens))
        self._tell(StepStats("decode", ended - started, len(inputs), len(inputs), len(inputs)))

    def _move(self, moves: list[Move]) -> None:
        for move in moves:
            self.runner.move(move.source, move.target)

    def _end(
        self,
        sequence: Sequence,
        outcome: GenerationResult | DragomanError,
        tokens: list[int] | None = None,
        partial: GenerationResult | None = None,
    ) -> None:
        stats = sequence.stats(outcome.code if isinstance(outcome, DragomanError) else "ok", time.monotonic())
        self._deliveries.append(Delivery(sequence, tokens or [], outcome, stats, partial))

    def _tell(self, stats: StepStats) -> None:
        if self._listener is not None:
            self._listener.on_step(stats)


def generate_all(
    runner: Runner, rules: TokenRules, requests: Rows[GenerationRequest], config: EngineConfig
) -> list[GenerationResult | DragomanError]:
    """Run requests to their ends in this thread, continuously batched, without an event loop.

    Returns one outcome a request, in order. Deadlines count; ``config.max_waiting`` does not.
    """
    queue = Queue(max_waiting=max(1, len(requests)), num_replicas=1, num_slots=runner.num_slots)
    replica = Replica(runner, queue, rules, config)
    sequences = [rules.sequence(request) for request in requests]
    outcomes: dict[Sequence, GenerationResult | DragomanError] = {}
    for sequence in sequences:
        try:
            queue.put(sequence)
        except InvalidRequestError as error:  # it needs more rows than there are
            outcomes[sequence] = error
    while len(outcomes) < len(sequences):
        for delivery in replica.step():
            if delivery.outcome is not None:
                outcomes[delivery.sequence] = delivery.outcome
    return [outcomes[sequence] for sequence in sequences]
