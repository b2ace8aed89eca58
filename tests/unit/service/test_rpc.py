"""What every RPC has in common, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from dragoman.admission import Admission
from dragoman.errors import InvalidRequestError
from dragoman.metrics import ServerMetrics
from dragoman.observer import RequestObserver
from dragoman.servicers.rpc import Call, Method, RpcRouter
from dragoman.v1 import generation_pb2 as pb


class Context:
    """Stands in for gRPC's; remembers how the call was aborted."""

    def __init__(self, remaining: float | None = None) -> None:
        self._remaining = remaining
        self.aborted: tuple[Any, ...] = ()

    def time_remaining(self) -> float | None:
        return self._remaining

    def peer(self) -> str:
        return "ipv4:192.0.2.1:50321"

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return (("key", "first"), ("key", "last"))

    async def abort(self, *status: Any) -> None:
        self.aborted = status
        raise grpc.aio.AbortError("aborted")


def router_for(behaviour: Any) -> tuple[ServerMetrics, Any]:
    metrics = ServerMetrics()
    router = RpcRouter(
        [Method("s", "m", pb.GetModelRequest, behaviour)], RequestObserver(metrics), 1000, Admission(100, 1 << 20)
    )
    details: Any = SimpleNamespace(method="/s/m")
    return metrics, router.service(details).stream_unary


async def message() -> AsyncGenerator[bytes]:
    """A request stream of one empty message."""
    yield b""


def handled(metrics: ServerMetrics, code: str) -> float | None:
    labels = {"grpc_type": "unary", "grpc_service": "s", "grpc_method": "m", "grpc_code": code}
    return metrics.registry.get_sample_value("grpc_server_handled_total", labels)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_what_should_end_the_process_is_not_swallowed(kind):
    """An interrupt that hits a handler is no error of the call."""

    async def behaviour(request: pb.GetModelRequest, call: Call) -> AsyncGenerator[pb.GetModelResponse]:
        raise kind
        yield

    _, handler = router_for(behaviour)
    context = Context()
    with pytest.raises(kind):
        await handler(message(), context)
    assert context.aborted == ()


@pytest.mark.parametrize(("remaining", "code"), [(None, "CANCELLED"), (60.0, "CANCELLED"), (0.0, "DEADLINE_EXCEEDED")])
async def test_a_cancelled_handler_closes_the_work_and_passes_it_on(remaining, code):
    """The servicer's generator is closed before the handler ends, and metrics tell a deadline from a cancel."""
    events: list[str] = []

    async def behaviour(request: pb.GetModelRequest, call: Call) -> AsyncGenerator[pb.GetModelResponse]:
        try:
            events.append("started")
            await asyncio.Event().wait()
            yield pb.GetModelResponse()
        finally:
            events.append("closed")

    metrics, handler = router_for(behaviour)
    task = asyncio.create_task(handler(message(), Context(remaining)))
    while not events:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events == ["started", "closed"]
    assert handled(metrics, code) == 1


async def test_a_call_whose_caller_is_gone_closes_the_work_too():
    """gRPC's own error on sending ends it as a cancel does, and is not answered."""
    closed = asyncio.Event()

    async def behaviour(request: pb.GenerateRequest, call: Call) -> AsyncGenerator[pb.StreamGenerateResponse]:
        try:
            while True:
                yield pb.StreamGenerateResponse()
        finally:
            closed.set()

    class Gone(Context):
        async def write(self, data: bytes) -> None:
            raise grpc.aio.UsageError("the call is over")

    metrics = ServerMetrics()
    router = RpcRouter(
        [Method("s", "m", pb.GenerateRequest, behaviour, stream_reply=True)],
        RequestObserver(metrics),
        1000,
        Admission(100, 1 << 20),
    )
    details: Any = SimpleNamespace(method="/s/m")
    handler: Any = router.service(details).stream_stream
    context = Gone()
    with pytest.raises(asyncio.CancelledError):
        await handler(message(), context)
    assert closed.is_set() and context.aborted == ()


async def test_an_error_whose_caller_is_gone_is_counted_as_a_cancel():
    """There is nobody to tell it: the call ends as a cancelled one does."""

    async def behaviour(request: pb.GetModelRequest, call: Call) -> AsyncGenerator[pb.GetModelResponse]:
        raise InvalidRequestError("bad")
        yield

    class Gone(Context):
        async def abort(self, *status: object) -> None:
            raise grpc.aio.UsageError("the call is over")

    metrics, handler = router_for(behaviour)
    with pytest.raises(asyncio.CancelledError):
        await handler(message(), Gone())
    assert handled(metrics, "CANCELLED") == 1


@pytest.mark.parametrize(
    ("peer", "caller"),
    [
        ("ipv4:192.0.2.1:50321", "ipv4:192.0.2.1"),
        ("ipv6:[2001:db8::1]:50321", "ipv6:[2001:db8::1]"),
        ("ipv6:%5B::1%5D:1", "ipv6:%5B::1%5D"),
        ("unix:/run/a:b", "unix:/run/a:b"),
        ("unix:", "unix:"),
    ],
)
async def test_a_caller_is_its_address_whatever_the_connection(peer, caller):
    """The port, which every connection has another one of, does not tell callers apart."""
    seen = []

    async def behaviour(request: pb.GetModelRequest, call: Call) -> AsyncGenerator[pb.GetModelResponse]:
        seen.append(call.caller)
        return
        yield

    _, handler = router_for(behaviour)
    context = Context()
    context.peer = lambda: peer
    await handler(message(), context)
    assert seen == [caller]
