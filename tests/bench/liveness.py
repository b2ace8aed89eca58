"""A million steps of scheduler and search under random arrivals, cancels, deadlines and overload.

    python tests/bench/liveness.py                          greedy requests
    python tests/bench/liveness.py --mixed --steps 200000   beams and samples among them

After every step, free and used rows make up all rows; every request ends exactly once; in the end the queue is empty.
One request in thirty or so is equal to one that runs, and shares its rows.
Prints the steps, how each request ended, and the seconds; the goal for a million greedy steps is under 60.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

import numpy as np

from dragoman.config import EngineConfig
from dragoman.engine.queue import Queue
from dragoman.engine.replica import Replica, TokenRules
from dragoman.engine.sequence import Sequence
from dragoman.errors import DragomanError
from dragoman.types import GenerationRequest, SearchOptions

NUM_SLOTS, NUM_TOKENS, MAX_WAITING = 8, 16, 24
SEARCHES = [SearchOptions()] * 4 + [
    SearchOptions(beam_size=3, num_hypotheses=2),
    SearchOptions(temperature=1.0, num_hypotheses=2),
]


class RandomRunner:
    """Hands over one of some ready tables of logits."""

    kv_cache_bytes = 0
    num_slots = NUM_SLOTS

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self._tables = [generator.standard_normal((NUM_SLOTS, NUM_TOKENS)).astype(np.float32) for _ in range(64)]
        self._step = 0

    def reserve(self, num_source_tokens: int, max_new_tokens: int) -> None: ...

    def admit(self, sources: object, slots: object, prefixes: object = ()) -> None: ...

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        self._step += 1
        return self._tables[self._step % 64][: len(tokens)].copy()

    def move(self, source_slot: int, target_slot: int) -> None: ...

    def fork(self, source_slot: int, target_slot: int) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--mixed", action="store_true", help="beams and samples, too")
    args = parser.parse_args()
    searches = SEARCHES if args.mixed else SEARCHES[:1]
    rng, rules, runner = random.Random(0), TokenRules(1, 2, (0, 1, 3)), RandomRunner()
    queue = Queue(MAX_WAITING, 1, NUM_SLOTS)
    replica = Replica(runner, queue, rules, EngineConfig())
    alive: dict[Sequence, None] = {}
    ends: Counter[str] = Counter()
    started = time.perf_counter()
    for _ in range(args.steps):
        if rng.random() < 0.4:
            deadline = time.monotonic() + rng.uniform(0, 0.002) if rng.random() < 0.2 else None
            request = GenerationRequest(
                (5, 2), rng.randint(1, 40), deadline=deadline, search=rng.choice(searches), caller=rng.choice("abc")
            )
            sequence = rules.sequence(request)
            try:
                queue.put(sequence)
                alive[sequence] = None
            except DragomanError as error:
                ends[error.code] += 1
        if alive and rng.random() < 0.05:
            sequence = next(iter(alive))
            sequence.cancel()
            queue.cancelled(sequence)
        end(replica, alive, ends)
    while alive:
        end(replica, alive, ends)
    seconds = time.perf_counter() - started
    assert (replica.scheduler.num_rows, replica.scheduler.num_running, queue.num_waiting) == (0, 0, 0)
    print(
        f"{args.steps} steps, {sum(ends.values())} requests {dict(ends)}, {seconds:.1f} s, "
        f"{seconds / args.steps * 1e6:.0f} us a step"
    )


def end(replica: Replica, alive: dict[Sequence, None], ends: Counter[str]) -> None:
    """One step, and what it must leave behind."""
    for delivery in replica.step():
        if delivery.outcome is not None:
            del alive[delivery.sequence]  # once
            ends[delivery.outcome.code if isinstance(delivery.outcome, DragomanError) else "ok"] += 1
    scheduler = replica.scheduler
    slots, runs = scheduler._slots, scheduler._runs
    assert slots.num_free + slots.num_used == NUM_SLOTS
    assert slots.num_used == sum([len(run.search.rows) for run in runs])
    assert scheduler.num_running == sum([len(run.sequences) for run in runs])


if __name__ == "__main__":
    main()
