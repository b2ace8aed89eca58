"""What a tokenizer file holds: tokens in the order of their ids, how text becomes them, and what each stands for.

Kind ``plain``: a token is one character (unit ``character``) or one blank-separated piece (unit ``piece``). The file is
JSON, ``{"kind": "plain", "unit": ..., "tokens": [...]}``; a token's id is its index.

Kind ``sentencepiece``: a unigram or BPE model of the SentencePiece library (Kudo and Richardson 2018,
https://github.com/google/sentencepiece), in that library's format. It normalises text by a rule of its own and keeps
one blank where there were several; U+2581, its mark for a blank, becomes one.

The four special tokens come first in either. Text is always plain text: a caller who types ``</s>`` or ``<0x0A>`` gets
these characters, never the token of that name. A vocabulary is never changed, so that any number of threads may share
it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

from sentencepiece import SentencePieceProcessor

from dragoman.errors import BundleError

SPECIAL_TOKENS: Final = ("<pad>", "<s>", "</s>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
BYTE_TOKENS: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))
UNITS: Final = ("character", "piece")

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
        """The text's ids, none of them a special one, but for UNK_ID where the policy is to refuse.

        Raises UnicodeEncodeError for a lone surrogate, or gives UNK_ID for it.
        """

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Of each id of ``encode``, the characters of the text that it stands for: their first, and their end.

        Blanks do not count: the span of a token that stands for nothing else is empty. The byte tokens of a character
        all have its span; where a rule changed the text first, so may the tokens of what it made of a character.
        """

    def unknown_units(self, text: str) -> list[str]:
        """What ``encode`` made UNK_ID of, or bytes, each once."""


@dataclass(frozen=True)
class PlainVocabulary:
    """Characters or pieces. Characters may have the 256 tokens ``<0x00>`` to ``<0xFF>`` beside them, for all others."""

    unit: str
    tokens: tuple[str, ...]

    marks_words = False
    normalization = "identity"

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise BundleError(f"tokenizer unit is {self.unit!r}; it must be one of {', '.join(UNITS)}")
        if self.tokens[: len(SPECIAL_TOKENS)] != SPECIAL_TOKENS:
            raise BundleError(f"tokenizer must start with {' '.join(SPECIAL_TOKENS)}, not {self.tokens[:4]}")
        if not all(isinstance(token, str) for token in self.tokens):
            raise BundleError("tokenizer holds a token that is no text")
        if len(set(self.tokens)) != len(self.tokens):
            raise BundleError("tokenizer holds the same token twice")

    @classmethod
    def from_bytes(cls, content: bytes) -> PlainVocabulary:
        """Read a file's content. Raises BundleError."""
        try:
            data = json.loads(content)
            if data["kind"] != "plain":
                raise BundleError(f"tokenizer kind is {data['kind']!r}, not 'plain'")
            return cls(unit=data["unit"], tokens=tuple(data["tokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise BundleError(f"no plain vocabulary: {error!r}") from error

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        texts: list[Piece] = [None] * len(SPECIAL_TOKENS)
        texts += self.tokens[len(SPECIAL_TOKENS) :]
        for byte, index in self._bytes.items():
            texts[index] = bytes([byte])
        return tuple(texts)

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
            return [self._ids.get(unit, UNK_ID) for unit in self._split(text)]
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

    def __init__(self, model: bytes) -> None:
        """``model`` is a model file's content.

        Raises BundleError when it is none, has other special tokens, or was trained with an option under which
        pieces stand for other texts than ``pieces`` says.
        """
        self._processor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise BundleError(f"no SentencePiece model: {error}") from error
        ids = list(range(self._processor.get_piece_size()))
        self.tokens: tuple[str, ...] = tuple(self._processor.id_to_piece(ids))
        controls, is_byte = self._processor.is_control(ids), self._processor.is_byte(ids)
        if self.tokens[: len(SPECIAL_TOKENS)] != SPECIAL_TOKENS or self._processor.unk_id() != UNK_ID:
            raise BundleError(f"tokenizer must start with {' '.join(SPECIAL_TOKENS)}, not {self.tokens[:4]}")
        if not all(controls[:UNK_ID]):
            raise BundleError(f"{' '.join(SPECIAL_TOKENS[:UNK_ID])} must be control tokens: text must not become them")
        self.normalization = _read_normalization(model)
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
        spans: list[tuple[int, int]] = []
        following = (0, 0)
        # Backwards: the library gives a character's place to the last of its bytes, and an empty one to the others.
        for index, (start, end) in zip(reversed(found["ids"]), reversed(found["offsets"]), strict=True):
            if start == end == following[0] and isinstance(self.pieces[index], bytes):
                end = following[1]
            following = end - len(text[start:end].lstrip()), end
            spans.append(following)
        return spans[::-1]

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


_READERS: Final[dict[str, Callable[[bytes], Vocabulary]]] = {
    "plain": PlainVocabulary.from_bytes,
    "sentencepiece": SentencePieceVocabulary,
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


def _read_normalization(model: bytes) -> str:
    """The name of a SentencePiece model's rule. Raises BundleError for options that this version does not decode by.

    The fields are those of sentencepiece_model.proto. The library's Python module for it wants the protobuf release of
    its own day, newer than what other packages stand, so that the few fields are read here.
    """
    fields = _message_fields(model)
    trainer, normalizer, denormalizer = (_message_fields(_as_bytes(fields.get(number))) for number in (2, 3, 5))
    options = {
        "add_dummy_prefix": normalizer.get(3, 1) == 1,
        "remove_extra_whitespaces": normalizer.get(4, 1) == 1,
        "escape_whitespaces": normalizer.get(5, 1) == 1,
        "treat_whitespace_as_suffix": trainer.get(24, 0) == 0,
        "denormalization_rule_tsv": not denormalizer.get(2),
    }
    if unusual := [name for name, usual in options.items() if not usual]:
        raise BundleError(f"was trained with another {', '.join(unusual)} than the default: train it without")
    return _as_bytes(normalizer.get(1)).decode("utf-8") or "identity"


def _as_bytes(value: int | bytes | None) -> bytes:
    return value if isinstance(value, bytes) else b""


def _message_fields(message: bytes) -> dict[int, int | bytes]:
    """The last value of each field of a valid protobuf message (https://protobuf.dev/programming-guides/encoding).

    Fixed-size numbers are left out.
    """
    fields: dict[int, int | bytes] = {}
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type in (0, 2):
            value, position = _varint(message, position)
            fields[number] = value
            if wire_type == 2:
                fields[number] = message[position : position + value]
                position += value
        else:
            position += 8 if wire_type == 1 else 4
    return fields


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number that starts at ``position``, and where it ends."""
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
