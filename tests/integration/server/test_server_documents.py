"""Documents over the wire: what was lost, where segments stand, and what a model cannot do."""

import pytest

from dragoman.answer import TextUpdate
from dragoman.errors import InvalidRequestError, ModelUnsupportedError
from dragoman.types import DecodingOptions


async def test_what_is_not_protected_is_told_with_the_answer_and_with_the_end_of_a_stream(start_server):
    """In characters of the request's text, as the places of its segments are."""
    running = await start_server()
    options = DecodingOptions(protect=("b",))
    unary = await running.client.generate("a\r abc", options)
    assert unary.text == "a\r abc"
    assert [segment.hypotheses[0].unprotected for segment in unary.segments] == [(), ((4, 5),)]
    *updates, streamed = [item async for item in running.client.stream("a\r abc", options)]
    assert streamed.segments == unary.segments
    assert all(isinstance(update, TextUpdate) for update in updates)
    assert {(update.segment, update.source) for update in updates} == {(0, (0, 1)), (1, (3, 6))}
    assert [update.result.unprotected for update in updates if update.segment == 1 and update.result] == [((4, 5),)]


async def test_what_cannot_be_done_is_refused_by_name(start_server):
    """A pattern that is none, by any server; sentences, by a model without a language, as its description says."""
    running = await start_server()
    with pytest.raises(InvalidRequestError, match=r"protect\[0\] is '\('"):
        await running.client.generate("abc", DecodingOptions(protect=("(",)))
    with pytest.raises(ModelUnsupportedError, match="split_sentences is set"):
        await running.client.generate("abc", DecodingOptions(split_sentences=True))
    info = await running.client.model_info()
    assert (info.source_language, info.target_language, info.splits_sentences) == ("", "", False)
