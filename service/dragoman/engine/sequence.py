"""The mutable life of one request inside the engine.

Owned by the queue while it waits and by one scheduler while it runs. Others may call ``cancel`` and ``stop``; and the
engine ``stats``, of one that it refuses or that died with its replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dragoman.engine.search import Hypothesis, Search
from dragoman.errors import DeadlineError, RequestCancelledError, RequestError
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
    """One request, its search, and when what happened (``time.monotonic`` seconds)."""

    request: GenerationRequest
    search: Search
    arrived: float
    status: Status = Status.WAITING
    cancelled: bool = False
    stopped: bool = False
    admitted: float | None = None
    encoded: float | None = None
    first_token: float | None = None
    encode_seconds: float = 0.0

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
        deadline = self.request.deadline
        # A caller hangs up when its deadline passes, by its own clock: then the deadline is the true reason.
        slack = CLOCK_SLACK_SECONDS if self.cancelled else 0.0
        if deadline is not None and now >= deadline - slack:
            phase = "in the queue" if self.status is Status.WAITING else "while decoding"
            return DeadlineError(f"the deadline passed {phase}, {now - self.arrived:.3f} s after the request arrived")
        return RequestCancelledError("the request was cancelled") if self.cancelled else None

    def result(self, now: float) -> GenerationResult:
        """The end of a sequence whose search is finished."""
        return GenerationResult(self.search.results(), len(self.request.source), self.timing(now))

    def partial(self, now: float) -> GenerationResult | None:
        """What a sequence of one row that failed had until then; None for others. Its finish reason means nothing."""
        if len(self.search.rows) != 1 or self.request.search.num_hypotheses != 1:
            return None
        self.search.stop(FinishReason.CANCELLED)
        return self.result(now)

    def timing(self, now: float) -> Timing:
        """Where the time went until ``now``."""
        queued_until = now if self.admitted is None else self.admitted
        decode_seconds = 0.0 if self.encoded is None else now - self.encoded
        return Timing(queued_until - self.arrived, self.encode_seconds, decode_seconds, now - self.arrived)

    def stats(self, code: str, now: float) -> RequestStats:
        """What the listener is told at the end; ``code`` is "ok" or an error's code."""
        return RequestStats(
            code=code,
            finish_reason=self.search.results()[0].finish_reason if code == "ok" else None,
            num_source_tokens=len(self.request.source),
            num_generated_tokens=self.search.num_tokens(),
            timing=self.timing(now),
            time_to_first_token_seconds=None if self.first_token is None else self.first_token - self.arrived,
            expired_in_queue=code == DeadlineError.code and self.admitted is None,
        )
