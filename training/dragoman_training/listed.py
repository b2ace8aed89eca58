"""SentencePiece models whose pieces have their ids in a list of their own, as Marian's and CTranslate2's have.

One JSON file a side,

    {"kind": "sentencepiece+vocab", "model": BASE64, "tokens": [...], "special": [0, 1, 9], "unknown": 1}

``model`` is a SentencePiece model file, which splits text into pieces and knows which of them stand for bytes; a piece
has the id of its place in ``tokens``. What the list lacks is ``<unk>``, the token ``unknown``. ``special`` are the ids
of tokens that stand for no text, ``unknown`` among them: no text becomes one of them. Nor do tokens of the form
``>>deu<<``, but for one that a text begins with, which says what language to answer in.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterable, Sequence

import sentencepiece

from dragoman_training.errors import CheckpointError
from dragoman_training.protobuf import message_fields

BLANK_MARK = "\u2581"
LANGUAGE = re.compile(r">>[^\s<>]+<<")


class ListedSentencePieceTokenizer:
    """A SentencePiece model and a list of tokens. Several threads may encode and decode with one object."""

    kind = "sentencepiece+vocab"

    def __init__(self, model: bytes, tokens: Sequence[str], special: Sequence[int], unknown: int) -> None:
        """``model`` is a SentencePiece model file's content; the ids of ``special`` include ``unknown``."""
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.normalization = message_fields(message_fields(model)[3])[1].decode("utf-8")
        except (RuntimeError, ValueError, LookupError) as error:  # ValueError: an empty file
            raise CheckpointError(f"not a SentencePiece model: {error}") from error
        check_listed(tokens, special, unknown)
        self._model = model
        self.tokens = tuple(tokens)
        self.special = frozenset(special)
        self.unknown = unknown
        self._languages = {t: i for i, t in enumerate(tokens) if i not in self.special and LANGUAGE.fullmatch(t)}
        silent = {*special, *self._languages.values()}
        self._ids = {token: index for index, token in enumerate(tokens) if index not in silent}
        processor = self._processor
        self._bytes = {i for token, i in self._ids.items() if processor.is_byte(processor.piece_to_id(token))}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """The one best segmentation's ids; superfluous blanks are gone. A language's token may come first."""
        ids: list[int] = []
        if (found := LANGUAGE.match(text)) and found[0] in self._languages:
            ids.append(self._languages[found[0]])
            text = text[found.end() :]
        return ids + [self._ids.get(piece, self.unknown) for piece in self._processor.encode(text, out_type=str)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; ``<unk>`` and bytes that are no UTF-8 show as U+FFFD, other special tokens not at all."""
        text, spelled = "", list[str]()
        for index in ids:
            token = self.tokens[index]
            if index in self._bytes:
                spelled.append(token)
                continue
            text, spelled = text + self._spelled(spelled), []
            if index == self.unknown:
                text += "\ufffd"
            elif token in self._ids:
                piece = token.replace(BLANK_MARK, " ")
                text += piece if text else piece.removeprefix(" ")
        return text + self._spelled(spelled)

    def _spelled(self, tokens: list[str]) -> str:
        """What the library makes of a run of bytes."""
        return str(self._processor.decode(tokens)) if tokens else ""

    def to_bytes(self) -> bytes:
        """The file described above."""
        content = {
            "kind": self.kind,
            "model": base64.b64encode(self._model).decode("ascii"),
            "tokens": list(self.tokens),
            "special": sorted(self.special),
            "unknown": self.unknown,
        }
        return (json.dumps(content, ensure_ascii=False) + "\n").encode("utf-8")

    @classmethod
    def from_bytes(cls, data: bytes) -> ListedSentencePieceTokenizer:
        """Read the file described above; anything else is a ``CheckpointError``."""
        try:
            content = json.loads(data)
            model = base64.b64decode(content["model"], validate=True)
            return cls(model, content["tokens"], content["special"], content["unknown"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"not a SentencePiece model with a vocabulary: {error}") from error


def check_listed(tokens: Sequence[str], special: Collection[int], unknown: int) -> None:
    """``CheckpointError`` unless all tokens are different texts, and the special ids some of theirs."""
    if not all(isinstance(token, str) and token for token in tokens):
        raise CheckpointError("the vocabulary holds a token that is no text: convert the model anew")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{len(tokens)} tokens are not all different: each may be there once")
    if strange := [index for index in special if index not in range(len(tokens))]:
        raise CheckpointError(f"special ids are {strange}: the vocabulary has {len(tokens)} tokens")
    if unknown not in special:
        raise CheckpointError(f"the id for unknown tokens is {unknown}: it must be a special one, of {sorted(special)}")
