"""The threads that loop schedule, run, update, and their bridge to asyncio.

Each replica's thread owns its scheduler and runner. The event loop owns the streams. They meet in two places: the
queue, and one ``call_soon_threadsafe`` a step that hands over all that the step produced.

If a runner fails or a step hangs, the engine is dead: every stream ends with EngineDeadError, and ``failed`` returns so
that the process can exit. It is never restarted in place.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as List
from concurrent.futures import Future
from typing import Any

from dragoman.config import EngineConfig
from dragoman.engine.forecast import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, Forecast
from dragoman.engine.queue import Queue
from dragoman.engine.replica import Replica, TokenRules
from dragoman.engine.sequence import Delivery, Sequence
from dragoman.errors import DeadlineError, DragomanError, EngineDeadError, NotReadyError, OverloadedError
from dragoman.types import (
    EngineSnapshot,
    GenerationRequest,
    GenerationResult,
    GenerationUpdate,
    RequestStats,
    Runner,
    StatsListener,
)

logger = logging.getLogger(__name__)


class Stream:
    """One request's answer as it grows. An async iterator; lives on the event loop.

    A reader slower than the engine gets several steps' tokens in one update: what waits here never exceeds the answer.
    """

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self._engine = engine
        self._sequence = sequence
        self._tokens: list[int] = []
        self._outcome: GenerationResult | DragomanError | None = None
        self._read = False
        self._news = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[GenerationUpdate]:
        return self

    async def __anext__(self) -> GenerationUpdate:
        """The next tokens; the last update holds the result. Raises the request's error."""
        if self._read:
            raise StopAsyncIteration
        await self._news.wait()
        self._news.clear()
        if isinstance(self._outcome, DragomanError):
            self._read = True
            raise self._outcome
        tokens, self._tokens = tuple(self._tokens), []
        self._read = self._outcome is not None
        return GenerationUpdate(tokens, self._outcome)

    def cancel(self) -> None:
        """Free the request's slots at the next step. Any number of times, also after the end."""
        if self._outcome is None:
            self._engine._cancel(self._sequence)

    def stop(self) -> None:
        """End well at the next step: the text has one of ``request.stop``. Any number of times, also after the end.

        Whoever shares the run has the same text, and so this end, too. Raises ValueError for a request without such
        texts, and for a beam search, which ends by itself.
        """
        request = self._sequence.request
        if not request.stop or request.search.beam_size > 1:
            raise ValueError("only a request with stop texts can be ended early, and no beam search: cut it at the end")
        self._sequence.stop()

    def _deliver(self, tokens: list[int], outcome: GenerationResult | DragomanError | None) -> None:
        self._tokens += tokens
        self._outcome = outcome
        self._news.set()


class Engine:
    """Serves one model's requests with one or more replicas. All public methods belong to the event loop."""

    def __init__(
        self, runners: List[Runner], rules: TokenRules, config: EngineConfig, listener: StatsListener | None = None
    ) -> None:
        """``runners`` are the replicas', one each; ``config.num_replicas`` is not looked at here."""
        self._config = config
        self._rules = rules
        self._listener = listener
        num_slots = min(runner.num_slots for runner in runners)
        self._queue = Queue(config.max_waiting, len(runners), num_slots, max_waiting_tokens=config.max_waiting_tokens)
        self._forecast = Forecast(num_slots * len(runners))
        self._replicas = [Replica(runner, self._queue, rules, config, listener) for runner in runners]
        self._threads = [ReplicaThread(self, replica, index) for index, replica in enumerate(self._replicas)]
        self._streams: dict[Sequence, Stream] = {}
        self._failure: EngineDeadError | None = None
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._dead = asyncio.Event()

    def prepare(self, work: Callable[[Runner], None]) -> None:
        """Run ``work`` on each replica's own thread before it takes requests, one after the other. Blocks.

        For runners whose threads matter: what a device captures or plans is its thread's own. Raises what ``work``
        raises; the engine is of no use then.
        """
        try:
            for thread in self._threads:
                thread.prepare(work)
        except BaseException:
            self._queue.close()
            for thread in self._threads:
                thread.release()
            raise

    def start(self) -> None:
        """Start the replicas; they deliver to the running event loop."""
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.release()
            if thread.ident is None:
                thread.start()
        self._watchdog = self._loop.create_task(self._watch())

    @property
    def num_slots(self) -> int:
        """How many rows one request may take."""
        return min(replica.scheduler.num_slots for replica in self._replicas)

    @property
    def max_waiting(self) -> int:
        """How many requests may wait."""
        return self._config.max_waiting

    @property
    def num_places(self) -> int:
        """How many requests can run and wait."""
        return sum(replica.scheduler.num_slots for replica in self._replicas) + self._config.max_waiting

    def check_room(self, num_requests: int, caller: str = "", priority: int = 0) -> None:
        """Raises OverloadedError unless so many more of this caller's may wait: worth asking before they are made."""
        try:
            self._queue.check_room(num_requests, caller, priority)
        except OverloadedError as error:
            self._say_when(error, time.monotonic())
            raise

    def submit(self, request: GenerationRequest) -> Stream:
        """Queue a request.

        Raises at once EngineDeadError, NotReadyError, DeadlineError, InvalidRequestError for more rows than there are,
        OverloadedError, or TooLateError when, by what the requests of late took, it would be done after its deadline.
        """
        if self._failure is not None:
            raise self._failure
        if self._loop is None or self._closing:
            raise NotReadyError("the engine is not running")
        now = time.monotonic()
        sequence = self._rules.sequence(request)
        try:
            if request.deadline is not None:
                if now >= request.deadline:
                    raise DeadlineError("the deadline had passed before the request was queued")
                is_idle = not self._queue.num_waiting and not self._is_full()
                self._forecast.check(request, self._queue.work_before(sequence), now, is_idle=is_idle)
            self._queue.put(sequence)
        except DragomanError as error:
            self._say_when(error, now)
            self._tell(sequence.stats(error.code, now))
            raise
        stream = Stream(self, sequence)
        self._streams[sequence] = stream
        self._idle.clear()
        return stream

    def _say_when(self, error: DragomanError | GenerationResult | None, now: float) -> None:
        """Where the queue was full: worth a retry when what waits now is done, as far as that can be foretold."""
        if type(error) is OverloadedError and (seconds := self._forecast.drain_seconds(self._queue.work, now)):
            error.retry_after_seconds = min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _is_full(self) -> bool:
        """Whether no replica has a free row."""
        return all(r.scheduler.num_rows == r.scheduler.num_slots for r in self._replicas)

    def snapshot(self) -> EngineSnapshot:
        """The engine at this moment. Any thread."""
        return EngineSnapshot(
            num_waiting=self._queue.num_waiting,
            num_callers_waiting=self._queue.num_callers,
            num_running=sum(r.scheduler.num_running for r in self._replicas),
            slots_used=sum(r.scheduler.num_rows for r in self._replicas),
            slots_total=sum(r.scheduler.num_slots for r in self._replicas),
            kv_cache_bytes=sum(r.runner.kv_cache_bytes for r in self._replicas),
            failure=self._failure,
        )

    async def drained(self) -> None:
        """Return when no request waits or runs."""
        await self._idle.wait()

    async def failed(self) -> EngineDeadError:
        """Return when the engine is dead; all streams have ended by then."""
        await self._dead.wait()
        assert self._failure is not None
        return self._failure

    async def close(self) -> None:
        """Stop the replicas after their current step; what still waits or runs ends with NotReadyError."""
        self._closing = True
        self._queue.close()
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        for thread in self._threads:
            thread.release()
            if thread.is_alive():
                await asyncio.to_thread(thread.join, self._config.stuck_seconds)
        self._end_all(NotReadyError("the server stopped before this request was done"))
        self._threads.clear()  # they refer back here: without a circle, memory is free once nobody holds the engine

    def _cancel(self, sequence: Sequence) -> None:
        sequence.cancel()
        self._queue.cancelled(sequence)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        """All that a step produced; on the event loop."""
        for delivery in deliveries:
            stream = self._streams.get(delivery.sequence)
            if stream is None:  # ended already, by a failure or a close
                continue
            if delivery.stats is not None:
                if delivery.stats.code == "ok" and not delivery.stats.shared:
                    timing = delivery.stats.timing
                    seconds = timing.total_seconds - timing.queue_seconds
                    self._forecast.learn(delivery.sequence.request, seconds, time.monotonic())
                self._say_when(delivery.outcome, time.monotonic())
                self._tell(delivery.stats)
                del self._streams[delivery.sequence]
            stream._deliver(delivery.tokens, delivery.outcome)
        if not self._streams:
            self._idle.set()

    def _tell(self, stats: RequestStats) -> None:
        if self._listener is not None:
            self._listener.on_finished(stats)

    def _end_all(self, error: DragomanError) -> None:
        now = time.monotonic()
        self._deliver([Delivery(s, [], error, s.stats(error.code, now)) for s in list(self._streams)])

    def _die(self, reason: str) -> None:
        """On the event loop."""
        if self._failure is None:
            logger.critical("the engine is dead: %s", reason)
            self._failure = EngineDeadError("the engine failed; the server is about to exit: retry elsewhere")
            self._queue.close()
            self._end_all(self._failure)
            self._dead.set()

    async def _watch(self) -> None:
        """A thread that computes for too long is as dead as one that raised; so are threads that leave work undone."""
        interval = min(1.0, self._config.stuck_seconds / 4)
        num_steps, moved = -1, time.monotonic()  # when something last happened, or there was nothing to do
        while True:
            slept = time.monotonic()
            await asyncio.sleep(interval)
            if time.monotonic() - slept > 2 * interval:
                continue  # this thread stood still too: the process was paused or starved, which is nobody's fault
            for thread in self._threads:
                seconds = thread.busy_seconds(time.monotonic())
                if seconds > self._config.stuck_seconds:
                    self._die(f"{thread.name} has been in one step for {seconds:.1f} s")
            steps = sum(thread.num_steps for thread in self._threads)
            if steps != num_steps or not self._queue.num_waiting:
                num_steps, moved = steps, time.monotonic()
            elif time.monotonic() - moved > self._config.stuck_seconds:
                self._die(f"requests have waited for {time.monotonic() - moved:.1f} s, and no thread has made a step")


class ReplicaThread(threading.Thread):
    """Steps one replica for as long as the queue is open; touches nothing of the event loop's."""

    def __init__(self, engine: Engine, replica: Replica, index: int) -> None:
        # A daemon: a hung run must not keep a dying process alive.
        super().__init__(name=f"replica-{index}", daemon=True)
        self._engine = engine
        self._replica = replica
        self.num_steps = 0
        self._step_started: float | None = None  # None while it waits for work
        self._preparation: tuple[Callable[[Runner], None], Future[None]] | None = None
        self._released = threading.Event()

    def prepare(self, work: Callable[[Runner], None]) -> None:
        """Start, and run ``work`` on this thread, which then waits for ``release``. Raises what ``work`` raises."""
        done: Future[None] = Future()
        self._preparation = work, done
        self.start()
        done.result()

    def release(self) -> None:
        """Let the thread take requests; before that it takes none if it was prepared."""
        self._released.set()

    def busy_seconds(self, now: float) -> float:
        """How long the current step has taken; 0 while idle."""
        started = self._step_started
        return 0.0 if started is None else now - started

    def run(self) -> None:
        engine, queue = self._engine, self._engine._queue
        if self._preparation is not None:
            work, done = self._preparation
            try:
                work(self._replica.runner)
            except BaseException as error:  # whatever it was, it is raised where the preparation was asked for
                done.set_exception(error)
                return
            done.set_result(None)
            self._released.wait()
        try:
            while not queue.closed:
                if not self._replica.scheduler.num_rows and not queue.wait():
                    return
                self._step_started = time.monotonic()
                deliveries = self._replica.step()
                if deliveries:
                    self._call(engine._deliver, deliveries)
                self._step_started = None
                self.num_steps += 1
        except BaseException as error:  # whatever it was, nobody else is left to tell the callers
            logger.exception("%s failed", self.name)
            self._call(engine._die, f"{self.name} raised {type(error).__name__}")

    def _call(self, function: Callable[[Any], None], argument: Any) -> None:
        loop = self._engine._loop
        assert loop is not None
        try:
            loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop is closed: the process is on its way out and nobody reads
            self._engine._queue.close()
