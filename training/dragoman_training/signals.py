"""SIGTERM and SIGINT, heard in order: at once where there is nothing to save, else when the one who trains asks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Stopped(BaseException):
    """A signal ended what has nothing to save. No ``Exception``: no handler of errors is to take it for one."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopSignal:
    """``number`` is the signal that was heard last, None before. Signals are heard while the ``with`` block lasts.

    To be used in the main thread. Python hears a signal between two of its own instructions: not while a library
    learns a vocabulary, say, but right after.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._ends_at_once = False

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _: FrameType | None) -> None:
        self.number = number
        if self._ends_at_once:
            raise Stopped(number)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """In this block a signal raises ``Stopped``, wherever the program is; so does one that came before."""
        self._ends_at_once = True
        try:
            self._raise_if_heard()
            yield
            self._raise_if_heard()  # where the exception was lost: Python drops those that a destructor raises
        except Exception as error:  # a library may have made another one of it
            self._raise_if_heard(error)
            raise
        finally:
            self._ends_at_once = False

    def _raise_if_heard(self, cause: Exception | None = None) -> None:
        if self.number is not None:
            raise Stopped(self.number) from cause
