"""How far a load is, on one line: rewritten on a terminal, elsewhere now and then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TextIO

from dragoman.loadtest.report import CANCELLED_HERE, OK, Outcome

_EVERY_SECONDS: Final = 10.0  # where no terminal shows it


class Progress:
    """Told what has ended, it says so far, of the load's seconds."""

    def __init__(self, stream: TextIO, seconds: float) -> None:
        self._stream, self._seconds, self._terminal = stream, seconds, stream.isatty()
        self._now = self._told = 0.0
        self._ok = self._errors = 0

    def __call__(self, ended: Sequence[Outcome]) -> None:
        """Count these, and show."""
        ok = sum(outcome.status == OK for outcome in ended)
        self._ok += ok
        self._errors += sum(outcome.status not in (OK, CANCELLED_HERE) for outcome in ended)
        self._now = max([self._now, *(outcome.done_seconds for outcome in ended)])
        line = f"{self._now:.0f} of {self._seconds:.0f} s: {self._ok} OK, {self._errors} errors"
        if self._terminal:
            self._stream.write(f"\r{line}\x1b[K")
            self._stream.flush()
        elif self._now - self._told >= _EVERY_SECONDS:
            self._told = self._now
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the terminal's line empty."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
