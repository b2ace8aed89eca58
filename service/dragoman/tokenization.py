"""What tokens a line becomes, each with its place in the text: for whoever counts them, or wonders about a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from dragoman.alignment import Span

if TYPE_CHECKING:  # heavy, and clients have no use for it
    from dragoman.tokenizer import SourceTokenizer, TargetTokenizer


class TokenizerSide(StrEnum):
    """Whose tokens."""

    SOURCE = "source"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class TextToken:
    """One token."""

    token: str
    id: int
    span: Span | None  # what it stands for, in characters, blanks left out; None for a token of the template


def source_tokens(tokenizer: SourceTokenizer, line: str, language: str) -> list[TextToken]:
    """What the encoder reads of a line. Raises InvalidRequestError as ``SourceTokenizer.encode``."""
    ids = tokenizer.encode(line, language=language)
    own = tokenizer.own(ids)
    spans: list[Span | None] = [None] * own.start
    spans += tokenizer.spans(line)
    spans += [None] * (len(ids) - own.stop)
    return [TextToken(*item) for item in zip(tokenizer.tokens(ids), ids, spans, strict=True)]


def target_tokens(tokenizer: TargetTokenizer, line: str) -> list[TextToken]:
    """What a line is as an answer. Raises InvalidRequestError as ``TargetTokenizer.encode``."""
    ids = tokenizer.encode(line, "text")
    return [TextToken(*item) for item in zip(tokenizer.tokens(ids), ids, tokenizer.vocabulary.spans(line), strict=True)]
