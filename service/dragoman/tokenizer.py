"""Text to token ids and back, by the rules that the bundle declares.

A tokenizer has a side: a ``SourceTokenizer`` encodes, a ``TargetTokenizer`` decodes, and neither can do the other's
work. Text is always plain text: a caller who types ``</s>`` gets the four characters, never the special token.

Kind ``plain``: a token is one character (unit ``character``) or one blank-separated piece (unit ``piece``). The file is
JSON, ``{"kind": "plain", "unit": ..., "tokens": [...]}``; a token's id is its index, and the four special tokens come
first.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dragoman.errors import BundleError, InvalidRequestError
from dragoman.types import TokenIds

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
UNITS = ("character", "piece")
UNKNOWN_POLICIES = ("refuse", "byte_fallback")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))

_MAX_NAMED_CHARACTERS = 10


@dataclass(frozen=True)
class PlainVocabulary:
    """Tokens in the order of their ids. With ``byte_fallback`` it holds the 256 tokens ``<0x00>`` to ``<0xFF>`` too."""

    unit: str
    tokens: tuple[str, ...]

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
    def load(cls, path: Path) -> PlainVocabulary:
        """Read and check a tokenizer file. Raises BundleError naming the file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["kind"] != "plain":
                raise BundleError(f"{path.name}: tokenizer kind is {data['kind']!r}; this version reads 'plain'")
            return cls(unit=data["unit"], tokens=tuple(data["tokens"]))
        except BundleError as error:
            raise BundleError(f"{path.name}: {error}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(f"{path.name} is no tokenizer file: {error!r}") from error

    def split(self, text: str) -> Sequence[str]:
        """The units of a text, known or not."""
        return text if self.unit == "character" else [piece for piece in text.split(" ") if piece]


class SourceTokenizer:
    """Encodes source text. Has no state beyond its vocabulary, so that any number of callers may share it."""

    def __init__(self, vocabulary: PlainVocabulary, start: TokenIds, end: TokenIds, unknown_policy: str) -> None:
        if unknown_policy not in UNKNOWN_POLICIES:
            raise BundleError(f"unknown_policy is {unknown_policy!r}; this version knows {', '.join(UNKNOWN_POLICIES)}")
        self._vocabulary = vocabulary
        self._start, self._end = start, end
        # Special and byte tokens are no text: they cannot be typed.
        first_id = {token: index for index, token in enumerate(vocabulary.tokens)}
        self._bytes = tuple(first_id.get(token, UNK_ID) for token in BYTE_TOKENS)
        if unknown_policy == "byte_fallback" and UNK_ID in self._bytes:
            raise BundleError("unknown_policy is byte_fallback, but the vocabulary lacks some of <0x00> to <0xFF>")
        if unknown_policy == "byte_fallback" and vocabulary.unit != "character":
            raise BundleError(
                "unknown_policy byte_fallback needs tokens of unit 'character': bytes carry no piece borders"
            )
        hidden = {*SPECIAL_TOKENS, *(BYTE_TOKENS if unknown_policy == "byte_fallback" else ())}
        self._ids = {token: index for token, index in first_id.items() if token not in hidden}
        self._unknown_policy = unknown_policy

    def encode(self, text: str) -> TokenIds:
        """Ids with the template's start and end tokens. Raises InvalidRequestError naming what it cannot encode."""
        ids: list[int] = []
        unknown: dict[str, None] = {}  # an ordered set
        for unit in self._vocabulary.split(text):
            known = self._ids.get(unit)
            if known is not None:
                ids.append(known)
            elif self._unknown_policy == "byte_fallback":
                ids.extend(self._bytes[byte] for byte in unit.encode("utf-8"))
            else:
                unknown[unit] = None
        if unknown:
            raise InvalidRequestError(self._describe(list(unknown)))
        return (*self._start, *ids, *self._end)

    def _describe(self, unknown: list[str]) -> str:
        named = unknown[:_MAX_NAMED_CHARACTERS]
        shown = ", ".join(f"{u!r} (U+{ord(u):04X})" if len(u) == 1 else repr(u[:40]) for u in named)
        more = f" and {len(unknown) - _MAX_NAMED_CHARACTERS} more" if len(unknown) > _MAX_NAMED_CHARACTERS else ""
        known = list(self._ids)
        accepts = f"it knows [{' '.join(known)}]" if len(known) <= 64 else f"it knows {len(known)} others"
        return f"text holds {shown}{more}, which this model's source vocabulary lacks; {accepts}"


class TargetTokenizer:
    """Decodes target ids. ``decode`` of all ids equals the joined pieces of an ``IncrementalDetokenizer``."""

    def __init__(self, vocabulary: PlainVocabulary) -> None:
        self._vocabulary = vocabulary
        byte_of = {token: byte for byte, token in enumerate(BYTE_TOKENS)} if vocabulary.unit == "character" else {}
        self._byte_of = {index: byte_of[token] for index, token in enumerate(vocabulary.tokens) if token in byte_of}
        self.separator = "" if vocabulary.unit == "character" else " "

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The tokens' names, special ones included."""
        return [self._vocabulary.tokens[index] for index in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a hypothesis. Special tokens have no text."""
        detokenizer = IncrementalDetokenizer(self)
        return detokenizer.push(ids) + detokenizer.close()

    def _piece(self, index: int) -> bytes | str | None:
        """A token's text, a byte of one, or None for a special token."""
        if index < len(SPECIAL_TOKENS):
            return None
        if index in self._byte_of:
            return bytes([self._byte_of[index]])
        return self._vocabulary.tokens[index]


class IncrementalDetokenizer:
    """Turns ids into text piece by piece; what it has given out it never takes back.

    Byte tokens are held until they form whole characters. Bytes that can never form one become U+FFFD, one for each
    maximal ill-formed part (Unicode 15, section 3.9), at once or, for a tail cut short, at ``close``.
    """

    def __init__(self, tokenizer: TargetTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending = b""
        self._empty = True

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids make final; may be empty."""
        out: list[str] = []
        for index in ids:
            piece = self._tokenizer._piece(index)
            if piece is None:
                continue
            if isinstance(piece, bytes):
                if not self._pending:
                    out.append(self._join())
                self._pending += piece
                out.append(self._flush(final=False))
            else:
                out.append(self._flush(final=True))
                out.append(self._join() + piece)
        return "".join(out)

    def close(self) -> str:
        """The text of an incomplete tail."""
        return self._flush(final=True)

    def _join(self) -> str:
        if self._empty:
            self._empty = False
            return ""
        return self._tokenizer.separator

    def _flush(self, *, final: bool) -> str:
        if not self._pending:
            return ""
        text, consumed = codecs.utf_8_decode(self._pending, "replace", final)
        self._pending = self._pending[consumed:]
        return text
