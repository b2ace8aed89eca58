"""What the server writes to stderr: one line an event, for people or as JSON.

Lines are written by a thread of their own, from a queue with a bound: a terminal or a pipe that nobody reads stops no
request. What the queue has no room for is left out, and counted in the next line that has room.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, Final

from dragoman.config import LogConfig

FIELDS: Final = "fields"
"""The attribute of a log record that holds what belongs to its message, by name: ``extra={FIELDS: {...}}``."""

_ENCODER: Final = json.JSONEncoder(default=str)
_MAX_WAITING_LINES: Final = 10_000
_FLUSH_SECONDS: Final = 2.0


@contextmanager
def logging_to_stderr(config: LogConfig) -> Generator[None]:
    """All loggers of the process write to stderr for as long; in the end, what was logged is written."""
    root = logging.getLogger()
    writer = LogWriter(sys.stderr)
    writer.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    level = root.level
    root.addHandler(writer)
    root.setLevel(config.level.upper())
    try:
        yield
    finally:
        root.removeHandler(writer)
        root.setLevel(level)
        writer.close()


class LogWriter(logging.Handler):
    """Formats where the event is, writes elsewhere."""

    def __init__(self, stream: IO[str], max_waiting_lines: int = _MAX_WAITING_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._max_waiting_lines = max_waiting_lines
        self._lines: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
        self._num_left_out = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Called under the handler's lock."""
        try:
            line = self.format(record)
        except Exception:  # a fault in a message must not become one of the request that it is about
            self.handleError(record)
            return
        if self._lines.qsize() >= self._max_waiting_lines:
            self._num_left_out += 1
            return
        if self._num_left_out:
            left_out = f"{self._num_left_out} lines were left out here: stderr was not read fast enough"
            self._lines.put(
                self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, left_out, None, None))
            )
            self._num_left_out = 0
        self._lines.put(line)

    def flush(self) -> None:
        """Wait until what was logged is written, but not for long."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(_FLUSH_SECONDS)

    def close(self) -> None:
        """Write what there is, and end."""
        super().close()
        self._lines.put(None)
        self._thread.join(_FLUSH_SECONDS)

    def _write(self) -> None:
        while (item := self._lines.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._stream.write(item + "\n")
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # its reader left, or it is closed: there is nowhere to say so
                pass


class TextFormatter(logging.Formatter):
    """For people: time, level, who, what, and the fields behind it. A message's own line ends are shown escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's own name
        """One line: nothing of it can be taken for another event. A traceback, which comes behind it, has several."""
        fields = getattr(record, FIELDS, {})
        text = " ".join((super().formatMessage(record), *(f"{name}={_plain(value)}" for name, value in fields.items())))
        return text.replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the fields, and a fault's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """ASCII alone, so that no terminal or collector has to guess."""
        seconds, milliseconds = divmod(int(record.created * 1000), 1000)
        event = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return _ENCODER.encode(event)


def _plain(value: object) -> str:
    """Quoted where it is no plain word or number."""
    text = str(value)
    return (
        text
        if text.isascii() and text.replace("-", "").replace("_", "").replace(".", "").isalnum()
        else json.dumps(text)
    )
