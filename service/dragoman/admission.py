"""How much is inside the server at a time: calls that make text, the bytes of their requests, and whose they are.

It is asked as a call arrives, before anything of it is parsed, so that to refuse costs little.

- *Bound*: at most ``max_calls`` calls, and ``max_bytes`` bytes of all their requests together.
- *Fair*: where a bound is reached, a caller that stays within its even share of it still comes in, up to twice the
  bound: nobody shuts the others out at the door. The engine's queue then makes room for it (``engine/queue.py``).
"""

from __future__ import annotations

from typing import Final

from dragoman.engine.forecast import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS
from dragoman.errors import OverloadedError

_UNKNOWN_SECONDS: Final = 1.0  # what a call is said to take before any has ended
_MEMORY: Final = 32  # calls: older ones fade


class Admission:
    """Of one server. It knows no clock: times are ``time.monotonic``'s, told by the caller. Not thread-safe."""

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self._calls = _Bound(max_calls)
        self._bytes = _Bound(max_bytes)
        self._seconds = _UNKNOWN_SECONDS

    @property
    def max_calls(self) -> int:
        """How many calls may be inside; whatever it becomes, those that are inside stay."""
        return self._calls.limit

    @max_calls.setter
    def max_calls(self, max_calls: int) -> None:
        self._calls.limit = max_calls

    @property
    def num_calls(self) -> int:
        """Calls that are inside."""
        return self._calls.total

    @property
    def num_bytes(self) -> int:
        """Bytes of their requests."""
        return self._bytes.total

    def enter(self, caller: str, now: float) -> Place:
        """A place for one more call of this caller's; it must be left. Raises OverloadedError."""
        if not self._calls.allows(caller, 1):
            raise self._refusal(f"{self._calls.total} calls are being answered, the limit is {self._calls.limit}")
        self._calls.add(caller, 1)
        return Place(self, caller, now)

    def _hold(self, caller: str, num_bytes: int, instead_of: int) -> None:
        """Raises OverloadedError."""
        more = num_bytes - instead_of
        if more > 0 and not self._bytes.allows(caller, more):
            raise self._refusal(
                f"the requests being answered have {self._bytes.total} bytes, this one {num_bytes}, the limit is "
                f"{self._bytes.limit}"
            )
        self._bytes.add(caller, more)

    def _leave(self, place: Place, now: float) -> None:
        self._calls.add(place.caller, -1)
        self._bytes.add(place.caller, -place.num_bytes)
        if place.answered:
            self._seconds += (now - place.entered - self._seconds) / _MEMORY

    def _refusal(self, reason: str) -> OverloadedError:
        # After so long, the calls of now have made room: what a call takes is what a place is taken for.
        seconds = min(max(self._seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        return OverloadedError(f"{reason}: retry later", seconds)


class Place:
    """One call's place inside."""

    def __init__(self, admission: Admission, caller: str, now: float) -> None:
        self._admission = admission
        self.caller = caller
        self.entered = now
        self.num_bytes = 0
        self.answered = False  # set it where the call ends well: how long such calls take is what others are told

    def hold(self, num_bytes: int) -> None:
        """The call's request has so many bytes; of a stream of requests, the latest. Raises OverloadedError."""
        self._admission._hold(self.caller, num_bytes, self.num_bytes)
        self.num_bytes = num_bytes

    def leave(self, now: float) -> None:
        """The call is over; once."""
        self._admission._leave(self, now)


class _Bound:
    """How much of one thing is taken, and by whom."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held: dict[str, int] = {}  # by caller; never 0

    def allows(self, caller: str, amount: int) -> bool:
        """Whether this caller may have so much more. What alone is more than the limit may come in alone."""
        if not self.total or self.total + amount <= self.limit:
            return True
        share = self.limit // (len(self._held) + (caller not in self._held))
        return self._held.get(caller, 0) + amount <= share and self.total + amount <= 2 * self.limit

    def add(self, caller: str, amount: int) -> None:
        """Take so much, or give it back."""
        self.total += amount
        held = self._held.get(caller, 0) + amount
        if held:
            self._held[caller] = held
        else:
            self._held.pop(caller, None)
