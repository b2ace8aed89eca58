"""What a step costs beyond the model: scheduler, search and bookkeeping, over a runner that hands over ready logits.

    python tests/bench/engine_overhead.py --rows 64 --tokens 8000

Prints microseconds a step, the least of many, for greedy rows (less numpy's argmax over the same logits), for greedy
rows with scores, for beams of 4 and for rows drawn by chance. The goal for greedy rows: at most 60 plus 3 a row.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from dragoman.config import EngineConfig
from dragoman.engine.queue import Queue
from dragoman.engine.replica import Replica, TokenRules
from dragoman.types import GenerationRequest, SearchOptions

STEPS = 200


class ReadyRunner:
    """Hands over the same logits at every step."""

    kv_cache_bytes = 0

    def __init__(self, num_slots: int, num_tokens: int) -> None:
        self.num_slots = num_slots
        self.logits = np.random.default_rng(0).standard_normal((num_slots, num_tokens)).astype(np.float32)
        self.logits[:, 2] = -50  # the end token does not come

    def reserve(self, num_source_tokens: int, max_new_tokens: int) -> None: ...

    def admit(self, sources: object, slots: object, prefixes: object = ()) -> None: ...

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        return self.logits[: len(tokens)]

    def move(self, source_slot: int, target_slot: int) -> None: ...

    def fork(self, source_slot: int, target_slot: int) -> None: ...


def step_seconds(rows: int, num_tokens: int, count: int, search: SearchOptions, scored: bool) -> float:
    """The least time of a step over ``rows`` rows."""
    runner = ReadyRunner(rows, num_tokens)
    queue = Queue(rows, 1, rows)
    rules = TokenRules(1, 2, (0, 1, 3))
    replica = Replica(runner, queue, rules, EngineConfig(share_equal=False))
    for _ in range(count):
        queue.put(rules.sequence(GenerationRequest((5, 2), 10 * STEPS, scored, search=search)))
    for _ in range(3):
        replica.step()
    assert replica.scheduler.num_rows == rows
    best = float("inf")
    for _ in range(STEPS):
        started = time.perf_counter()
        replica.step()
        best = min(best, time.perf_counter() - started)
    return best


def argmax_seconds(rows: int, num_tokens: int) -> float:
    logits = ReadyRunner(rows, num_tokens).logits
    best = float("inf")
    for _ in range(STEPS):
        started = time.perf_counter()
        logits.argmax(axis=1)
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8000)
    args = parser.parse_args()
    rows, size = args.rows, args.tokens
    argmax = argmax_seconds(rows, size)
    greedy = step_seconds(rows, size, rows, SearchOptions(), scored=False)
    print(f"argmax {argmax * 1e6:.0f} us")
    print(f"greedy {greedy * 1e6:.0f} us, {(greedy - argmax) * 1e6:.0f} beyond argmax; the goal is {60 + 3 * rows}")
    for name, count, search, scored in (
        ("greedy with scores", rows, SearchOptions(), True),
        ("beams of 4", rows // 4, SearchOptions(beam_size=4), False),
        ("by chance, top-p 0.9", rows, SearchOptions(temperature=1.0, top_p=0.9), False),
    ):
        print(f"{name} {step_seconds(rows, size, count, search, scored) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
