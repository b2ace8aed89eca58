"""Equal requests share a run: nobody gets another answer by it, and nobody feels another's end."""

import asyncio
import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.config import EngineConfig
from dragoman.engine.engine import Engine
from dragoman.engine.queue import Queue
from dragoman.engine.replica import Replica, TokenRules, generate_all
from dragoman.errors import DeadlineError, OverloadedError, RequestCancelledError, RowError
from dragoman.testing import VOCABULARY, ScriptedRunner
from dragoman.types import FinishReason, GenerationRequest, GenerationResult, SearchOptions, Steering
from dragoman.vocabulary import BOS_ID, EOS_ID, PAD_ID, UNK_ID

RULES = TokenRules(decoder_start=BOS_ID, eos=EOS_ID, never_generated=(PAD_ID, BOS_ID, UNK_ID))
SIZE = len(VOCABULARY.tokens)


def hashing_script(source, fed):
    """A script in which every token depends on the whole source and the whole prefix."""
    generator = random.Random(hash((source, fed)))
    logits = [generator.uniform(-2, 2) for _ in range(SIZE)]
    logits[EOS_ID] += 0.4 * len(fed) / (1 + len(source))
    return logits


class World:
    """A replica, step by step, and what each request has had of it."""

    def __init__(self, script=hashing_script, num_slots=8, runner=None, **config):
        self.runner = runner or ScriptedRunner(script, num_slots)
        self.queue = Queue(100, 1, num_slots)
        self.replica = Replica(self.runner, self.queue, RULES, EngineConfig(**config))
        self.tokens, self.outcomes, self.stats = {}, {}, {}

    def put(self, request):
        sequence = RULES.sequence(request)
        self.queue.put(sequence)
        self.tokens[sequence] = []
        return sequence

    def cancel(self, sequence):
        sequence.cancel()
        self.queue.cancelled(sequence)

    def step(self, count=1):
        for _ in range(count):
            for delivery in self.replica.step():
                sequence = delivery.sequence
                assert sequence not in self.outcomes, "ended twice"
                self.tokens[sequence] += delivery.tokens
                if delivery.outcome is not None:
                    self.outcomes[sequence], self.stats[sequence] = delivery.outcome, delivery.stats
            scheduler = self.replica.scheduler
            assert scheduler.num_rows == sum(len(run.search.rows) for run in scheduler.runs)
            assert scheduler.num_running == sum(len(run.sequences) for run in scheduler.runs)

    def drain(self):
        for _ in range(500):
            self.step()
            if len(self.outcomes) == len(self.tokens):
                break
        scheduler = self.replica.scheduler
        assert len(self.outcomes) == len(self.tokens)
        assert (scheduler.num_rows, scheduler.num_running, self.queue.num_waiting, scheduler._shared) == (0, 0, 0, {})

    @property
    def num_rows(self):
        return self.replica.scheduler.num_rows


SOURCE = (5, 6, 7, EOS_ID)
LONG = GenerationRequest(SOURCE, 12, True, steering=Steering(min_new_tokens=12))


def alone(request, script=hashing_script):
    (outcome,) = generate_all(ScriptedRunner(script, 8), RULES, [request], EngineConfig())
    return outcome.hypotheses


requests = st.builds(
    GenerationRequest,
    source=st.sampled_from([SOURCE, (8, EOS_ID)]),
    max_new_tokens=st.sampled_from([6, 12]),
    search=st.sampled_from(
        [
            SearchOptions(),
            SearchOptions(beam_size=3, num_hypotheses=2),
            SearchOptions(num_hypotheses=2, alternatives=True),
            SearchOptions(temperature=1.0, seed=4),
        ]
    ),
    prefix=st.sampled_from([(), (9, 10)]),
    stop=st.sampled_from([(), ("x",)]),
    caller=st.sampled_from("ab"),
    priority=st.integers(-1, 1),
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), requests, st.none() | st.integers(0, 8)), min_size=2, max_size=14),
    st.integers(3, 9),
)
def test_an_answer_is_the_same_shared_or_not(arrivals, num_slots):
    """Random arrivals of few different requests, cancels among them: tokens, scores and how each ends."""

    def ends(*, share_equal):
        world, cancels, sequences = World(num_slots=num_slots, share_equal=share_equal), [], []
        for pause, request, cancel_after in arrivals:
            world.step(pause)
            sequences.append(world.put(request))
            cancels = [(left - pause, sequence) for left, sequence in cancels]
            if cancel_after is not None:
                cancels.append((cancel_after, sequences[-1]))
            for left, sequence in cancels:
                if left <= 0:
                    world.cancel(sequence)
        world.drain()
        return [(world.outcomes[sequence], world.tokens[sequence]) for sequence in sequences]

    for (_, request, cancel_after), shared, single in zip(
        arrivals, ends(share_equal=True), ends(share_equal=False), strict=True
    ):
        for outcome, tokens in (shared, single):
            if isinstance(outcome, GenerationResult):
                assert outcome.hypotheses == alone(request)
                best = outcome.hypotheses[0].tokens
                assert tuple(tokens) in {best, best[: len(tokens)]}
            else:
                assert isinstance(outcome, RequestCancelledError) and cancel_after is not None


def test_equal_requests_take_the_rows_of_one_and_are_encoded_once():
    """At once or later: the late one gets what was produced so far with its first update, and the same end."""
    world = World()
    first, second = world.put(LONG), world.put(LONG)
    world.step(5)
    assert world.num_rows == 1
    late = world.put(replace(LONG, priority=3, deadline=time.monotonic() + 1000))
    world.step()
    assert world.num_rows == 1
    assert world.tokens[late] == world.tokens[first] == world.tokens[second] and len(world.tokens[first]) == 6
    world.drain()
    assert world.runner.encoded == [SOURCE]
    for sequence in (first, second, late):
        assert world.outcomes[sequence].hypotheses == alone(LONG)
        assert tuple(world.tokens[sequence]) == alone(LONG)[0].tokens
        assert world.stats[sequence].num_generated_tokens == 12
    assert [world.stats[s].shared for s in (first, second, late)] == [False, True, True]


def test_the_times_of_each_are_its_own():
    """A late one has waited from its own arrival to its own admission, and has decoded for a shorter time."""
    world = World()
    first = world.put(LONG)
    world.step(6)
    late = world.put(LONG)
    world.drain()
    early, short = world.stats[first], world.stats[late]
    assert 0 <= short.timing.queue_seconds <= short.timing.total_seconds < early.timing.total_seconds
    assert short.timing.decode_seconds < early.timing.decode_seconds
    assert short.timing.encode_seconds == 0 < early.timing.encode_seconds
    assert 0 <= short.time_to_first_token_seconds <= short.timing.total_seconds


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_the_end_of_one_is_not_the_others(who, how):
    """The first, one in the middle or the last: it alone ends, at the next step; the search goes on for the rest."""
    world = World()
    deadlines = [time.monotonic() + 1000 + index for index in range(3)]
    sequences = [world.put(replace(LONG, deadline=deadline)) for deadline in deadlines]
    world.step(4)
    if how == "cancel":
        world.cancel(sequences[who])
    else:
        sequences[who].deadline = 0.0
    world.step()
    assert list(world.outcomes) == [sequences[who]]
    assert isinstance(world.outcomes[sequences[who]], RequestCancelledError if how == "cancel" else DeadlineError)
    assert world.num_rows == 1
    joined = world.put(LONG)
    world.drain()
    for sequence in {*sequences, joined} - {sequences[who]}:
        assert world.outcomes[sequence].hypotheses == alone(LONG)
        assert tuple(world.tokens[sequence]) == alone(LONG)[0].tokens
    assert world.runner.encoded == [SOURCE]


def test_the_rows_are_free_when_the_last_one_is_gone():
    """All cancelled: nothing runs, and an equal request begins anew."""
    world = World()
    sequences = [world.put(replace(LONG, search=SearchOptions(beam_size=3))) for _ in range(2)]
    world.step(3)
    assert world.num_rows == 3
    for sequence in sequences:
        world.cancel(sequence)
    world.step()
    assert world.num_rows == 0
    world.put(sequences[0].request)
    world.drain()
    assert world.runner.encoded == [SOURCE, SOURCE]


@pytest.mark.parametrize(
    "other",
    [
        replace(LONG, caller="another"),
        replace(LONG, max_new_tokens=11, steering=None),
        replace(LONG, return_scores=False),
        replace(LONG, prefix=(8,)),
        replace(LONG, steering=Steering(min_new_tokens=12, suppressed=(9,))),
        replace(LONG, search=SearchOptions(beam_size=2)),
        replace(LONG, num_top=1),
        replace(LONG, stop=("x",)),
        replace(LONG, stop_at_loops=True),
    ],
)
def test_what_is_not_equal_is_not_shared(other):
    """Another caller's, or one that differs in anything that makes the answer."""
    world = World()
    world.put(LONG)
    world.put(other)
    world.step()
    assert world.num_rows == 1 + len(RULES.sequence(other).hypotheses)


def test_what_is_drawn_by_chance_is_not_shared():
    """Two draws are two draws, even where a seed makes them the same."""
    world = World()
    request = replace(LONG, search=SearchOptions(temperature=1.0, seed=1))
    sequences = [world.put(request), world.put(request)]
    world.step()
    assert world.num_rows == 2
    world.drain()
    assert world.outcomes[sequences[0]].hypotheses == world.outcomes[sequences[1]].hypotheses


def test_sharing_can_be_switched_off():
    """Then each has rows of its own."""
    world = World(share_equal=False)
    world.put(LONG)
    world.put(LONG)
    world.step()
    assert world.num_rows == 2


def test_turns_are_not_won_by_sharing():
    """An equal request waits for its turn and for room like any other: it joins when it would have been admitted."""
    world = World(num_slots=1)
    world.put(LONG)
    world.step(2)
    equal = world.put(LONG)
    world.step(3)
    assert world.tokens[equal] == []
    assert world.queue.num_waiting == 1


def test_a_text_that_has_its_end_ends_for_all_that_asked_for_it():
    """They have the same stop texts, and the same tokens: what one's reader saw first, the others have, too."""
    world = World()
    request = replace(LONG, stop=("x",))
    first, second = world.put(request), world.put(request)
    world.step(4)
    first.stop()
    world.step()
    for sequence in (first, second):
        (hypothesis,) = world.outcomes[sequence].hypotheses
        assert (len(hypothesis.tokens), hypothesis.finish_reason) == (4, FinishReason.STOP_SEQUENCE)
    assert world.num_rows == 0


def test_what_fails_one_fails_its_equals_alone():
    """A row of NaN: both are told; another request is answered."""

    def script(source, fed):
        return [float("nan")] * SIZE if source == SOURCE and len(fed) > 3 else hashing_script(source, fed)

    world = World(script)
    bad = [world.put(LONG), world.put(LONG)]
    good = world.put(replace(LONG, source=(9, EOS_ID)))
    world.drain()
    assert [type(world.outcomes[sequence]) for sequence in bad] == [RowError, RowError]
    assert isinstance(world.outcomes[good], GenerationResult)


def test_no_memory_for_one_is_none_for_its_equals():
    """Refused before anything was encoded; the others that came with them are served."""

    class Small(ScriptedRunner):
        def reserve(self, num_source_tokens, max_new_tokens):
            if num_source_tokens > 2:
                raise OverloadedError("no room")

    world = World(runner=Small(hashing_script, 8))
    refused = [world.put(LONG), world.put(LONG)]
    good = world.put(replace(LONG, source=(9, EOS_ID)))
    world.drain()
    assert [type(world.outcomes[sequence]) for sequence in refused] == [OverloadedError, OverloadedError]
    assert world.outcomes[good].hypotheses == alone(replace(LONG, source=(9, EOS_ID)))


async def test_streams_of_equal_requests_end_each_for_itself():
    """Through the engine: the first is cancelled while both run; the second has the whole answer, and both are told."""
    steps, go_on = threading.Semaphore(0), threading.Semaphore(0)
    runner = ScriptedRunner(hashing_script, 8)

    def hold():
        steps.release()
        assert go_on.acquire(timeout=30)

    runner.before_decode = hold
    told = []
    listener = SimpleNamespace(on_step=lambda stats: None, on_finished=told.append)
    engine = Engine([runner], RULES, EngineConfig(), listener)
    engine.start()
    try:
        first, second = engine.submit(LONG), engine.submit(LONG)
        for _ in range(3):
            assert await asyncio.to_thread(steps.acquire, True, 30)
            go_on.release()
        first.cancel()
        go_on.release(100)
        with pytest.raises(RequestCancelledError):
            async for _ in first:
                pass
        updates = [update async for update in second]
        assert updates[-1].result.hypotheses == alone(LONG)
        assert sum((update.tokens for update in updates), ()) == alone(LONG)[0].tokens
        await engine.drained()
        assert engine.snapshot().slots_used == 0
    finally:
        await engine.close()
    assert [(stats.code, stats.shared) for stats in told] == [("cancelled", False), ("ok", True)]
    assert runner.encoded == [SOURCE]


async def test_only_a_request_with_stop_texts_can_be_ended_early():
    """Any other's end would be its equals', who asked for the whole."""
    engine = Engine([ScriptedRunner(hashing_script, 8)], RULES, EngineConfig())
    engine.start()
    try:
        for request in (LONG, replace(LONG, stop=("x",), search=SearchOptions(beam_size=2))):
            with pytest.raises(ValueError, match="only a request with stop texts"):
                engine.submit(request).stop()
    finally:
        await engine.close()
