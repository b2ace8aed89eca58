"""Sending requests: at given times, whatever became of the earlier ones; or from callers who wait for their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from dragoman.loadtest.report import CLIENT_LIMIT, OK, Outcome

ERROR_PAUSE_SECONDS: Final = 0.1
"""A caller of a closed loop waits so long behind an error, or a server that refuses would be asked without a pause."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended."""

    status: str
    first_time: float | None = None  # of the event loop, when a stream's first piece came


@dataclass(frozen=True, slots=True)
class Job:
    """A request that can be sent."""

    part: str
    deadline_seconds: float  # from its intended time
    send: Callable[[float], Awaitable[Answer]]  # within the seconds given; raises for a fault of the load test alone


Record = Callable[[Outcome], None]


async def run_open(
    jobs: Iterator[Job], arrivals: Iterable[float], *, origin: float, max_in_flight: int, record: Record
) -> None:
    """Send at each arrival time (seconds from ``origin``, a time of the event loop; ascending), until all have ended.

    At most ``max_in_flight`` calls run together, which bounds this process's memory; a request that finds no room is
    not sent later, it ends at once with ``CLIENT_LIMIT``. The deadline counts from the intended time, as the latency
    does: what is sent late has less of it left. What a call raises ends the load and is raised here.
    """
    loop = asyncio.get_running_loop()
    num_in_flight = 0

    async def send(job: Job, intended: float) -> None:
        nonlocal num_in_flight
        await _send(job, intended, origin, record)
        num_in_flight -= 1

    async with asyncio.TaskGroup() as tasks:
        for intended in arrivals:
            # Also when late already: answers that have come must be let in, or they would look slow.
            await asyncio.sleep(max(origin + intended - loop.time(), 0))
            job = next(jobs)
            if num_in_flight < max_in_flight:
                num_in_flight += 1
                tasks.create_task(send(job, intended))
            else:
                now = loop.time() - origin
                record(Outcome(intended, now, now, CLIENT_LIMIT, None, job.part))


async def run_closed(
    jobs: Iterator[Job],
    changes: Iterable[tuple[float, int]],
    end: float,
    *,
    origin: float,
    think_seconds: float,
    record: Record,
) -> None:
    """Let callers send, each when its last answer has come, until ``end`` and all have ended.

    Changes are when the number of callers becomes another, in seconds from ``origin``, ascending. A caller that is too
    many ends behind its answer. The intended time is when a caller would send: a closed loop waits for a server that
    stalls, so its latency tells less than an open one's.
    """
    loop = asyncio.get_running_loop()
    wanted = 0
    running: set[int] = set()

    async def caller(index: int) -> None:
        while index < wanted and (intended := loop.time() - origin) < end:
            status = await _send(next(jobs), intended, origin, record)
            await asyncio.sleep(think_seconds if status == OK else max(think_seconds, ERROR_PAUSE_SECONDS))
        running.discard(index)

    async with asyncio.TaskGroup() as tasks:
        for when, count in changes:
            await asyncio.sleep(max(origin + when - loop.time(), 0))
            wanted = count
            for index in range(wanted):
                if index not in running:
                    running.add(index)
                    tasks.create_task(caller(index))


async def _send(job: Job, intended: float, origin: float, record: Record) -> str:
    loop = asyncio.get_running_loop()
    sent = loop.time() - origin
    answer = await job.send(intended + job.deadline_seconds - sent)
    first = None if answer.first_time is None else answer.first_time - origin
    record(Outcome(intended, sent, loop.time() - origin, answer.status, first, job.part))
    return answer.status
