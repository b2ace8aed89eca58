"""One replica: a scheduler and a runner that advance together, one step at a time, in one thread.

It knows neither threads nor asyncio: ``Engine`` runs it on a thread of its own, ``generate_all`` in the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from dragoman.config import EngineConfig
from dragoman.engine.queue import Dropped, Queue
from dragoman.engine.scheduler import Scheduler
from dragoman.engine.search import greedy
from dragoman.engine.sequence import Hypothesis, Sequence
from dragoman.engine.slots import Move
from dragoman.errors import DragomanError, OverloadedError
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
        return Sequence(request, [Hypothesis(self.decoder_start)], arrived=time.monotonic())


@dataclass(slots=True)
class Delivery:
    """What one step did to one sequence. An end comes with its outcome and its stats."""

    sequence: Sequence
    tokens: list[int]
    outcome: GenerationResult | DragomanError | None = None
    stats: RequestStats | None = None


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
        self.scheduler = Scheduler(queue, runner.num_slots, config.max_encode_tokens, rules.eos)
        self._never_generated: IntArray = np.array(rules.never_generated, np.int64)
        self._listener = listener
        self._deliveries: list[Delivery] = []

    def step(self) -> list[Delivery]:
        """Drop what is over, admit and encode what waits, decode one token a row."""
        plan = self.scheduler.schedule(time.monotonic())
        for dropped in plan.dropped:
            self._end(dropped.sequence, dropped.error)
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
                self.runner.reserve(len(sequence.request.source), sequence.request.max_new_tokens)
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
        sources = [sequence.request.source for sequence in installed for _ in sequence.hypotheses]
        self.runner.admit(sources, [h.slot for sequence in installed for h in sequence.hypotheses])
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
        choice = greedy(logits, self._never_generated, self.scheduler.scored_rows())
        ended = time.monotonic()
        advances, moves = self.scheduler.update(choice.tokens.tolist(), choice.usable.tolist(), choice.scores, ended)
        self._move(moves)
        for advance in advances:
            if advance.finished:
                outcome = advance.error or advance.sequence.result(ended)
                self._end(advance.sequence, outcome, advance.tokens)
            else:
                self._deliveries.append(Delivery(advance.sequence, advance.tokens))
        self._tell(StepStats("decode", ended - started, len(inputs), len(inputs), len(inputs)))

    def _move(self, moves: list[Move]) -> None:
        for move in moves:
            self.runner.move(move.source, move.target)

    def _end(
        self, sequence: Sequence, outcome: GenerationResult | DragomanError, tokens: list[int] | None = None
    ) -> None:
        code = outcome.code if isinstance(outcome, DragomanError) else "ok"
        self._deliveries.append(Delivery(sequence, tokens or [], outcome, sequence.stats(code, time.monotonic())))

    def _tell(self, stats: StepStats) -> None:
        if self._listener is not None:
            self._listener.on_step(stats)


def generate_all(
    runner: Runner, rules: TokenRules, requests: Rows[GenerationRequest], config: EngineConfig
) -> list[GenerationResult | DragomanError]:
    """Run requests to their ends in this thread, continuously batched, without an event loop.

    Returns one outcome a request, in order. Deadlines count; ``config.max_waiting`` does not.
    """
    queue = Queue(max_waiting=max(1, len(requests)), num_replicas=1)
    replica = Replica(runner, queue, rules, config)
    sequences = [rules.sequence(request) for request in requests]
    for sequence in sequences:
        queue.put(sequence)
    outcomes: dict[Sequence, GenerationResult | DragomanError] = {}
    while len(outcomes) < len(sequences):
        for delivery in replica.step():
            if delivery.outcome is not None:
                outcomes[delivery.sequence] = delivery.outcome
    return [outcomes[sequence] for sequence in sequences]
