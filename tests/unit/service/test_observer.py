"""Each request is told of once, when it ends: in the metrics, as a line of the log, and as spans."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from dragoman.answer import TextResult
from dragoman.errors import InvalidRequestError
from dragoman.logs import FIELDS
from dragoman.metrics import ServerMetrics
from dragoman.observer import RequestObserver
from dragoman.servicers.rpc import Call
from dragoman.testing import scripted_model
from dragoman.types import Timing

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALL = Call("Generate", caller="token:alice", metadata={"traceparent": TRACEPARENT, "x-request-id": "from-metadata"})
RESULT = TextResult("geheim", (), 7, 5, Timing(0.25, 0.125, 0.5, 1.0))


def fields(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Of the one line that was logged."""
    (line,) = caplog.records
    assert (line.name, line.levelname, line.getMessage()) == ("dragoman.requests", "INFO", "request")
    found: dict[str, Any] = getattr(line, FIELDS)
    return found


@pytest.fixture
def log(caplog):
    """What is logged at info."""
    caplog.set_level(logging.INFO)
    return caplog


def run(
    observer: RequestObserver, call: Call = CALL, request_id: str = "r-1", error: BaseException | None = None
) -> None:
    with observer.request(call, request_id, "secret") as running:
        running.model = scripted_model()
        if error is not None:
            raise error
        running.results = (RESULT,)


def test_a_request_that_ended_well_is_a_line_with_all_its_figures(log):
    """Who, what, how it ended, where the time went, how much; and nothing of the text."""
    run(RequestObserver(ServerMetrics(), logs_requests=True))
    seen = fields(log)
    assert seen.pop("seconds") >= 0
    assert seen == {
        "request_id": "r-1",
        "method": "Generate",
        "model": "scripted",
        "version": "1",
        "code": "ok",
        "caller": "token:alice",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "queue_seconds": 0.25,
        "encode_seconds": 0.125,
        "decode_seconds": 0.5,
        "source_tokens": 7,
        "generated_tokens": 5,
    }


def test_texts_are_logged_where_that_was_asked_for(log):
    """With the answer, and with what an error says of them."""
    observer = RequestObserver(ServerMetrics(), logs_requests=True, logs_text=True)
    run(observer)
    assert (fields(log)["text"], fields(log)["answer"]) == ("secret", "geheim")
    log.clear()
    with pytest.raises(InvalidRequestError):
        run(observer, error=InvalidRequestError("'s' is no word"))
    assert (fields(log)["text"], fields(log)["error"]) == ("secret", "'s' is no word")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("secret"), "invalid_request"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (ZeroDivisionError("secret"), "internal"),
    ],
)
def test_every_end_is_one_line_and_one_count_without_the_text(log, error, code):
    """What an error says may quote the text."""
    metrics = ServerMetrics()
    with pytest.raises(type(error)):
        run(RequestObserver(metrics, logs_requests=True), error=error)
    assert fields(log)["code"] == code and "secret" not in str(fields(log))
    labels = {"model": "scripted", "method": "Generate", "code": code}
    assert metrics.registry.get_sample_value("dragoman_requests_total", labels) == 1


def test_a_request_of_several_texts_counts_each(log):
    """In one line."""
    metrics = ServerMetrics()
    with RequestObserver(metrics, logs_requests=True).request(CALL) as running:
        running.take(["a", "b", "c"])
        running.results = (RESULT, RESULT, RESULT)
    assert (fields(log)["texts"], fields(log)["source_tokens"]) == (3, 21)
    labels = {"model": "other", "method": "Generate", "code": "ok"}
    assert metrics.registry.get_sample_value("dragoman_requests_total", labels) == 3


@pytest.mark.parametrize(
    ("metadata", "request_id", "expected"),
    [
        (CALL.metadata, "", ("from-metadata", "0af7651916cd43dd8448eb211c80319c")),
        ({"x-request-id": "y" * 1000, "traceparent": "00-XYZ-1-01"}, "", ("y" * 128, None)),
        ({"x-request-id": b"bytes", "traceparent": b"bytes"}, "", (None, None)),
        ({"traceparent": "-" * 1000}, "z" * 1000, ("z" * 128, None)),
    ],
)
def test_ids_are_the_callers_and_bounded(log, metadata, request_id, expected):
    """The request's own goes before the metadata's; what is no trace id is left out."""
    run(RequestObserver(ServerMetrics(), logs_requests=True), Call("Generate", metadata=metadata), request_id)
    assert (fields(log).get("request_id"), fields(log).get("trace_id")) == expected


def test_a_request_refused_at_the_door_is_counted_and_logged(log):
    """As of no model: nothing of it was looked at."""
    metrics = ServerMetrics()
    RequestObserver(metrics, logs_requests=True).refused(CALL, "overloaded")
    assert fields(log) == {"method": "Generate", "code": "overloaded", "caller": "token:alice"}
    labels = {"model": "other", "reason": "overloaded"}
    assert metrics.registry.get_sample_value("dragoman_requests_rejected_total", labels) == 1


def test_nothing_is_logged_unless_asked_for(log):
    """Counts do not depend on it."""
    run(RequestObserver(ServerMetrics()))
    assert not log.records
