"""Answers put together from segments that grow interleaved."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.answer import TextHypothesis, TextResult, TextUpdate
from dragoman.servicers.growing import GrowingText
from dragoman.types import FinishReason, Timing


@settings(derandomize=True, max_examples=100)
@given(st.data())
def test_what_is_given_away_adds_up_to_the_answer(data):
    """Whatever the order of the segments' pieces: no character too early, none taken back, none lost at the end."""
    gaps = data.draw(st.lists(st.sampled_from(["", " ", "\n\n  "]), min_size=1, max_size=5))
    answers = [data.draw(st.lists(st.text("xyz", max_size=2), min_size=1, max_size=4)) for _ in gaps[1:]]
    text, spans = gaps[0], []
    for gap in gaps[1:]:
        spans.append((len(text), len(text) + 3))
        text += "abc" + gap
    expected = gaps[0] + "".join("".join(pieces) + gap for pieces, gap in zip(answers, gaps[1:], strict=True))
    order = data.draw(st.permutations([s for s, pieces in enumerate(answers) for _ in pieces]))
    growing, given_away, taken = GrowingText(text), "", [0] * len(answers)
    for segment in order:
        pieces = answers[segment]
        delta = pieces[taken[segment]]
        taken[segment] += 1
        ended = taken[segment] == len(pieces)
        hypothesis = TextHypothesis("".join(pieces), (), FinishReason.STOP) if ended else None
        given_away += growing.push(TextUpdate(segment, 0, delta, hypothesis, source=spans[segment]))
        given_away += growing.push(TextUpdate(segment, 1, "another answer", hypothesis, source=spans[segment]))
        assert expected.startswith(given_away)
    rest = growing.close(TextResult(expected, (), 0, 0, Timing()))
    assert given_away + rest == expected
    assert rest == (gaps[-1] if answers else expected)


def test_the_first_segment_grows_at_once():
    """With what stands before it; the second one waits for its end."""
    growing = GrowingText("  ab\ncd")
    whole = TextHypothesis("X", (), FinishReason.STOP)
    assert growing.push(TextUpdate(1, 0, "Y", source=(5, 7))) == ""
    assert growing.push(TextUpdate(0, 0, "X", source=(2, 4))) == "  X"
    assert growing.push(TextUpdate(0, 0, "", whole, source=(2, 4))) == "\nY"
    assert growing.push(TextUpdate(1, 0, "Z", source=(5, 7))) == "Z"
