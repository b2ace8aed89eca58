"""What cannot be in time is refused at once, once it is known how long things take, and never for ever."""

import asyncio
import time

import pytest

from dragoman.config import EngineConfig
from dragoman.engine.engine import Engine
from dragoman.engine.forecast import FORGET_SECONDS, MIN_ENDED, Forecast
from dragoman.engine.replica import TokenRules
from dragoman.errors import DragomanError, OverloadedError, TooLateError
from dragoman.testing import ScriptedRunner
from dragoman.types import GenerationRequest
from dragoman.vocabulary import BOS_ID, EOS_ID, PAD_ID, UNK_ID


def request(length=10, max_new_tokens=1000, **options):
    return GenerationRequest((5,) * length, max_new_tokens, **options)


def taught(num_rows=1, seconds_a_step=0.01, now=100.0):
    """Every request of ten steps so far took ten times as long as a step."""
    forecast = Forecast(num_rows)
    for _ in range(MIN_ENDED):
        forecast.learn(request(10), 10 * seconds_a_step, now)
    return forecast


def test_without_evidence_nothing_is_refused():
    """One request fewer than is asked for, however slow they were, says nothing."""
    forecast = Forecast(1)
    for _ in range(MIN_ENDED - 1):
        forecast.check(request(deadline=100.001), 10**9, now=100.0)
        forecast.learn(request(), 1000.0, 100.0)
    forecast.check(request(deadline=100.001), 10**9, now=100.0)


def test_a_request_that_would_be_late_is_refused_with_both_times_and_when_to_come_back():
    """30 steps ahead and 10 of its own, 10 ms each: 0.4 s are predicted, 0.25 s allowed."""
    forecast = taught()
    with pytest.raises(TooLateError, match=r"expected in 0\.400 s, the deadline allows 0\.250 s") as refused:
        forecast.check(request(deadline=100.25), 30, now=100.0)
    assert isinstance(refused.value, OverloadedError)
    assert refused.value.retry_after_seconds == pytest.approx(0.15)
    forecast.check(request(deadline=100.45), 30, now=100.0)
    forecast.check(request(), 10**9, now=100.0)


def test_work_ahead_is_spread_over_the_rows():
    """640 row-steps ahead of 64 rows are 10 steps."""
    assert taught(num_rows=64).seconds(request(), 640, 100.0) == pytest.approx(0.2)


def test_a_long_source_and_a_prefix_take_longer_and_a_low_limit_less():
    """By the steps that they have: 40, 10 + 30, and 5 of at most 5."""
    forecast = taught()
    assert forecast.seconds(request(40), 0, 100.0) == pytest.approx(0.4)
    assert forecast.seconds(request(10, prefix=(7,) * 30), 0, 100.0) == pytest.approx(0.4)
    assert forecast.seconds(request(40, max_new_tokens=5), 0, 100.0) == pytest.approx(0.05)
    assert forecast.seconds(request(40, prefix=(7,) * 30, score_prefix=True), 0, 100.0) == pytest.approx(0.31)


def test_what_is_learned_follows_what_happens():
    """After a hundred requests at another speed, a tenth as fast, the first ones count for nothing."""
    forecast = taught()
    for _ in range(200):
        forecast.learn(request(), 1.0, 101.0)
    assert forecast.seconds(request(), 0, 101.0) == pytest.approx(1.0, rel=0.01)


def test_a_wrong_forecast_does_not_refuse_for_ever():
    """When everything is refused nothing ends, and after a while all is forgotten: it starts from nothing again."""
    forecast = taught(seconds_a_step=1000.0)
    late = request(deadline=1000.0)
    with pytest.raises(TooLateError):
        forecast.check(late, 0, 100.0 + FORGET_SECONDS)
    now = 100.5 + FORGET_SECONDS
    forecast.check(late, 0, now)
    for _ in range(MIN_ENDED):
        forecast.learn(request(), 0.1, now)
    assert forecast.seconds(request(), 0, now) == pytest.approx(0.1)


def test_how_long_the_rows_are_busy_with_what_waits():
    """400 row-steps of 10 ms on 4 rows take a second; without evidence, or when it is old, it is not known."""
    assert taught(num_rows=4).drain_seconds(400, 100.0) == pytest.approx(1.0)
    assert taught().drain_seconds(400, 101.0 + FORGET_SECONDS) == 0.0
    assert Forecast(1).drain_seconds(400, 0.0) == 0.0


class Listener:
    def __init__(self):
        self.codes = []

    def on_step(self, stats):
        pass

    def on_finished(self, stats):
        self.codes.append(stats.code)


RULES = TokenRules(decoder_start=BOS_ID, eos=EOS_ID, never_generated=(PAD_ID, BOS_ID, UNK_ID))


async def outcome(stream):
    try:
        return [update async for update in stream][-1].result
    except DragomanError as error:
        return error


async def test_the_engine_learns_from_what_ended_well():
    """After enough answers a hopeless deadline is refused before any work, and counted; others are served as before."""
    runner, listener = ScriptedRunner(), Listener()
    engine = Engine([runner], RULES, EngineConfig(), listener)
    engine.start()
    try:
        word = (*range(4, 20), EOS_ID)
        for _ in range(MIN_ENDED):
            assert not isinstance(await outcome(engine.submit(GenerationRequest(word, 64))), DragomanError)
        # Slower than any clock could be wrong by: the prediction is for a source of 10 million tokens, in 10 s.
        hopeless = GenerationRequest((*word[:-1] * 625_000, EOS_ID), 10**9, deadline=time.monotonic() + 10)
        with pytest.raises(TooLateError, match=r"the deadline allows (9|10)\."):
            engine.submit(hopeless)
        assert len(runner.encoded) == MIN_ENDED
        fine = engine.submit(GenerationRequest(word, 64, deadline=time.monotonic() + 3600))
        assert not isinstance(await outcome(fine), DragomanError)
        assert listener.codes == ["ok"] * MIN_ENDED + ["too_late", "ok"]
    finally:
        await engine.close()


async def test_who_finds_the_queue_full_is_told_when_what_waits_will_be_done():
    """From what requests took of late: 3 of 10 steps wait, of 0.2 s each. Before anything is known it is a second."""
    engine = Engine([ScriptedRunner(num_slots=1)], RULES, EngineConfig(max_waiting=3))
    engine._loop = asyncio.get_running_loop()  # its thread never runs: what waits stays
    for _ in range(3):
        engine.submit(request(10))
    for refused in (lambda: engine.submit(request(10)), lambda: engine.check_room(1)):
        with pytest.raises(OverloadedError) as caught:
            refused()
        assert caught.value.retry_after_seconds == 1.0
    for _ in range(MIN_ENDED):
        engine._forecast.learn(request(10), 2.0, time.monotonic())
    for refused in (lambda: engine.submit(request(10)), lambda: engine.check_room(1)):
        with pytest.raises(OverloadedError) as caught:
            refused()
        assert caught.value.retry_after_seconds == pytest.approx(6.0)
