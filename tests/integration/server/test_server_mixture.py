"""Thousands of callers at once, of whom many are rude: every other answer is right, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from pathlib import Path

import grpc

from dragoman.client import AsyncClient
from dragoman.config import EngineConfig
from dragoman.errors import DeadlineError, InvalidRequestError, TooLateError
from dragoman.retries import NO_RETRIES
from dragoman.testing import ALPHABET, ScriptedRunner
from dragoman.v1 import generation_pb2 as pb

GENERATE = "/dragoman.v1.GenerationService/Generate"
STREAM = "/dragoman.v1.GenerationService/StreamGenerate"
CALLS = 5000
AT_ONCE = 64


class Callers:
    """Each method is one caller, who behaves as its name says. The model answers each text with itself."""

    def __init__(self, client: AsyncClient, channel: grpc.aio.Channel, target: str, rng: random.Random) -> None:
        self.client, self.channel, self.target, self.rng = client, channel, target, rng
        self.seen: Counter[str] = Counter()

    def text(self) -> str:
        return "".join(self.rng.choices(ALPHABET, k=self.rng.randint(1, 12)))

    async def a_while(self) -> None:
        for _ in range(self.rng.randrange(30)):
            await asyncio.sleep(0)

    async def asks(self) -> None:
        text = self.text()
        assert (await self.client.generate(text)).text == text

    async def listens(self) -> None:
        text = self.text()
        items = [item async for item in self.client.stream(text)]
        assert "".join(getattr(item, "delta", "") for item in items) == text == getattr(items[-1], "text", "")

    async def listens_slowly(self) -> None:
        text, told = self.text(), ""
        async for item in self.client.stream(text):
            await self.a_while()
            told += getattr(item, "delta", "")
        assert told == text

    async def asks_for_several(self) -> None:
        texts = [self.text(), "1", self.text()]
        first, refused, last = await self.client.batch(texts)
        assert isinstance(refused, InvalidRequestError)
        assert [getattr(first, "text", None), getattr(last, "text", None)] == [texts[0], texts[2]]

    async def is_in_a_hurry(self) -> None:
        text = self.text()
        try:
            assert (await self.client.generate(text, timeout=self.rng.uniform(0.0, 0.5))).text == text
        except (DeadlineError, TooLateError):
            self.seen["too late"] += 1

    async def cancels(self) -> None:
        call = asyncio.create_task(self.client.generate(self.text()))
        await self.a_while()
        self.seen["cancelled"] += call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    async def leaves_a_stream(self) -> None:
        items = self.client.stream(self.text())
        await anext(items)
        await items.aclose()

    async def hangs_up(self) -> None:
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self.target, options=options) as channel:
            method = channel.unary_stream(STREAM, None, None)
            call = method(pb.GenerateRequest(text=self.text()).SerializeToString())
            if self.rng.random() < 0.5:
                await call.read()
            else:
                await channel.channel_ready()
        call.cancel()

    async def sends_no_message(self) -> None:
        data = b"\xff" + self.rng.randbytes(self.rng.randrange(50))
        try:
            await self.channel.unary_unary(GENERATE, None, None)(data)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            self.seen["refused"] += 1

    async def speaks_no_http(self) -> None:
        _, writer = await asyncio.open_connection(*self.target.split(":"))
        writer.write(self.rng.randbytes(self.rng.randint(1, 100)))
        await self.a_while()
        writer.close()


POLITE = ("asks", "listens", "listens_slowly", "asks_for_several")
RUDE = ("is_in_a_hurry", "cancels", "leaves_a_stream", "sends_no_message")
COSTLY = ("hangs_up", "speaks_no_http")  # a connection each: a tenth of the calls


async def call_all(callers: Callers, count: int) -> None:
    """So many calls of random kinds, ``AT_ONCE`` at a time."""
    kinds = callers.rng.choices([*POLITE, *RUDE, *COSTLY], [*[9] * 4, *[9] * 4, *[4] * 2], k=count)
    waiting = iter(kinds)

    async def caller() -> None:
        for kind in waiting:
            await getattr(callers, kind)()

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


async def at_rest(running):
    await running.server._router.idle()
    await running.model.engine.drained()


async def test_rude_callers_leave_nothing_behind_and_disturb_nobody(start_server):
    """No slot, task, stream or descriptor is left of five thousand calls; whoever stayed got the right answer."""
    engine = EngineConfig(max_waiting=1000)
    running = await start_server(ScriptedRunner(num_slots=8), engine, max_calls=1000)
    target = f"127.0.0.1:{running.server.port}"
    async with AsyncClient(target, retries=NO_RETRIES) as client:
        callers = Callers(client, running.channel, target, random.Random(1))
        await call_all(callers, 200)  # opens what stays open
        await at_rest(running)
        tasks, files = len(asyncio.all_tasks()), open_files()
        await call_all(callers, CALLS - 200)
        await at_rest(running)
        while len(asyncio.all_tasks()) > tasks or open_files() > files:
            await asyncio.sleep(0.01)  # what was closed is closed soon; a leak would never be
    assert min(callers.seen[name] for name in ("cancelled", "refused")) > CALLS // 50
    assert callers.seen["too late"]
    snapshot = running.model.engine.snapshot()
    assert (snapshot.slots_used, snapshot.num_running, snapshot.num_waiting) == (0, 0, 0)
    samples = await running.scrape()
    started, handled = (
        sum(value for (other, _), value in samples.items() if other == f"grpc_server_{name}_total")
        for name in ("started", "handled")
    )
    assert started == handled > CALLS / 2
