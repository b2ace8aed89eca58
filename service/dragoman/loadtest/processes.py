"""A load in one process, this one, or in several, which share one clock and one schedule."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from dragoman.client_credentials import PLAIN, ClientCredentials
from dragoman.errors import ConfigError
from dragoman.loadtest.arrivals import arrival_times, caller_changes
from dragoman.loadtest.load import run_closed, run_open
from dragoman.loadtest.report import Outcome
from dragoman.loadtest.requests import draw_requests
from dragoman.loadtest.scenario import Scenario
from dragoman.loadtest.target import connect

_TELL_SECONDS: Final = 1.0
_START_SECONDS: Final = 0.1  # for the start to reach all processes

Watch = Callable[[Sequence[Outcome]], None]
"""Is told once a second what has ended since."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A scenario, against whom, and how. Connections and requests in flight are those of each process."""

    target: str
    scenario: Scenario
    credentials: ClientCredentials = PLAIN
    processes: int = 1
    connections: int = 1
    max_in_flight: int = 10_000
    seed: int = 0
    connect_seconds: float = 10.0


def run_plan(plan: Plan, watch: Watch) -> list[Outcome]:
    """Every outcome but those of the warm-up, once all requests have ended. Raises ConfigError: nobody is there."""
    outcomes: list[Outcome] = []

    def tell(ended: Sequence[Outcome]) -> None:
        outcomes.extend(ended)
        watch(ended)

    if plan.processes == 1:
        asyncio.run(_drive(plan, 0, _now, tell))
    else:
        _run_processes(plan, tell)
    return outcomes


async def _now() -> float:
    return time.monotonic()


async def _drive(plan: Plan, index: int, start: Callable[[], Awaitable[float]], tell: Watch) -> None:
    """The share of one process: every n-th request of an open loop, every n-th caller of a closed one."""
    scenario, warm_up = plan.scenario, plan.scenario.warm_up_seconds
    ended: list[Outcome] = []

    def record(outcome: Outcome) -> None:
        if outcome.intended_seconds >= 0:
            ended.append(outcome)

    async def keep_telling() -> None:
        while True:
            await asyncio.sleep(_TELL_SECONDS)
            tell(ended[:])
            ended.clear()

    requests = draw_requests(scenario.mix, plan.seed * plan.processes + index)
    async with connect(
        plan.target,
        requests,
        connections=plan.connections,
        connect_seconds=plan.connect_seconds,
        credentials=plan.credentials,
    ) as jobs:
        origin = await start() + warm_up  # of time.monotonic, which is the event loop's clock, too
        telling = asyncio.create_task(keep_telling())
        try:
            if scenario.closed:
                changes = [(when - warm_up, count) for when, count in caller_changes(scenario.warmed_stages)]
                await run_closed(
                    jobs,
                    [(when, _share(count, index, plan.processes)) for when, count in changes],
                    scenario.seconds,
                    origin=origin,
                    think_seconds=scenario.think_seconds,
                    record=record,
                )
            else:
                times = arrival_times(scenario.warmed_stages, scenario.arrivals, plan.seed)
                own = islice(times, index, None, plan.processes)
                await run_open(
                    jobs,
                    (when - warm_up for when in own),
                    origin=origin,
                    max_in_flight=plan.max_in_flight,
                    record=record,
                )
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling
    tell(ended)


def _share(count: int, index: int, processes: int) -> int:
    """Of so many callers; the shares of all processes make the count."""
    return count * (index + 1) // processes - count * index // processes


def _run_processes(plan: Plan, tell: Watch) -> None:
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    pairs = [context.Pipe() for _ in range(plan.processes)]
    processes = [
        context.Process(target=_work, args=(plan, index, theirs), daemon=True)
        for index, (_, theirs) in enumerate(pairs)
    ]
    pipes: list[Any] = [ours for ours, _ in pairs]
    try:
        for process, (_, theirs) in zip(processes, pairs, strict=True):
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
        for pipe in pipes:
            _receive(pipe)  # it is connected
        start = time.monotonic() + _START_SECONDS
        for pipe in pipes:
            pipe.send(start)
        running = list(pipes)
        while running:
            for ready in wait(running):
                ended = _receive(ready)
                if ended is None:
                    running.remove(ready)
                else:
                    tell(ended)
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            pipe.close()
            if process.pid is not None:
                process.terminate()
                process.join()
            process.close()


def _receive(pipe: Any) -> Any:
    try:
        message = pipe.recv()
    except EOFError:
        raise ConfigError("a process of the load ended by itself: see its error above; is there memory left?") from None
    if isinstance(message, str):
        raise ConfigError(message)
    return message


def _work(plan: Plan, index: int, pipe: Connection) -> None:
    """One process: it says when it is connected, hears when to start, and sends what has ended; None at its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others

    async def start() -> float:
        pipe.send(())
        moment: float = await asyncio.to_thread(pipe.recv)
        return moment

    try:
        asyncio.run(_drive(plan, index, start, pipe.send))
        pipe.send(None)
    except ConfigError as error:
        pipe.send(str(error))
    finally:
        pipe.close()
