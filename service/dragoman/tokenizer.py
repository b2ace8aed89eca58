"""Text to token ids and back, by the vocabularies and sequence templates that the bundle declares.

A tokenizer has a side: a ``SourceTokenizer`` encodes what is to be answered, a ``TargetTokenizer`` decodes answers, and
encodes what a caller gives of one. What a token is, is the vocabulary's business (``vocabulary.py``).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from dragoman.errors import InvalidRequestError
from dragoman.types import TokenIds
from dragoman.vocabulary import UNK_ID, Vocabulary

_MAX_NAMED_UNITS = 10
_REPLACED = dict.fromkeys(range(0xDC80, 0xDD00), "\ufffd")  # what "surrogateescape" makes of bytes


class SourceTokenizer:
    """Encodes source text. Has no state beyond its vocabulary, so that any number of callers may share it."""

    def __init__(self, vocabulary: Vocabulary, start: TokenIds, end: TokenIds) -> None:
        self._vocabulary = vocabulary
        self._start, self._end = start, end

    @property
    def empty(self) -> TokenIds:
        """The template around nothing: what a text of which the vocabulary keeps nothing is encoded to."""
        return (*self._start, *self._end)

    def encode(self, text: str) -> TokenIds:
        """Ids with the template's start and end tokens. Raises InvalidRequestError naming what it cannot encode."""
        return (*self._start, *_encode(self._vocabulary, text, "text", "source"), *self._end)

    def own(self, source: TokenIds) -> slice:
        """Where in an encoded text its own tokens are, without the template's."""
        return slice(len(self._start), len(source) - len(self._end))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The tokens' names."""
        names = self._vocabulary.tokens
        return [names[index] for index in ids]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The characters that each of a text's own tokens stands for; see ``Vocabulary.spans``."""
        return self._vocabulary.spans(text)


class TargetTokenizer:
    """Decodes target ids. ``decode`` of all ids equals the joined pieces of an ``IncrementalDetokenizer``."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._ids = {token: index for index, token in enumerate(vocabulary.tokens)}

    def encode(self, text: str, name: str) -> TokenIds:
        """The ids of an answer, or of the beginning of one, without start and end tokens.

        ``name`` is what to call the text. Raises InvalidRequestError naming what it cannot encode.
        """
        return tuple(_encode(self.vocabulary, text, name, "target"))

    def ids(self, tokens: Iterable[str], name: str) -> TokenIds:
        """The ids of tokens by their names. Raises InvalidRequestError for those that there are not."""
        tokens = tuple(tokens)
        if unknown := list(dict.fromkeys(token for token in tokens if token not in self._ids)):
            more = f" and {len(unknown) - _MAX_NAMED_UNITS} more" if len(unknown) > _MAX_NAMED_UNITS else ""
            shown = ", ".join(repr(token[:40]) for token in unknown[:_MAX_NAMED_UNITS])
            raise InvalidRequestError(
                f"{name} names {shown}{more}, which are no tokens of this model's target vocabulary: give names as "
                "answers have them"
            )
        return tuple(self._ids[token] for token in tokens)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The tokens' names, special ones included."""
        names = self.vocabulary.tokens
        return [names[index] for index in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a hypothesis. Special tokens have no text."""
        detokenizer = IncrementalDetokenizer(self)
        return detokenizer.push(ids) + detokenizer.close()


class IncrementalDetokenizer:
    """Turns ids into text piece by piece; what it has given out it never takes back.

    Byte tokens are held until they form whole characters. A byte that can be part of none becomes U+FFFD, at once or,
    in a tail cut short, at ``close``: one for each byte, as the SentencePiece library has it.
    """

    def __init__(self, tokenizer: TargetTokenizer) -> None:
        vocabulary = tokenizer.vocabulary
        self._pieces = vocabulary.pieces
        self._separator = vocabulary.separator
        self._marks_words = vocabulary.marks_words
        self._pending = b""
        self._started = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids make final; may be empty."""
        out: list[str] = []
        for index in ids:
            piece = self._pieces[index]
            if isinstance(piece, bytes):
                self._started = True
                self._pending += piece
                out.append(self._flush(final=False))
                continue
            if self._pending:
                out.append(self._flush(final=True))
            if piece is not None:
                out.append(self._separator + piece if self._started else self._first(piece))
        return "".join(out)

    def close(self) -> str:
        """The text of an incomplete tail."""
        return self._flush(final=True)

    def _first(self, piece: str) -> str:
        if self._marks_words:
            piece = piece.removeprefix(" ")
        self._started = piece != ""
        return piece

    def _flush(self, *, final: bool) -> str:
        # "surrogateescape" makes one surrogate of each byte at fault; "replace" would make one U+FFFD of several.
        text, consumed = codecs.utf_8_decode(self._pending, "surrogateescape", final)
        self._pending = self._pending[consumed:]
        return text.translate(_REPLACED)


def _encode(vocabulary: Vocabulary, text: str, name: str, side: str) -> list[int]:
    try:
        ids = vocabulary.encode(text)
    except UnicodeEncodeError as error:
        raise lone_surrogate(text, name) from error
    if UNK_ID in ids:
        unknown = vocabulary.unknown_units(text)
        named = unknown[:_MAX_NAMED_UNITS]
        shown = ", ".join(f"{u!r} (U+{ord(u):04X})" if len(u) == 1 else repr(u[:40]) for u in named)
        more = f" and {len(unknown) - _MAX_NAMED_UNITS} more" if len(unknown) > _MAX_NAMED_UNITS else ""
        known = vocabulary.known_units
        accepts = f"it knows [{' '.join(known)}]" if len(known) <= 64 else f"it knows {len(known)} others"
        raise InvalidRequestError(f"{name} holds {shown}{more}, which this model's {side} vocabulary lacks; {accepts}")
    return ids


def lone_surrogate(text: str, name: str = "text") -> InvalidRequestError:
    """What to tell the caller of a text that UTF-8 cannot hold."""
    position = next(i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    return InvalidRequestError(
        f"{name} holds the lone surrogate U+{ord(text[position]):04X} at character {position}: send valid Unicode"
    )
