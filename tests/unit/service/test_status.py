"""Errors to statuses and back."""

from __future__ import annotations

import inspect

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from dragoman import errors
from dragoman.errors import DragomanError
from dragoman.servicers.status import DETAILS_KEY, MAX_MESSAGE_BYTES, code_of, error_of, error_of_rpc, status_of

REQUEST_TIME = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, DragomanError) and kind not in (errors.ConfigError, errors.BundleError)
]
CODES = {
    "invalid_request": "INVALID_ARGUMENT",
    "source_too_long": "INVALID_ARGUMENT",
    "reply_too_large": "RESOURCE_EXHAUSTED",
    "model_not_found": "NOT_FOUND",
    "load_failed": "FAILED_PRECONDITION",
    "unsupported": "UNIMPLEMENTED",
    "model_unsupported": "FAILED_PRECONDITION",
    "overloaded": "RESOURCE_EXHAUSTED",
    "too_late": "RESOURCE_EXHAUSTED",
    "deadline": "DEADLINE_EXCEEDED",
    "cancelled": "CANCELLED",
    "unauthenticated": "UNAUTHENTICATED",
    "not_ready": "UNAVAILABLE",
    "engine_dead": "UNAVAILABLE",
    "internal": "INTERNAL",
}


@pytest.mark.parametrize("kind", REQUEST_TIME)
def test_every_error_has_the_status_of_the_table_and_comes_back(kind):
    """The client raises an error with the code and text that the server raised."""
    status = status_of(kind("what, limit, remedy"))
    assert code_of(status).name == CODES[kind.code]
    back = error_of(status)
    assert (back.code, str(back)) == (kind.code, "what, limit, remedy")


def test_the_time_to_wait_comes_back_with_an_overload():
    """RetryInfo carries it."""
    for kind in (errors.OverloadedError, errors.TooLateError):
        back = error_of(status_of(kind("full", retry_after_seconds=2.5)))
        assert type(back) is kind
        assert back.retry_after_seconds == 2.5


def test_an_unknown_exception_is_hidden_from_the_caller(caplog):
    """Its text is in the log alone, under an id that the caller gets; each has its own."""
    first, second = status_of(ValueError("secret")), status_of(ValueError("secret"))
    assert code_of(first) is grpc.StatusCode.INTERNAL
    assert "secret" not in first.message and first.message != second.message
    assert "secret" in caplog.text


def test_a_long_message_is_cut():
    """Headers hold a few KiB; a caller's text must not break them."""
    for character in ("x", "é", "🦥"):
        message = status_of(errors.InvalidRequestError(character * 100_000)).message
        assert MAX_MESSAGE_BYTES - 6 < len(message.encode()) <= MAX_MESSAGE_BYTES
        assert message.strip(character) == "…"


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect", errors.NotReadyError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", errors.DeadlineError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams", errors.OverloadedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)", errors.InvalidRequestError),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Stream removed (CLIENT: Received message larger than max (9 vs. 4))",
            errors.ReplyTooLargeError,
        ),
        (grpc.StatusCode.UNKNOWN, "?", DragomanError),
    ],
)
def test_a_status_that_grpc_made_itself_is_an_error_too(code, message, kind):
    """Without ErrorInfo the code decides."""
    error = error_of_rpc(code, message, ())
    assert type(error) is kind
    assert str(error) == message


def test_details_of_others_and_broken_details_do_not_mislead():
    """Another domain's reason means nothing here, and unreadable bytes are as good as none."""
    detail = Any()
    detail.Pack(ErrorInfo(reason="overloaded", domain="example.com"))
    status = Status(code=3, message="m", details=[detail])
    assert type(error_of(status)) is errors.InvalidRequestError
    broken = error_of_rpc(grpc.StatusCode.NOT_FOUND, "m", ((DETAILS_KEY, b"\xff\xff"),))
    assert type(broken) is errors.ModelNotFoundError
