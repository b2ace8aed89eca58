"""Spans of a text that must arrive as they are: found by patterns, hidden from the model, put back into its answer.

A model reads a substitute in the place of each span: a made-up word of a shape that models learn to copy. Of an answer
that has each substitute once, the spans are put back. One that has not may be asked for again, with other substitutes
or with the spans themselves; what does not arrive either way is told, and never made up.

Patterns are regular expressions of RE2 (https://github.com/google/re2/wiki/Syntax), whose time grows with the length of
a line alone: a pattern of a stranger cannot make a server hang, as one of Python's own engine could.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dragoman.alignment import Span
from dragoman.errors import InvalidRequestError
from dragoman.sentences import stripped

CLASSES: Final = {
    "urls": r"(?:https?|ftp)://[^\s<>\"]*[^\s<>\".,;:!?)\]}]|\bwww\.[^\s<>\"]*[^\s<>\".,;:!?)\]}]",
    "emails": r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",
    "numbers": r"[$€£¥]?\b\d+(?:[.,:/-]\d+)*\b%?",
    "codes": r"\b(?:[A-Za-z]+[._-]?\d|\d+[._-]?[A-Z])[A-Za-z0-9]*(?:[._/-][A-Za-z0-9]+)*\b",
    "placeholders": r"\{\{[^{}\s]+\}\}|\$?\{[^{}\s]*\}|%(?:\(\w+\)|\d+\$)?[-+0#]*\d*(?:\.\d+)?[sdifxXu@]\b|%@|%\w+%",
    "tags": r"</?[A-Za-z][^<>]*>|&(?:[A-Za-z]+|#\d+);",
}
"""Patterns that have a name."""

MAX_SPANS: Final = 64  # of a segment: there are as many codes, and more for those that its text has
_MAX_MATCHES: Final = 4096  # of a text
_MAX_PROGRAM_BYTES: Final = 1 << 18
_MAX_STEPS: Final = 100_000_000  # instructions x characters: seconds at worst, of a thread's time


class Protector:
    """Finds the spans of one text. Its work is bounded over all the lines that it is given."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Names of ``CLASSES``, or expressions. Raises InvalidRequestError for what is none."""
        self._patterns: list[tuple[Any, int]] = []  # with the steps that a character may take; none to count for ours
        for index, pattern in enumerate(patterns):
            if pattern in CLASSES:
                self._patterns.append((_compiled(CLASSES[pattern]), 0))
            else:
                given = _checked(pattern, index)
                self._patterns.append((given, given.programsize))
        self._steps_left = _MAX_STEPS
        self._matches_left = _MAX_MATCHES

    def find(self, line: str) -> list[Span]:
        """The spans to protect in a line, in order; of matches that overlap or touch, one span. Blanks alone are none.

        Raises InvalidRequestError where it would be too much work.
        """
        matches: list[Span] = []
        for pattern, weight in self._patterns:
            self._count(weight * len(line), 0)
            for match in pattern.finditer(line):
                self._count(weight * (len(line) - match.end()), 1)
                if (span := stripped(line, match.span()))[0] < span[1]:
                    matches.append(span)
        spans: list[Span] = []
        for start, end in sorted(matches):
            if spans and start <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(end, spans[-1][1])
            else:
                spans.append((start, end))
        return spans

    def _count(self, num_steps: int, num_matches: int) -> None:
        self._steps_left -= num_steps
        self._matches_left -= num_matches
        if self._steps_left < 0 or self._matches_left < 0:
            raise InvalidRequestError(
                "protect takes too much work: its patterns match too often, or look too far in lines that are too "
                f"long (at most {_MAX_MATCHES} matches of a text): give fewer and simpler patterns, or less text"
            )


def _checked(pattern: str, index: int) -> Any:
    import re2

    try:
        return _compiled(pattern)
    except re2.error as error:
        why = error.args[0].decode("utf-8", "replace") if error.args and isinstance(error.args[0], bytes) else error
        raise InvalidRequestError(
            f"protect[{index}] is {pattern[:100]!r}, which is neither one of {', '.join(CLASSES)} nor a regular "
            f"expression of RE2 that this server accepts: {why}"
        ) from error


def _compiled(pattern: str) -> Any:
    import re2  # rarely used, and not quick to import

    options = re2.Options()
    options.max_mem = _MAX_PROGRAM_BYTES
    options.log_errors = False
    options.never_capture = True
    return re2.compile(pattern, options)


_LETTERS: Final = "XKZRVMTBDWGHJLNPQSFC"
_DIGITS: Final = ("27", "83", "46", "91", "38", "62", "74", "19", "52", "85")

_SUBSTITUTES: Final = {
    "braces": tuple(f"{{{number}}}" for number in range(10)),
    "code": tuple(f"{letter}{_DIGITS[(index + i) % 10]}" for i in range(7) for index, letter in enumerate(_LETTERS)),
    "itself": (),
}
"""What may stand for a span, by kind, short as a model copies it best; nothing, where it stands for itself.

Training teaches to copy these shapes: see ``made_up_code`` of ``dragoman_training/augment.py``.
"""


@dataclass(frozen=True, slots=True)
class _Place:
    """One span of a segment, and what stands for it in what the model reads."""

    span: Span
    read: Span
    substitute: str
    blank_before: bool = False  # one that was added in front of it
    blank_behind: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """A segment as the model reads it."""

    text: str
    spans: tuple[Span, ...] = ()  # those to protect, in the segment
    originals: tuple[str, ...] = ()  # what they hold
    places: tuple[_Place, ...] = ()  # one for each of them, or none where they are read as they are

    @classmethod
    def of(cls, text: str, spans: Sequence[Span], kind: str) -> Reading:
        """A segment's text with substitutes for the spans, which are read as they are where there are none or too few.

        A blank is added where one would touch a letter, digit or brace.
        """
        originals = tuple(text[start:end] for start, end in spans)
        lowered = text.casefold()
        free = [one for one in _SUBSTITUTES[kind] if one.casefold() not in lowered]
        if len(free) < len(spans):
            return cls(text, tuple(spans), originals)
        parts: list[str] = []
        places: list[_Place] = []
        position = length = 0
        for (start, end), substitute in zip(spans, free, strict=False):
            before = start > 0 and _clings(text[start - 1])
            behind = end < len(text) and _clings(text[end])
            parts += [text[position:start], " " * before, substitute, " " * behind]
            read = length + start - position + before
            places.append(_Place((start, end), (read, read + len(substitute)), substitute, before, behind))
            length = read + len(substitute) + behind
            position = end
        return cls("".join([*parts, text[position:]]), tuple(spans), originals, tuple(places))

    def place(self, span: Span) -> Span:
        """Where in the segment a span of the read text comes from; of a substitute's part, all that it stands for."""
        start, end = span
        shift = 0
        for place in self.places:
            first, last = place.read[0] - place.blank_before, place.read[1] + place.blank_behind
            if end <= first:
                break
            if start < last:
                return place.span
            shift = place.span[1] - last
        return start + shift, end + shift

    def restored(self, answer: str) -> tuple[str, tuple[Span, ...]]:
        """The answer with the spans in their substitutes' places, and those that it does not have exactly once.

        A substitute that has grown together with other letters, digits or braces stays, and counts as missing. Of spans
        with the same content that are read as they are, all count as missing unless there are as many.
        """
        if not self.spans:
            return answer, ()
        if not self.places:
            wanted = Counter(self.originals)
            wrong = {one for one, number in wanted.items() if len(_whole(one).findall(answer)) != number}
            return answer, tuple(s for s, one in zip(self.spans, self.originals, strict=True) if one in wrong)
        by_substitute = {p.substitute.casefold(): (p, o) for p, o in zip(self.places, self.originals, strict=True)}
        seen = Counter[str]()

        def put_back(match: re.Match[str]) -> str:
            place, original = by_substitute[match.group("it").casefold()]
            seen[place.substitute] += 1
            before = "" if place.blank_before else match.group("before")
            return before + original + ("" if place.blank_behind else match.group("behind"))

        it = "|".join(map(re.escape, by_substitute))
        one = rf"(?P<before> ?)(?<![\w{{])(?P<it>{it})(?![\w}}])(?P<behind> ?)"
        text = re.sub(one, put_back, answer, flags=re.IGNORECASE)  # in a headline, say, a model writes capitals
        lowered = answer.casefold()
        lost = [p for p in self.places if not seen[p.substitute] == lowered.count(p.substitute.casefold()) == 1]
        return text, tuple(place.span for place in lost)


def _clings(character: str) -> bool:
    return character.isalnum() or character in "_{}"


def vocabulary_of(kind: str) -> str:
    """All substitutes of a kind as a text, which a vocabulary must be able to write; empty for the span itself."""
    return " ".join(_SUBSTITUTES[kind])


def _whole(text: str) -> re.Pattern[str]:
    """The text where it stands by itself, and not as a part of a longer word or number."""
    before = r"(?<!\w)(?<!\w[.,:/-])" if text[0].isalnum() else ""
    behind = r"(?!\w)(?![.,:/-]\w)" if text[-1].isalnum() else ""
    return re.compile(before + re.escape(text) + behind)
