"""More than the server can do: what is over the bounds is told so at once, what was let in is answered."""

from __future__ import annotations

import asyncio
import time
from itertools import islice, product
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1.health_pb2 import HealthCheckResponse

from dragoman.client import AsyncClient
from dragoman.client_credentials import ClientCredentials
from dragoman.config import AuthConfig, EngineConfig
from dragoman.errors import OverloadedError, UnauthenticatedError
from dragoman.retries import NO_RETRIES
from dragoman.servicers import rpc
from dragoman.testing import ALPHABET, ScriptedRunner
from dragoman.v1 import generation_pb2 as pb

GENERATE = "/dragoman.v1.GenerationService/Generate"
BATCH = "/dragoman.v1.GenerationService/BatchGenerate"
CHECK = "/grpc.health.v1.Health/Check"
SERVING = HealthCheckResponse(status=HealthCheckResponse.SERVING).SerializeToString()


def words(count: int) -> list[str]:
    """So many texts, all different."""
    return ["".join(letters) for letters in islice(product(ALPHABET, repeat=3), count)]


async def test_of_two_thousand_calls_at_once_as_many_are_answered_as_there_is_room_for(start_server):
    """8 slots and 64 places: 72 answers; each of the others is refused with the time to wait, and is counted."""
    running = await start_server(ScriptedRunner(num_slots=8), EngineConfig(max_waiting=64, stuck_seconds=300))
    texts = words(2000)
    gate = running.gate()
    first = [asyncio.create_task(running.client.generate(text)) for text in texts[:8]]
    await gate.wait_reached()
    deadline = time.monotonic() + 60
    while True:  # behind the first, or the first few, whose step stands still
        snapshot = running.model.engine.snapshot()
        num_inside = snapshot.num_running + snapshot.num_waiting
        if num_inside == 8:
            break
        assert time.monotonic() < deadline, f"of the first 8 calls {num_inside} are in the engine after 60 s"
        await running.client.model_info()
    second = running.gate()
    gate.open()
    await second.wait_reached()
    assert running.model.engine.snapshot().num_running == 8

    refused: list[float] = []
    all_refused = asyncio.Event()

    async def call(text: str) -> str | None:
        try:
            answer: str = (await running.client.generate(text)).text
            return answer
        except OverloadedError as error:
            refused.append(error.retry_after_seconds)
            if len(refused) == 2000 - 72:
                all_refused.set()
            return None
        except BaseException:
            all_refused.set()  # that one is no refusal: the figures below tell, instead of a wait without an end
            raise

    calls = [asyncio.create_task(call(text)) for text in texts[8:]]
    await all_refused.wait()  # while the engine stands still: nobody waited for anything
    snapshot = running.model.engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (8, 64)
    assert all(0.1 <= seconds <= 60 for seconds in refused)
    second.open()
    assert [(await one).text for one in first] == texts[:8]
    answers = await asyncio.gather(*calls)
    assert sum(answer is not None for answer in answers) == 64
    assert all(answer in (None, text) for answer, text in zip(answers, texts[8:], strict=True))

    await running.server._router.idle()
    # All of them at the door, before they were read: no model was asked.
    rejected = [
        await running.value("dragoman_requests_rejected_total", model=model, reason="overloaded")
        for model in ("other", "scripted")
    ]
    assert rejected == [1928, 0]
    assert await running.value("dragoman_requests_total", model="scripted", method="Generate", code="ok") == 72
    admission = running.server._admission
    assert (admission.num_calls, admission.num_bytes) == (0, 0)
    assert (await running.client.generate("abc")).text == "abc"


async def test_as_many_calls_are_let_in_as_the_models_can_make_use_of(start_server):
    """Those that run and wait; or what the settings say."""
    running = await start_server(ScriptedRunner(num_slots=40), EngineConfig(max_waiting=300))
    assert running.server._admission.max_calls == 40 + 300
    assert (await start_server(max_calls=7)).server._admission.max_calls == 7


async def test_calls_beyond_the_bound_are_refused_before_they_are_read(start_server):
    """With the reason and the time to wait; what is no request for text is answered as ever."""
    running = await start_server(max_calls=2)
    gate = running.gate()
    calls = [asyncio.create_task(running.client.generate(text)) for text in ("ab", "cd")]
    await gate.wait_reached()
    while running.server._admission.num_calls < 2:
        await running.client.model_info()
    error = await running.refusal(GENERATE, b"no message at all")
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "2 calls are being answered, the limit is 2" in error.details()
    status = Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    info, retry = ErrorInfo(), RetryInfo()
    assert status.details[0].Unpack(info) and status.details[1].Unpack(retry)
    assert (info.reason, info.domain) == ("overloaded", "dragoman")
    assert retry.retry_delay.ToTimedelta().total_seconds() > 0
    assert await running.call(CHECK, b"") == SERVING
    assert await running.value("dragoman_requests_rejected_total", model="other", reason="overloaded") == 1
    gate.open()
    assert [(await call).text for call in calls] == ["ab", "cd"]
    assert (await running.client.generate("abc")).text == "abc"


async def test_the_bytes_of_all_requests_together_are_bounded(start_server):
    """A batch that would be too much beside another is refused whole, and let in when that one is done."""
    running = await start_server(max_request_bytes=1000)
    batch = pb.BatchGenerateRequest(requests=[pb.GenerateRequest(text="ab") for _ in range(100)]).SerializeToString()
    assert len(batch) == 600
    gate = running.gate()
    call = running.channel.unary_unary(BATCH)(batch)
    await gate.wait_reached()
    error = await running.refusal(BATCH, batch)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "have 600 bytes, this one 600, the limit is 1000" in error.details()
    gate.open()
    await call
    await running.call(BATCH, batch)


async def test_the_source_tokens_that_wait_are_bounded(start_server):
    """Of long texts fewer may wait than of short ones."""
    running = await start_server(ScriptedRunner(num_slots=1), EngineConfig(max_waiting_tokens=50))
    gate = running.gate()
    busy = asyncio.create_task(running.client.generate("a"))
    await gate.wait_reached()
    waiting = asyncio.create_task(running.client.generate("b" * 40))  # 41 with its end
    while running.model.engine.snapshot().num_waiting < 1:
        await running.client.model_info()
    with pytest.raises(OverloadedError, match="41 source tokens wait already and this one has 31, the limit is 50"):
        await running.client.generate("c" * 30)
    gate.open()
    assert (await running.client.generate("d")).text == "d"
    assert [(await busy).text, (await waiting).text] == ["a", "b" * 40]


async def test_a_call_that_never_sends_its_message_gives_its_place_back(start_server, monkeypatch):
    """The caller is told so; a half-open call can hold no place for long."""
    monkeypatch.setattr(rpc, "FIRST_MESSAGE_SECONDS", 0.05)
    running = await start_server(max_calls=1)
    never = asyncio.Event()

    async def nothing() -> Any:
        await never.wait()
        yield b""

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.channel.stream_unary(GENERATE, None, None)(nothing(), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sent no message within 0.05 s" in caught.value.details()
    never.set()
    assert (await running.client.generate("abc")).text == "abc"


ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


@pytest.fixture
def auth(tmp_path: Path) -> AuthConfig:
    """Two callers; the first may not ask for much."""
    path = tmp_path / "tokens.toml"
    path.write_text(
        f'[alice]\nsecret = "{ALICE}"\nrequests_per_second = 0.001\n\n[bob]\nsecret = "{BOB}"\nmax_running = 2\n'
    )
    return AuthConfig(str(path))


async def test_without_a_token_health_answers_and_nothing_else(start_server, auth):
    """UNAUTHENTICATED, with a reason for programs, counted, and before anything is parsed."""
    running = await start_server(auth=auth)
    for data in (b"no message at all", pb.GenerateRequest(text="abc").SerializeToString()):
        error = await running.refusal(GENERATE, data)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "authorization: Bearer TOKEN" in error.details()
        status = Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
        info = ErrorInfo()
        assert status.details[0].Unpack(info) and info.reason == "unauthenticated"
    for method in (
        "/dragoman.v1.GenerationService/GetModel",
        "/inference.GRPCInferenceService/ModelMetadata",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ):
        assert (await running.refusal(method, b"")).code() is grpc.StatusCode.UNAUTHENTICATED
    assert await running.call(CHECK, b"") == SERVING
    assert await running.value("dragoman_requests_rejected_total", model="other", reason="unauthenticated") == 2
    assert running.runner.encoded == []


async def test_reflection_is_open_to_all_where_that_is_chosen(start_server, auth):
    """Tools can then find out what there is to call; they cannot call it."""
    running = await start_server(auth=AuthConfig(auth.tokens, open_reflection=True))
    await running.call("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b"\x3a\x00")
    assert (await running.refusal(GENERATE, b"")).code() is grpc.StatusCode.UNAUTHENTICATED


async def test_each_token_has_its_own_limits_and_its_own_share(start_server, auth):
    """One caller's refusals are its own; whoever fills the server does not keep the other out."""
    running = await start_server(auth=auth, credentials=ClientCredentials(token=BOB), max_calls=2)
    async with AsyncClient(
        f"127.0.0.1:{running.server.port}", credentials=ClientCredentials(token=ALICE), retries=NO_RETRIES
    ) as alice:
        gate = running.gate()
        calls = [asyncio.create_task(running.client.generate(text)) for text in ("ab", "cd")]
        await gate.wait_reached()
        while running.server._admission.num_calls < 2:
            await running.client.model_info()
        with pytest.raises(OverloadedError, match="2 calls"):
            await running.client.generate("ef")
        let_in = asyncio.create_task(alice.generate("gh"))
        while running.server._admission.num_calls < 3:
            await running.client.model_info()
        with pytest.raises(OverloadedError, match=r"alice may make 0\.001 requests a second") as caught:
            gate.open()
            await let_in
            await alice.generate("ij")
        assert caught.value.retry_after_seconds > 900
        assert [(await call).text for call in calls] == ["ab", "cd"]
        assert (await let_in).text == "gh"
        assert (await running.client.generate("abc")).text == "abc"


async def test_each_text_of_a_batch_is_a_request_of_its_caller(start_server, auth):
    """A batch cannot get around a caller's rate."""
    running = await start_server(auth=auth, credentials=ClientCredentials(token=ALICE))
    assert [answer.text for answer in await running.client.batch(["ab", "cd", "ef"])] == ["ab", "cd", "ef"]
    with pytest.raises(OverloadedError) as caught:
        await running.client.generate("ab")
    assert caught.value.retry_after_seconds > 2900


async def test_a_token_that_is_none_is_told_so_by_the_client(start_server, auth):
    """As an error of its own, in a batch call too."""
    running = await start_server(auth=auth, credentials=ClientCredentials(token="mallory-0123456789"))
    with pytest.raises(UnauthenticatedError, match="none of this server's"):
        await running.client.generate("abc")
    with pytest.raises(UnauthenticatedError):
        await running.client.batch(["abc"])


async def test_equal_requests_of_two_tokens_are_not_each_others(start_server, auth):
    """Callers are told apart by their tokens, though they come from one address."""
    running = await start_server(auth=auth, credentials=ClientCredentials(token=BOB))
    async with AsyncClient(
        f"127.0.0.1:{running.server.port}", credentials=ClientCredentials(token=ALICE), retries=NO_RETRIES
    ) as alice:
        gate = running.gate()
        first = asyncio.create_task(running.client.generate("abc"))
        await gate.wait_reached()
        others = [asyncio.create_task(client.generate("abc")) for client in (running.client, alice)]
        while running.model.engine.snapshot().num_waiting < 2:
            await running.client.model_info()
        assert running.model.engine.snapshot().num_callers_waiting == 2
        gate.open()
        assert {(await call).text for call in (first, *others)} == {"abc"}
    assert len(running.runner.encoded) == 2  # the first and its equal share one run
