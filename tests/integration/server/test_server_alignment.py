"""Alignment over the wire."""

import math

import grpc
import numpy as np
import pytest

from dragoman.alignment import AlignmentPoint
from dragoman.answer import TextUpdate
from dragoman.errors import ModelUnsupportedError
from dragoman.types import DecodingOptions
from dragoman.v1 import generation_pb2 as pb

GENERATE = "/dragoman.v1.GenerationService/Generate"
ALIGNED = DecodingOptions(return_alignment=True)


def diagonal(source, tokens):
    return np.eye(len(tokens), len(source), dtype=np.float32)


async def test_an_alignment_comes_with_the_answer_and_with_the_end_of_a_stream(start_server):
    """Of all segments, with the characters of the request's text."""
    running = await start_server(forced_pass=diagonal)
    expected = (AlignmentPoint(0, 0, 1.0, (3, 4)), AlignmentPoint(1, 1, 1.0, (4, 5)))
    unary = await running.client.generate("a\n bc", ALIGNED)
    assert unary.segments[1].hypotheses[0].alignment == expected
    assert [segment.source_tokens for segment in unary.segments] == [("a",), ("b", "c")]
    *updates, streamed = [item async for item in running.client.stream("a\n bc", ALIGNED)]
    assert streamed.segments == unary.segments
    ends = [u.result for u in updates if isinstance(u, TextUpdate) and u.result is not None and u.segment == 1]
    assert [end.alignment for end in ends] == [expected]
    assert (await running.client.generate("bc")).segments[0].hypotheses[0].alignment == ()


async def test_a_coverage_penalty_is_in_the_score_that_ranks(start_server):
    """Of answers and streams alike: half of each step's attention is lost, and the rest is on the first token."""

    def coverage(source, tokens):
        weights = np.zeros((len(tokens) + 1, len(source)), np.float32)
        weights[:, 0] = 0.5 / (len(tokens) + 1)
        return weights

    running = await start_server(forced_pass=diagonal, coverage=coverage)
    options = DecodingOptions(beam_size=2, coverage_penalty=0.25, return_scores=True)
    unary = await running.client.generate("abc", options)
    *_, streamed = [item async for item in running.client.stream("abc", options)]
    assert streamed.segments == unary.segments
    (best,) = unary.segments[0].hypotheses
    plain = best.log_probability / len(best.token_scores)
    assert best.score == pytest.approx(plain + 0.25 * math.log(0.5))


async def test_a_model_that_cannot_align_says_so(start_server):
    """FAILED_PRECONDITION with the remedy; in the description, too; of a batch, each such item alone; and counted."""
    running = await start_server()
    request = pb.GenerateRequest(text="abc", options=pb.DecodingOptions(return_alignment=True))
    error = await running.refusal(GENERATE, request.SerializeToString())
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "dragoman export --alignment" in error.details()
    with pytest.raises(ModelUnsupportedError):
        await running.client.generate("abc", ALIGNED)
    with pytest.raises(ModelUnsupportedError, match="coverage_penalty is 1"):
        await running.client.generate("abc", DecodingOptions(beam_size=2, coverage_penalty=1.0))
    (item,) = await running.client.batch(["abc"], ALIGNED)
    assert isinstance(item, ModelUnsupportedError)
    assert not (await running.client.model_info()).alignment
    labels = {"model": "scripted", "reason": "model_unsupported"}
    assert await running.value("dragoman_requests_rejected_total", **labels) == 4
