"""The mutable life of one request inside the engine.

Owned by the queue while it waits and by one scheduler while it runs; only ``cancel`` may be called from elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from dragoman.errors import DeadlineError, RequestCancelledError, RequestError
from dragoman.types import FinishReason, GenerationRequest, GenerationResult, HypothesisResult, RequestStats, Timing

CLOCK_SLACK_SECONDS = 0.05
"""How much earlier than this process a caller's clock may say that a deadline has passed."""


class Status(Enum):
    """Where a sequence is. It goes forward only, and every sequence ends FINISHED exactly once."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Hypothesis:
    """One partial answer: a row of the decoding step. ``slot`` is -1 while it owns none."""

    next_input: int  # the token that the next step feeds
    tokens: list[int] = field(default_factory=list)  # without the end token
    token_scores: list[float] = field(default_factory=list)  # with the end token's
    slot: int = -1
    finish_reason: FinishReason | None = None

    def result(self, *, scored: bool) -> HypothesisResult:
        """The finished answer."""
        assert self.finish_reason is not None
        scores = tuple(self.token_scores) if scored else None
        return HypothesisResult(tuple(self.tokens), self.finish_reason, None if scores is None else sum(scores), scores)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, its hypotheses, and when what happened (``time.monotonic`` seconds)."""

    request: GenerationRequest
    hypotheses: list[Hypothesis]
    arrived: float
    status: Status = Status.WAITING
    cancelled: bool = False
    admitted: float | None = None
    encoded: float | None = None
    first_token: float | None = None
    encode_seconds: float = 0.0

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
        """The end of a sequence all of whose hypotheses are finished."""
        hypotheses = tuple(h.result(scored=self.request.return_scores) for h in self.hypotheses)
        return GenerationResult(hypotheses, len(self.request.source), self.timing(now))

    def timing(self, now: float) -> Timing:
        """Where the time went until ``now``."""
        queued_until = now if self.admitted is None else self.admitted
        decode_seconds = 0.0 if self.encoded is None else now - self.encoded
        return Timing(queued_until - self.arrived, self.encode_seconds, decode_seconds, now - self.arrived)

    def stats(self, code: str, now: float) -> RequestStats:
        """What the listener is told at the end; ``code`` is "ok" or an error's code."""
        return RequestStats(
            code=code,
            finish_reason=self.hypotheses[0].finish_reason if code == "ok" else None,
            num_source_tokens=len(self.request.source),
            num_generated_tokens=sum(len(h.tokens) for h in self.hypotheses),
            timing=self.timing(now),
            time_to_first_token_seconds=None if self.first_token is None else self.first_token - self.arrived,
            expired_in_queue=code == DeadlineError.code and self.admitted is None,
        )
