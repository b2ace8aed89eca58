"""The queue in front of replicas that run by themselves, step by step: nobody is lost, nobody waits for ever.

Time is a count of steps. A replica here is what ``Scheduler`` is to the queue, with the lengths of the answers given.
"""

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.config import EngineConfig
from dragoman.engine.queue import Queue
from dragoman.engine.replica import TokenRules, generate_all
from dragoman.engine.search import Hypothesis
from dragoman.engine.sequence import Sequence, Status
from dragoman.errors import OverloadedError, RequestCancelledError
from dragoman.testing import ScriptedRunner
from dragoman.types import GenerationRequest, GenerationResult
from dragoman.vocabulary import BOS_ID, EOS_ID, PAD_ID, UNK_ID


@dataclass(eq=False)
class Job:
    """A request, how long its answer is, and what happened to it."""

    steps: int
    rows: int = 1
    length: int = 3
    caller: str = ""
    priority: int = 0
    deadline: float | None = None
    cancel_at: int | None = None
    arrived: int = 0
    taken: int | None = None
    ended: int | None = None
    end: str | None = None
    sequence: Sequence = field(init=False)

    def __post_init__(self):
        request = GenerationRequest(
            (5,) * self.length, 1000, deadline=self.deadline, priority=self.priority, caller=self.caller
        )
        self.sequence = Sequence(request, SimpleNamespace(rows=[Hypothesis(1) for _ in range(self.rows)]), 0.0)

    @property
    def waited(self):
        return self.taken - self.arrived


class World:
    """Replicas that share a queue."""

    def __init__(self, num_slots=8, num_replicas=1, max_waiting=1000, max_encode_tokens=1000):
        self.queue = Queue(max_waiting, num_replicas, num_slots)
        self.num_slots = num_slots
        self.max_encode_tokens = max_encode_tokens
        self.running: list[dict[Sequence, int]] = [{} for _ in range(num_replicas)]  # and steps to go
        self.jobs: dict[Sequence, Job] = {}
        self.now = 0

    def put(self, job):
        """False when it was refused."""
        job.arrived = self.now
        try:
            self.queue.put(job.sequence)
        except OverloadedError:
            return False
        self.jobs[job.sequence] = job
        return True

    def end(self, sequence, how):
        job = self.jobs[sequence]
        assert job.end is None, "ended twice"
        job.ended, job.end = self.now, how
        sequence.status = Status.FINISHED

    def step(self):
        """One step of every replica."""
        self.now += 1
        for job in self.jobs.values():
            if job.end is None and job.cancel_at is not None and self.now >= job.arrived + job.cancel_at:
                job.sequence.cancel()
                self.queue.cancelled(job.sequence)
        busy = False
        for running in self.running:
            for sequence, error in self.queue.sweep(self.now):
                self.end(sequence, type(error).__name__)
            for sequence in list(running):
                error = sequence.interruption(self.now)
                running[sequence] -= 1
                if error is not None or not running[sequence]:
                    self.end(sequence, "ok" if error is None else type(error).__name__)
                    del running[sequence]
                    self.queue.finished(1)
            free = self.num_slots - sum(len(s.hypotheses) for s in running)
            taken = self.queue.take(len(running), free, self.max_encode_tokens)
            for sequence in taken:
                job = self.jobs[sequence]
                assert sequence.status is Status.WAITING and job.end is None and job.taken is None
                assert sequence.interruption(self.now) is None, "cancelled or expired ones are not taken"
                sequence.status = Status.RUNNING
                job.taken = self.now
                running[sequence] = job.steps
            assert sum(len(s.hypotheses) for s in running) <= self.num_slots
            assert len(taken) <= 1 or len(taken) * max(len(s.request.source) for s in taken) <= self.max_encode_tokens
            busy = busy or bool(running)
        assert busy or not self.queue.num_waiting, "somebody waits and nobody works"
        ended = sum(job.end is not None for job in self.jobs.values())
        assert self.queue.num_waiting + sum(map(len, self.running)) + ended == len(self.jobs)

    @property
    def at_rest(self):
        return not self.queue.num_waiting and not any(self.running)

    def run(self, limit):
        """Step until all is done."""
        for _ in range(limit):
            self.step()
            if self.at_rest:
                return
        raise AssertionError(f"not done after {limit} steps")


jobs = st.builds(
    Job,
    steps=st.integers(1, 12),
    rows=st.integers(1, 4),
    length=st.integers(1, 9),
    caller=st.sampled_from("abc"),
    priority=st.integers(-1, 2),
    deadline=st.none() | st.integers(1, 60),
    cancel_at=st.none() | st.integers(0, 20),
)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 3), jobs), max_size=40),
    st.integers(4, 7),
    st.integers(1, 3),
    st.integers(2, 20),
    st.sampled_from([4, 20, 1000]),
)
def test_nobody_is_lost_and_the_queue_drains(arrivals, num_slots, num_replicas, max_waiting, max_encode_tokens):
    """Random arrivals, sizes, priorities, cancels, deadlines and overload: each request ends once, in bounded time."""
    world = World(num_slots, num_replicas, max_waiting, max_encode_tokens)
    for pause, job in arrivals:
        for _ in range(pause):
            world.step()
        world.put(job)
    # In every step in which somebody waits somebody runs, so the work there is bounds the steps it takes.
    world.run(sum(job.steps for _, job in arrivals) + 2)
    assert world.queue.num_callers == 0
    for job in world.jobs.values():
        cancelled = None if job.cancel_at is None else max(job.arrived + job.cancel_at, job.arrived + 1)
        if job.cancel_at is not None:
            assert job.ended <= cancelled, "a cancel takes effect at the next step"
        if job.deadline is not None:
            assert job.ended <= max(job.deadline, job.arrived + 1), "so does a deadline"
        assert (job.end == "ok") <= (job.taken is not None and job.ended == job.taken + job.steps)
        assert (job.end == RequestCancelledError.__name__) <= (job.cancel_at is not None)
        assert (job.end == OverloadedError.__name__) <= (job.taken is None)


@settings(max_examples=50)
@given(st.lists(jobs, min_size=1, max_size=30), st.integers(1, 3))
def test_whoever_waits_is_reached_though_others_never_stop_coming(crowd, num_replicas):
    """A request of the lowest priority and of many rows is taken while every step brings a new one before it."""
    world = World(4, num_replicas, max_waiting=10_000)
    patient = Job(steps=1, rows=4, length=9, caller="patient", priority=-2)
    assert world.put(patient)
    for turn in range(500):
        model = crowd[turn % len(crowd)]
        world.put(Job(model.steps, model.rows, model.length, f"{model.caller}{turn % 7}", model.priority))
        world.step()
        if patient.taken is not None:
            break
    # Its turn comes within LOW_TURN x 5 priorities turns, each held up by no more than a full drain of 12 steps.
    assert patient.taken is not None and patient.taken <= 4 * 5 * 2 * 12


def test_small_requests_pass_one_that_needs_more_rows_than_are_free():
    """Four of eight rows run long; six are needed: small ones still flow through the two that it leaves them."""
    world = World(8)
    for _ in range(4):
        world.put(Job(steps=300))
    world.step()
    big = Job(steps=10, rows=6)
    small = [Job(steps=5) for _ in range(50)]
    for job in (big, *small):
        world.put(job)
    world.run(1000)
    waits = sorted(job.waited for job in small)
    assert waits[0] == 1
    assert waits[47] <= 24 * 5 + 1  # 95 %: two at a time, five steps each
    assert big.waited <= 300


def test_small_requests_that_keep_coming_do_not_delay_one_of_many_rows():
    """Its rows come free with the runs that it found: two new small ones a step, without end, change nothing."""
    world = World(8)
    for _ in range(4):
        world.put(Job(steps=60))
    world.step()
    big = Job(steps=10, rows=6)
    world.put(big)
    for _ in range(100):
        for _ in range(2):
            world.put(Job(steps=7))
        world.step()
    assert big.taken == 61


def test_one_that_needs_all_rows_gets_them_when_the_running_ones_end():
    """Nobody passes: whoever comes behind waits for the longest run, and for this one, and no longer."""
    world = World(8)
    for steps in (5, 30):
        world.put(Job(steps=steps))
    world.step()
    whole, behind = Job(steps=10, rows=8), Job(steps=1)
    world.put(whole)
    world.put(behind)
    world.run(100)
    assert (whole.taken, behind.taken) == (31, 41)


def test_the_place_of_one_that_is_set_aside_is_free_again_when_it_leaves():
    """Cancelled while it waited for its rows: the others have all rows at the next step."""
    world = World(8)
    world.put(Job(steps=50))
    world.step()
    whole = Job(steps=10, rows=8, cancel_at=3)
    behind = [Job(steps=20) for _ in range(7)]
    for job in (whole, *behind):
        world.put(job)
    world.run(100)
    assert whole.end == "RequestCancelledError" and whole.taken is None
    assert {job.taken for job in behind} == {whole.ended}


def test_one_that_is_set_aside_is_taken_by_whichever_replica_has_the_rows():
    """Also by one that has more than its even share of requests already."""
    queue = Queue(10, 2, 4)
    big = Job(steps=5, rows=2).sequence
    queue.put(big)
    assert queue.take(num_running=0, num_free=1, max_encode_tokens=100) == []
    assert queue.take(num_running=2, num_free=2, max_encode_tokens=100) == [big]


def test_a_short_request_finishes_long_before_a_long_one():
    """A 300-step request runs; at its step 20 comes a 5-step one and is done by step 26."""
    world = World(8)
    world.put(Job(steps=300))
    for _ in range(20):
        world.step()
    short = Job(steps=5)
    world.put(short)
    for _ in range(6):
        world.step()
    assert short.end == "ok"


def test_between_two_decoding_steps_of_a_replica_is_one_encoder_run_within_the_budget():
    """Forty requests through the real replica, eight slots, 30 tokens: admissions hold rows up by no more than that."""

    class Recorder(ScriptedRunner):
        def __init__(self):
            super().__init__(num_slots=8)
            self.runs = []

        def admit(self, sources, slots, prefixes):
            self.runs.append(len(sources) * max(map(len, sources)))
            super().admit(sources, slots, prefixes)

        def decode(self, tokens):
            self.runs.append("decode")
            return super().decode(tokens)

    runner = Recorder()
    rules = TokenRules(decoder_start=BOS_ID, eos=EOS_ID, never_generated=(PAD_ID, BOS_ID, UNK_ID))
    requests = [GenerationRequest((*range(4, 5 + i * 7 % 13), EOS_ID), 20) for i in range(40)]
    outcomes = generate_all(runner, rules, requests, EngineConfig(max_encode_tokens=30))
    assert all(isinstance(outcome, GenerationResult) for outcome in outcomes)
    for run, following in itertools.pairwise(runner.runs):
        assert run == "decode" or (run <= 30 and following == "decode")
    assert sum(run != "decode" for run in runner.runs) > 5


def test_a_backlog_is_encoded_step_by_step_between_decoding_steps():
    """Fifty long sources come at once: no step takes more than the budget, and all rows are used soon all the same."""
    world = World(64, max_encode_tokens=100)
    running = Job(steps=20)
    world.put(running)
    world.step()
    burst = [Job(steps=1000, length=25) for _ in range(50)]
    for job in burst:
        world.put(job)
    for step in range(1, 14):
        world.step()
        assert sum(job.taken is not None for job in burst) == min(4 * step, 50)
    for _ in range(7):
        world.step()
    assert (running.end, running.ended) == ("ok", 21)  # a row's steps are counted, not its seconds: none was skipped
