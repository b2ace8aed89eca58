"""What every RPC has in common: who calls, bytes in, bytes out, errors as statuses, bounds, metrics, drain.

Handlers get raw bytes from gRPC and parse them here, because the stock handlers answer bytes that are no message with
UNKNOWN. A servicer sees messages, yields messages, and raises errors; it knows nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from dragoman.admission import Admission, Place
from dragoman.engine.sequence import CLOCK_SLACK_SECONDS
from dragoman.errors import DragomanError, InvalidRequestError, NotReadyError, ReplyTooLargeError, UnsupportedError
from dragoman.metrics import OTHER, RpcMetrics
from dragoman.observer import RequestObserver
from dragoman.servicers.status import DETAILS_KEY, code_of, status_of
from dragoman.servicers.wire import parse
from dragoman.tokens import Allowance, Tokens

if TYPE_CHECKING:  # generic in the stubs alone
    Context = grpc.aio.ServicerContext[bytes, bytes]
    RawHandler = grpc.RpcMethodHandler[bytes, bytes]

FIRST_MESSAGE_SECONDS: Final = 30.0
"""How long a call that takes one message may be open without it: it holds a place that others could use."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a servicer may know of the call it answers."""

    method: str
    deadline: float | None = None  # on time.monotonic's clock
    caller: str = ""  # "token:" and the token's name; without tokens, the address without the port
    metadata: Mapping[str, str | bytes] = field(default_factory=dict)  # what came with it; of a repeated key, the last
    draining: asyncio.Event = field(default_factory=asyncio.Event)  # set: a stream of requests takes no more of them
    charge: Callable[[int], None] = lambda num_requests: None  # the call has so many more requests than one
    service: str = ""  # that the method belongs to

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
    generates: bool = False  # makes text: bounded; refused while the server drains, which waits for it; in metrics
    is_open: bool = False  # needs no token

    @property
    def kind(self) -> str:
        """As the ``grpc_type`` label names it."""
        return "bidi_stream" if self.stream_request else "server_stream" if self.stream_reply else "unary"


@dataclass(frozen=True, slots=True)
class _Visit:
    """A call that was let in: by its caller's name, and with what it takes while it is inside."""

    call: Call
    place: Place | None = None
    allowance: Allowance | None = None


class RpcRouter(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Finds the method, runs it, and turns whatever happens into a status and metrics."""

    def __init__(
        self,
        methods: Sequence[Method],
        observer: RequestObserver,
        max_message_bytes: int,
        admission: Admission,
        tokens: Tokens | None = None,
    ) -> None:
        """Without ``tokens``, whoever reaches the port may call."""
        self._observer = observer
        self._admission = admission
        self._tokens = tokens
        self._max_message_bytes = max_message_bytes
        self._handlers = {f"/{m.service}/{m.name}": self._handler(m) for m in methods}
        self._unknown = self._unknown_handler(observer.metrics.rpc("bidi_stream", OTHER, OTHER))
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> RawHandler:
        """gRPC asks here for each call."""
        return self._handlers.get(handler_call_details.method, self._unknown)

    def drain(self) -> None:
        """Refuse new work from now on; what runs goes on."""
        self._draining.set()

    async def idle(self) -> None:
        """Return when no call that generates runs."""
        await self._idle.wait()

    def _handler(self, method: Method) -> RawHandler:
        rpc = self._observer.metrics.rpc(method.kind, method.service, method.name)

        async def run(data: AsyncIterator[bytes], context: Context) -> bytes:
            return await self._run(method, rpc, data, context)

        async def run_stream(data: AsyncIterator[bytes], context: Context) -> None:
            await self._run(method, rpc, data, context)

        # On the wire every request is a stream. gRPC's handlers for one request leave a call without any message
        # unanswered for ever; here it is a fault like another. A lone reply goes out together with its status, so that
        # a server that is killed leaves no half an answer, which no proxy could ask for elsewhere.
        if method.stream_reply:
            return grpc.stream_stream_rpc_method_handler(run_stream)
        return grpc.stream_unary_rpc_method_handler(run)

    async def _run(self, method: Method, rpc: RpcMetrics, data: AsyncIterator[bytes], context: Context) -> bytes:
        """Answer a call. Returns the reply, if there is to be just one."""
        started = time.monotonic()
        rpc.started()
        call = Call(
            method.name,
            _deadline(context, started),
            _caller(context.peer()),
            dict(context.invocation_metadata() or ()),
            self._draining,
            service=method.service,
        )
        code, is_inside, lone = "UNKNOWN", False, b""
        try:
            with self._inside(method, call, started) as visit:
                call = visit.call
                request = await self._request(method, rpc, data, visit)
                is_inside = True
                async with aclosing(method.behaviour(request, call)) as replies:
                    async for reply in replies:
                        if method.stream_reply:
                            await context.write(self._serialize(reply))
                        else:
                            lone = self._serialize(reply)
                        rpc.sent()
                if visit.place is not None:
                    visit.place.answered = True
            code = "OK"
        except asyncio.CancelledError:
            code = "DEADLINE_EXCEEDED" if call.interruption() == "deadline" else "CANCELLED"
            raise  # gRPC leaks the call otherwise
        except grpc.aio.BaseError as error:  # gRPC's own: the caller is gone, nothing can be sent to it
            code = "CANCELLED"
            raise asyncio.CancelledError from error  # as itself, gRPC logs it as a fault, at length
        except Exception as error:
            if method.generates and not is_inside and isinstance(error, DragomanError):
                # The servicer, which counts the others, never sees this one.
                self._observer.refused(call, error.code)
            status = status_of(error)
            code = code_of(status).name
            try:
                await _abort(context, status)
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
        finally:
            rpc.handled(code, time.monotonic() - started)
        return lone

    @contextmanager
    def _inside(self, method: Method, call: Call, now: float) -> Generator[_Visit]:
        """Let a call in for as long as it runs. Raises UnauthenticatedError, NotReadyError and OverloadedError."""
        allowance = None
        if self._tokens is not None and not method.is_open:
            allowance = self._tokens.allowance(call.metadata, now)
            call = replace(call, caller=f"token:{allowance.token.name}", charge=allowance.charge)
        if not method.generates:
            yield _Visit(call)
            return
        if self._draining.is_set():
            raise NotReadyError("the server is draining: retry elsewhere")
        place = self._admission.enter(call.caller, now)
        self._idle.clear()
        try:
            if allowance is not None:
                allowance.enter(now)
            try:
                yield _Visit(call, place, allowance)
            finally:
                if allowance is not None:
                    allowance.leave()
        finally:
            place.leave(time.monotonic())
            if not self._admission.num_calls:
                self._idle.set()

    async def _request(
        self, method: Method, rpc: RpcMetrics, data: AsyncIterator[bytes], visit: _Visit
    ) -> Message | AsyncGenerator[Message]:
        if method.stream_request:
            return self._requests(method, rpc, data, visit)
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                async for item in data:
                    return self._parse(method, rpc, item, visit)
        except TimeoutError:
            raise InvalidRequestError(
                f"the call sent no message within {FIRST_MESSAGE_SECONDS:g} s; {method.name} takes one at once"
            ) from None
        raise InvalidRequestError(f"the call ended without a message; {method.name} takes one")

    async def _requests(
        self, method: Method, rpc: RpcMetrics, data: AsyncIterator[bytes], visit: _Visit
    ) -> AsyncGenerator[Message]:
        is_first = True  # it was paid for when the call came in
        async for item in data:
            if visit.allowance is not None and not is_first:
                visit.allowance.pay(time.monotonic())
            is_first = False
            yield self._parse(method, rpc, item, visit)

    def _parse(self, method: Method, rpc: RpcMetrics, data: bytes, visit: _Visit) -> Message:
        rpc.received()
        if len(data) > self._max_message_bytes:
            raise InvalidRequestError(
                f"the request has {len(data)} bytes; this server accepts {self._max_message_bytes}: send less at once"
            )
        if visit.place is not None:
            visit.place.hold(len(data))
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
