"""A finished answer aligned with its source, for those who ask, without anybody else noticing."""

import asyncio
import contextlib
import math
import threading
import time

import numpy as np
import pytest

from dragoman.alignment import Aligner, AlignmentPoint, points
from dragoman.answer import TextResult, TextUpdate
from dragoman.bundle import GoldenCase
from dragoman.config import EngineConfig
from dragoman.errors import (
    BundleError,
    DeadlineError,
    InvalidRequestError,
    ModelUnsupportedError,
    NotReadyError,
    OverloadedError,
)
from dragoman.served_model import check_alignment
from dragoman.testing import ScriptedRunner, scripted_model
from dragoman.types import DecodingOptions

ALIGNED = DecodingOptions(return_alignment=True)


def crossed(source, tokens):
    """Token t comes from the last source token but t; the end token gets more than any."""
    weights = np.zeros((len(tokens), len(source)), np.float32)
    weights[:, -1] = 0.75
    for target in range(len(tokens)):
        weights[target, len(source) - 2 - target] = 0.25
    return weights


class Gated:
    """A forced pass that stops until it is let go, and remembers whom it was for."""

    def __init__(self):
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.sources = []

    def __call__(self, source, tokens):
        self.sources.append(source)
        self.reached.set()
        assert self.opened.wait(60), "the test forgot to open the gate"
        return crossed(source, tokens)


@contextlib.asynccontextmanager
async def running(forced_pass=crossed, runner=None, config=None):
    model = scripted_model([runner or ScriptedRunner()], config, forced_pass=forced_pass)
    model.start()
    try:
        yield model
    finally:
        await model.close()


def test_a_target_token_gets_the_own_source_token_with_the_largest_weight():
    """Worked example: start and end token have no part in it, weights stay as they are, the first of equals wins."""
    weights = np.array([[0.5, 0.1, 0.2, 0.0, 0.2], [0.0, 0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.125, 0.5, 0.375]])
    assert points(weights, slice(1, 4), [(7, 8), (8, 9), (10, 12)]) == (
        AlignmentPoint(1, 0, 0.2, (8, 9)),
        AlignmentPoint(0, 1, 0.25, (7, 8)),
        AlignmentPoint(2, 2, 0.5, (10, 12)),
    )


async def test_each_token_of_an_answer_points_to_characters_of_the_text():
    """Spans count the whole text, whatever lies before a line; tokens count within their segment."""
    async with running() as model:
        result = await model.pipeline.generate("  abc\n\n de", ALIGNED)
    first, second = result.segments
    assert (first.source_tokens, second.source_tokens) == (("a", "b", "c"), ("d", "e"))
    assert first.hypotheses[0].alignment == (
        AlignmentPoint(2, 0, 0.25, (4, 5)),
        AlignmentPoint(1, 1, 0.25, (3, 4)),
        AlignmentPoint(0, 2, 0.25, (2, 3)),
    )
    assert [(p.source_token, p.source_span) for p in second.hypotheses[0].alignment] == [(1, (9, 10)), (0, (8, 9))]


async def test_the_answer_is_the_same_whether_or_not_one_asks():
    """Text, tokens and scores to the last bit; who does not ask gets no alignment and costs no forced pass."""
    asked = []

    def forced_pass(source, tokens):
        asked.append(source)
        return crossed(source, tokens)

    async with running(forced_pass) as model:
        plain = await model.pipeline.generate("abc\nde", DecodingOptions(return_scores=True))
        assert asked == []
        with_alignment = await model.pipeline.generate(
            "abc\nde", DecodingOptions(return_scores=True, return_alignment=True)
        )
    assert len(asked) == 2
    for one, other in zip(plain.segments, with_alignment.segments, strict=True):
        (a,), (b,) = one.hypotheses, other.hypotheses
        assert (a.text, a.tokens, a.finish_reason, a.token_scores) == (
            b.text,
            b.tokens,
            b.finish_reason,
            b.token_scores,
        )
        assert (a.alignment, one.source_tokens) == ((), ())


async def test_a_stream_has_the_alignment_with_the_end_of_a_hypothesis():
    """And again in the whole answer."""
    async with running() as model:
        *updates, result = [item async for item in model.pipeline.stream("abc", ALIGNED)]
    assert isinstance(result, TextResult)
    ends = [update.result for update in updates if isinstance(update, TextUpdate) and update.result is not None]
    assert ends == [result.segments[0].hypotheses[0]]
    assert len(ends[0].alignment) == 3


async def test_a_model_without_an_alignment_graph_refuses_with_the_remedy():
    """Even where there is nothing to align; the model is not asked."""
    runner = ScriptedRunner()
    async with running(None, runner) as model:
        for text in ("abc", ""):
            with pytest.raises(ModelUnsupportedError, match="dragoman export --alignment"):
                await model.pipeline.generate(text, ALIGNED)
    assert runner.encoded == []


async def test_an_empty_answer_has_an_empty_alignment():
    """Without a forced pass."""

    def forced_pass(source, tokens):
        raise AssertionError("there is nothing to align")

    async with running(forced_pass, ScriptedRunner(lambda source, fed: [0.0, 0.0, 1.0] + [0.0] * 27)) as model:
        (segment,) = (await model.pipeline.generate("abc", ALIGNED)).segments
    assert (segment.hypotheses[0].tokens, segment.hypotheses[0].alignment) == ((), ())


async def test_the_engine_goes_on_while_a_forced_pass_takes_its_time():
    """Others are answered before it ends."""
    gated = Gated()
    async with running(gated) as model:
        slow = asyncio.create_task(model.pipeline.generate("abc", ALIGNED))
        assert await asyncio.to_thread(gated.reached.wait, 60)
        assert (await model.pipeline.generate("xyz", DecodingOptions())).text == "xyz"
        assert not slow.done()
        gated.opened.set()
        assert len((await slow).segments[0].hypotheses[0].alignment) == 3


async def test_a_cancelled_request_is_not_aligned():
    """It waits behind another and goes away: its forced pass is never run, the next one's is."""
    gated = Gated()
    aligner = Aligner(gated, max_waiting=10)
    calls = [asyncio.create_task(aligner.weights((source, 2), (5,), None)) for source in (4, 5, 6)]
    assert await asyncio.to_thread(gated.reached.wait, 60)
    calls[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[1]
    gated.opened.set()
    await calls[2]
    assert gated.sources == [(4, 2), (6, 2)]
    aligner.close()


async def test_a_deadline_ends_the_wait_for_a_forced_pass():
    """One that has passed already, and one that passes in the queue: neither is run."""
    gated = Gated()
    aligner = Aligner(gated, max_waiting=10)
    first = asyncio.create_task(aligner.weights((4, 2), (5,), None))
    assert await asyncio.to_thread(gated.reached.wait, 60)
    for deadline in (time.monotonic() - 1, time.monotonic() + 0.01):
        with pytest.raises(DeadlineError, match="before the finished answer was aligned"):
            await aligner.weights((5, 2), (5,), deadline)
    gated.opened.set()
    await first
    assert gated.sources == [(4, 2)]
    aligner.close()


async def test_answers_that_wait_to_be_aligned_are_bounded():
    """A request more is refused as it comes, with the remedy; one that does not ask is served."""
    gated = Gated()
    async with running(gated, config=EngineConfig(max_waiting=2)) as model:
        texts = [asyncio.create_task(model.pipeline.generate(text, ALIGNED)) for text in ("a", "b")]
        assert await asyncio.to_thread(gated.reached.wait, 60)
        await model.engine.drained()
        with pytest.raises(OverloadedError, match="without return_alignment"):
            await model.pipeline.generate("c", ALIGNED)
        assert (await model.pipeline.generate("d", DecodingOptions())).text == "d"
        gated.opened.set()
        assert [(await text).text for text in texts] == ["a", "b"]
        assert (await model.pipeline.generate("c", ALIGNED)).text == "c"


async def test_room_is_taken_as_a_request_comes():
    """Of three at once the third finds none, though no answer is finished yet; a refused text keeps none."""
    async with running(config=EngineConfig(max_waiting=2)) as model:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="'1'"):
                await model.pipeline.generate("a\n1", ALIGNED)
        texts = [model.pipeline.generate(text, ALIGNED) for text in ("a", "b", "c")]
        first, second, third = await asyncio.gather(*texts, return_exceptions=True)
        assert (first.text, second.text) == ("a", "b")
        assert isinstance(third, OverloadedError)
        assert "2 answers are to be aligned already" in str(third)
        assert (await model.pipeline.generate("c", ALIGNED)).text == "c"


async def test_a_request_for_which_there_is_never_room_is_told_so():
    """Not to come again later; the model is not asked."""
    runner = ScriptedRunner()
    options = DecodingOptions(return_alignment=True, return_alternatives=True, num_hypotheses=3)
    async with running(runner=runner, config=EngineConfig(max_waiting=2)) as model:
        with pytest.raises(InvalidRequestError, match="for 3 answers; this server aligns 2 at a time: ask for fewer"):
            await model.pipeline.generate("abc", options)
    assert runner.encoded == []


async def test_a_forced_pass_that_fails_fails_its_request_alone():
    """The next one is served."""

    def forced_pass(source, tokens):
        if source[0] == 4:
            raise ValueError("broken")
        return crossed(source, tokens)

    async with running(forced_pass) as model:
        with pytest.raises(ValueError, match="broken"):
            await model.pipeline.generate("a", ALIGNED)
        assert (await model.pipeline.generate("b", ALIGNED)).text == "b"


async def test_what_still_waits_when_the_server_stops_is_told_so():
    """Waiting or new: NotReadyError."""
    gated = Gated()
    aligner = Aligner(gated, max_waiting=10)
    calls = [asyncio.create_task(aligner.weights((source, 2), (5,), None)) for source in (4, 5)]
    assert await asyncio.to_thread(gated.reached.wait, 60)
    aligner.close()
    with pytest.raises(NotReadyError):
        await calls[1]
    with pytest.raises(NotReadyError):
        await aligner.weights((6, 2), (5,), None)
    gated.opened.set()
    await calls[0]
    assert gated.sources == [(4, 2)]


@pytest.mark.parametrize("row", [[0.5, 0.25], [math.nan, 1.0], []])
def test_a_graph_whose_weights_are_no_shares_is_not_served(row):
    """Too little, not a number, or no row for the token: the file is named."""
    case = GoldenCase("a", (4, 2), (4,), 0.0, "a")
    with pytest.raises(BundleError, match=r"alignment\.onnx gives weights for 'a' that sum to"):
        check_alignment(lambda source, tokens: np.array([row] if row else np.zeros((0, 2))), case, "alignment.onnx")
    check_alignment(crossed, case, "alignment.onnx")
    with pytest.raises(BundleError, match=r"sum to \[1.0\], not to 1 for each step"):  # of coverage, a row is missing
        check_alignment(crossed, case, "alignment.onnx", num_more=1)
