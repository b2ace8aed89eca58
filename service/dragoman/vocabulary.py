"""What a tokenizer file holds: tokens in the order of their ids, how text becomes them, and what each stands for.

Kind ``plain``: a token is one character (unit ``character``) or one blank-separated piece (unit ``piece``). The file is
JSON, ``{"kind": "plain", "unit": ..., "tokens": [...]}``; a token's id is its index.

Kind ``sentencepiece``: a unigram or BPE model of the SentencePiece library (Kudo and Richardson 2018,
https://github.com/google/sentencepiece), in that library's format. It normalises text by a rule of its own and keeps
one blank where there were several; U+2581, its mark for a blank, becomes one.

Kind ``sentencepiece+vocab``: such a model that says how text is split, and a list of tokens that gives the pieces their
ids, as Marian and CTranslate2 have it. JSON, ``{"kind": ..., "model": BASE64, "tokens": [...], "special": [...],
"unknown": ...}``: the ids of tokens that stand for no text, and which of them stands for what the list lacks.

The four special tokens come first, but for files that say otherwise: a plain one may have ``special`` and ``unknown``,
too. Text is always plain text: a caller who types ``</s>`` or ``<0x0A>`` gets these characters, never the token of that
name. (What a token of a language is typed for, ``>>deu<<``, is the source tokenizer's business.) A vocabulary is never
changed, so that any number of threads may share it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

from dragoman.errors import BundleError
from dragoman.sentencepiece_model import found_spans, open_model, read_normalization

SPECIAL_TOKENS: Final = ("<pad>", "<s>", "</s>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
BYTE_TOKENS: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))
UNITS: Final = ("character", "piece")
LANGUAGE_TOKEN: Final = re.compile(r">>([^\s<>]+)<<")
"""The name of a token that says which language to answer in, as models of several languages have them."""

_BLANK_MARK: Final = "\u2581"
_PIECE: Final = re.compile("[^ ]+")

Piece = str | bytes | None
"""What a token stands for: a text, one byte of a character's UTF-8, or nothing (special tokens)."""


class Vocabulary(Protocol):
    """The tokens of one side, whatever their kind."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens' names."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What the tokens stand for."""

    @property
    def unknown_id(self) -> int:
        """The token that stands for what no other does: ``<unk>``, a special one."""

    @property
    def languages(self) -> Mapping[str, int]:
        """The tokens that say which language to answer in, ``>>deu<<`` for "deu", by language."""

    @property
    def separator(self) -> str:
        """What stands between two pieces."""

    @property
    def marks_words(self) -> bool:
        """Whether pieces bring their own blanks, of which those at the start of a text go away."""

    @property
    def normalization(self) -> str:
        """The rule by which text is changed before it is split; "identity" for none."""

    @property
    def unknown_policy(self) -> str:
        """What happens to a character that no token stands for: "refuse", or "byte_fallback" to its bytes."""

    @property
    def known_units(self) -> tuple[str, ...]:
        """What a text may be made of: characters, or whole pieces."""

    def encode(self, text: str) -> list[int]:
        """The text's ids, none of them a special one, but for ``unknown_id`` where the policy is to refuse.

        Raises UnicodeEncodeError for a lone surrogate, or gives ``unknown_id`` for it.
        """

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Of each id of ``encode``, the characters of the text that it stands for: their first, and their end.

        Blanks do not count: the span of a token that stands for nothing else is empty. The byte tokens of a character
        all have its span; where a rule changed the text first, so may the tokens of what it made of a character.
        """

    def unknown_units(self, text: str) -> list[str]:
        """What ``encode`` made ``unknown_id`` of, or bytes, each once."""


@dataclass(frozen=True)
class PlainVocabulary:
    """Characters or pieces. Characters may have the 256 tokens ``<0x00>`` to ``<0xFF>`` beside them, for all others."""

    unit: str
    tokens: tuple[str, ...]
    special: tuple[int, ...] = ()  # without any: the four, which come first
    unknown_id: int = UNK_ID

    marks_words = False
    normalization = "identity"

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise BundleError(f"tokenizer unit is {self.unit!r}; it must be one of {', '.join(UNITS)}")
        if not self.special and self.tokens[: len(SPECIAL_TOKENS)] != SPECIAL_TOKENS:
            raise BundleError(f"tokenizer must start with {' '.join(SPECIAL_TOKENS)}, not {self.tokens[:4]}")
        _check_tokens(self.tokens, self._silent, self.unknown_id)

    @classmethod
    def from_bytes(cls, content: bytes) -> PlainVocabulary:
        """Read a file's content. Raises BundleError."""
        try:
            data = json.loads(content)
            if data["kind"] != "plain":
                raise BundleError(f"tokenizer kind is {data['kind']!r}, not 'plain'")
            tokens = tuple(data["tokens"])
            if "special" not in data:
                return cls(data["unit"], tokens)
            return cls(data["unit"], tokens, tuple(data["special"]), data["unknown"])
        except (ValueError, KeyError, TypeError) as error:
            raise BundleError(f"no plain vocabulary: {error!r}") from error

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        texts: list[Piece] = list(self.tokens)
        for index in self._silent:
            texts[index] = None
        for byte, index in self._bytes.items():
            texts[index] = bytes([byte])
        return tuple(texts)

    @cached_property
    def languages(self) -> Mapping[str, int]:
        return _languages(self.tokens) if self.unit == "piece" else {}

    @property
    def separator(self) -> str:
        return "" if self.unit == "character" else " "

    @cached_property
    def unknown_policy(self) -> str:
        return "byte_fallback" if len(self._bytes) == len(BYTE_TOKENS) else "refuse"

    @property
    def known_units(self) -> tuple[str, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, str))

    def encode(self, text: str) -> list[int]:
        if self.unknown_policy == "refuse":
            return [self._ids.get(unit, self.unknown_id) for unit in self._split(text)]
        ids: list[int] = []
        for character in text:
            known = self._ids.get(character)
            ids += [self._bytes[byte] for byte in character.encode("utf-8")] if known is None else [known]
        return ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        if self.unit == "piece":
            return [match.span() for match in _PIECE.finditer(text)]
        by_bytes = self.unknown_policy == "byte_fallback"
        return [
            (position, position + 1)
            for position, character in enumerate(text)
            for _ in range(len(character.encode("utf-8")) if by_bytes and character not in self._ids else 1)
        ]

    def unknown_units(self, text: str) -> list[str]:
        return list(dict.fromkeys(unit for unit in self._split(text) if unit not in self._ids))

    def _split(self, text: str) -> Sequence[str]:
        return text if self.unit == "character" else [piece for piece in text.split(" ") if piece]

    @property
    def _silent(self) -> Sequence[int]:
        """The ids of special tokens."""
        return self.special or range(len(SPECIAL_TOKENS))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {piece: index for index, piece in enumerate(self.pieces) if isinstance(piece, str)}

    @cached_property
    def _bytes(self) -> dict[int, int]:
        """The ids of those byte tokens that there are. Among pieces there is none: bytes carry no piece borders."""
        if self.unit != "character":
            return {}
        byte_of = {token: byte for byte, token in enumerate(BYTE_TOKENS)}
        return {byte_of[token]: index for index, token in enumerate(self.tokens) if token in byte_of}


class SentencePieceVocabulary:
    """A SentencePiece model. Encoding is its one best segmentation; nothing is sampled."""

    separator = ""
    marks_words = True
    unknown_id = UNK_ID
    languages: Mapping[str, int] = {}  # a model's own symbols are text to it

    def __init__(self, model: bytes) -> None:
        """``model`` is a model file's content.

        Raises BundleError when it is none, has other special tokens, or was trained with an option under which
        pieces stand for other texts than ``pieces`` says.
        """
        self._processor = open_model(model)
        ids = list(range(self._processor.get_piece_size()))
        self.tokens: tuple[str, ...] = tuple(self._processor.id_to_piece(ids))
        controls, is_byte = self._processor.is_control(ids), self._processor.is_byte(ids)
        if self.tokens[: len(SPECIAL_TOKENS)] != SPECIAL_TOKENS or self._processor.unk_id() != UNK_ID:
            raise BundleError(f"tokenizer must start with {' '.join(SPECIAL_TOKENS)}, not {self.tokens[:4]}")
        if not all(controls[:UNK_ID]):
            raise BundleError(f"{' '.join(SPECIAL_TOKENS[:UNK_ID])} must be control tokens: text must not become them")
        self.normalization = read_normalization(model)
        self.unknown_policy = "byte_fallback" if any(is_byte) else "refuse"
        self.pieces: tuple[Piece, ...] = tuple(
            None
            if controls[index] or index == UNK_ID
            else bytes([BYTE_TOKENS.index(token)])
            if is_byte[index]
            else token.replace(_BLANK_MARK, " ")
            for index, token in enumerate(self.tokens)
        )

    @property
    def known_units(self) -> tuple[str, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, str) and len(piece) == 1)

    def encode(self, text: str) -> list[int]:
        # The library's own conversion of a text with a lone surrogate fails without saying why.
        ids: list[int] = self._processor.encode(text.encode("utf-8"))
        return ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        found = self._processor.encode(text, return_type="offset_mapping")
        return found_spans(found, (isinstance(self.pieces[index], bytes) for index in found["ids"]), text)

    def unknown_units(self, text: str) -> list[str]:
        found = self._processor.encode(text, return_type="offset_mapping")
        units: dict[str, None] = {}  # an ordered set
        for index, piece, (start, end) in zip(found["ids"], found["pieces"], found["offsets"], strict=True):
            if index == UNK_ID:
                # Of the text as it was typed; a character that normalisation made of another has no place there.
                units |= dict.fromkeys(text[start:end] or piece)
            elif isinstance(self.pieces[index], bytes):
                units |= dict.fromkeys(text[start:end])  # the last byte of a character has its place
        return list(units)


class ListedVocabulary:
    """A SentencePiece model that splits text, and a list that gives the pieces their ids."""

    separator = ""
    marks_words = True

    def __init__(self, model: bytes, tokens: Sequence[str], special: Sequence[int], unknown: int) -> None:
        """Raises BundleError as ``SentencePieceVocabulary`` does, and for ids that no token has."""
        self._processor = open_model(model)
        self.normalization = read_normalization(model)
        self.tokens = tuple(tokens)
        self.unknown_id = unknown
        _check_tokens(self.tokens, special, unknown)
        self.languages = {name: index for name, index in _languages(tokens).items() if index not in special}
        silent = {*special, *self.languages.values()}
        self.pieces: tuple[Piece, ...] = tuple(
            None if index in silent else self._piece(token) for index, token in enumerate(tokens)
        )
        self._ids = {token: index for index, token in enumerate(tokens) if index not in silent}
        spelled = {piece for piece in self.pieces if isinstance(piece, bytes)}
        self.unknown_policy = "byte_fallback" if len(spelled) == len(BYTE_TOKENS) else "refuse"

    @classmethod
    def from_bytes(cls, content: bytes) -> ListedVocabulary:
        """Read a file's content. Raises BundleError."""
        try:
            data = json.loads(content)
            if data["kind"] != "sentencepiece+vocab":
                raise BundleError(f"tokenizer kind is {data['kind']!r}, not 'sentencepiece+vocab'")
            model = base64.b64decode(data["model"], validate=True)
            return cls(model, data["tokens"], data["special"], data["unknown"])
        except (ValueError, KeyError, TypeError) as error:
            raise BundleError(f"no SentencePiece model with a vocabulary: {error!r}") from error

    def _piece(self, token: str) -> Piece:
        if self._is_byte(token):
            return bytes([BYTE_TOKENS.index(token)])
        return token.replace(_BLANK_MARK, " ")

    def _is_byte(self, piece: str) -> bool:
        return bool(self._processor.is_byte(self._processor.piece_to_id(piece)))

    @property
    def known_units(self) -> tuple[str, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, str) and len(piece) == 1)

    def encode(self, text: str) -> list[int]:
        # Pieces by their names, not by the model's own ids: what the model does not know, the list may.
        pieces = self._processor.encode(text.encode("utf-8"), out_type=str)
        return [self._ids.get(piece, self.unknown_id) for piece in pieces]

    def spans(self, text: str) -> list[tuple[int, int]]:
        found = self._processor.encode(text, return_type="offset_mapping")
        return found_spans(found, map(self._is_byte, found["pieces"]), text)

    def unknown_units(self, text: str) -> list[str]:
        found = self._processor.encode(text, return_type="offset_mapping")
        units: dict[str, None] = {}  # an ordered set
        for index, piece, (start, end) in zip(found["ids"], found["pieces"], found["offsets"], strict=True):
            typed = text[start:end]
            if self._is_byte(piece):
                units |= dict.fromkeys(typed)  # the last byte of a character has its place
            elif piece not in self._ids:
                # What the model knows it splits off whole; what it does not know, it leaves in one piece.
                known = index != self._processor.unk_id()
                units |= dict.fromkeys([typed.strip() or piece] if known else typed or piece)
        return list(units)


def _check_tokens(tokens: Sequence[str], special: Sequence[int], unknown: int) -> None:
    """Raises BundleError unless all tokens are different texts, and the special ids some of theirs."""
    if not all(isinstance(token, str) for token in tokens):
        raise BundleError("tokenizer holds a token that is no text")
    if len(set(tokens)) != len(tokens):
        raise BundleError("tokenizer holds the same token twice")
    if strange := [index for index in special if index not in range(len(tokens))]:
        raise BundleError(f"tokenizer has the special ids {strange}, and {len(tokens)} tokens")
    if unknown not in special:
        raise BundleError(f"tokenizer reads what it lacks as {unknown}, which is none of its special ids")


def _languages(tokens: Sequence[str]) -> dict[str, int]:
    """The tokens of languages, by what they name."""
    found = ((LANGUAGE_TOKEN.fullmatch(token), index) for index, token in enumerate(tokens))
    return {match[1]: index for match, index in found if match is not None}


_READERS: Final[dict[str, Callable[[bytes], Vocabulary]]] = {
    "plain": PlainVocabulary.from_bytes,
    "sentencepiece": SentencePieceVocabulary,
    "sentencepiece+vocab": ListedVocabulary.from_bytes,
}


def load_vocabulary(kind: str, path: Path) -> Vocabulary:
    """Read and check a tokenizer file. Raises BundleError naming the file."""
    if kind not in _READERS:
        raise BundleError(f"{path.name}: tokenizer kind is {kind!r}; this version reads {', '.join(_READERS)}")
    try:
        return _READERS[kind](path.read_bytes())
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror or error}") from error
    except BundleError as error:
        raise BundleError(f"{path.name}: {error}") from error
