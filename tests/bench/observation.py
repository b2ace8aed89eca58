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
from dragoman.types import DecodingOptions

NUM_WORDS = 256
CALL = Call("Generate", caller="ipv4:192.0.2.1", service="dragoman.v1.GenerationService")


async def answer(model: ServedModel, observer: RequestObserver | None, word: str) -> None:
    """One request, watched or not."""
    with nullcontext() if observer is None else observer.request(CALL, "", word) as running:
        async for item in model.pipeline.stream(word, DecodingOptions(), Terms(caller=word)):
            if running is not None and isinstance(item, TextResult):
                running.model, running.results = model, (item,)


async def measure(num_rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round, by what watched."""
    metrics = ServerMetrics()
    path, limits = embedded_bundle("g2p-en"), TextLimits(1 << 16, 256)
    plain = ServedModel.load(path, EngineConfig(), limits)
    watched = ServedModel.load(path, EngineConfig(), limits, metrics.listener("g2p-en"))
    ways = {
        "nothing": (plain, None),
        "nothing again": (plain, None),
        "metrics": (watched, RequestObserver(metrics)),
        "metrics and log": (watched, RequestObserver(metrics, logs_requests=True)),
    }
    noise = random.Random(1)
    words = ["".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=noise.randint(3, 12))) for _ in range(NUM_WORDS)]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for model in (plain, watched):
        model.start()
    for number in range(num_rounds + 1):
        for name in noise.sample(sorted(ways), len(ways)):
            model, observer = ways[name]
            started = time.process_time()
            await asyncio.gather(*(answer(model, observer, word) for word in words))
            if number:  # the first round warms up
                seconds[name].append(time.process_time() - started)
    for model in (plain, watched):
        await model.close()
    return seconds


def main() -> None:
    """Print medians, and by how much each is above nothing."""
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # for the life of the process
    with logging_to_stderr(LogConfig(format="json")):
        seconds = asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 40))
    base = statistics.median(seconds["nothing"])
    for name, found in seconds.items():
        median = statistics.median(found)
        ratios = [one / other for one, other in zip(found, seconds["nothing"], strict=True)]
        print(
            f"{name:16} {median / NUM_WORDS * 1e6:7.1f} us of CPU a request, {(median / base - 1) * 100:+.2f} % "
            f"(median of pairs {(statistics.median(ratios) - 1) * 100:+.2f} %)"
        )


if __name__ == "__main__":
    main()
