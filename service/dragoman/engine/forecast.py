"""When a new request would be done, told from those that ended: what cannot be in time is refused before any work.

One number is learned: the seconds of one expected step, encoding and the neighbours' share included. A prediction is
the work that goes before, spread over all rows, and the request's own steps. It leaves out what is unknown (how far the
running ones are), so it errs on the early side, which only means that a request waits in vain as it would without.
"""

from __future__ import annotations

from typing import Final

from dragoman.engine.work import expected_steps
from dragoman.errors import TooLateError
from dragoman.types import GenerationRequest

MIN_ENDED: Final = 10
"""After fewer requests nothing is predicted: the first ones are slow."""

FORGET_SECONDS: Final = 30.0
"""When nothing has ended well for so long, what was learned is void: a wrong forecast cannot refuse for ever."""

IDLE_FACTOR: Final = 10.0
"""On an idle server, a prediction has to be so many times what the deadline allows."""

MIN_RETRY_SECONDS: Final = 0.1
MAX_RETRY_SECONDS: Final = 60.0
"""What a refused caller is told to wait is within these."""

_MEMORY: Final = 32  # requests: older ones fade


class Forecast:
    """Of one engine. It knows no clock: times are ``time.monotonic``'s, told by the caller. Not thread-safe."""

    def __init__(self, num_rows: int) -> None:
        """``num_rows``: of all replicas."""
        self._num_rows = num_rows
        self._num_ended = 0
        self._seconds = 0.0  # fading sums; their quotient is the seconds of one step
        self._steps = 0.0
        self._learned_at = 0.0

    def learn(self, request: GenerationRequest, seconds: float, now: float) -> None:
        """A request ended well, so long after it left the queue."""
        if now - self._learned_at > FORGET_SECONDS:
            self._num_ended, self._seconds, self._steps = 0, 0.0, 0.0
        fade = 1.0 - 1.0 / _MEMORY
        self._seconds = fade * self._seconds + seconds
        self._steps = fade * self._steps + expected_steps(request)
        self._num_ended += 1
        self._learned_at = now

    def seconds(self, request: GenerationRequest, work_before: int, now: float) -> float:
        """How long a request takes that is queued now behind so many row-steps; 0 where that is not known."""
        if self._num_ended < MIN_ENDED or now - self._learned_at > FORGET_SECONDS:
            return 0.0
        return (work_before / self._num_rows + expected_steps(request)) * self._seconds / self._steps

    def drain_seconds(self, work: int, now: float) -> float:
        """How long all rows are busy with so many row-steps; 0 where that is not known."""
        if self._num_ended < MIN_ENDED or now - self._learned_at > FORGET_SECONDS:
            return 0.0
        return work / self._num_rows * self._seconds / self._steps

    def check(self, request: GenerationRequest, work_before: int, now: float, *, is_idle: bool = False) -> None:
        """Raises TooLateError when the request, queued now, would be done after its deadline only.

        ``is_idle``: a row is free for it at once. What was learned may be too slow, by a pause of the process say, and
        only good ends unlearn it: so then only what is far out of reach is refused.
        """
        if request.deadline is None:
            return
        predicted, allowed = self.seconds(request, work_before, now), request.deadline - now
        if predicted > allowed * (IDLE_FACTOR if is_idle else 1.0):
            raise TooLateError(
                f"the answer is expected in {predicted:.3f} s, the deadline allows {allowed:.3f} s: "
                "retry later, or allow more time",
                retry_after_seconds=min(max(predicted - allowed, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS),
            )
