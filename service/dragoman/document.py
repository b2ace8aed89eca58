"""Text to segments and back: one segment a line, or a sentence, everything else as it was.

A line ends where Unicode has a mandatory break (UAX 14): at LF, CR, CRLF, VT, FF, NEL, U+2028 and U+2029. Line ends,
blank lines, and blanks around a line or between sentences never reach a model. Joining the answers puts them where the
segments were, so that layout survives byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_LINE: Final = re.compile("[^\n\v\f\r\x85\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the text for the model: characters ``start`` to ``end`` of the whole.

    ``continues``: the sentence goes on in the next segment, as it was too long for the model.
    """

    start: int
    end: int
    text: str
    continues: bool = False


def split(text: str, max_segments: int | None = None) -> list[Segment]:
    """The non-blank lines, without the blanks around them. A text of blanks has none.

    It stops at the first one over ``max_segments``: more than that many tell the caller that there are too many.
    """
    segments: list[Segment] = []
    for line in _LINE.finditer(text):
        content = line.group().strip()
        if content:
            start = line.start() + len(line.group()) - len(line.group().lstrip())
            segments.append(Segment(start, start + len(content), content))
            if max_segments is not None and len(segments) > max_segments:
                break
    return segments


def join(text: str, segments: Sequence[Segment], answers: Sequence[str]) -> str:
    """The text with each segment replaced by its answer."""
    parts = []
    position = 0
    for segment, answer in zip(segments, answers, strict=True):
        parts += [text[position : segment.start], answer]
        position = segment.end
    return "".join([*parts, text[position:]])
