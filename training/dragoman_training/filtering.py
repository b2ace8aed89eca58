"""The one decision which pairs of text are left out before they are tokenized."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dragoman_training.config import require


@dataclass(frozen=True, kw_only=True)
class PairFilter:
    """Blank sides and texts that cannot be a line always go, too long or too unlike sides where a limit is set.

    A text is blank if it has nothing but white space. It cannot be a line of an aligned file if it holds a line feed,
    or ends in a carriage return. Words are what stands between white space; the ratio is that of the longer side's
    characters to the shorter side's.
    """

    max_characters: int | None = None
    max_words: int | None = None
    max_ratio: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_characters", "max_words", "max_ratio"):
            value = getattr(self, name)
            require(value is None or 1 <= value < math.inf, name, value, "it must be a number of at least 1")

    def reason(self, source: str, target: str) -> str | None:
        """Why this pair is left out, None if it is not: the first reason that holds."""
        if not source.strip():
            return "blank source"
        if not target.strip():
            return "blank target"
        if any("\n" in text or text.endswith("\r") for text in (source, target)):
            return "line break in a text"
        if self.max_characters is not None and max(len(source), len(target)) > self.max_characters:
            return f"over {self.max_characters} characters"
        if self.max_words is not None and max(len(source.split()), len(target.split())) > self.max_words:
            return f"over {self.max_words} words"
        if self.max_ratio is not None:
            shorter, longer = sorted((len(source), len(target)))
            if longer > self.max_ratio * shorter:
                return f"length ratio over {self.max_ratio:g}"
        return None

    def kept(self, pairs: Iterable[tuple[str, str]], dropped: Counter[str]) -> Iterator[tuple[str, str]]:
        """The pairs that stay; the others are counted in ``dropped`` by their reason."""
        for source, target in pairs:
            reason = self.reason(source, target)
            if reason is None:
                yield source, target
            else:
                dropped[reason] += 1
