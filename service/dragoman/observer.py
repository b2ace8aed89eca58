"""Tells of each request when it ends, whichever way, once: to the metrics, to the log, and to the traces."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dragoman.answer import TextResult, TextScore
from dragoman.errors import DragomanError
from dragoman.logs import FIELDS
from dragoman.metrics import OTHER, ServerMetrics
from dragoman.types import Timing

if TYPE_CHECKING:
    from dragoman.served_model import ServedModel
    from dragoman.servicers.rpc import Call
    from dragoman.tracing import Traces

logger = logging.getLogger("dragoman.requests")

_REQUEST_ID_KEY: Final = "x-request-id"
_MAX_ID_CHARACTERS: Final = 128


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What is known of a request at its end."""

    service: str
    method: str
    code: str  # "ok", or the code of its error
    model: str
    version: str
    request_id: str
    caller: str
    metadata: Mapping[str, str | bytes]
    started_ns: int  # since 1970
    seconds: float
    num_texts: int
    num_source_tokens: int
    num_generated_tokens: int
    timing: Timing | None  # of its text that took longest; None where no text was answered


@dataclass(slots=True)
class RunningRequest:
    """What becomes known of a request while it runs; whoever runs it says so here."""

    texts: Sequence[str] = ()
    num_texts: int = 1  # one, until it is known
    model: ServedModel | None = None
    results: Sequence[TextResult | TextScore] = ()

    def take(self, texts: Sequence[str]) -> None:
        """These are the texts that it is for; each of them ends as the whole request does."""
        self.texts, self.num_texts = texts, len(texts)


class RequestObserver:
    """One for each server. Belongs to its event loop."""

    def __init__(
        self,
        metrics: ServerMetrics,
        traces: Traces | None = None,
        *,
        logs_requests: bool = False,
        logs_text: bool = False,
    ) -> None:
        """``logs_text``: texts, answers and what errors say of them are in the log; without, nothing of them is."""
        self.metrics = metrics
        self._traces = traces
        self._logs_requests = logs_requests
        self._logs_text = logs_text

    @contextmanager
    def request(self, call: Call, request_id: str = "", text: str | None = None) -> Generator[RunningRequest]:
        """For as long as a request runs. ``request_id``: the caller's, if it gave one."""
        running = RunningRequest(() if text is None else (text,))
        started, started_ns = time.monotonic(), time.time_ns()
        code, error = "internal", None
        try:
            yield running
            code = "ok"
        except DragomanError as caught:
            code, error = caught.code, caught
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = call.interruption()
            raise
        finally:
            seconds = time.monotonic() - started
            model = OTHER if running.model is None else running.model.name
            for _ in range(running.num_texts):
                self.metrics.request_finished(model, call.method, code, seconds)
            if self._traces is not None or self._logs_requests:
                results = running.results
                self._tell(
                    FinishedRequest(
                        service=call.service,
                        method=call.method,
                        code=code,
                        model=model,
                        version="" if running.model is None else running.model.version,
                        request_id=(request_id or _text(call.metadata.get(_REQUEST_ID_KEY)))[:_MAX_ID_CHARACTERS],
                        caller=call.caller,
                        metadata=call.metadata,
                        started_ns=started_ns,
                        seconds=seconds,
                        num_texts=running.num_texts,
                        num_source_tokens=sum(result.num_source_tokens for result in results),
                        num_generated_tokens=sum(r.num_generated_tokens for r in results if isinstance(r, TextResult)),
                        timing=max((r.timing for r in results), key=lambda t: t.total_seconds, default=None),
                    ),
                    running,
                    error,
                )

    def refused(self, call: Call, code: str) -> None:
        """A request ended before any of it was looked at."""
        self.metrics.request_finished(OTHER, call.method, code, 0.0)
        if self._logs_requests:
            self._log({"method": call.method, "code": code, "caller": call.caller})

    def _tell(self, request: FinishedRequest, running: RunningRequest, error: DragomanError | None) -> None:
        if self._traces is not None:
            self._traces.add(request)
        if not self._logs_requests:
            return
        fields: dict[str, Any] = {
            "request_id": request.request_id,
            "method": request.method,
            "model": request.model,
            "version": request.version,
            "code": request.code,
            "caller": request.caller,
            "trace_id": _trace_id(request.metadata),
            "seconds": round(request.seconds, 6),
        }
        if request.num_texts != 1:
            fields["texts"] = request.num_texts
        if (timing := request.timing) is not None:
            fields |= {
                "queue_seconds": round(timing.queue_seconds, 6),
                "encode_seconds": round(timing.encode_seconds, 6),
                "decode_seconds": round(timing.decode_seconds, 6),
                "source_tokens": request.num_source_tokens,
                "generated_tokens": request.num_generated_tokens,
            }
        if self._logs_text:
            fields["text"] = "\n".join(running.texts)
            fields["answer"] = "\n".join(result.text for result in running.results if isinstance(result, TextResult))
            fields["error"] = "" if error is None else str(error)
        self._log({name: value for name, value in fields.items() if value != ""})

    def _log(self, fields: dict[str, Any]) -> None:
        if logger.isEnabledFor(logging.INFO):
            # As logger.info, but for looking up from where it was called, which is always here.
            record = logging.LogRecord(logger.name, logging.INFO, "", 0, "request", (), None)
            setattr(record, FIELDS, fields)
            logger.handle(record)


def _trace_id(metadata: Mapping[str, str | bytes]) -> str:
    """The 32 digits of a W3C traceparent; empty where there is none."""
    parts = _text(metadata.get("traceparent")).split("-")
    is_one = len(parts) >= 4 and len(parts[1]) == 32 and set(parts[1]) <= set("0123456789abcdef")
    return parts[1] if is_one else ""


def _text(value: str | bytes | None) -> str:
    return value if isinstance(value, str) else ""
