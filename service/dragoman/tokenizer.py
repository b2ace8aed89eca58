"""Text to token ids and back, by the vocabularies and sequence templates that the bundle declares.

A tokenizer has a side: a ``SourceTokenizer`` encodes what is to be answered, a ``TargetTokenizer`` decodes answers, and
encodes what a caller gives of one. What a token is, is the vocabulary's business (``vocabulary.py``).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from dragoman.errors import InvalidRequestError
from dragoman.types import TokenIds, UnknownWords
from dragoman.vocabulary import LANGUAGE_TOKEN, Vocabulary

_MAX_NAMED_UNITS = 10
_REPLACED = dict.fromkeys(range(0xDC80, 0xDD00), "\ufffd")  # what "surrogateescape" makes of bytes


class SourceTokenizer:
    """Encodes source text. Has no state beyond its vocabulary, so that any number of callers may share it.

    A model of several languages reads a token first that says which one to answer in: it is named with the text, or the
    text begins with it, ``>>deu<<``. Either way it is part of the template, none of the text's own tokens.
    """

    def __init__(self, vocabulary: Vocabulary, start: TokenIds, end: TokenIds) -> None:
        self._vocabulary = vocabulary
        self._start, self._end = start, end
        self._languages = vocabulary.languages
        self._language_ids = frozenset(vocabulary.languages.values())

    @property
    def languages(self) -> tuple[str, ...]:
        """What languages may be asked for; none, of a model that answers in one."""
        return tuple(self._languages)

    @property
    def unknown_id(self) -> int:
        """See ``Vocabulary.unknown_id``."""
        return self._vocabulary.unknown_id

    def encode(self, text: str, unknown_words: UnknownWords | None = None, language: str = "") -> TokenIds:
        """Ids with the template's tokens, that of ``language`` or of what the text begins with among them.

        Raises InvalidRequestError naming what it cannot encode, unless that may be read as ``<unk>``, and what it
        spells in bytes, where that is to be refused; and a language that the model does not know, or another than the
        text's.
        """
        typed, start = self._typed_language(text)
        if language and typed and language != typed:
            raise InvalidRequestError(
                f"target_language is {language!r} and the text begins with >>{typed}<<: leave one of them out"
            )
        chosen = self._language_token(language or typed)
        own = text[start:]
        ids = _encode(self._vocabulary, own, "text")
        if unknown_words not in (UnknownWords.COPY, UnknownWords.SUPPRESS):
            _check_known(self._vocabulary, ids, own, "text", "source", spelled=unknown_words == UnknownWords.REFUSE)
        return (*self._start, *chosen, *ids, *self._end)

    def typed_language(self, text: str) -> str:
        """The language that a text begins with; none where it does not."""
        return self._typed_language(text)[0]

    def _typed_language(self, text: str) -> tuple[str, int]:
        """The language that a text begins with, or none, and where its own part begins."""
        found = LANGUAGE_TOKEN.match(text) if self._languages else None
        return (found[1], found.end()) if found is not None else ("", 0)

    def _language_token(self, language: str) -> TokenIds:
        if not language:
            return ()
        if language not in self._languages:
            names = self.languages
            more = f" and {len(names) - _MAX_NAMED_UNITS} more" if len(names) > _MAX_NAMED_UNITS else ""
            raise InvalidRequestError(
                f"the target language is {language[:40]!r}, which this model does not know: it has "
                f"{', '.join(names[:_MAX_NAMED_UNITS])}{more}"
            )
        return (self._languages[language],)

    @property
    def marks_words(self) -> bool:
        """See ``Vocabulary.marks_words``."""
        return self._vocabulary.marks_words

    def own(self, source: TokenIds) -> slice:
        """Where in an encoded text its own tokens are, without the template's; nowhere, where it has none."""
        start, end = len(self._start), len(source) - len(self._end)
        return slice(start + (start < end and source[start] in self._language_ids), end)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The tokens' names."""
        names = self._vocabulary.tokens
        return [names[index] for index in ids]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The characters that each of a text's own tokens stands for; see ``Vocabulary.spans``."""
        _, start = self._typed_language(text)
        return [(start + first, start + end) for first, end in self._vocabulary.spans(text[start:])]


class TargetTokenizer:
    """Decodes target ids. ``decode`` of all ids equals the joined pieces of an ``IncrementalDetokenizer``."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._ids = {token: index for index, token in enumerate(vocabulary.tokens)}

    @property
    def unknown_id(self) -> int:
        """See ``Vocabulary.unknown_id``."""
        return self.vocabulary.unknown_id

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
    if vocabulary.unknown_id in ids or (spelled and any(isinstance(vocabulary.pieces[index], bytes) for index in ids)):
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
