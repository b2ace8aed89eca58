"""Errors to gRPC statuses and back. The one place that knows which code an error has.

A status carries ``google.rpc.ErrorInfo`` with the error's ``code`` as its reason, so that a client can tell apart what
shares a gRPC code, and ``google.rpc.RetryInfo`` where a retry is worth it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from dragoman import errors
from dragoman.errors import DragomanError, OverloadedError

logger = logging.getLogger(__name__)

DOMAIN: Final = "dragoman"
DETAILS_KEY: Final = "grpc-status-details-bin"
MAX_MESSAGE_BYTES: Final = 1000
"""Headers are limited to a few KiB, and a message is in them twice, once with each non-ASCII byte written as three."""

_CODES: Final = {
    "invalid_request": grpc.StatusCode.INVALID_ARGUMENT,
    "source_too_long": grpc.StatusCode.INVALID_ARGUMENT,
    "reply_too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "model_not_found": grpc.StatusCode.NOT_FOUND,
    "load_failed": grpc.StatusCode.FAILED_PRECONDITION,
    "unsupported": grpc.StatusCode.UNIMPLEMENTED,
    "model_unsupported": grpc.StatusCode.FAILED_PRECONDITION,
    "overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "too_late": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
    "cancelled": grpc.StatusCode.CANCELLED,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "not_ready": grpc.StatusCode.UNAVAILABLE,
    "engine_dead": grpc.StatusCode.UNAVAILABLE,
}
"""By ``DragomanError.code``; a code that is not here is INTERNAL."""

_CLASSES: Final[dict[str, type[DragomanError]]] = {
    "invalid_request": errors.InvalidRequestError,
    "source_too_long": errors.SourceTooLongError,
    "reply_too_large": errors.ReplyTooLargeError,
    "model_not_found": errors.ModelNotFoundError,
    "load_failed": errors.LoadError,
    "unsupported": errors.UnsupportedError,
    "model_unsupported": errors.ModelUnsupportedError,
    "overloaded": errors.OverloadedError,
    "too_late": errors.TooLateError,
    "deadline": errors.DeadlineError,
    "cancelled": errors.RequestCancelledError,
    "unauthenticated": errors.UnauthenticatedError,
    "not_ready": errors.NotReadyError,
    "engine_dead": errors.EngineDeadError,
}

_FALLBACK_REASONS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid_request",
    grpc.StatusCode.NOT_FOUND: "model_not_found",
    grpc.StatusCode.UNIMPLEMENTED: "unsupported",
    grpc.StatusCode.FAILED_PRECONDITION: "model_unsupported",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "overloaded",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.UNAVAILABLE: "not_ready",
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
}
"""For statuses without ErrorInfo: those that gRPC itself makes."""

_BY_NUMBER: Final = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: Exception) -> Status:
    """The status that a caller gets for an error.

    An error that is not Dragoman's own is logged with its traceback under a fresh id; the caller gets the id alone.
    """
    if not isinstance(error, DragomanError):
        error_id = secrets.token_hex(4)
        # The traceback module copes with an exception whose text cannot be made; formatting it here would not.
        logger.error("internal error, id %s", error_id, exc_info=error)
        return _status("internal", f"internal error, id {error_id}: the server's log has the rest")
    retry = error.retry_after_seconds if isinstance(error, OverloadedError) else None
    return _status(error.code, str(error), retry)


def code_of(status: Status) -> grpc.StatusCode:
    """The gRPC code of a status."""
    return _BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)


def error_of(status: Status) -> DragomanError:
    """The error that a status stands for: by its ErrorInfo, else by its code."""
    reason = _FALLBACK_REASONS.get(code_of(status), "internal")
    retry_after_seconds = 1.0
    for detail in status.details:
        info, retry = ErrorInfo(), RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason = info.reason
        elif detail.Unpack(retry):
            retry_after_seconds = retry.retry_delay.ToTimedelta().total_seconds()
    kind = _CLASSES.get(reason, DragomanError)
    if issubclass(kind, OverloadedError):
        return kind(status.message, retry_after_seconds)
    return kind(status.message)


def error_of_rpc(
    code: grpc.StatusCode, message: str, trailing_metadata: Iterable[tuple[str, str | bytes]]
) -> DragomanError:
    """The error that a failed call stands for."""
    for key, value in trailing_metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return error_of(Status.FromString(value))
            except DecodeError:
                logger.warning("a status with unreadable details: %s %s", code.name, message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:  # gRPC's own words; no retry helps
        kind = errors.ReplyTooLargeError if "CLIENT: Received" in message else errors.InvalidRequestError
        return kind(message)
    return error_of(Status(code=code.value[0], message=message))


def _status(reason: str, message: str, retry_after_seconds: float | None = None) -> Status:
    encoded = message.encode("utf-8", "replace")
    if len(encoded) > MAX_MESSAGE_BYTES:
        message = encoded[: MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "…"
    status = Status(code=_CODES.get(reason, grpc.StatusCode.INTERNAL).value[0], message=message)
    status.details.append(_pack(ErrorInfo(reason=reason, domain=DOMAIN)))
    if retry_after_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after_seconds * 1e9))
        status.details.append(_pack(RetryInfo(retry_delay=delay)))
    return status


def _pack(message: ErrorInfo | RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
