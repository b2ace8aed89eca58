"""Which source token each target token of a finished answer comes from: a forced pass beside the engine.

The engine knows nothing of it: its steps, and so its answers, are the same whether or not somebody asks. A forced pass
reads source and answer once more, with a graph of its own, on a thread of its own. It delays the end of the one request
that asked for it; of others, it takes a core's time where there are no more cores than engine threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dragoman.errors import DeadlineError, InvalidRequestError, NotReadyError, OverloadedError
from dragoman.types import FloatArray, TokenIds

ForcedPass = Callable[[TokenIds, TokenIds], FloatArray]
"""A source with its template and an answer of T tokens to attention weights (T, S): a row for each target token."""

Span = tuple[int, int]
"""Characters of a text: from the first up to, not including, the second."""

_STOPPED: Final = "the server stopped before this answer was aligned"


@dataclass(frozen=True, slots=True)
class AlignmentPoint:
    """The source token that the model looked at most for one target token.

    Both are counted among the text's own tokens, without start and end token. ``weight`` is its share of all attention,
    that to the source's start and end token included. ``source_span`` is in characters of the whole text; it is empty
    where the source token stands for nothing but a blank.
    """

    source_token: int
    target_token: int
    weight: float
    source_span: Span


class Aligner:
    """Runs forced passes, one at a time. All methods belong to the event loop."""

    def __init__(self, forced_pass: ForcedPass, max_waiting: int, coverage: ForcedPass | None = None) -> None:
        """Both passes are called in a thread. ``max_waiting``: passes that are promised at a time, at most.

        ``coverage`` gives the last decoder layer's cross-attention, the mean of its heads, as T + 1 rows: one for each
        token that is read, the start token first; None where there is no such pass.
        """
        self._forced_pass = forced_pass
        self._coverage = coverage
        self._max_waiting = max_waiting
        self._num_promised = 0
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aligner")

    @property
    def tells_coverage(self) -> bool:
        """Whether ``coverage`` may be called."""
        return self._coverage is not None

    @contextmanager
    def room(self, num_passes: int) -> Generator[None]:
        """Room for the passes of one request, from its admission to its end: what is admitted can be computed.

        Raises OverloadedError where too many are promised already, InvalidRequestError where so many never find room.
        """
        if num_passes > self._max_waiting:
            raise InvalidRequestError(
                f"the request takes forced passes for {num_passes} answers; this server aligns {self._max_waiting} at "
                "a time: ask for fewer answers or beams, or leave return_alignment, coverage_penalty and unknown_words "
                "unset"
            )
        if self._num_promised + num_passes > self._max_waiting:
            raise OverloadedError(
                f"{self._num_promised} answers are to be aligned already, the limit is {self._max_waiting}: retry "
                "later, or without return_alignment, coverage_penalty and unknown_words"
            )
        self._num_promised += num_passes
        try:
            yield
        finally:
            self._num_promised -= num_passes

    async def weights(self, source: TokenIds, tokens: TokenIds, deadline: float | None) -> FloatArray:
        """What ``ForcedPass`` returns. A cancelled call, if it still waits for its turn, is never computed.

        deadline: on ``time.monotonic``'s clock. Raises DeadlineError, and NotReadyError after ``close``.
        """
        return await self._run(self._forced_pass, source, tokens, deadline)

    async def coverage(self, source: TokenIds, tokens: TokenIds, deadline: float | None) -> FloatArray:
        """The same for the pass that tells coverage: (T + 1, S)."""
        assert self._coverage is not None
        return await self._run(self._coverage, source, tokens, deadline)

    async def _run(
        self, forced_pass: ForcedPass, source: TokenIds, tokens: TokenIds, deadline: float | None
    ) -> FloatArray:
        if self._closed:
            raise NotReadyError(_STOPPED)
        seconds = None if deadline is None else deadline - time.monotonic()
        try:
            if seconds is not None and seconds <= 0:
                raise TimeoutError
            work = asyncio.get_running_loop().run_in_executor(self._thread, forced_pass, source, tokens)
            return await asyncio.wait_for(work, seconds)
        except TimeoutError as error:
            raise DeadlineError("the deadline passed before the finished answer was aligned") from error
        except asyncio.CancelledError as error:
            if self._closed:  # what was cancelled is the work, not the caller
                raise NotReadyError(_STOPPED) from error
            raise

    def close(self) -> None:
        """Compute nothing more."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


def points(weights: FloatArray, own: slice, spans: Sequence[Span]) -> tuple[AlignmentPoint, ...]:
    """One point for each target token: the text's own token with the largest weight, the first of equal ones.

    weights: (T, S); ``own`` are the positions of the text's own tokens in the source, ``spans`` their characters.
    """
    best = weights[:, own].argmax(axis=1).tolist()
    return tuple(
        AlignmentPoint(source, target, float(weights[target, own.start + source]), spans[source])
        for target, source in enumerate(best)
    )
