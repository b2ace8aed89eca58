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
from dragoman.engine.choice import HostOffers, as_slices
from dragoman.engine.queue import Queue
from dragoman.engine.scheduler import Run, Scheduler
from dragoman.engine.search import TokenSearch, failure
from dragoman.engine.sequence import Delivery, Sequence
from dragoman.engine.slots import Move
from dragoman.engine.steering import steer
from dragoman.errors import DragomanError, InvalidRequestError, OverloadedError
from dragoman.types import (
    GenerationRequest,
    GenerationResult,
    Runner,
    StatsListener,
    StepStats,
    TokenIds,
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
        self.scheduler = Scheduler(queue, runner.num_slots, config.max_encode_tokens, shares=config.share_equal)
        self._rules = rules
        self._never_generated = as_slices(rules.never_generated)
        self._listener = listener

    def step(self) -> list[Delivery]:
        """Drop what is over, admit and encode what waits, decode one token a row."""
        plan = self.scheduler.schedule(time.monotonic())
        deliveries = plan.deliveries
        self._move(plan.moves)
        if plan.admitted:
            deliveries += self._encode(plan.admitted)
        if self.scheduler.num_rows:
            deliveries += self._decode()
        return deliveries

    def _encode(self, admitted: list[Run]) -> list[Delivery]:
        """Returns the ends of those for which there was no room."""
        installed: list[Run] = []
        ends: list[Delivery] = []
        rejected: list[tuple[Run, OverloadedError]] = []
        for run in admitted:
            try:
                request = run.request
                self.runner.reserve(len(request.source), len(request.prefix) + request.max_new_tokens)
                installed.append(run)
            except OverloadedError as error:
                rejected.append((run, error))
        # The rows that move here were admitted a moment ago and hold nothing yet: they are installed below.
        for run, reason in rejected:
            ends += self._reject(run, reason)
        if not installed:
            return ends
        started = time.monotonic()
        sources = [run.request.source for run in installed]
        try:
            self.runner.admit(
                sources,
                [[row.slot for row in run.rows] for run in installed],
                [_may_come(run.request) for run in installed],
            )
        except OverloadedError as error:  # nothing was installed: those that run already go on
            for run in installed:
                ends += self._reject(run, error)
            return ends
        ended = time.monotonic()
        for run in installed:
            for sequence in run.sequences:
                sequence.encoded = ended
                sequence.encode_seconds = ended - started
        if self._listener is not None:
            tokens = sum(map(len, sources))
            padded = len(sources) * max(map(len, sources))
            self._listener.on_step(StepStats("encode", ended - started, len(sources), tokens, padded))
        return ends

    def _reject(self, run: Run, reason: OverloadedError) -> list[Delivery]:
        self._move(self.scheduler.reject(run))
        return [sequence.ended(reason, time.monotonic()) for sequence in run.sequences]

    def _decode(self) -> list[Delivery]:
        started = time.monotonic()
        inputs = np.array(self.scheduler.inputs(), np.int64)  # (R,)
        step = self.runner.decode(inputs)
        offers = HostOffers(step, self._never_generated) if isinstance(step, np.ndarray) else step
        for row, request, steering in self.scheduler.steered():
            try:
                steer(offers.edit(row.slot, steering.allowed), row.tokens, request, self._rules.eos)
            except Exception as error:  # a request's options must not harm another's
                offers.fail(row.slot, failure(error))
        update = self.scheduler.update(offers, ended := time.monotonic())
        for fork in update.forks:
            self.runner.fork(fork.source, fork.target)
        self._move(update.moves)
        if self._listener is not None:
            self._listener.on_step(StepStats("decode", ended - started, len(inputs), len(inputs), len(inputs)))
        return update.deliveries

    def _move(self, moves: list[Move]) -> None:
        for move in moves:
            self.runner.move(move.source, move.target)


def _may_come(request: GenerationRequest) -> TokenIds:
    """What a request's answers may hold, whatever else is likely."""
    return request.prefix if request.steering is None else (*request.prefix, *request.steering.allowed)


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
