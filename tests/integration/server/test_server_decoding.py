"""Decoding options, scores, priorities and callers over the wire."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from dragoman.answer import TextUpdate
from dragoman.client import ServedResult
from dragoman.errors import InvalidRequestError
from dragoman.testing import ScriptedRunner
from dragoman.types import DecodingOptions, FinishReason, GenerationRequest

ALL = DecodingOptions(beam_size=3, num_hypotheses=3, return_scores=True, num_top_tokens=2, target_prefix="xy")


async def test_all_answers_with_all_their_numbers_come_back(start_server):
    """Several hypotheses with both scores, and the most probable tokens of each position; unary as streamed."""
    running = await start_server()
    result = await running.client.generate("abcdef", ALL)
    found = result.segments[0].hypotheses
    assert len(found) == 3 and result.seed is None
    for one in found:
        assert one.tokens[:2] == ("x", "y")
        assert one.log_probability == pytest.approx(math.fsum(one.token_scores))
        assert one.score == pytest.approx(one.log_probability / len(one.token_scores))
        assert len(one.top_tokens) == len(one.token_scores)
        assert all(len(place) == 2 for place in one.top_tokens)
    *updates, whole = [item async for item in running.client.stream("abcdef", ALL)]
    assert isinstance(whole, ServedResult) and whole.segments == result.segments
    for number, one in enumerate(found):
        own = [update for update in updates if isinstance(update, TextUpdate) and update.hypothesis == number]
        assert "".join(update.delta for update in own) == one.text
        assert own[-1].result == one


async def test_what_was_drawn_comes_with_its_seed(start_server):
    """The largest one, too; a seed that the server chose draws the same again."""
    running = await start_server()
    large = await running.client.generate("abc", DecodingOptions(temperature=2.0, seed=2**64 - 1))
    assert large.seed == 2**64 - 1
    drawn = await running.client.generate("abc", DecodingOptions(temperature=2.0))
    again = await running.client.generate("abc", DecodingOptions(temperature=2.0, seed=drawn.seed))
    assert (again.text, again.seed) == (drawn.text, drawn.seed)


async def test_a_stream_ends_before_a_stop_string(start_server):
    """Nothing of it is on the wire."""
    running = await start_server()
    *updates, whole = [item async for item in running.client.stream("abcdef", DecodingOptions(stop=("de",)))]
    assert whole.text == "abc"
    assert whole.segments[0].hypotheses[0].finish_reason is FinishReason.STOP_SEQUENCE
    assert "".join(update.delta for update in updates) == "abc"


async def test_a_given_answer_is_scored(start_server):
    """The same numbers as a search that wrote it; counted as a request of its own method."""
    running = await start_server()
    answer = (await running.client.generate("abc", DecodingOptions(return_scores=True))).segments[0].hypotheses[0]
    score = await running.client.score("abc", answer.text, request_id="mine")
    assert (score.tokens, score.token_scores) == (answer.tokens, answer.token_scores)
    assert score.log_probability == answer.log_probability
    assert (score.model, score.version, score.request_id, score.num_source_tokens) == ("scripted", "1", "mine", 4)
    worse = await running.client.score("abc", "xyz")
    assert worse.log_probability < score.log_probability
    with pytest.raises(InvalidRequestError, match="target holds 'X'"):
        await running.client.score("abc", "X")
    name = "dragoman_requests_total"
    assert await running.value(name, model="scripted", method="Score", code="ok") == 2
    assert await running.value(name, model="scripted", method="Score", code="invalid_request") == 1


async def test_priority_and_caller_reach_the_engine(start_server, monkeypatch):
    """Of answers, streams, batches and scores; the caller is the peer's address without its port."""
    running = await start_server()
    seen: list[GenerationRequest] = []
    submit = running.model.engine.submit

    def spy(request: GenerationRequest) -> Any:
        seen.append(request)
        return submit(request)

    monkeypatch.setattr(running.model.engine, "submit", spy)
    client = running.client
    await client.generate("a", priority=-10)
    [item async for item in client.stream("a", priority=10)]
    await client.batch(["a"], priority=3)
    await client.score("a", "a", priority=4)
    assert [request.priority for request in seen] == [-10, 10, 3, 4]
    assert {request.caller for request in seen} == {"ipv4:127.0.0.1"}
    with pytest.raises(InvalidRequestError, match="priority is 11"):
        await client.generate("a", priority=11)
    with pytest.raises(InvalidRequestError, match="priority is 1099511627776; it must be an integer from -10 to 10"):
        await client.generate("a", priority=2**40)


async def test_bad_options_of_one_caller_harm_no_other(start_server):
    """Refused while others are being decoded: these are answered."""
    running = await start_server(ScriptedRunner(num_slots=4))
    good = [asyncio.create_task(running.client.generate("abcdefgh")) for _ in range(20)]
    bad = [
        running.refusal("/dragoman.v1.GenerationService/Generate", data)
        for data in (b"\x1a\x01a\x2a\x09\x29\x00\x00\x00\x00\x00\x00\xf8\x7f", b"\x1a\x01a\x2a\x02\x10\x00") * 5
    ]  # a temperature of NaN, and a beam_size of 0
    for error in await asyncio.gather(*bad):
        assert error.details().startswith(("temperature is nan", "beam_size is 0"))
    assert [(await call).text for call in good] == ["abcdefgh"] * 20
