"""What every RPC has in common: bytes in, bytes out, errors as statuses, metrics, drain.

Handlers get raw bytes from gRPC and parse them here, because the stock handlers answer bytes that are no message with
UNKNOWN. A servicer sees messages, yields messages, and raises errors; it knows nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from dragoman.engine.sequence import CLOCK_SLACK_SECONDS
from dragoman.errors import DragomanError, InvalidRequestError, NotReadyError, ReplyTooLargeError, UnsupportedError
from dragoman.metrics import OTHER, RpcMetrics, ServerMetrics
from dragoman.servicers.status import DETAILS_KEY, code_of, status_of
from dragoman.servicers.wire import parse

if TYPE_CHECKING:  # generic in the stubs alone
    Context = grpc.aio.ServicerContext[bytes, bytes]
    RawHandler = grpc.RpcMethodHandler[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Call:
    """What a servicer may know of the call it answers."""

    method: str
    deadline: float | None = None  # on time.monotonic's clock
    caller: str = ""  # the address that the call came from, without the port

    def interruption(self) -> str:
        """Why the call was just taken away, as an error code: gRPC cancels a call whose deadline passes too."""
        late = self.deadline is not None and time.monotonic() >= self.deadline - CLOCK_SLACK_SECONDS
        return "deadline" if late else "cancelled"


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC. ``behaviour`` gets a request, or an iterator of them, and yields one reply, or many."""

    service: str
    name: str
    request_type: type[Message]
    behaviour: Callable[[Any, Call], AsyncGenerator[Message]]
    stream_request: bool = False
    stream_reply: bool = False
    generates: bool = False  # makes text: refused while the server drains, which waits for it; a request in metrics

    @property
    def kind(self) -> str:
        """As the ``grpc_type`` label names it."""
        return "bidi_stream" if self.stream_request else "server_stream" if self.stream_reply else "unary"


class RpcRouter(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Finds the method, runs it, and turns whatever happens into a status and metrics."""

    def __init__(self, methods: Sequence[Method], metrics: ServerMetrics, max_message_bytes: int) -> None:
        self._metrics = metrics
        self._max_message_bytes = max_message_bytes
        self._handlers = {f"/{m.service}/{m.name}": self._handler(m) for m in methods}
        self._unknown = self._unknown_handler(metrics.rpc("bidi_stream", OTHER, OTHER))
        self._draining = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> RawHandler:
        """gRPC asks here for each call."""
        return self._handlers.get(handler_call_details.method, self._unknown)

    def drain(self) -> None:
        """Refuse new work from now on; what runs goes on."""
        self._draining = True

    async def idle(self) -> None:
        """Return when no call that generates runs."""
        await self._idle.wait()

    def _handler(self, method: Method) -> RawHandler:
        rpc = self._metrics.rpc(method.kind, method.service, method.name)

        async def run(data: AsyncIterator[bytes], context: Context) -> None:
            await self._run(method, rpc, data, context)

        # On the wire every method is one of streams. gRPC's handlers for one request leave a call without any
        # message unanswered for ever; here it is a fault like another.
        return grpc.stream_stream_rpc_method_handler(run)

    async def _run(self, method: Method, rpc: RpcMetrics, data: AsyncIterator[bytes], context: Context) -> None:
        started = time.monotonic()
        rpc.started()
        call = Call(method.name, _deadline(context, started), _caller(context.peer()))
        code = "UNKNOWN"
        if method.generates:
            self._num_running += 1
            self._idle.clear()
        try:
            request = await self._request(method, rpc, data)
            async with aclosing(method.behaviour(request, call)) as replies:
                async for reply in replies:
                    await context.write(self._serialize(reply))
                    rpc.sent()
            code = "OK"
        except asyncio.CancelledError:
            code = "DEADLINE_EXCEEDED" if call.interruption() == "deadline" else "CANCELLED"
            raise  # gRPC leaks the call otherwise
        except grpc.aio.BaseError as error:  # gRPC's own: the caller is gone, nothing can be sent to it
            code = "CANCELLED"
            raise asyncio.CancelledError from error  # as itself, gRPC logs it as a fault, at length
        except Exception as error:
            status = status_of(error)
            code = code_of(status).name
            try:
                await _abort(context, status)
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
        finally:
            rpc.handled(code, time.monotonic() - started)
            if method.generates:
                self._num_running -= 1
                if not self._num_running:
                    self._idle.set()

    async def _request(
        self, method: Method, rpc: RpcMetrics, data: AsyncIterator[bytes]
    ) -> Message | AsyncGenerator[Message]:
        if method.stream_request:
            return (self._parse(method, rpc, item) async for item in data)
        try:
            if method.generates and self._draining:
                raise NotReadyError("the server is draining: retry elsewhere")
            async for item in data:
                return self._parse(method, rpc, item)
            raise InvalidRequestError(f"the call ended without a message; {method.name} takes one")
        except DragomanError as error:
            if method.generates:  # the servicer, which counts the others, never sees this one
                self._metrics.request_finished(OTHER, method.name, error.code, 0.0)
            raise

    def _parse(self, method: Method, rpc: RpcMetrics, data: bytes) -> Message:
        rpc.received()
        if len(data) > self._max_message_bytes:
            raise InvalidRequestError(
                f"the request has {len(data)} bytes; this server accepts {self._max_message_bytes}: send less at once"
            )
        return parse(method.request_type, data)

    def _serialize(self, reply: Message) -> bytes:
        data = reply.SerializeToString()
        if len(data) > self._max_message_bytes:
            limit = self._max_message_bytes
            raise ReplyTooLargeError(
                f"the reply has {len(data)} bytes; this server sends at most {limit}: ask for less at once"
            )
        return data

    def _unknown_handler(self, rpc: RpcMetrics) -> RawHandler:
        async def refuse(data: AsyncIterator[bytes], context: Context) -> None:
            rpc.started()
            status = status_of(UnsupportedError("this server has no such method"))
            rpc.handled(code_of(status).name, 0.0)
            await _abort(context, status)

        return grpc.stream_stream_rpc_method_handler(refuse)


async def _abort(context: Context, status: Status) -> None:
    """End a call with a status. Raises gRPC's AbortError, and CancelledError where the caller is gone."""
    try:
        await context.abort(code_of(status), status.message, ((DETAILS_KEY, status.SerializeToString()),))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error


def _deadline(context: Context, now: float) -> float | None:
    remaining: float | None = context.time_remaining()
    return None if remaining is None else now + remaining


def _caller(peer: str) -> str:
    """``ipv4:192.0.2.1:50321`` without the port, which is another one for each connection."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
