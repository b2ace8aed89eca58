"""How much of one reply is left for answers, while several of them are still being made."""

from __future__ import annotations

from typing import Final

from google.rpc.status_pb2 import Status

from dragoman.errors import ReplyTooLargeError

ITEM_BYTES: Final = 240
"""So much of a batch's reply is kept for each item: an error of a short message, and what any item has around it."""

_FRAME_BYTES: Final = 16
"""What protobuf puts around an item, at most."""


class Room:
    """How many bytes the answers of one reply may still have."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    def check(self, num_bytes: int) -> None:
        """Raises ReplyTooLargeError where there is no room for an answer of so many bytes or more."""
        if (total := self._taken + num_bytes) >= self._limit:
            raise ReplyTooLargeError(
                f"the reply would have {total} bytes or more; this server's limit for the answers of one reply is "
                f"{self._limit}: ask for fewer lines, items, hypotheses or top tokens at once"
            )

    def take(self, num_bytes: int) -> None:
        """``check``, for an answer that is complete: its room is taken from then on."""
        self.check(num_bytes)
        self._taken += num_bytes

    def fitted(self, status: Status) -> Status:
        """An item's error, its message shortened, and marked so, where the reply has no room for all of it."""
        more = status.ByteSize() + _FRAME_BYTES - ITEM_BYTES
        if more > 0 and self._taken + more < self._limit:
            self._taken += more
        elif more > 0:
            message = status.message.encode("utf-8")
            status.message = message[: max(0, len(message) - more - len("…".encode()))].decode("utf-8", "ignore") + "…"
        return status
