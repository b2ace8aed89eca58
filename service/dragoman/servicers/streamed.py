"""Replies to the requests of one stream: each grows by itself, and all share the way to the caller.

What a slow caller has not read yet is joined: a reply that waits has one response of new text, however long it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from dragoman.oip import inference_pb2 as pb

Response = pb.ModelStreamInferResponse


class Reply:
    """What one request gets."""

    def __init__(self, changed: Callable[[Reply], None]) -> None:
        """``changed`` is called when there is something to take, and not again before it was taken."""
        self._changed = changed
        self._told = False
        self._make: Callable[[Sequence[str]], Response] | None = None
        self._deltas: list[str] = []
        self._last: list[Response] = []
        self._error: Exception | None = None
        self.ended = False
        """Everything was taken."""

    def open(self, num_texts: int, make: Callable[[Sequence[str]], Response]) -> None:
        """So many texts are to be sent as they grow; ``make`` makes a response of what each grew by."""
        self._deltas = [""] * num_texts
        self._make = make

    def grow(self, place: int, delta: str) -> None:
        """Text to append to one of them; without them, nothing."""
        if delta and self._deltas:
            self._deltas[place] += delta
            self._tell()

    def finish(self, *responses: Response) -> None:
        """The request is done with: these are the last."""
        self._last = list(responses)
        self._tell()

    def fail(self, error: Exception) -> None:
        """The request ends the stream: ``take`` raises this."""
        self._error = error
        self._tell()

    def take(self) -> list[Response]:
        """What is to be sent now."""
        self._told = False
        if self._error is not None:
            raise self._error
        responses = []
        if self._make is not None and any(self._deltas):
            responses.append(self._make(self._deltas))
            self._deltas = [""] * len(self._deltas)
        self.ended = bool(self._last)
        return responses + self._last

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._changed(self)


class Replies:
    """The replies of one stream, in the order in which they have something to send."""

    def __init__(self) -> None:
        self._changed: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._error: Exception | None = None

    def begin(self) -> Reply:
        """The reply to another request."""
        return Reply(self._changed.put_nowait)

    def end(self, error: Exception | None = None) -> None:
        """There is no other request, and all there were are done with; ``error`` is why there is none."""
        self._error = error
        self._changed.put_nowait(None)

    async def changed(self) -> AsyncGenerator[Reply]:
        """Those that have something to take, until the end. Raises what ``end`` was given."""
        while (reply := await self._changed.get()) is not None:
            yield reply
        if self._error is not None:
            raise self._error
