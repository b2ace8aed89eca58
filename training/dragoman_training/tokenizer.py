"""Text to ids and back with a plain vocabulary: a token is one character, or one blank-separated piece.

The file (JSON) is shared with the service, which has a reader of its own:

    {"kind": "plain", "unit": "character", "tokens": ["<pad>", "<s>", "</s>", "<unk>", "a", ...]}

An id is the index in ``tokens``; the four specials come first, always. Text that looks like a special is text: it never
becomes that special's id. Sequence templates: a source is its tokens and ``</s>``; the decoder reads
``SpecialIds.decoder_start`` and then the target's tokens; the labels are the target's tokens and ``</s>``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dragoman_training.errors import CheckpointError

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """The ids with a meaning of their own. ``decoder_start`` is what the decoder reads first, everywhere."""

    pad: int = 0
    bos: int = 1
    eos: int = 2
    unk: int = 3
    decoder_start: int = 1

    @property
    def never_produced(self) -> tuple[int, ...]:
        """Ids that no search may choose."""
        return tuple(sorted({self.pad, self.bos, self.unk, self.decoder_start} - {self.eos}))

    def as_dict(self) -> dict[str, int]:
        """As stored in a checkpoint's config.json."""
        return asdict(self)


SPECIAL_IDS = SpecialIds()


class PlainTokenizer:
    """One vocabulary. It does not normalise, strip or lower-case; ``encode`` adds no specials."""

    def __init__(self, unit: str, tokens: Sequence[str]) -> None:
        if unit not in ("character", "piece"):
            raise CheckpointError(f"tokenizer unit is {unit!r}: choose character or piece")
        if tuple(tokens[: len(SPECIAL_TOKENS)]) != SPECIAL_TOKENS:
            raise CheckpointError(f"tokens start with {list(tokens[:4])}: they must start with {list(SPECIAL_TOKENS)}")
        self.unit = unit
        self.tokens = tuple(tokens)
        self._ids = {token: index for index, token in enumerate(tokens) if index >= len(SPECIAL_TOKENS)}
        if len(self._ids) + len(SPECIAL_TOKENS) != len(self.tokens) or set(SPECIAL_TOKENS) & self._ids.keys():
            raise CheckpointError(f"{len(self.tokens)} tokens are not all different: each may be there once")
        for token in self._ids:
            if (unit == "character" and len(token) != 1) or (unit == "piece" and (not token or " " in token)):
                raise CheckpointError(f"token {token!r} is no {unit}: build the vocabulary from text again")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def build(cls, unit: str, lines: Iterable[str]) -> PlainTokenizer:
        """The vocabulary of all tokens in ``lines``, in code point order."""
        seen: set[str] = set()
        for line in lines:
            seen.update(split_text(unit, line))
        return cls(unit, [*SPECIAL_TOKENS, *sorted(seen - set(SPECIAL_TOKENS))])

    def encode(self, text: str) -> list[int]:
        """Ids of a text's tokens; a token outside the vocabulary becomes ``<unk>``."""
        return [self._ids.get(token, SPECIAL_IDS.unk) for token in split_text(self.unit, text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; ``<pad>``, ``<s>`` and ``</s>`` leave no trace, ``<unk>`` shows as U+FFFD."""
        parts = ["\ufffd" if i == SPECIAL_IDS.unk else self.tokens[i] for i in ids if i >= SPECIAL_IDS.unk]
        return ("" if self.unit == "character" else " ").join(parts)

    def save(self, path: Path) -> None:
        """Write the file described above."""
        content = {"kind": "plain", "unit": self.unit, "tokens": list(self.tokens)}
        path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> PlainTokenizer:
        """Read the file described above; anything else is a ``CheckpointError`` that names the file."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["kind"] != "plain":
                raise CheckpointError(f"kind is {content['kind']!r}: this reader knows plain")
            return cls(content["unit"], content["tokens"])
        except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
            raise CheckpointError(f"{path} is no tokenizer file: {error}") from error


def split_text(unit: str, text: str) -> list[str]:
    """The tokens of a text as strings: its characters, or what stands between blanks (U+0020)."""
    return list(text) if unit == "character" else [piece for piece in text.split(" ") if piece]
