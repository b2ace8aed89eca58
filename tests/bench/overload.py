"""A server at ten times what it can do, for half a minute: what becomes of those let in, of the others, and of memory.

A process of its own serves a model that follows a script: 8 rows, 50 ms a step, answers of 9 steps, so 18 a second; as
many may wait as run. Three loads, one behind the other: 0.8 times that rate, ten times it, and 0.8 times it again.

python tests/bench/overload.py                  30 s of overload
python tests/bench/overload.py --seconds 10 --waiting 64

Exit status 1 when an accepted request's usual (p50) or worst usual (p95) latency more than doubles, a refusal takes
100 ms or more at p95, anything ends otherwise than OK or RESOURCE_EXHAUSTED, memory grows by more than a tenth, or the
first second after the overload is not as good as before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import Counter
from pathlib import Path

from dragoman.loadtest.arrivals import Arrivals, Stage, arrival_times
from dragoman.loadtest.load import run_open
from dragoman.loadtest.report import Outcome
from dragoman.loadtest.requests import draw_requests
from dragoman.loadtest.scenario import Part
from dragoman.loadtest.target import connect
from dragoman.testing import ALPHABET

NUM_ROWS, STEP_SECONDS, NUM_LETTERS = 8, 0.05, 8
CAPACITY = NUM_ROWS / (STEP_SECONDS * (NUM_LETTERS + 1))

SERVE = """
import asyncio, sys, time
from dragoman.cli.serve import serve
from dragoman.config import EngineConfig, ServerConfig
from dragoman.metrics import ServerMetrics
from dragoman.model_table import ModelTable
from dragoman.server import Server
from dragoman.testing import ScriptedRunner, scripted_model

runner = ScriptedRunner(num_slots={rows})
runner.before_decode = lambda: time.sleep({step})
metrics = ServerMetrics()
engine = EngineConfig(max_waiting={waiting}, share_equal=False)
model = scripted_model([runner], engine, listener=metrics.listener("scripted"))
config = ServerConfig(host="127.0.0.1", port=0, metrics_port=0)
sys.exit(asyncio.run(serve(Server(ModelTable([model]), config, metrics))))
"""


def quantile(values: list[float], q: float) -> float:
    """Of none, 0."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def resident_bytes(pid: int) -> int:
    """The process's memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


class Phase:
    """One load and what came of it."""

    def __init__(self, outcomes: list[Outcome], memory: list[int]) -> None:
        self.codes = Counter(outcome.status for outcome in outcomes)
        self.accepted = [o.done_seconds - o.sent_seconds for o in outcomes if o.status == "OK"]
        self.refused = [o.done_seconds - o.sent_seconds for o in outcomes if o.status == "RESOURCE_EXHAUSTED"]
        self.first = [
            o.done_seconds - o.sent_seconds for o in outcomes if o.status == "OK" and o.intended_seconds < 1.0
        ]
        self.memory = memory

    def line(self) -> str:
        """For people."""
        times = ", ".join(
            f"{name} " + " ".join(f"p{100 * q:.0f} {quantile(values, q) * 1e3:.0f} ms" for q in (0.5, 0.95, 0.99))
            for name, values in (("accepted", self.accepted), ("refused", self.refused))
            if values
        )
        return f"{dict(self.codes)}; {times}; memory {self.memory[0] / 1e6:.1f} to {max(self.memory) / 1e6:.1f} MB"


async def load(target: str, rate: float, seconds: float, seed: int, pid: int) -> Phase:
    """Send for so long, and look at the server's memory meanwhile."""
    rng = random.Random(seed)
    texts = ["".join(rng.choices(ALPHABET, k=NUM_LETTERS)) for _ in range(2000)]
    memory = [resident_bytes(pid)]

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.5)
            memory.append(resident_bytes(pid))

    watching = asyncio.create_task(watch())
    outcomes: list[Outcome] = []
    times = arrival_times([Stage(seconds, rate, rate)], Arrivals.POISSON, seed)
    async with connect(target, draw_requests([Part(texts=tuple(texts))], seed), connections=8) as jobs:
        origin = asyncio.get_running_loop().time()
        await run_open(jobs, times, origin=origin, max_in_flight=100_000, record=outcomes.append)
    watching.cancel()
    return Phase(outcomes, memory)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the overload; half of it before and after")
    parser.add_argument("--waiting", type=int, default=NUM_ROWS, help="requests that may wait")
    parser.add_argument("--times", type=float, default=10.0, help="the overload's rate, in what the server can do")
    args = parser.parse_args()
    code = SERVE.format(rows=NUM_ROWS, step=STEP_SECONDS, waiting=args.waiting)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    target = f"127.0.0.1:{json.loads(await process.stdout.readline())['port']}"
    await load(target, CAPACITY, 2.0, 0, process.pid)  # first calls are slow
    before = await load(target, 0.8 * CAPACITY, args.seconds / 2, 1, process.pid)
    over = await load(target, args.times * CAPACITY, args.seconds, 2, process.pid)
    after = await load(target, 0.8 * CAPACITY, args.seconds / 2, 3, process.pid)
    process.terminate()
    status = await process.wait()
    for name, phase in (("before", before), ("overload", over), ("after", after)):
        print(f"{name}: {phase.line()}")
    ratios = [quantile(over.accepted, q) / quantile(before.accepted, q) for q in (0.5, 0.95)]
    growth = max(over.memory[len(over.memory) // 3 :]) / max(over.memory[: len(over.memory) // 3])
    answered = len(over.accepted) / args.seconds / CAPACITY
    recovery = statistics.fmean(after.first) / statistics.fmean(before.accepted)
    print(
        f"accepted take {ratios[0]:.2f} (p50) and {ratios[1]:.2f} (p95) times as long as before; {answered:.0%} of "
        f"what the server can do is answered; memory grows by {growth - 1:.1%} behind the first third; the first "
        f"second after it takes {recovery:.2f} times as long as before; exit status {status}"
    )
    good = (
        max(ratios) <= 2.0
        and quantile(over.refused, 0.95) < 0.1
        and set(over.codes) <= {"OK", "RESOURCE_EXHAUSTED"}
        and growth < 1.1
        and recovery <= 2.0
        and status == 0
    )
    print("good" if good else "not good")
    return int(not good)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
