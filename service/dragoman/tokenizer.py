"""Text to token ids and back, by the vocabularies and sequence templates that the bundle declares.

A tokenizer has a side: a ``SourceTokenizer`` encodes what is to be answered, a ``TargetTokenizer`` decodes answers, and
encodes what a caller gives of one. What a token is, is the vocabulary's business (``vocabulary.py``).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from dragoman.errors import InvalidRequestError
from dragoman.types import TokenIds, UnknownWords
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

    def encode(self, text: str, unknown_words: UnknownWords | None = None) -> TokenIds:
        """Ids with the template's start and end tokens.

        Raises InvalidRequestError naming what it cannot encode, unless that may be read as ``<unk>``, and what it
        spells in bytes, where that is to be refused.
        """
        ids = _encode(self._vocabulary, text, "text")
        if unknown_words not in (UnknownWords.COPY, UnknownWords.SUPPRESS):
            _check_known(self._vocabulary, ids, text, "text", "source", spelled=unknown_words == UnknownWords.REFUSE)
        return (*self._start, *ids, *self._end)

    @property
    def marks_words(self) -> bool:
        """See ``Vocabulary.marks_words``."""
        return self._vocabulary.marks_words

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
        ids = _encode(self.vocabulary, text, name)
        _check_known(self.vocabulary, ids, text, name, "target")
        return tuple(ids)

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

    def spans(self, ids: Iterable[int]) -> list[tuple[int, int]]:
        """The characters of the decoded text that each token stands for, without blanks before them.

        A character spelled in bytes is its last byte's; the others' spans are empty, as is a special token's.
        """
        detokenizer = IncrementalDetokenizer(self)
        spans, end = [], 0
        for index in ids:
            piece = detokenizer.push([index])
            end += len(piece)
            spans.append((end - len(piece.lstrip()), end))
        return spans


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

    def insert(self, text: str) -> str:
        """What ``push`` would return of a token that stands for this text, which is not empty."""
        return self._flush(final=True) + (self._separator + text if self._started else self._first(text))

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


def _encode(vocabulary: Vocabulary, text: str, name: str) -> list[int]:
    try:
        return vocabulary.encode(text)
    except UnicodeEncodeError as error:
        raise lone_surrogate(text, name) from error


def _check_known(
    vocabulary: Vocabulary, ids: list[int], text: str, name: str, side: str, *, spelled: bool = False
) -> None:
    """Raises InvalidRequestError for what became ``<unk>`` and, if ``spelled``, for what became bytes."""
    if UNK_ID in ids or (spelled and any(isinstance(vocabulary.pieces[index], bytes) for index in ids)):
        unknown = vocabulary.unknown_units(text)
        named = unknown[:_MAX_NAMED_UNITS]
        shown = ", ".join(f"{u!r} (U+{ord(u):04X})" if len(u) == 1 else repr(u[:40]) for u in named)
        more = f" and {len(unknown) - _MAX_NAMED_UNITS} more" if len(unknown) > _MAX_NAMED_UNITS else ""
        known = vocabulary.known_units
        accepts = f"it knows [{' '.join(known)}]" if len(known) <= 64 else f"it knows {len(known)} others"
        raise InvalidRequestError(f"{name} holds {shown}{more}, which this model's {side} vocabulary lacks; {accepts}")


def lone_surrogate(text: str, name: str = "text") -> InvalidRequestError:
    """What to tell the caller of a text that UTF-8 cannot hold."""
    position = next(i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    return InvalidRequestError(
        f"{name} holds the lone surrogate U+{ord(text[position]):04X} at character {position}: send valid Unicode"
    )
