"""Messages to dataclasses and back."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.alignment import AlignmentPoint
from dragoman.answer import TextHypothesis, TextResult, TextScore, TextSegment, TextUpdate, TopToken
from dragoman.errors import DragomanError, InvalidRequestError
from dragoman.servicers import wire
from dragoman.types import DecodingOptions, FinishReason, Timing, UnknownWords
from dragoman.v1 import generation_pb2 as pb

texts = st.text(max_size=8)
counts = st.integers(0, 2**32 - 1)
numbers = st.floats(-100, 0)
hypotheses = st.builds(
    lambda text, tokens, reason, scores, alignment, top, unprotected: TextHypothesis(
        text,
        tuple(tokens),
        reason,
        score=None if scores is None else sum(scores) / 2,
        token_scores=None if scores is None else tuple(scores),
        log_probability=None if scores is None else sum(scores, 0.0),
        alignment=tuple(alignment),
        top_tokens=tuple(tuple(place) for place in top),
        unprotected=tuple(unprotected),
    ),
    texts,
    st.lists(texts, max_size=3),
    st.sampled_from(FinishReason),
    st.none() | st.lists(numbers, max_size=3),
    st.lists(
        st.builds(AlignmentPoint, counts, counts, st.floats(0, 1, width=32), st.tuples(counts, counts)), max_size=3
    ),
    st.lists(st.lists(st.builds(TopToken, texts, numbers), max_size=2), max_size=2),
    st.lists(st.tuples(counts, counts), max_size=2),
)
times = st.builds(Timing, *[st.integers(0, 10**12).map(lambda n: n / 1e9)] * 4)
results = st.builds(
    TextResult,
    texts,
    st.lists(
        st.builds(
            TextSegment,
            counts,
            counts,
            st.lists(hypotheses, min_size=1, max_size=2).map(tuple),
            st.lists(texts, max_size=3).map(tuple),
            st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
    counts,
    counts,
    times,
    st.none() | st.integers(0, 2**64 - 1),
)
scores = st.builds(
    TextScore, st.lists(texts, max_size=3).map(tuple), st.lists(numbers).map(tuple), numbers, counts, times
)


@given(results)
def test_a_result_comes_back_as_it_was_sent(result):
    """Up to the nanosecond of a duration."""
    message = wire.result_to_wire(result, model="m", version="1", request_id="r")
    back = wire.result_from_wire(pb.GenerateResponse.FromString(message.SerializeToString()))
    assert back.timing.total_seconds == pytest.approx(result.timing.total_seconds, abs=2e-9)
    assert (back.text, back.segments, back.seed) == (result.text, result.segments, result.seed)
    assert (back.num_source_tokens, back.num_generated_tokens) == (
        result.num_source_tokens,
        result.num_generated_tokens,
    )


@given(st.builds(TextUpdate, counts, counts, texts, st.none() | hypotheses, st.tuples(counts, counts)))
def test_an_update_comes_back_as_it_was_sent(update):
    """With and without the finished hypothesis."""
    assert wire.update_from_wire(wire.update_to_wire(update)) == update


@given(scores)
def test_a_score_comes_back_as_it_was_sent(score):
    """Up to the nanosecond of a duration."""
    message = wire.score_to_wire(score, model="m", version="1", request_id="r")
    back = wire.score_from_wire(pb.ScoreResponse.FromString(message.SerializeToString()))
    assert back.timing.total_seconds == pytest.approx(score.timing.total_seconds, abs=2e-9)
    assert dataclasses.replace(back, timing=score.timing) == score


names = st.lists(texts, max_size=2).map(tuple)
steering = {
    "max_new_tokens": st.none() | st.integers(100, 1_000_000),
    "min_new_tokens": st.integers(0, 100),
    "max_length_ratio": st.none() | st.floats(0.1, 1000),
    "repetition_penalty": st.floats(0.1, 100),
    "no_repeat_ngram_size": st.integers(0, 100),
    "target_prefix": texts,
    "suppress_tokens": names,
    "suppress_sequences": st.lists(st.lists(texts, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple),
    "stop": st.lists(st.text(min_size=1, max_size=8), max_size=2).map(tuple),
    "detect_repetition": st.booleans(),
    "return_scores": st.booleans(),
    "num_top_tokens": st.integers(0, 32),
    "return_alignment": st.booleans(),
    "unknown_words": st.none() | st.sampled_from(UnknownWords),
    "split_sentences": st.none() | st.booleans(),
}
some_options = (
    st.builds(
        DecodingOptions,
        beam_size=st.integers(5, 1024),
        patience=st.floats(1, 100),
        num_hypotheses=st.integers(1, 5),
        length_penalty=st.floats(-10, 10).filter(bool),  # with 0 there is no patience
        coverage_penalty=st.floats(-10, 10),
        **steering,
    )
    | st.builds(
        DecodingOptions,
        temperature=st.floats(0.001, 100),
        num_hypotheses=st.integers(1, 1024),
        top_k=st.integers(0, 1_000_000),
        top_p=st.floats(0.01, 1),
        min_p=st.floats(0, 1),
        seed=st.none() | st.integers(0, 2**64 - 1),
        **steering,
    )
    | st.builds(
        DecodingOptions, num_hypotheses=st.integers(1, 1024), return_alternatives=st.just(value=True), **steering
    )
    | st.builds(DecodingOptions, protect=st.lists(st.text(min_size=1, max_size=8), max_size=16).map(tuple))
)


@given(some_options)
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


def test_the_message_knows_every_policy_for_unknown_words():
    """And no other, but for the unspecified one, which is none; a policy from the future is refused."""
    names = {f"UNKNOWN_WORDS_{policy.name}" for policy in UnknownWords}
    assert names | {"UNKNOWN_WORDS_UNSPECIFIED"} == set(pb.UnknownWords.keys())
    assert wire.options_from_wire(pb.DecodingOptions(unknown_words="UNKNOWN_WORDS_UNSPECIFIED")) == DecodingOptions()
    future = pb.DecodingOptions.FromString(b"\xc8\x01\x63")  # field 25 holds 99
    with pytest.raises(InvalidRequestError, match="unknown_words is 99; it must be one of UNKNOWN_WORDS_UNSPECIFIED"):
        wire.options_from_wire(future)


def test_no_hypothesis_is_smaller_than_it_is_said_to_be():
    """Each part of it counts; of one with many scores and top tokens, most of it is counted."""
    top = (tuple(TopToken("", -1.0) for _ in range(5)),) * 7
    bare = TextHypothesis("é" * 10, ("", "b"), FinishReason.STOP)
    full = dataclasses.replace(bare, token_scores=(-1.0,) * 7, log_probability=-7.0, score=-1.0, top_tokens=top)
    for hypothesis in (bare, full):
        size = wire.update_to_wire(TextUpdate(0, 0, "", hypothesis)).result.ByteSize()
        assert 0 < wire.least_bytes(hypothesis) <= size
    assert wire.least_bytes(full) > 0.6 * size


@given(hypotheses)
def test_the_least_size_of_any_hypothesis_holds(hypothesis):
    """Whatever it is made of."""
    size = wire.update_to_wire(TextUpdate(0, 0, "", hypothesis)).result.ByteSize()
    assert wire.least_bytes(hypothesis) <= size


def test_an_explicit_default_is_as_good_as_none():
    """beam_size 1 is greedy search, whether it was said or not."""
    assert wire.options_from_wire(pb.DecodingOptions(beam_size=1, temperature=0.0, top_p=1.0)) == DecodingOptions()


def test_an_unknown_field_of_a_suppressed_sequence_is_named():
    """Repeated messages are looked into where they are read."""
    options = pb.DecodingOptions.FromString(b"\x9a\x01\x03\x98\x06\x01")  # field 19 holds a message with a field 99
    with pytest.raises(InvalidRequestError, match=r"suppress_sequences\[0\] has a field 99"):
        wire.options_from_wire(options)


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
