"""The server under load: each request as one gRPC call, made once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from typing import Any

import grpc

from dragoman.addresses import channel_target
from dragoman.client_credentials import PLAIN, ClientCredentials, open_async_channel
from dragoman.errors import ConfigError
from dragoman.loadtest.load import Answer, Job
from dragoman.loadtest.report import CANCELLED_HERE, OK
from dragoman.loadtest.requests import Request
from dragoman.servicers.wire import options_to_wire
from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationServiceStub

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # a target is dialled directly, whatever proxies the environment names
    ("grpc.use_local_subchannel_pool", 1),  # else all channels to one target share one connection
    ("grpc.enable_retries", 0),  # a retried call would hide an error and count as slow
    ("grpc.max_receive_message_length", 64 << 20),
)


@contextlib.asynccontextmanager
async def connect(
    target: str,
    requests: Iterator[Request],
    *,
    connections: int,
    connect_seconds: float = 10.0,
    credentials: ClientCredentials = PLAIN,
) -> AsyncIterator[Iterator[Job]]:
    """The requests as jobs, spread over so many connections in turn.

    Raises ConfigError when the target cannot be reached: that is no finding about a server.
    """
    dialled, options = channel_target(target)
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(open_async_channel(dialled, credentials, [*_OPTIONS, *options]))
            for _ in range(connections)
        ]
        try:
            async with asyncio.timeout(connect_seconds):
                await asyncio.gather(*(channel.channel_ready() for channel in channels))
        except TimeoutError:
            raise ConfigError(
                f"cannot connect to {target} within {connect_seconds:g} s: is the server running there?"
            ) from None
        stubs = [GenerationServiceStub(channel) for channel in channels]  # type: ignore[no-untyped-call]  # generated code
        yield (_job(request, stub, credentials) for request, stub in zip(requests, cycle(stubs), strict=False))


def _job(request: Request, stub: Any, credentials: ClientCredentials) -> Job:
    part = request.part
    message = GenerateRequest(
        text=request.text, model=part.model, version=part.version, options=options_to_wire(part.options)
    )

    async def send(timeout_seconds: float) -> Answer:
        if timeout_seconds <= 0:
            return Answer(grpc.StatusCode.DEADLINE_EXCEEDED.name)  # gRPC takes 0 for no deadline at all
        method = stub.StreamGenerate if request.streaming else stub.Generate
        call = method(message, timeout=timeout_seconds, metadata=credentials.metadata)
        first_time = None
        loop = asyncio.get_running_loop()
        timer = None if request.cancel_seconds is None else loop.call_later(request.cancel_seconds, call.cancel)
        try:
            if request.streaming:
                async for piece in call:
                    if first_time is None and piece.delta:
                        first_time = loop.time()
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return Answer(error.code().name, first_time)
        except asyncio.CancelledError:
            if timer is None or timer.when() > loop.time():
                raise  # the load itself was
            return Answer(CANCELLED_HERE, first_time)
        finally:
            if timer is not None:
                timer.cancel()
        return Answer(OK, first_time)

    return Job(part.name, part.deadline_ms / 1000, send)
