"""Messages to dataclasses and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import DragomanError, InvalidRequestError, UnsupportedError
from dragoman.pipeline import TextHypothesis, TextResult, TextSegment, TextUpdate
from dragoman.servicers import wire
from dragoman.types import DecodingOptions, FinishReason, Timing
from dragoman.v1 import generation_pb2 as pb

texts = st.text(max_size=8)
hypotheses = st.builds(
    lambda text, tokens, reason, scores: TextHypothesis(
        text, tuple(tokens), reason, None if scores is None else sum(scores), None if scores is None else tuple(scores)
    ),
    texts,
    st.lists(texts, max_size=3),
    st.sampled_from(FinishReason),
    st.none() | st.lists(st.floats(-100, 0), max_size=3),
)
counts = st.integers(0, 2**32 - 1)
results = st.builds(
    TextResult,
    texts,
    st.lists(st.builds(TextSegment, counts, counts, st.tuples(hypotheses)), max_size=2).map(tuple),
    counts,
    counts,
    st.builds(Timing, *[st.integers(0, 10**12).map(lambda n: n / 1e9)] * 4),
)


@given(results)
def test_a_result_comes_back_as_it_was_sent(result):
    """Up to the nanosecond of a duration."""
    message = wire.result_to_wire(result, model="m", version="1", request_id="r")
    back = wire.result_from_wire(pb.GenerateResponse.FromString(message.SerializeToString()))
    assert back.timing.total_seconds == pytest.approx(result.timing.total_seconds, abs=2e-9)
    assert (back.text, back.segments) == (result.text, result.segments)
    assert (back.num_source_tokens, back.num_generated_tokens) == (
        result.num_source_tokens,
        result.num_generated_tokens,
    )


@given(st.builds(TextUpdate, counts, counts, texts, st.none() | hypotheses))
def test_an_update_comes_back_as_it_was_sent(update):
    """With and without the finished hypothesis."""
    assert wire.update_from_wire(wire.update_to_wire(update)) == update


@given(st.builds(DecodingOptions, st.none() | st.integers(1, 1_000_000), return_scores=st.booleans()))
def test_options_come_back_as_they_were_sent(options):
    """What is unset stays the default."""
    assert wire.options_from_wire(wire.options_to_wire(options)) == options


def test_the_message_and_the_dataclass_have_the_same_options():
    """An option that one of them lacks would be ignored in silence."""
    assert set(DecodingOptions.__dataclass_fields__) == {f.name for f in pb.DecodingOptions.DESCRIPTOR.fields}


def test_the_message_knows_every_finish_reason():
    """And no other, but for the unspecified one."""
    assert {f"FINISH_REASON_{reason.name}" for reason in FinishReason} | {"FINISH_REASON_UNSPECIFIED"} == set(
        pb.FinishReason.keys()
    )


def test_an_explicit_default_is_as_good_as_none():
    """beam_size 1 is greedy search, whether it was said or not."""
    assert wire.options_from_wire(pb.DecodingOptions(beam_size=1, temperature=0.0)) == DecodingOptions()
    with pytest.raises(UnsupportedError):
        wire.options_from_wire(pb.DecodingOptions(beam_size=2))


@pytest.mark.parametrize(
    ("kind", "data", "place"),
    [
        (pb.BatchGenerateRequest, b"\x98\x06\x01", "BatchGenerateRequest has a field 99"),
        (pb.GenerateRequest, b"\x98\x06\x01", "GenerateRequest has a field 99"),
        (pb.GenerateRequest, b"\x2a\x03\x98\x06\x01", "GenerateRequest.options has a field 99"),
    ],
)
def test_an_unknown_field_is_named_at_any_depth(kind, data, place):
    """A caller who asks for something gets it or is told."""
    with pytest.raises(InvalidRequestError) as caught:
        wire.parse(kind, data)
    assert str(caught.value).startswith(place)


def test_an_unknown_field_of_an_item_is_left_to_the_item():
    """A batch is parsed whatever its items hold; each is checked by itself, so that a bad one fails alone."""
    batch = wire.parse(pb.BatchGenerateRequest, b"\x0a\x00\x0a\x05\x2a\x03\x98\x06\x01")
    wire.check_known(batch.requests[0], "requests[0]")
    with pytest.raises(InvalidRequestError, match=r"requests\[1\]\.options has a field 99"):
        wire.check_known(batch.requests[1], "requests[1]")


@given(st.binary(max_size=40))
def test_bytes_are_a_message_or_an_invalid_request(data):
    """Nothing else comes out of the parser, whatever goes in."""
    try:
        message = wire.parse(pb.GenerateRequest, data)
    except InvalidRequestError:
        return
    assert isinstance(message, pb.GenerateRequest)


def test_a_finish_reason_from_the_future_is_not_taken_for_another():
    """The client says that it is too old."""
    with pytest.raises(DragomanError, match="upgrade"):
        wire.update_from_wire(pb.StreamGenerateResponse.FromString(b"\x20\x01\x2a\x02\x20\x63"))  # reason 99
