"""The engine as its callers see it, over a scripted runner: how each request ends, and that nobody feels another."""

import asyncio
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.config import EngineConfig
from dragoman.engine.engine import Engine
from dragoman.engine.replica import TokenRules, generate_all
from dragoman.errors import (
    DeadlineError,
    DragomanError,
    EngineDeadError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestCancelledError,
    RowError,
)
from dragoman.testing import VOCABULARY, ScriptedRunner, copy_script
from dragoman.types import FinishReason, GenerationRequest, RequestStats, SearchOptions, StepStats
from dragoman.vocabulary import BOS_ID, EOS_ID, PAD_ID, UNK_ID

RULES = TokenRules(decoder_start=BOS_ID, eos=EOS_ID, never_generated=(PAD_ID, BOS_ID, UNK_ID))
SIZE = len(VOCABULARY.tokens)


def hashing_script(source, fed):
    """A script in which every token depends on the whole source and the whole prefix."""
    generator = random.Random(hash((source, fed)))
    logits = [generator.uniform(-1, 1) for _ in range(SIZE)]
    logits[EOS_ID] += 0.5 * len(fed) / (1 + len(source))
    return logits


def request(source, max_new_tokens=64, **options):
    return GenerationRequest((*source, EOS_ID), max_new_tokens, **options)


def alone(req, script):
    (outcome,) = generate_all(ScriptedRunner(script, num_slots=1), RULES, [req], EngineConfig())
    return outcome.hypotheses


class Listener:
    def __init__(self):
        self.finished: list[RequestStats] = []
        self.steps: list[StepStats] = []

    def on_step(self, stats):
        self.steps.append(stats)

    def on_finished(self, stats):
        self.finished.append(stats)

    def codes(self):
        return sorted(stats.code for stats in self.finished)


class Running:
    """A started engine that is closed at the end."""

    def __init__(self, *runners, **config):
        self.listener = Listener()
        self.engine = Engine(runners, RULES, EngineConfig(**config), self.listener)

    async def __aenter__(self):
        self.engine.start()
        return self.engine

    async def __aexit__(self, *_):
        await self.engine.close()


class Gate:
    """Holds the runner before a step until it is let through; counts the steps that arrived."""

    def __init__(self):
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)

    def __call__(self):
        self._arrived.release()
        assert self._permits.acquire(timeout=30)

    async def arrived(self):
        assert await asyncio.to_thread(self._arrived.acquire, True, 30)

    def let(self, steps=1):
        self._permits.release(steps)


async def outcome(stream):
    try:
        async for update in stream:
            if update.result is not None:
                return update.result
    except DragomanError as error:
        return error
    raise AssertionError("a stream ends with a result or an error")


sources = st.lists(st.integers(4, SIZE - 1), min_size=1, max_size=12).map(tuple)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(sources, st.integers(1, 20), st.booleans(), st.integers(0, 12)), min_size=1, max_size=25),
    st.integers(1, 6),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_no_request_feels_another(plans, num_slots, num_replicas, rng):
    """Random arrivals, lengths, cancels, slots and replicas: whatever finishes equals the same request alone."""

    async def scenario():
        runners = [ScriptedRunner(hashing_script, num_slots) for _ in range(num_replicas)]
        running = Running(*runners, max_encode_tokens=rng.choice([8, 40, 1000]))
        async with running as engine:

            async def one(source, limit, cancel, after):
                req = request(source, limit, return_scores=True)
                stream = engine.submit(req)
                tokens = []
                try:
                    async for update in stream:
                        tokens += update.tokens
                        if cancel and len(tokens) >= after:
                            stream.cancel()
                        if update.result is not None:
                            assert tuple(tokens) == update.result.hypotheses[0].tokens
                            assert update.result.hypotheses == alone(req, hashing_script)
                            return "ok"
                except RequestCancelledError:
                    assert cancel
                    return "cancelled"

            codes = await asyncio.gather(*(one(*plan) for plan in plans))
            snapshot = engine.snapshot()
            assert (snapshot.num_running, snapshot.num_waiting, snapshot.slots_used) == (0, 0, 0)
            assert running.listener.codes() == sorted(codes)

    asyncio.run(scenario())


@pytest.mark.parametrize(("source", "limit"), [((), 5), ((5, 2), 0), ((5, 2), -1)])
def test_a_row_without_source_or_steps_cannot_be_made(source, limit):
    """Length 0, over which attention has no meaning, never reaches a graph."""
    with pytest.raises(InvalidRequestError, match="both must be at least 1"):
        GenerationRequest(source, limit)


async def test_a_short_request_does_not_wait_for_a_long_one():
    """A 3-token request that arrives while a 60-token one runs is done long before the long one is."""
    gate = Gate()
    runner = ScriptedRunner()
    runner.before_decode = gate
    async with Running(runner) as engine:
        long = engine.submit(request(range(4, 30), 26))
        gate.let(5)
        for _ in range(6):
            await gate.arrived()  # the sixth step is about to run
        short = engine.submit(request((7, 8), 10))
        gate.let(4)
        result = await outcome(short)
        assert result.hypotheses[0].tokens == (7, 8)
        assert runner.num_decode_steps <= 10
        gate.let(100)
        assert len((await outcome(long)).hypotheses[0].tokens) == 26


async def test_a_cancel_frees_the_slot_at_the_next_step():
    """One slot: the running request is cancelled, the waiting one runs from the very next step on."""
    gate = Gate()
    runner = ScriptedRunner(num_slots=1)
    runner.before_decode = gate
    async with Running(runner) as engine:
        first = engine.submit(request(range(4, 30)))
        second = engine.submit(request((9,)))
        await gate.arrived()
        first.cancel()
        gate.let(1)  # the step that was running when the cancel came
        gate.let(2)  # the second request's token, and its end
        assert isinstance(await outcome(first), RequestCancelledError)
        assert (await outcome(second)).hypotheses[0].tokens == (9,)
        assert runner.num_decode_steps == 3


async def test_expired_requests_never_reach_the_encoder():
    """One busy slot: thirty requests whose deadline passes in the queue are answered so, and only counted."""
    gate = Gate()
    runner = ScriptedRunner(num_slots=1)
    runner.before_decode = gate
    running = Running(runner)
    async with running as engine:
        busy = engine.submit(request((5, 6)))
        await gate.arrived()
        soon = time.monotonic() + 0.05
        hopeless = [engine.submit(request((7,), deadline=soon)) for _ in range(30)]
        fresh = engine.submit(request((8,), deadline=time.monotonic() + 3600))
        while time.monotonic() < soon:
            await asyncio.sleep(0.01)
        gate.let(100)
        outcomes = await asyncio.gather(*map(outcome, hopeless))
        assert [type(o) for o in outcomes] == [DeadlineError] * 30
        assert (await outcome(fresh)).hypotheses[0].tokens == (8,)
        assert (await outcome(busy)).hypotheses[0].tokens == (5, 6)
        assert [source[0] for source in runner.encoded] == [5, 8]
        assert sum(stats.expired_in_queue for stats in running.listener.finished) == 30


async def test_a_running_request_ends_at_its_deadline():
    """A deadline that passes while decoding ends the request at the next step."""
    runner = ScriptedRunner(lambda source, fed: [0.0] * 4 + [1.0] * (SIZE - 4))
    runner.before_decode = lambda: time.sleep(0.001)
    async with Running(runner) as engine:
        stream = engine.submit(request((5,), 1_000_000, deadline=time.monotonic() + 0.1))
        assert isinstance(await outcome(stream), DeadlineError)
        assert engine.snapshot().slots_used == 0


async def test_a_model_that_never_stops_ends_at_the_limit():
    """Without an end token the answer is cut at max_new_tokens and says so."""
    async with Running(ScriptedRunner(lambda source, fed: [0.0] * 4 + [1.0] * (SIZE - 4))) as engine:
        (hypothesis,) = (await outcome(engine.submit(request((5,), 17)))).hypotheses
        assert len(hypothesis.tokens) == 17
        assert hypothesis.finish_reason is FinishReason.LENGTH


async def test_a_row_of_nan_fails_alone():
    """A source that makes the model give NaN gets an error; the requests beside it are as if it were not there."""

    def script(source, fed):
        return [float("nan")] * SIZE if source[0] == 4 and len(fed) == 3 else copy_script(source, fed)

    async with Running(ScriptedRunner(script)) as engine:
        bad = engine.submit(request((4, 5, 6, 7)))
        good = [engine.submit(request((5, 6, 7, 8, i))) for i in range(9, 14)]
        assert isinstance(await outcome(bad), RowError)
        for i, stream in enumerate(good):
            assert (await outcome(stream)).hypotheses[0].tokens == (5, 6, 7, 8, i + 9)


async def test_the_reason_that_is_counted_is_a_good_answers():
    """Beside stop texts, a row may end alone: the first alternative does, and the second is the best that there is."""

    def script(source, fed):
        if len(fed) == 1:
            return [{5: 3.0, 6: 2.0}.get(token, -5.0) for token in range(SIZE)]
        return [float("nan")] * SIZE if fed[1] == 5 else [float(token == EOS_ID) for token in range(SIZE)]

    running = Running(ScriptedRunner(script))
    async with running as engine:
        search = SearchOptions(num_hypotheses=2, alternatives=True)
        found = await outcome(engine.submit(request((4,), search=search, stop=("x",))))
        assert [type(hypothesis.error) for hypothesis in found.hypotheses] == [RowError, type(None)]
    assert [(stats.code, stats.finish_reason) for stats in running.listener.finished] == [("ok", FinishReason.STOP)]


async def test_a_full_queue_refuses_at_once():
    """One slot and two places to wait: the fourth request is refused, the three are served."""
    gate = Gate()
    runner = ScriptedRunner(num_slots=1)
    runner.before_decode = gate
    running = Running(runner, max_waiting=2)
    async with running as engine:
        first = engine.submit(request((5,)))
        await gate.arrived()
        rest = [engine.submit(request((6,))) for _ in range(2)]
        with pytest.raises(OverloadedError):
            engine.submit(request((7,)))
        gate.let(100)
        for stream in (first, *rest):
            assert not isinstance(await outcome(stream), DragomanError)
        assert running.listener.codes() == ["ok", "ok", "ok", "overloaded"]


async def test_no_kv_memory_for_a_request_refuses_that_request_alone():
    """A source for which there is no room is refused; those admitted with it are served, each from its own slot."""

    class Small(ScriptedRunner):
        def reserve(self, num_source_tokens, max_new_tokens):
            if num_source_tokens > 5:
                raise OverloadedError("no room")

    gate = Gate()
    runner = Small()
    runner.before_decode = gate
    async with Running(runner) as engine:
        blocker = engine.submit(request((20,)))
        await gate.arrived()
        streams = [engine.submit(request(range(4, 4 + n))) for n in (2, 9, 3, 9, 1)]
        gate.let(100)
        outcomes = [await outcome(stream) for stream in streams]
        assert [isinstance(o, OverloadedError) for o in outcomes] == [False, True, False, True, False]
        for index, length in ((0, 2), (2, 3), (4, 1)):
            assert outcomes[index].hypotheses[0].tokens == tuple(range(4, 4 + length))
        assert (await outcome(blocker)).hypotheses[0].tokens == (20,)
        assert engine.snapshot().slots_used == 0


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), MemoryError()])
async def test_a_broken_runner_fails_every_stream_and_says_that_the_engine_is_dead(error):
    """Running and waiting requests end with EngineDeadError, new ones are refused, ``failed`` returns."""

    def explode():
        raise error

    runner = ScriptedRunner(num_slots=1)
    runner.before_decode = explode
    running = Running(runner)
    async with running as engine:
        streams = [engine.submit(request((5,))) for _ in range(3)]
        outcomes = await asyncio.gather(*map(outcome, streams))
        assert [type(o) for o in outcomes] == [EngineDeadError] * 3
        assert isinstance(await engine.failed(), EngineDeadError)
        with pytest.raises(EngineDeadError):
            engine.submit(request((5,)))
        assert engine.snapshot().failure is not None
        assert running.listener.codes() == ["engine_dead"] * 3


async def test_a_hung_step_is_found_by_the_watchdog():
    """A step that does not come back is a dead engine: the caller is told instead of waiting for ever."""
    gate = Gate()
    runner = ScriptedRunner()
    runner.before_decode = gate
    async with Running(runner, stuck_seconds=0.2) as engine:
        stream = engine.submit(request((5,)))
        assert isinstance(await outcome(stream), EngineDeadError)
        await engine.failed()
        gate.let(1)  # so that the thread can end


async def test_a_paused_process_does_not_take_itself_for_stuck():
    """When the watching loop stood still as long as the step did, the whole process was paused: that is no hang."""
    gate = Gate()
    runner = ScriptedRunner()
    runner.before_decode = gate
    async with Running(runner, stuck_seconds=1.0) as engine:
        stream = engine.submit(request((5,)))
        await gate.arrived()
        time.sleep(3)  # the event loop stands still on purpose
        gate.let(10)
        assert (await outcome(stream)).hypotheses[0].tokens == (5,)


async def test_an_idle_engine_is_not_stuck():
    """No work for longer than stuck_seconds is no hang."""
    async with Running(ScriptedRunner(), stuck_seconds=0.5) as engine:
        await asyncio.sleep(1.5)
        assert (await outcome(engine.submit(request((5,))))).hypotheses[0].tokens == (5,)


async def test_close_ends_what_still_runs():
    """Whoever still waits or runs at the close gets NotReadyError; nobody hangs, nothing is left."""
    gate = Gate()
    runner = ScriptedRunner(num_slots=1)
    runner.before_decode = gate
    running = Running(runner)
    engine = await running.__aenter__()
    streams = [engine.submit(request((5, 6, 7))) for _ in range(3)]
    await gate.arrived()
    gate.let(1)
    await engine.close()
    outcomes = await asyncio.gather(*map(outcome, streams))
    assert [type(o) for o in outcomes] == [NotReadyError] * 3
    await engine.drained()
    with pytest.raises(NotReadyError):
        engine.submit(request((5,)))


async def test_a_slow_reader_gets_everything_in_fewer_updates():
    """A stream that is read late gives all tokens, joined, and never holds more than the answer."""
    async with Running(ScriptedRunner()) as engine:
        stream = engine.submit(request(range(4, 24)))
        await engine.drained()
        updates = [update async for update in stream]
        assert len(updates) == 1
        assert updates[0].tokens == tuple(range(4, 24))
        assert updates[0].result.hypotheses[0].tokens == tuple(range(4, 24))


async def test_replicas_share_the_work():
    """While one of two replicas is in a step, the other takes its half of what waits."""
    gate = Gate()
    runners = [ScriptedRunner(num_slots=8), ScriptedRunner(num_slots=8)]
    for runner in runners:
        runner.before_decode = gate
    async with Running(*runners) as engine:
        streams = [engine.submit(request(range(4, 20))) for _ in range(8)]
        await gate.arrived()
        await gate.arrived()  # the second one: the first is held in its step
        assert all(runner.encoded for runner in runners)
        gate.let(1000)
        for stream in streams:
            assert (await outcome(stream)).hypotheses[0].tokens == tuple(range(4, 20))


async def test_a_cancel_after_the_end_changes_nothing():
    """Cancelling a finished request is harmless and is not counted."""
    running = Running(ScriptedRunner())
    async with running as engine:
        stream = engine.submit(request((5,)))
        await outcome(stream)
        stream.cancel()
        stream.cancel()
        await outcome(engine.submit(request((6,))))
        assert running.listener.codes() == ["ok", "ok"]


async def test_what_is_prepared_is_so_on_the_thread_that_serves():
    """Each runner once, on a thread of its own, which then takes the requests."""
    prepared, served = {}, {}
    runners = [ScriptedRunner(), ScriptedRunner()]
    engine = Engine(runners, RULES, EngineConfig())
    engine.prepare(lambda runner: prepared.setdefault(runner, threading.current_thread()))
    assert len(prepared) == len(set(prepared.values())) == 2
    assert threading.current_thread() not in prepared.values()
    for runner in runners:
        runner.before_decode = lambda runner=runner: served.setdefault(runner, threading.current_thread())
    engine.start()
    result = await outcome(engine.submit(request((4, 5, 6))))
    assert result.hypotheses[0].tokens == (4, 5, 6)
    await engine.close()
    assert served and served.items() <= prepared.items()
    assert not any(thread.is_alive() for thread in prepared.values())


async def test_an_engine_that_is_prepared_and_never_started_ends():
    """Its threads wait for a start; a close ends them."""
    threads = []
    engine = Engine([ScriptedRunner()], RULES, EngineConfig())
    engine.prepare(lambda _: threads.append(threading.current_thread()))
    assert threads[0].is_alive()
    await engine.close()
    assert not threads[0].is_alive()


def test_a_preparation_that_fails_is_raised_and_leaves_no_thread():
    """Where it was asked for, as it was raised; replicas that were prepared before end, too."""
    threads = []

    def work(runner):
        threads.append(threading.current_thread())
        if runner is runners[1]:
            raise ValueError("no kernel image")

    runners = [ScriptedRunner(), ScriptedRunner(), ScriptedRunner()]
    with pytest.raises(ValueError, match="no kernel image"):
        Engine(runners, RULES, EngineConfig()).prepare(work)
    assert len(threads) == 2
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
