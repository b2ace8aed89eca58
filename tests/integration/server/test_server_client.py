"""The client against servers that refuse, drain and die: what is asked again, and who answers instead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys

import grpc
import pytest

from dragoman.client import AsyncClient, Client
from dragoman.config import embedded_bundle
from dragoman.errors import DragomanError, EngineDeadError, InvalidRequestError, NotReadyError, OverloadedError
from dragoman.retries import NO_RETRIES, RetryPolicy
from dragoman.servicers.status import DETAILS_KEY, code_of, status_of
from dragoman.v1 import generation_pb2 as pb

QUICK = RetryPolicy(max_attempts=4, first_seconds=0.001, max_seconds=0.1)
ANSWER = pb.GenerateResponse(text="abc", model="m", version="1")


class Fickle(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """A server that fails with one error after the other, in the middle of a stream where told, and then answers."""

    def __init__(self, failures: list[DragomanError], after_first: bool = False) -> None:
        self.failures, self.after_first = failures, after_first
        self.times: list[float] = []  # that were left for each call

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        name = details.method.rpartition("/")[2]
        if name == "StreamGenerate":
            return grpc.unary_stream_rpc_method_handler(self.stream)
        answers = {
            "Generate": ANSWER,
            "BatchGenerate": pb.BatchGenerateResponse(items=[pb.BatchItem(response=ANSWER)]),
            "GetModel": pb.GetModelResponse(model="m"),
        }

        async def unary(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            await self.fail(context)
            return answers[name].SerializeToString()

        return grpc.unary_unary_rpc_method_handler(unary)

    async def stream(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        if not self.after_first:
            await self.fail(context)
        await context.write(pb.StreamGenerateResponse(delta="a").SerializeToString())
        if self.after_first:
            await self.fail(context)
        await context.write(pb.StreamGenerateResponse(response=ANSWER).SerializeToString())

    async def fail(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self.times.append(context.time_remaining())
        if self.failures:
            status = status_of(self.failures.pop(0))
            await context.abort(code_of(status), status.message, ((DETAILS_KEY, status.SerializeToString()),))


@contextlib.asynccontextmanager
async def served(handler):
    """Its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([handler])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def failures():
    return [OverloadedError("full", 0.01), NotReadyError("draining"), EngineDeadError("dead")]


async def ask(client, method):
    """An answer's text, or what stands for it."""
    if method == "stream":
        return [item async for item in client.stream("abc", timeout=60)][-1].text
    if method == "batch":
        return (await client.batch(["abc"], timeout=60))[0].text
    if method == "model_info":
        return "abc" if (await client.model_info(timeout=60)).model == "m" else ""
    return (await client.generate("abc", timeout=60)).text


def ask_from_a_thread(target, method):
    with Client(target, retries=QUICK) as client:
        if method == "stream":
            return list(client.stream("abc", timeout=60))[-1].text
        if method == "batch":
            return client.batch(["abc"], timeout=60)[0].text
        if method == "model_info":
            return "abc" if client.model_info(timeout=60).model == "m" else ""
        return client.generate("abc", timeout=60).text


@pytest.mark.parametrize("method", ["generate", "stream", "batch", "model_info"])
async def test_what_was_refused_for_the_moment_is_asked_again(method):
    """From an event loop and from a thread, each time with a deadline."""
    for in_thread in (False, True):
        server = Fickle(failures())
        async with served(server) as target:
            if in_thread:
                assert await asyncio.to_thread(ask_from_a_thread, target, method) == "abc"
            else:
                async with AsyncClient(target, retries=QUICK) as client:
                    assert await ask(client, method) == "abc"
        assert len(server.times) == 4
        assert max(server.times) < 62  # gRPC rounds up


async def test_attempts_have_an_end_and_the_last_refusal_is_told():
    """With its own class and hint."""
    server = Fickle([*failures(), OverloadedError("still full", 0.02), *failures()])
    async with served(server) as target, AsyncClient(target, retries=QUICK) as client:
        with pytest.raises(OverloadedError, match="still full") as caught:
            await client.generate("abc")
    assert caught.value.retry_after_seconds == pytest.approx(0.02)
    assert len(server.times) == 4


@pytest.mark.parametrize(
    ("failure", "retries"),
    [(InvalidRequestError("no"), QUICK), (OverloadedError("full", 60.0), QUICK), (NotReadyError("no"), NO_RETRIES)],
)
async def test_what_is_not_worth_it_is_told_at_once(failure, retries):
    """What would be refused again; what the server wants to be left alone with for long; and where nobody wants it."""
    server = Fickle([failure])
    async with served(server) as target, AsyncClient(target, retries=retries) as client:
        with pytest.raises(type(failure), match=str(failure)):
            await client.generate("abc")
    assert len(server.times) == 1


async def test_a_stream_that_has_begun_is_never_begun_again():
    """What was shown cannot be taken back."""
    server = Fickle([NotReadyError("draining")], after_first=True)
    seen = []
    async with served(server) as target, AsyncClient(target, retries=QUICK) as client:
        with pytest.raises(NotReadyError, match="draining"):
            async for item in client.stream("abc"):
                seen.append(item.delta)
    assert seen == ["a"]
    assert len(server.times) == 1


async def start_process():
    """A server process of the pronunciation model, and its address."""
    command = [sys.executable, "-m", "dragoman.cli.main", "serve", str(embedded_bundle("g2p-en"))]
    process = await asyncio.create_subprocess_exec(
        *command, "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0", stdout=asyncio.subprocess.PIPE
    )
    ready = json.loads(await process.stdout.readline())
    return process, f"127.0.0.1:{ready['port']}"


async def test_every_call_is_answered_though_one_of_two_servers_is_killed():
    """A thousand calls through one client that shares them out; one server gets SIGKILL in their middle."""
    (first, one), (second, other) = await asyncio.gather(start_process(), start_process())
    words = ("giraffe", "queue", "attention", "a")
    answered = 0
    try:
        async with AsyncClient(one) as client:
            expected = {word: (await client.generate(word)).text for word in words}
        async with AsyncClient(f"{one},{other}") as client:
            numbers = iter(range(1000))

            async def caller():
                nonlocal answered
                for number in numbers:
                    word = words[number % len(words)]
                    assert (await client.generate(word, timeout=60)).text == expected[word]
                    answered += 1
                    if answered == 400:
                        first.kill()

            await asyncio.gather(*(caller() for _ in range(16)))
        assert answered == 1000
        second.send_signal(signal.SIGTERM)
        assert await second.wait() == 0
        assert await first.wait() == -signal.SIGKILL
    finally:
        for process in (first, second):
            if process.returncode is None:
                process.kill()
                await process.wait()
