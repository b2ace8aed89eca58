"""Where a model looks in a source for each token of an answer, in words and as shades: what ``explain`` shows.

Weights are shares of the attention that the model's alignment graph returns: each target token has 1 to give, to the
source's tokens and to the start and end tokens around them. They tell where the model looked, not why it answered so.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dragoman.alignment import Span
from dragoman.types import FloatArray

SHADES: Final = ((0.70, "█"), (0.45, "▓"), (0.20, "▒"), (0.05, "░"))  # from which weight on; below, nothing
MIN_NAMED: Final = 0.1  # the least weight of a word that is named beside the first
MAX_NAMED: Final = 3
MAX_LABEL: Final = 24  # columns of the terminal for a word; longer ones are cut

# From a letter or digit to the last one before a blank; marks around it, and marks alone, are words of their own.
_WORD: Final = re.compile(r"\w(?:\S*\w)?|[^\w\s]+")


@dataclass(frozen=True, slots=True)
class Side:
    """A text and its tokens: what each is called, and the characters that it stands for (none: an empty span)."""

    text: str
    tokens: tuple[str, ...]
    spans: tuple[Span, ...]
    has_words: bool  # whether words are what a reader wants to see; else the tokens are


@dataclass(frozen=True, slots=True)
class TokenAttention:
    """What a forced pass over a text and its answer found."""

    source: Side
    target: Side
    before: tuple[str, ...]  # the template's tokens around the source's own
    after: tuple[str, ...]
    weights: FloatArray  # (T, before + S + after)


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Weights with labels. ``own``: which columns are the text's own; the template's tokens stand around them."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    own: slice
    weights: FloatArray  # (target, source)


def heatmap(attention: TokenAttention, *, tokens: bool = False) -> Heatmap:
    """Token by token, or word by word: what a word's tokens get is added up, what they give is their mean."""
    sources, source_of = _parts(attention.source, tokens)
    targets, target_of = _parts(attention.target, tokens)
    num_before, num_own = len(attention.before), len(source_of)
    rows = np.zeros((len(targets), attention.weights.shape[1]), np.float32)
    np.add.at(rows, target_of, attention.weights)
    rows /= np.bincount(target_of, minlength=len(targets))[:, None]
    columns = np.zeros((len(targets), len(sources)), np.float32)
    np.add.at(columns.T, source_of, rows[:, num_before : num_before + num_own].T)
    return Heatmap(
        source=(*attention.before, *sources, *attention.after),
        target=tuple(targets),
        own=slice(num_before, num_before + len(sources)),
        weights=np.concatenate([rows[:, :num_before], columns, rows[:, num_before + num_own :]], axis=1),
    )


def name_sources(found: Heatmap) -> list[str]:
    """A line for each target word: the words of the source that weigh most, the template's tokens left out.

    ``word[2]`` is the second such word of the source.
    """
    names = _numbered(found.source[found.own])
    width = max((_width(_cut(word)) for word in found.target), default=0)
    lines = []
    for word, weights in zip(found.target, found.weights[:, found.own], strict=True):
        order = sorted(range(len(names)), key=lambda index: -weights[index])[:MAX_NAMED]
        named = [index for place, index in enumerate(order) if place == 0 or weights[index] >= MIN_NAMED]
        lines.append(f"{_pad(_cut(word), width)}  {', '.join(f'{names[n]} {weights[n]:.0%}' for n in named)}".rstrip())
    return lines


def draw(found: Heatmap, columns: int) -> list[str]:
    """The weights as shades, source words side by side; in several blocks where they need more than ``columns``."""
    names, labels = [_cut(word) for word in found.source], [_cut(word) for word in found.target]
    label_width = max(map(_width, labels), default=0)
    lines: list[str] = []
    for start, end in _blocks([_width(name) for name in names], columns - label_width - 1):
        lines.append(" ".join([" " * label_width, *names[start:end]]).rstrip())
        for label, weights in zip(labels, found.weights[:, start:end], strict=True):
            cells = [_shade(weight) * _width(name) for weight, name in zip(weights, names[start:end], strict=True)]
            lines.append(" ".join([_pad(label, label_width), *cells]).rstrip())
        lines.append("")
    return [*lines, "  ".join(f"{shade} from {least:.0%}" for least, shade in reversed(SHADES))]


def shown(text: str) -> str:
    """The text with U+FFFD for what is not to be seen, or would move or colour what a terminal shows."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _parts(side: Side, tokens: bool) -> tuple[list[str], list[int]]:
    """The words of a side, and which of them each token belongs to: the one of its first character.

    A token that stands for nothing to be seen, a blank or the first byte of a character, goes with the one behind it.
    """
    words = list(_WORD.finditer(side.text))
    if tokens or not side.has_words or not words:
        return list(side.tokens), list(range(len(side.tokens)))
    word_at = {position: number for number, word in enumerate(words) for position in range(*word.span())}
    number = len(words) - 1
    numbers = []
    for start, end in reversed(side.spans):
        number = next((word_at[position] for position in range(start, end) if position in word_at), number)
        numbers.append(number)
    used = sorted(set(numbers))
    return [words[number].group() for number in used], [used.index(number) for number in reversed(numbers)]


def _numbered(words: Sequence[str]) -> list[str]:
    """The words as they are named in a line: those that there are several of with their number among them."""
    seen: dict[str, int] = {}
    names = []
    for word in words:
        seen[word] = seen.get(word, 0) + 1
        names.append(shown(word) if words.count(word) == 1 else f"{shown(word)}[{seen[word]}]")
    return names


def _blocks(widths: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Which columns go side by side, a blank between two of them; one at least."""
    start = 0
    while start < len(widths):
        end, used = start + 1, widths[start]
        while end < len(widths) and used + 1 + widths[end] <= room:
            used += 1 + widths[end]
            end += 1
        yield start, end
        start = end


def _shade(weight: float) -> str:
    return next((shade for least, shade in SHADES if weight >= least), " ")


def _width(text: str) -> int:
    """How many columns a terminal takes for it (Unicode Standard Annex 11): East Asian wide characters two."""
    return sum(
        0
        if unicodedata.category(character) in ("Mn", "Me")
        else 2
        if unicodedata.east_asian_width(character) in "WF"
        else 1
        for character in text
    )


def _cut(text: str) -> str:
    text = shown(text)
    if _width(text) <= MAX_LABEL:
        return text
    while _width(text) > MAX_LABEL - 1:
        text = text[:-1]
    return f"{text}…"


def _pad(text: str, width: int) -> str:
    return text + " " * (width - _width(text))
