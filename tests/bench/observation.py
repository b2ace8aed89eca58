"""What it costs to watch: the embedded g2p-en model without metrics, with them, and with a line of the log a request.

  OMP_NUM_THREADS=1 python tests/bench/observation.py [ROUNDS]

Each round answers the same words as in the server, but for gRPC, once in each way, in turns, so that whatever else the
machine does falls on all alike. Compared is the time on the processor of the whole process, engine thread included.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from dragoman.answer import TextResult
from dragoman.config import EngineConfig, LogConfig, embedded_bundle
from dragoman.logs import logging_to_stderr
from dragoman.metrics import ServerMetrics
from dragoman.observer import RequestObserver
from dragoman.pipeline import TextLimits
from dragoman.resolver import Terms
from dragoman.served_model import ServedModel
from dragoman.servicers.rpc import Call
from dragoman.types import DecodingOptions, RequestStats, StatsListener, StepStats

NUM_WORDS = 64
CALL = Call("Generate", caller="ipv4:192.0.2.1", service="dragoman.v1.GenerationService")


async def answer(model: ServedModel, observer: RequestObserver | None, word: str) -> None:
    """One request, watched or not."""
    with nullcontext() if observer is None else observer.request(CALL, "", word) as running:
        async for item in model.pipeline.stream(word, DecodingOptions(), Terms(caller=word)):
            if running is not None and isinstance(item, TextResult):
                running.model, running.results = model, (item,)


class Switch:
    """A listener that can be turned off: one engine is measured, as two differ by more than metrics cost."""

    def __init__(self, listener: StatsListener) -> None:
        self._listener = listener
        self.is_on = False

    def on_step(self, stats: StepStats) -> None:
        """See ``StatsListener``."""
        if self.is_on:
            self._listener.on_step(stats)

    def on_finished(self, stats: RequestStats) -> None:
        """See ``StatsListener``."""
        if self.is_on:
            self._listener.on_finished(stats)


async def measure(num_rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round, by what watched."""
    metrics = ServerMetrics()
    switch = Switch(metrics.listener("g2p-en"))
    model = ServedModel.load(embedded_bundle("g2p-en"), EngineConfig(), TextLimits(1 << 16, 256), switch)
    ways = {
        "nothing": None,
        "nothing again": None,
        "metrics": RequestObserver(metrics),
        "metrics and log": RequestObserver(metrics, logs_requests=True),
    }
    noise = random.Random(1)
    words = ["".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=noise.randint(3, 12))) for _ in range(NUM_WORDS)]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    model.start()
    for number in range(num_rounds + 1):
        for name in noise.sample(sorted(ways), len(ways)):
            observer = ways[name]
            switch.is_on = observer is not None
            started = time.process_time()
            await asyncio.gather(*(answer(model, observer, word) for word in words))
            if number:  # the first round warms up
                seconds[name].append(time.process_time() - started)
    await model.close()
    return seconds


def main() -> None:
    """Print medians, and how much each is above nothing, with the error of that. "nothing again" shows the noise."""
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # for the life of the process
    with logging_to_stderr(LogConfig(format="json")):
        seconds = asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
    base = statistics.median(seconds["nothing"])
    for name, found in seconds.items():
        more = [one - other for one, other in zip(found, seconds["nothing"], strict=True)]
        error = 1.25 * statistics.stdev(more) / len(more) ** 0.5  # of a median of normal noise
        print(
            f"{name:16} {statistics.median(found) / NUM_WORDS * 1e6:7.1f} us of CPU a request, "
            f"{statistics.median(more) / base * 100:+.2f} % +- {error / base * 100:.2f}"
        )


if __name__ == "__main__":
    main()
