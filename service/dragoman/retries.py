"""When a failed call is made again, and how long is waited before.

gRPC has retries of its own, which know status codes alone: not that one RESOURCE_EXHAUSTED is worth a retry and another
is not, nor how long the server asks to wait (``google.rpc.RetryInfo``). So these are made here, and gRPC's are left
without a policy. A call of ours changes nothing on a server: made twice, it gives the same answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from dragoman.errors import ConfigError, DragomanError, EngineDeadError, NotReadyError, OverloadedError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call is made in all, and what is waited between: twice as long each time, up to a limit.

    Raises ConfigError for figures that are none.
    """

    max_attempts: int = 5  # 1: no retries
    first_seconds: float = 0.1
    max_seconds: float = 10.0  # a server that asks for more is not asked again

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}; it must be at least 1, which means no retries")
        if not 0 < self.first_seconds <= self.max_seconds < float("inf"):
            raise ConfigError(
                f"first_seconds is {self.first_seconds} and max_seconds {self.max_seconds}; the first must be above 0 "
                "and at most the second"
            )

    def delay(self, attempts: int, hint_seconds: float, jitter: float) -> float:
        """Seconds to wait after so many failed attempts: what the server asks for, and a share of what is added to it.

        ``jitter`` is a random number of 0..1, so that callers who failed together do not come back together.
        """
        longest = min(self.first_seconds * 2.0 ** min(attempts - 1, 100), self.max_seconds)
        return hint_seconds + longest * (0.5 + 0.5 * jitter)


NO_RETRIES = RetryPolicy(max_attempts=1)


class Attempts:
    """The attempts of one call, and the time that is left for them."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout: float | None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._policy, self._clock, self._jitter = policy, clock, jitter
        self._deadline = None if timeout is None else clock() + timeout
        self._failed = 0

    def remaining(self) -> float | None:
        """Seconds for the next attempt; None for as many as it takes."""
        if self._deadline is None:
            return None
        seconds = self._deadline - self._clock()
        return seconds if seconds > 0 else -1.0  # gRPC takes 0 for no deadline at all

    def delay_after(self, error: DragomanError) -> float:
        """Seconds to wait before the next attempt.

        Raises ``error`` where there is none: because another would fail the same way, these were enough, the server
        asks for more patience than the policy has, or the deadline would pass meanwhile.
        """
        self._failed += 1
        if isinstance(error, OverloadedError):
            hint = error.retry_after_seconds
        elif isinstance(error, NotReadyError | EngineDeadError):  # or nobody is there: gRPC's UNAVAILABLE
            hint = 0.0
        else:
            raise error
        if self._failed >= self._policy.max_attempts or hint > self._policy.max_seconds:
            raise error
        delay = self._policy.delay(self._failed, hint, self._jitter())
        remaining = self.remaining()
        if remaining is not None and delay >= remaining:
            raise error
        return delay
