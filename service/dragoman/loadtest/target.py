"""The server under load: one ``Generate`` call as a load's ``Call``."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

import grpc

from dragoman.client_credentials import PLAIN, ClientCredentials, open_async_channel
from dragoman.errors import ConfigError
from dragoman.loadtest.load import Call
from dragoman.loadtest.report import OK
from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationServiceStub

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # a target is dialled directly, whatever proxies the environment names
    ("grpc.use_local_subchannel_pool", 1),  # else all channels to one target share one connection
    ("grpc.enable_retries", 0),  # a retried call would hide an error and count as slow
)


@contextlib.asynccontextmanager
async def connect(
    target: str,
    texts: Sequence[str],
    *,
    connections: int,
    connect_seconds: float,
    seed: int,
    credentials: ClientCredentials = PLAIN,
) -> AsyncIterator[Call]:
    """A ``Call`` that sends texts drawn at random (the same for the same seed) over so many connections in turn.

    Raises ConfigError when the target cannot be reached: that is no finding about a server.
    """
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(open_async_channel(target, credentials, _OPTIONS))
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
        requests = [GenerateRequest(text=text) for text in texts]
        choose = random.Random(seed)

        async def call(number: int, timeout_seconds: float) -> str:
            if timeout_seconds <= 0:
                return grpc.StatusCode.DEADLINE_EXCEEDED.name  # gRPC takes 0 for no deadline at all
            try:
                await stubs[number % connections].Generate(
                    choose.choice(requests), timeout=timeout_seconds, metadata=credentials.metadata
                )
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return OK

        yield call
