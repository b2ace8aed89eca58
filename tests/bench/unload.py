"""Whether a model's memory comes back when it is unloaded, and how long the event loop stands still meanwhile.

    python tests/bench/unload.py                       the embedded model
    python tests/bench/unload.py --bundle BUNDLE --rounds 20

Each round loads the model into a running server, answers requests until all slots were in use, and unloads it. Printed
are the resident memory with the model, and after it; the longest pause of the event loop while it loaded and
unloaded. Exit status 1 if the least that is left after one of the last three rounds is more than after one of the first
three, by a tenth of what the model takes and 8 MB: what the libraries allocate once and keep is excused, and what the
allocator cannot give back at a time, as a small piece of it is in use.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from dragoman.bundle import load_manifest
from dragoman.client import AsyncClient
from dragoman.config import EngineConfig, RepositoryConfig, ServerConfig, embedded_bundle
from dragoman.metrics import ServerMetrics
from dragoman.model_loader import ModelLoader
from dragoman.model_repository import ModelRepository
from dragoman.model_table import ModelTable
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel
from dragoman.server import Server


def resident() -> float:
    """MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Pauses:
    """The longest time that the event loop took for something else."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def __aenter__(self) -> None:
        self._watch = asyncio.create_task(self._look())

    async def __aexit__(self, *exception: object) -> None:
        self._watch.cancel()

    async def _look(self) -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(0.005)
            self.longest = max(self.longest, time.monotonic() - started - 0.005)


async def measure(bundle: Path, rounds: int) -> int:
    name = load_manifest(bundle).name

    def load(path: Path) -> ServedModel:
        return ServedModel.load(path, EngineConfig(), TextLimits(65536, 256))

    table = ModelTable(default=name)
    loader = ModelLoader(table, ModelRepository([bundle]), load, RepositoryConfig(), 60.0)
    config = ServerConfig(host="127.0.0.1", port=0, metrics_port=0)
    server = Server(table, config, ServerMetrics(), loader)
    await server.start()
    texts = ["abcdefghij"[i % 7 : 2 + i % 9] or "word" for i in range(200)]
    growth: list[float] = []
    taken = 0.0
    async with AsyncClient(f"127.0.0.1:{server.port}", model=name) as client:
        for number in range(rounds + 1):
            loading, unloading = Pauses(), Pauses()
            if number:
                async with loading:
                    await loader.load(name)
            await client.batch(texts)
            loaded = resident()
            async with unloading:
                await loader.unload(name)
            growth.append(resident())
            print(
                f"{number}: {loaded:.0f} MB with it, {growth[-1]:.0f} MB without; longest pause "
                f"{loading.longest * 1e3:.0f} ms while it loaded, {unloading.longest * 1e3:.0f} ms while it left"
            )
            taken = taken or loaded - growth[0]
    await server.close()
    more = min(growth[-3:]) - min(growth[:3])
    print(f"{name}: {taken:.0f} MB came back after the first round, {more:.1f} MB more are left after {rounds} others")
    return int(more > 8.0 + taken / 10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=embedded_bundle("g2p-en"))
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    return asyncio.run(measure(args.bundle, args.rounds))


if __name__ == "__main__":
    sys.exit(main())
