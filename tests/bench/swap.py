"""Versions are swapped under load in a real process: is every request answered, by one version, and how much later?

    python tests/bench/swap.py --swaps 10 --callers 16

``dragoman serve --models`` serves copies of the embedded model as versions 1, 2, 3 and so on, which appear one after
the other while callers ask, unary, by stream and in batches; SIGHUP tells of each. Every answer must be that of the
model, a batch's of one version, and a health probe must be answered all the while; nothing is asked twice. Printed are
how many answers there were, the latencies of single requests while a swap went on and otherwise, the slowest probe (it
shares a process with the callers), and the server's resident memory after the first swap and after the last. Exit
status 1 if an answer was lost or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import grpc

from dragoman.bundle import MANIFEST_NAME, load_manifest
from dragoman.client import AsyncClient, ServedResult
from dragoman.config import embedded_bundle
from dragoman.retries import NO_RETRIES

WORDS = ("giraffe", "translation", "dragoman", "abc", "swap", "versions", "under", "load")


class Load:
    """Callers that ask and look at what comes."""

    def __init__(self, client: AsyncClient, expected: dict[str, str]) -> None:
        self._client = client
        self._expected = expected
        self.swapping = False
        self.done = False
        self.num_answers = 0
        self.wrong: list[str] = []
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.slowest_probe = 0.0

    async def ask(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.done:
            try:
                await (self._one, self._stream, self._batch)[seed % 3](rng)
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    async def _one(self, rng: random.Random) -> None:
        word, started, swapping = rng.choice(WORDS), time.monotonic(), self.swapping
        self._look(word, await self._client.generate(word))
        self.seconds[swapping].append(time.monotonic() - started)

    async def _stream(self, rng: random.Random) -> None:
        word, text = rng.choice(WORDS), ""
        async for item in self._client.stream(word):
            if isinstance(item, ServedResult):
                self._look(word, item)
                if item.text != text:
                    self.wrong.append(f"stream of {word}: {text!r}, in whole {item.text!r}")
            else:
                text += item.delta

    async def _batch(self, rng: random.Random) -> None:
        answers = await self._client.batch(WORDS)
        if len({answer.version for answer in answers if isinstance(answer, ServedResult)}) > 1:
            self.wrong.append("a batch was answered by two versions")
        for word, answer in zip(WORDS, answers, strict=True):
            self._look(word, answer)

    def _look(self, word: str, answer: object) -> None:
        self.num_answers += 1
        if not isinstance(answer, ServedResult) or answer.text != self._expected[word]:
            self.wrong.append(f"{word}: {answer}")

    async def probe(self, channel: grpc.aio.Channel) -> None:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
        while not self.done:
            started = time.monotonic()
            if await check(b"") != b"\x08\x01":
                self.wrong.append("a probe was told that the server does not serve")
            self.slowest_probe = max(self.slowest_probe, time.monotonic() - started)
            await asyncio.sleep(0.02)


def put(folder: Path, version: int) -> None:
    """A copy of the embedded model as another version, in one move."""
    embedded = embedded_bundle("g2p-en")
    manifest = dataclasses.replace(load_manifest(embedded), version=str(version))
    copy = folder / manifest.name / f".{version}"
    shutil.copytree(embedded, copy)
    (copy / MANIFEST_NAME).write_text(manifest.to_json())
    copy.rename(copy.with_name(str(version)))


def resident(pid: int) -> float:
    """MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def measure(folder: Path, swaps: int, callers: int) -> int:
    put(folder, 1)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dragoman.cli.main", "serve", "--models", str(folder), "--host", "127.0.0.1"),
        *("--port", "0", "--metrics-port", "0", "--log-level", "warning"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    target = f"127.0.0.1:{json.loads(await process.stdout.readline())['port']}"
    memory = []
    async with (
        AsyncClient(target, retries=NO_RETRIES) as client,
        grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        load = Load(client, {word: (await client.generate(word)).text for word in WORDS})
        tasks = [asyncio.create_task(load.ask(seed)) for seed in range(callers)]
        tasks.append(asyncio.create_task(load.probe(channel)))
        for version in range(2, swaps + 2):
            await asyncio.sleep(1)
            put(folder, version)
            load.swapping = True
            process.send_signal(signal.SIGHUP)
            while [status.version for status in await client.models() if status.state == "ready"] != [str(version)]:
                await asyncio.sleep(0.02)
            while len([status for status in await client.models() if status.state == "draining"]):
                await asyncio.sleep(0.02)
            load.swapping = False
            memory.append(resident(process.pid))
        load.done = True
        await asyncio.gather(*tasks)
    process.terminate()
    status = await process.wait()
    for swapping, seconds in load.seconds.items():
        ordered = sorted(seconds)
        p50, p99 = (ordered[int(len(ordered) * share)] * 1e3 for share in (0.5, 0.99))
        when = "during swaps" if swapping else "otherwise"
        print(f"{when}: {len(ordered)} single requests, {p50:.0f} ms, p99 {p99:.0f} ms")
    print(f"{load.num_answers} answers over {swaps} swaps, {len(load.wrong)} lost or wrong, exit status {status}")
    print(f"slowest probe {load.slowest_probe * 1e3:.0f} ms; MB after the swaps: {[round(mb) for mb in memory]}")
    for line in load.wrong[:10]:
        print(line)
    return int(bool(load.wrong or status))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--callers", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(measure(Path(folder), args.swaps, args.callers))


if __name__ == "__main__":
    sys.exit(main())
