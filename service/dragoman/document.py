"""Text to segments and back: one segment a line, everything else as it was.

Only LF and CRLF end a line; other separators are characters like any. Blank lines, and blanks around a line, never
reach a model. Joining the answers puts them where the segments were, so that layout survives byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the text for the model: characters ``start`` to ``end`` of the whole."""

    start: int
    end: int
    text: str


def split(text: str, max_segments: int | None = None) -> list[Segment]:
    """The non-blank lines, without the blanks around them. A text of blanks has none.

    It stops at the first one over ``max_segments``: more than that many tell the caller that there are too many.
    """
    segments: list[Segment] = []
    position = 0
    for line in text.split("\n"):
        content = line.strip()
        if content:
            start = position + len(line) - len(line.lstrip())
            segments.append(Segment(start, start + len(content), content))
            if max_segments is not None and len(segments) > max_segments:
                break
        position += len(line) + 1
    return segments


def join(text: str, segments: Sequence[Segment], answers: Sequence[str]) -> str:
    """The text with each segment replaced by its answer."""
    parts = []
    position = 0
    for segment, answer in zip(segments, answers, strict=True):
        parts += [text[position : segment.start], answer]
        position = segment.end
    return "".join([*parts, text[position:]])
