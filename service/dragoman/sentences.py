"""Where the sentences of a line end, and where one that is too long for a model may be cut.

Sentences are found by the rules of sentencex (https://github.com/wikimedia/sentencex), which has some for about 300
languages and, where it is not sure, leaves sentences together.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

from dragoman.alignment import Span

_BLANK: Final = re.compile(r"\s")
_CUT: Final = re.compile(r"(?<=[,;:)\]–—،؛])\s+|(?<=[、，；：])\s*|\s+")
_CLAUSE_MARKS: Final = frozenset(",;:)]–—،؛、，；：")


class SentenceSplitter:
    """Splits lines of one language. Has no state of any line."""

    def __init__(self, language: str) -> None:
        """``language`` is a code of ISO 639, such as ``en``; one without rules of its own is split by English ones."""
        from sentencex import segment  # a line is rarely split where nothing is served

        self._language = language
        self._segment = segment

    def split(self, line: str, whole: Sequence[Span] = ()) -> list[Span]:
        """The sentences' characters, without the blanks between them, in order. Nothing in ``whole`` is split."""
        spans: list[Span] = []
        begin = position = 0
        for sentence in self._sentences(line):
            position += len(sentence)
            if position == len(line) or not _is_inside(position, whole):
                spans.append((begin, position))
                begin = position
        return [span for span in (stripped(line, span) for span in spans) if span[0] < span[1]]

    def _sentences(self, line: str) -> list[str]:
        # The library panics at the initial of a name with a blank beside it that takes several bytes in UTF-8.
        plain = _BLANK.sub(" ", line)
        try:
            sentences: list[str] = self._segment(self._language, plain)
        except BaseException as error:  # a panic is none of Exception's
            if type(error).__name__ != "PanicException":
                raise
            return [line]
        return sentences if "".join(sentences) == plain else [line]


def _is_inside(position: int, spans: Sequence[Span]) -> bool:
    """Whether one of the spans, which are in order and apart, goes on both before and behind the position."""
    index = bisect_left(spans, position, key=lambda span: span[0]) - 1
    return index >= 0 and position < spans[index][1]


def stripped(text: str, span: Span) -> Span:
    """The span without the blanks at its ends."""
    start, end = span
    content = text[start:end]
    return start + len(content) - len(content.lstrip()), end - len(content) + len(content.rstrip())


def pieces(text: str, tokens: Sequence[Span], most: int, whole: Sequence[Span] = ()) -> list[Span]:
    """A sentence in pieces of at most ``most`` tokens, cut at blanks and behind the marks that end clauses.

    ``tokens`` are the characters that each token of the text stands for. A piece ends behind the last clause mark in
    the second half of what fits, else at the last blank. Nothing in ``whole`` is cut. Returns a single piece, which is
    the text, where there is no place to cut it; others may have more than ``most`` tokens, too.
    """
    token_ends = [end for _, end in tokens]
    cuts = [
        (match.start(), match.end(), text[match.start() - 1] in _CLAUSE_MARKS)
        for match in _CUT.finditer(text)
        if match.start() > 0 and match.end() < len(text) and not _is_inside(match.start(), whole)
    ]
    before = [bisect_right(token_ends, start) for start, _, _ in cuts]  # tokens before each cut
    found: list[Span] = []
    start = first = 0
    while len(token_ends) - (taken := bisect_right(token_ends, start)) > most and first < len(cuts):
        last = max(bisect_right(before, taken + most), first + 1)
        clauses = [i for i in range(first, last) if cuts[i][2] and before[i] > taken + most / 2]
        first = clauses[-1] if clauses else last - 1
        end, next_start, _ = cuts[first]
        found.append((start, end))
        start, first = next_start, first + 1
    return [*found, (start, len(text))]
