"""Layout survives: what is not a segment comes back as it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.document import join, split


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("", []),
        ("  \n\t\r\n\u00a0", []),
        ("one", ["one"]),
        ("Menu\n\nSoup\t4.50\r\n  Bread\n", ["Menu", "Soup\t4.50", "Bread"]),
        ("a\u2028b\x85c\rd\ve\u2029\ff", ["a", "b", "c", "d", "e", "f"]),
        ("a\x1cb\u00a0c\u200bd", ["a\x1cb\u00a0c\u200bd"]),
    ],
)
def test_lines_end_at_unicode_s_mandatory_breaks(text, segments):
    """Worked examples: nothing else ends one; blanks around a line are not in a segment."""
    assert [segment.text for segment in split(text)] == segments


def test_splitting_stops_once_there_are_too_many():
    """Of a text of a million lines, one more than the limit is enough to know."""
    assert len(split("a\n" * 1_000_000, max_segments=5)) == 6
    assert len(split("a\n" * 5, max_segments=5)) == 5


@given(st.text(st.sampled_from("ab \n\r\t\v\f\u00a0\x85\u2028\u2029")))
def test_splitting_and_joining_gives_the_text_back(text):
    """Answers equal to the segments give the text, byte for byte; spans cut exactly the segments."""
    segments = split(text)
    assert join(text, segments, [s.text for s in segments]) == text
    assert [text[s.start : s.end] for s in segments] == [s.text for s in segments]


def test_answers_take_the_place_of_their_segments():
    """Worked example with indentation, a blank line and both line ends."""
    text = "  a\r\n\n b \n"
    assert join(text, split(text), ["X", "YY"]) == "  X\r\n\n YY \n"
