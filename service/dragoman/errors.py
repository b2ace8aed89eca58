"""Every error that Dragoman raises on purpose.

    DragomanError                    code                 gRPC status
    ├─ ConfigError                   config               (the process does not start)
    ├─ BundleError                   bundle               (the process does not start)
    ├─ RequestError
    │  ├─ InvalidRequestError        invalid_request      INVALID_ARGUMENT
    │  ├─ SourceTooLongError         source_too_long      INVALID_ARGUMENT
    │  ├─ ReplyTooLargeError         reply_too_large      RESOURCE_EXHAUSTED (no retry helps)
    │  ├─ ModelNotFoundError         model_not_found      NOT_FOUND
    │  ├─ LoadError                  load_failed          FAILED_PRECONDITION
    │  ├─ UnsupportedError           unsupported          UNIMPLEMENTED
    │  │  └─ ModelUnsupportedError   model_unsupported    FAILED_PRECONDITION
    │  ├─ OverloadedError            overloaded           RESOURCE_EXHAUSTED + google.rpc.RetryInfo
    │  │  └─ TooLateError            too_late             RESOURCE_EXHAUSTED + google.rpc.RetryInfo
    │  ├─ DeadlineError              deadline             DEADLINE_EXCEEDED
    │  ├─ RequestCancelledError      cancelled            CANCELLED
    │  └─ UnauthenticatedError       unauthenticated      UNAUTHENTICATED
    ├─ NotReadyError                 not_ready            UNAVAILABLE (loading, draining)
    ├─ EngineDeadError               engine_dead          UNAVAILABLE (the process is about to exit)
    └─ RowError                      internal             INTERNAL (this request alone)
    anything else                    internal             INTERNAL (logged with its traceback, hidden from the caller)

``code`` is the label in metrics and the ``reason`` on the wire. A message names the value, the limit and the remedy,
and is safe to send to the caller: it holds no path, and of the caller's text only the characters at fault.
"""

from __future__ import annotations

from typing import ClassVar


class DragomanError(Exception):
    """Base of all; ``code`` is stable and machine readable."""

    code: ClassVar[str] = "internal"


class ConfigError(DragomanError):
    """A setting is wrong; raised before anything starts."""

    code = "config"


class BundleError(DragomanError):
    """A bundle is missing, damaged, of another format version, or fails its own golden set."""

    code = "bundle"


class RequestError(DragomanError):
    """The fault lies in one request, which fails alone."""

    code = "invalid_request"


class InvalidRequestError(RequestError):
    """A field holds a value that is never acceptable."""


class SourceTooLongError(RequestError):
    """The text is longer than the model or the server accepts."""

    code = "source_too_long"


class ImpossibleError(InvalidRequestError):
    """A request's constraints exclude each other, which shows while it is decoded: no token is left that may come."""


class ReplyTooLargeError(RequestError):
    """The answer has more bytes than the server sends in one message."""

    code = "reply_too_large"


class ModelNotFoundError(RequestError):
    """No model of that name and version is served."""

    code = "model_not_found"


class LoadError(RequestError):
    """A version of a model cannot be loaded; what was served before still is. The message may name files."""

    code = "load_failed"


class UnsupportedError(RequestError):
    """A well-formed option that this server does not implement."""

    code = "unsupported"


class ModelUnsupportedError(UnsupportedError):
    """An option that this server implements, but which needs what the model was exported without."""

    code = "model_unsupported"


class OverloadedError(RequestError):
    """The queue or the KV memory is full; worth a retry after ``retry_after_seconds``."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class TooLateError(OverloadedError):
    """The answer would be done after the caller's deadline only; refused before any work."""

    code = "too_late"


class DeadlineError(RequestError):
    """The caller's deadline passed while the request waited or ran."""

    code = "deadline"


class RequestCancelledError(RequestError):
    """The caller cancelled or went away."""

    code = "cancelled"


class UnauthenticatedError(RequestError):
    """The caller did not say who it is, or nobody whom this server knows."""

    code = "unauthenticated"


class NotReadyError(DragomanError):
    """The server is loading or draining."""

    code = "not_ready"


class EngineDeadError(DragomanError):
    """The engine failed or hangs; the process is about to exit."""

    code = "engine_dead"


class RowError(DragomanError):
    """The model produced no usable number for one row (NaN or infinity); its neighbours are unharmed."""
