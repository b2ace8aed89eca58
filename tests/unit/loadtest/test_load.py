"""Sending on a schedule, on an event loop whose clock jumps to the next thing that is due."""

import asyncio
import itertools
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import pytest

from dragoman.loadtest.load import ERROR_PAUSE_SECONDS, Answer, Job, run_closed, run_open
from dragoman.loadtest.report import CLIENT_LIMIT, OK, Outcome, summarize

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Never waits: it moves the clock on instead."""

    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


def run_in_virtual_time(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end at once; all sleeps take exactly their time on the loop's own clock."""
    selector = _Selector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]  # the one hook that an event loop has for this
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


Call = Callable[[int, float], Awaitable[str]]


def jobs_of(call: Call, deadline_seconds: float = 10.0) -> Iterator[Job]:
    """Requests that end with the status that a function of their number and time says."""

    def job(number: int) -> Job:
        async def send(timeout: float) -> Answer:
            return Answer(await call(number, timeout))

        return Job("all", deadline_seconds, send)

    return map(job, itertools.count())


async def run_load(
    call: Call, arrivals: Iterable[float], *, deadline_seconds: float, max_in_flight: int
) -> list[Outcome]:
    """An open loop from now on."""
    outcomes: list[Outcome] = []
    origin = asyncio.get_running_loop().time()
    jobs = jobs_of(call, deadline_seconds)
    await run_open(jobs, arrivals, origin=origin, max_in_flight=max_in_flight, record=outcomes.append)
    return outcomes


async def quick(number: int, timeout: float) -> str:
    """A server that takes 10 ms."""
    await asyncio.sleep(0.010)
    return OK


def test_requests_leave_on_time_although_earlier_ones_are_unanswered():
    """A slow server does not slow the load down: each request is sent when it was due."""
    in_flight = most_in_flight = 0

    async def slow(number: int, timeout: float) -> str:
        nonlocal in_flight, most_in_flight
        in_flight += 1
        most_in_flight = max(most_in_flight, in_flight)
        await asyncio.sleep(5.0)
        in_flight -= 1
        return OK

    arrivals = [0.1, 0.2, 0.3, 1.0]
    outcomes = run_in_virtual_time(run_load(slow, arrivals, deadline_seconds=10.0, max_in_flight=100))

    assert [o.intended_seconds for o in outcomes] == arrivals
    assert [o.sent_seconds for o in outcomes] == pytest.approx(arrivals)
    assert most_in_flight == 4


def test_a_pause_of_the_server_is_charged_to_every_request_that_was_due_in_it():
    """1,000 requests over 10 s, none answered during the third second: p99 shows nearly the whole second."""

    async def pausing(number: int, timeout: float) -> str:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.010)
        if 2.0 <= loop.time() < 3.0:
            await asyncio.sleep(3.0 - loop.time())
        return OK

    arrivals = [n / 100 for n in range(1000)]
    outcomes = run_in_virtual_time(run_load(pausing, arrivals, deadline_seconds=10.0, max_in_flight=1000))
    latency = summarize(outcomes, 100.0).all.latency_ms

    assert latency is not None
    assert latency.p50 == pytest.approx(10)
    assert latency.p95 == pytest.approx(510, abs=20)  # 100 of 1,000 requests waited, evenly up to 1 s
    assert latency.p99 == pytest.approx(910, abs=20)
    assert latency.max == pytest.approx(1010, abs=20)


def test_a_stall_of_this_side_is_charged_too():
    """Requests that could not be sent in time count from when they were due: no omission by coordination."""
    stall_until = 2.0

    async def blocking(number: int, timeout: float) -> str:
        if number == 0:  # as if this process got no CPU: the loop's clock moves, nothing else runs
            loop = asyncio.get_running_loop()
            loop._selector.now = stall_until  # type: ignore[attr-defined]  # the virtual clock
        await asyncio.sleep(0.010)
        return OK

    outcomes = run_in_virtual_time(run_load(blocking, [0.5, 1.0, 1.5], deadline_seconds=10.0, max_in_flight=10))

    assert sorted(o.latency_seconds for o in outcomes) == pytest.approx([0.51, 1.01, 1.51])
    assert max(o.sent_seconds - o.intended_seconds for o in outcomes) == pytest.approx(1.0)


def test_what_exceeds_the_bound_is_an_error_and_not_sent():
    """With two in flight and a server that answers after 1 s, of ten requests in 0.9 s eight end as client_limit."""
    sent = []

    async def slow(number: int, timeout: float) -> str:
        sent.append(number)
        await asyncio.sleep(1.0)
        return OK

    arrivals = [n / 10 for n in range(10)]
    outcomes = run_in_virtual_time(run_load(slow, arrivals, deadline_seconds=10.0, max_in_flight=2))

    assert sent == [0, 1]
    assert sorted(o.status for o in outcomes) == [OK] * 2 + [CLIENT_LIMIT] * 8


def test_room_in_flight_comes_back():
    """The bound is on requests at one time: after an answer the next request is sent."""
    outcomes = run_in_virtual_time(run_load(quick, [n / 10 for n in range(10)], deadline_seconds=10.0, max_in_flight=1))

    assert [o.status for o in outcomes] == [OK] * 10


def test_every_third_rejected_is_a_third_of_errors():
    """Statuses arrive in the report as the calls returned them."""

    async def rejecting(number: int, timeout: float) -> str:
        return "RESOURCE_EXHAUSTED" if number % 3 == 2 else await quick(number, timeout)

    arrivals = [n / 100 for n in range(300)]
    outcomes = run_in_virtual_time(run_load(rejecting, arrivals, deadline_seconds=10.0, max_in_flight=100))
    report = summarize(outcomes, 100.0).all

    assert report.errors == {"RESOURCE_EXHAUSTED": 100}
    assert report.error_rate == pytest.approx(1 / 3)
    assert report.latency_ms is not None
    assert report.latency_ms.max == pytest.approx(10)


def test_the_deadline_counts_from_the_intended_time():
    """A request that left 1.5 s late has 1.5 s less to be answered in."""
    timeouts = {}

    async def record(number: int, timeout: float) -> str:
        timeouts[number] = timeout
        if number == 0:
            asyncio.get_running_loop()._selector.now = 2.0  # type: ignore[attr-defined]  # the virtual clock
        return OK

    run_in_virtual_time(run_load(record, [0.0, 0.5], deadline_seconds=4.0, max_in_flight=10))

    assert timeouts == pytest.approx({0: 4.0, 1: 2.5})


def test_an_error_of_the_call_itself_is_not_swallowed():
    """A call must return a status; what it raises is a fault of the load test and ends it."""

    async def broken(number: int, timeout: float) -> str:
        raise RuntimeError("no status")

    async def load() -> list[Outcome]:
        return await run_load(broken, [0.0, 0.1], deadline_seconds=1.0, max_in_flight=10)

    with pytest.raises(ExceptionGroup) as raised:
        run_in_virtual_time(load())
    assert raised.group_contains(RuntimeError, match="no status")


def run_callers(call: Call, changes: list[tuple[float, int]], end: float, think_seconds: float = 0.0) -> list[Outcome]:
    """A closed loop in virtual time."""
    outcomes: list[Outcome] = []

    async def load() -> None:
        origin = asyncio.get_running_loop().time()
        await run_closed(
            jobs_of(call), changes, end, origin=origin, think_seconds=think_seconds, record=outcomes.append
        )

    run_in_virtual_time(load())
    return outcomes


def test_a_caller_sends_behind_its_answer():
    """Two callers of a server that takes 10 ms, who think for 40 ms: each sends every 50 ms, 20 times in a second."""
    outcomes = run_callers(quick, [(0.0, 2)], end=1.0, think_seconds=0.04)

    assert len(outcomes) == 40
    assert sorted(o.intended_seconds for o in outcomes)[::2] == pytest.approx([n / 20 for n in range(20)])


def test_callers_are_as_many_as_the_changes_say():
    """One caller for a second, three for a second, one again: so many answers of 10 ms fit."""
    outcomes = run_callers(quick, [(0.0, 1), (1.0, 3), (2.0, 1)], end=3.0)
    counts = [sum(second <= o.intended_seconds + 1e-9 < second + 1 for o in outcomes) for second in range(3)]

    assert counts == pytest.approx([100, 300, 100], abs=2)


def test_a_caller_waits_behind_an_error():
    """A server that refuses at once is not asked without a pause."""

    async def refusing(number: int, timeout: float) -> str:
        return "RESOURCE_EXHAUSTED"

    outcomes = run_callers(refusing, [(0.0, 1)], end=1.0)

    assert len(outcomes) == pytest.approx(1 / ERROR_PAUSE_SECONDS, abs=1)
