"""The happy path of every method, through a real socket."""

from __future__ import annotations

import asyncio
import random
from string import ascii_lowercase

import grpc
import pytest

from dragoman.answer import TextUpdate
from dragoman.client import Client, ServedResult, TokenizerInfo
from dragoman.errors import DragomanError, InvalidRequestError
from dragoman.types import DecodingOptions, FinishReason
from dragoman.v1 import generation_pb2 as pb


async def test_a_text_is_answered_with_all_that_is_known_of_it(start_server):
    """Text, segments, tokens, finish reason, usage, model and the caller's own id come back."""
    running = await start_server()
    result = await running.client.generate(" abc\n\nxyz", request_id="mine")
    assert result.text == " abc\n\nxyz"
    assert [(s.start, s.end) for s in result.segments] == [(1, 4), (6, 9)]
    assert result.segments[1].hypotheses[0].tokens == ("x", "y", "z")
    assert result.segments[1].hypotheses[0].finish_reason is FinishReason.STOP
    assert (result.num_source_tokens, result.num_generated_tokens) == (8, 6)
    assert (result.model, result.version, result.request_id) == ("scripted", "1", "mine")


@pytest.mark.parametrize("text", ["", " ", "\n\r\n \t\n"])
async def test_blank_text_comes_back_unchanged_without_a_run(start_server, text):
    """Nothing to answer means nothing computed."""
    running = await start_server()
    result = await running.client.generate(text)
    assert result.text == text
    assert running.runner.encoded == []


async def test_a_stream_adds_up_to_the_whole_answer(start_server):
    """The deltas of each segment, joined, are its text; the last item is what Generate answers."""
    running = await start_server()
    items = [item async for item in running.client.stream("abc\nxy", request_id="mine")]
    whole = items.pop()
    assert isinstance(whole, ServedResult)
    assert (whole.text, whole.request_id) == ("abc\nxy", "mine")
    updates = [item for item in items if isinstance(item, TextUpdate)]
    assert len(updates) == len(items)
    for index, segment in enumerate(whole.segments):
        assert "".join(u.delta for u in updates if u.segment == index) == segment.hypotheses[0].text
        assert [u.result for u in updates if u.segment == index and u.result] == [segment.hypotheses[0]]


async def test_a_bad_item_of_a_batch_fails_alone(start_server):
    """Every item has its own outcome, in order, blank ones included."""
    running = await start_server()
    outcomes = await running.client.batch(["abc", "4", "", "xyz"])
    assert [o.text if isinstance(o, ServedResult) else type(o) for o in outcomes] == [
        "abc",
        InvalidRequestError,
        "",
        "xyz",
    ]
    assert "'4'" in str(outcomes[1])


async def test_a_batch_item_with_an_unknown_field_fails_alone(start_server):
    """A field that only one item has, and nobody knows, is that item's error."""
    running = await start_server()
    good, bad = pb.GenerateRequest(text="abc"), pb.GenerateRequest.FromString(b"\x1a\x01a\xf8\x06\x01")
    reply = await running.call(
        "/dragoman.v1.GenerationService/BatchGenerate",
        pb.BatchGenerateRequest(requests=[good, bad, good]).SerializeToString(),
    )
    first, second, third = pb.BatchGenerateResponse.FromString(reply).items
    assert (first.response.text, third.response.text) == ("abc", "abc")
    assert second.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "requests[1] has a field 111" in second.error.message


async def test_batches_without_and_of_blank_texts(start_server):
    """No item gives no outcome; blank ones come back as they are, in order, without a run."""
    running = await start_server()
    assert await running.client.batch([]) == []
    for texts in ([""], ["", "hello", ""], [""] * 64, [" " if i % 10 == 0 else "a" * i for i in range(21)]):
        outcomes = await running.client.batch(texts)
        assert [o.text if isinstance(o, ServedResult) else o for o in outcomes] == texts
    assert len(running.runner.encoded) == 1 + 18


async def test_every_answer_is_at_the_place_of_its_text(start_server):
    """1,300 texts of unlike lengths, a quarter of them blank, in batches of up to 1,024: answer i is that to text i."""
    running = await start_server()
    rng = random.Random(2)
    texts = [
        "" if rng.random() < 0.24 else "".join(rng.choices(ascii_lowercase, k=rng.randint(1, 40))) for _ in range(1300)
    ]
    outcomes = [*await running.client.batch(texts[:1024]), *await running.client.batch(texts[1024:])]
    assert [o.text if isinstance(o, ServedResult) else o for o in outcomes] == texts


async def test_a_batch_larger_than_the_queue_is_answered_in_full(start_server):
    """A batch enters the engine through a window, so that its size alone never overloads the queue."""
    running = await start_server()
    words = [chr(97 + i % 26) * (1 + i % 5) for i in range(1000)]
    outcomes = await running.client.batch(words)
    assert [o.text if isinstance(o, ServedResult) else o for o in outcomes] == words


async def test_scores_come_when_they_are_asked_for(start_server):
    """One score a token and one for the end token, and their sum."""
    running = await start_server()
    with_scores = (await running.client.generate("ab", DecodingOptions(return_scores=True))).segments[0].hypotheses[0]
    assert with_scores.token_scores is not None and with_scores.score is not None
    assert len(with_scores.token_scores) == 3
    assert with_scores.score == pytest.approx(sum(with_scores.token_scores))
    without = (await running.client.generate("ab")).segments[0].hypotheses[0]
    assert without.score is None and without.token_scores is None


async def test_max_new_tokens_cuts_the_answer_and_says_so(start_server):
    """The limit is the request's own."""
    running = await start_server()
    result = await running.client.generate("abcdef", DecodingOptions(max_new_tokens=2))
    assert result.text == "ab"
    assert result.segments[0].hypotheses[0].finish_reason is FinishReason.LENGTH


async def test_the_model_describes_itself(start_server):
    """GetModel tells name, limits of model and server, tokenizers, and the policy for unknown characters."""
    running = await start_server(max_text_bytes=1000)
    info = await running.client.model_info()
    assert (info.model, info.version, info.precision, info.provider) == ("scripted", "1", "fp32", "cpu")
    assert (info.max_source_tokens, info.max_text_bytes, info.unknown_policy) == (64, 1000, "refuse")
    assert info.source_tokenizer == info.target_tokenizer == TokenizerInfo("plain", 30, "identity")
    assert len(info.checksum) == 64
    assert info.created.year == 2000


async def test_the_plain_client_does_what_the_async_one_does(start_server):
    """Each method of Client gives the same dataclasses and errors."""
    running = await start_server()

    def use() -> tuple[object, ...]:
        with Client(f"127.0.0.1:{running.server.port}") as client:
            with pytest.raises(InvalidRequestError, match="'1'"):
                client.generate("1")
            batch = client.batch(["ab", "2"])
            *updates, whole = client.stream("cd")
            assert isinstance(whole, ServedResult) and isinstance(batch[0], ServedResult)
            assert "".join(u.delta for u in updates if isinstance(u, TextUpdate)) == "cd"
            assert client.score("ab", "ab").token_scores == client.score("ab", "ab", priority=1).token_scores
            return client.generate("ab").text, batch[0].text, type(batch[1]), whole.text, client.model_info().model

    assert await asyncio.to_thread(use) == ("ab", "ab", InvalidRequestError, "cd", "scripted")


async def test_a_server_that_is_not_there_is_a_clear_error(start_server):
    """Not a raw gRPC exception."""
    running = await start_server()
    await running.server.close()
    with pytest.raises(DragomanError) as caught:
        await running.client.generate("abc", timeout=20)
    assert caught.value.code == "not_ready"


async def test_reflection_lists_the_services_and_their_messages(start_server):
    """Command-line tools need no .proto file."""
    from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

    running = await start_server()
    call = running.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ServerReflectionRequest.SerializeToString,
        ServerReflectionResponse.FromString,
    )
    requests = [
        ServerReflectionRequest(list_services=""),
        ServerReflectionRequest(file_containing_symbol="dragoman.v1.GenerationService"),
    ]
    replies = [reply async for reply in call(iter(requests))]
    assert [s.name for s in replies[0].list_services_response.service] == [
        "dragoman.v1.GenerationService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    ]
    assert replies[1].file_descriptor_response.file_descriptor_proto
