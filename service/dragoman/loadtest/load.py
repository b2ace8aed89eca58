"""Sending requests at given times, whatever became of the earlier ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from dragoman.loadtest.report import CLIENT_LIMIT, Outcome

Call = Callable[[int, float], Awaitable[str]]
"""Sends request number n, answering within the seconds given, and returns its status; raises for no status."""


async def run_load(
    call: Call, arrivals: Iterable[float], *, deadline_seconds: float, max_in_flight: int
) -> list[Outcome]:
    """Call at each arrival time (seconds from now, ascending) and return every outcome once all calls have ended.

    At most ``max_in_flight`` calls run together, which bounds this process's memory; a request that finds no room is
    not sent later, it ends at once with ``CLIENT_LIMIT``. The deadline counts from the intended time, as the latency
    does: what is sent late has less of it left. What a call raises ends the load and is raised here.
    """
    loop = asyncio.get_running_loop()
    outcomes: list[Outcome] = []
    num_in_flight = 0
    start = loop.time()

    async def send(number: int, intended: float) -> None:
        nonlocal num_in_flight
        sent = loop.time() - start
        status = await call(number, intended + deadline_seconds - sent)
        num_in_flight -= 1
        outcomes.append(Outcome(intended, sent, loop.time() - start, status))

    async with asyncio.TaskGroup() as tasks:
        for number, intended in enumerate(arrivals):
            # Also when late already: answers that have come must be let in, or they would look slow.
            await asyncio.sleep(max(start + intended - loop.time(), 0))
            if num_in_flight < max_in_flight:
                num_in_flight += 1
                tasks.create_task(send(number, intended))
            else:
                now = loop.time() - start
                outcomes.append(Outcome(intended, now, now, CLIENT_LIMIT))
    return outcomes
