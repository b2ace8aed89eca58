"""One line an event, for people or programs, and never in the way of a request."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading

import pytest

from dragoman.config import LogConfig
from dragoman.logs import FIELDS, JsonFormatter, LogWriter, TextFormatter, logging_to_stderr


def record(message: str, *args: object, level: int = logging.INFO, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("dragoman.x", level, __file__, 1, message, args, None)
    setattr(made, FIELDS, fields)
    made.created = 1_700_000_000.25
    return made


def test_a_json_line_is_one_object_with_the_fields_beside_the_message():
    """In UTC, to the millisecond; nothing but ASCII goes out, and what JSON has no word for becomes text."""
    line = JsonFormatter().format(record("said %s", "a\nb\u2028ü", code="ok", seconds=0.25, error=ValueError("x")))
    assert line.isascii() and "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "logger": "dragoman.x",
        "message": "said a\nb\u2028ü",
        "code": "ok",
        "seconds": 0.25,
        "error": "x",
    }


def test_a_faults_traceback_is_in_its_line():
    """As a field, with what was raised."""
    try:
        raise ValueError("broken")
    except ValueError:
        faulty = record("internal error")
        faulty.exc_info = sys.exc_info()
    assert "ValueError: broken" in json.loads(JsonFormatter().format(faulty))["traceback"]
    assert TextFormatter().format(faulty).splitlines()[-1] == "ValueError: broken"


def test_no_value_can_pass_for_a_line_or_field_of_its_own():
    """A caller's request id is text like any other."""
    line = TextFormatter().format(record("request", request_id="x\n2026 INFO y: request code=ok", code="bad-1.5_a"))
    assert line.endswith('INFO dragoman.x: request request_id="x\\n2026 INFO y: request code=ok" code=bad-1.5_a')
    assert "\n" not in line


class SlowStream(io.StringIO):
    """Nobody reads it until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def write(self, text: str) -> int:
        assert self.opened.wait(60)
        return super().write(text)


def test_a_stream_that_nobody_reads_stops_no_event_and_what_was_left_out_is_counted():
    """A bound number of lines waits; the first line that has room again says how many are missing before it."""
    stream = SlowStream()
    writer = LogWriter(stream, max_waiting_lines=4)
    writer.setFormatter(logging.Formatter("%(message)s"))
    for number in range(100):
        writer.handle(record(f"event {number}"))
    stream.opened.set()
    writer.flush()
    writer.handle(record("after"))
    writer.close()
    lines = stream.getvalue().splitlines()
    written = [line for line in lines if line.startswith("event")]
    assert written == [f"event {number}" for number in range(len(written))] and 4 <= len(written) <= 5
    assert lines[len(written) :] == [
        f"{100 - len(written)} lines were left out here: stderr was not read fast enough",
        "after",
    ]


class ClosedStream(io.StringIO):
    """Its reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_stream_whose_reader_left_harms_nothing():
    """Nor does a message that cannot be made."""
    writer = LogWriter(ClosedStream())
    for _ in range(3):
        writer.handle(record("event"))
    writer.flush()
    writer.close()


@pytest.mark.parametrize(("level", "expected"), [("info", ["seen", "warned"]), ("warning", ["warned"])])
def test_the_process_logs_to_stderr_for_as_long_as_it_serves(capsys, level, expected):
    """All that was logged is written when it ends, and loggers are as they were."""
    before = logging.getLogger().handlers[:]
    with logging_to_stderr(LogConfig(level=level, format="json")):
        logging.getLogger("dragoman.test").info("seen")
        logging.getLogger("dragoman.test").warning("warned")
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == expected
    assert logging.getLogger().handlers == before
