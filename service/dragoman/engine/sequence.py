"""The mutable life of one request inside the engine.

Owned by the queue while it waits and by one scheduler while it runs. Others may call ``cancel`` and ``stop``; and the
engine ``stats``, of one that it refuses or that died with its replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from dragoman.engine.search import Hypothesis, Search
from dragoman.errors import DeadlineError, DragomanError, RequestCancelledError, RequestError
from dragoman.types import FinishReason, GenerationRequest, GenerationResult, RequestStats, Timing

CLOCK_SLACK_SECONDS = 0.05
"""How much earlier than this process a caller's clock may say that a deadline has passed."""


class Status(Enum):
    """Where a sequence is. It goes forward only, and every sequence ends FINISHED exactly once."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, its search, and when what happened (``time.monotonic`` seconds).

    Equal requests may share a search while they run (``scheduler.py``); everything else is each one's own.
    """

    request: GenerationRequest
    search: Search
    arrived: float
    status: Status = Status.WAITING
    cancelled: bool = False
    stopped: bool = False
    shared: bool = False  # its search is one that was there already
    deadline: float = field(init=False)  # infinite where the request has none
    admitted: float | None = None
    encoded: float | None = None
    first_token: float | None = None
    num_later_steps: int = 0  # decoding steps behind the one that made the first token
    encode_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.deadline = math.inf if self.request.deadline is None else self.request.deadline

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The rows: those that own slots while the sequence runs."""
        return self.search.rows

    def stop(self) -> None:
        """Ask for a good end at the next step: the text has what it was to end with. Any thread, also after the end."""
        self.stopped = True

    def cancel(self) -> None:
        """Ask for an end at the next step. Any thread, any number of times, also after the end."""
        self.cancelled = True

    def interruption(self, now: float) -> RequestError | None:
        """Why this sequence must not go on, if there is a reason."""
        # A caller hangs up when its deadline passes, by its own clock: then the deadline is the true reason.
        slack = CLOCK_SLACK_SECONDS if self.cancelled else 0.0
        if now >= self.deadline - slack:
            phase = "in the queue" if self.status is Status.WAITING else "while decoding"
            return DeadlineError(f"the deadline passed {phase}, {now - self.arrived:.3f} s after the request arrived")
        return RequestCancelledError("the request was cancelled") if self.cancelled else None

    def result(self, now: float) -> GenerationResult:
        """The end of a sequence whose search is finished."""
        return GenerationResult(self.search.results(), len(self.request.source), self.timing(now))

    def timing(self, now: float) -> Timing:
        """Where the time went until ``now``."""
        queued_until = now if self.admitted is None else self.admitted
        decode_seconds = 0.0 if self.encoded is None else now - self.encoded
        return Timing(queued_until - self.arrived, self.encode_seconds, decode_seconds, now - self.arrived)

    def ended(self, outcome: GenerationResult | DragomanError, now: float, tokens: list[int] | None = None) -> Delivery:
        """Its last delivery. An answer of failed hypotheses alone counts as their failure."""
        self.status = Status.FINISHED
        if isinstance(outcome, DragomanError):
            stats = self.stats(outcome.code, now)
        elif (error := _common_error(outcome)) is not None:
            stats = self.stats(error.code, now)
        else:
            best = next(hypothesis for hypothesis in outcome.hypotheses if hypothesis.error is None)
            stats = self.stats("ok", now, best.finish_reason)
        return Delivery(self, tokens or [], outcome, stats)

    def stats(self, code: str, now: float, finish_reason: FinishReason | None = None) -> RequestStats:
        """What the listener is told at the end; ``code`` is an error's, or "ok", to which belongs a reason."""
        return RequestStats(
            code=code,
            finish_reason=finish_reason,
            num_source_tokens=len(self.request.source),
            num_generated_tokens=self.search.num_tokens(),
            timing=self.timing(now),
            time_to_first_token_seconds=None if self.first_token is None else self.first_token - self.arrived,
            expired_in_queue=code == DeadlineError.code and self.admitted is None,
            shared=self.shared,
            inter_token_seconds=(now - self.first_token) / self.num_later_steps
            if self.first_token is not None and self.num_later_steps
            else None,
        )


@dataclass(slots=True)
class Delivery:
    """What one step did to one sequence. An end comes with its outcome and its stats."""

    sequence: Sequence
    tokens: list[int]
    outcome: GenerationResult | DragomanError | None = None
    stats: RequestStats | None = None


def _common_error(result: GenerationResult) -> DragomanError | None:
    errors = [hypothesis.error for hypothesis in result.hypotheses]
    return None if None in errors else errors[0]
