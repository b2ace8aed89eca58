"""The vocabularies of a folder in CTranslate2's format, and which of their tokens have a meaning of their own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dragoman_training.errors import ModelImportError
from dragoman_training.importing.ct2_variables import Variables


@dataclass(frozen=True, kw_only=True)
class Words:
    """The vocabularies with ``<unk>``, and what the configuration says about their special tokens."""

    source: list[str]
    target: list[str]
    unknown: str
    start: str  # of a sentence
    end: str
    decoder_start: str | None
    source_start: bool  # whether <s> and </s> stand around a source
    source_end: bool


def read_words(folder: Path, variables: Variables, settings: dict[str, Any]) -> Words:
    """The vocabularies. Raises ``ModelImportError`` where one is missing, no list of texts, or lacks ``</s>``."""
    unknown, start, end = (
        str(settings.get(f"{name}_token") or default)
        for name, default in (("unk", "<unk>"), ("bos", "<s>"), ("eos", "</s>"))
    )
    around = {
        name: bool(settings.get(f"add_source_{name}", variables.setting(f"with_source_{name}", 0)))
        for name in ("bos", "eos")
    }
    default = start if variables.setting("with_target_bos", 1) else end
    vocabularies: dict[str, list[str]] = {}
    for side in ("source", "target"):
        path, tokens = _read_vocabulary(folder, side)
        if unknown not in tokens:
            tokens.append(unknown)
        if side == "target" and end not in tokens:
            raise ModelImportError(f"{path} lacks the end of a sentence, {end}")
        vocabularies[side] = tokens
    words = Words(
        **vocabularies,
        unknown=unknown,
        start=start,
        end=end,
        decoder_start=settings.get("decoder_start_token", default),
        source_start=around["bos"],
        source_end=around["eos"],
    )
    for token, used in ((start, words.source_start), (end, words.source_end)):
        if used and token not in words.source:
            raise ModelImportError(f"the source vocabulary lacks {token}, which is to stand around each source")
    zero_start = variables.setting("decoder/start_from_zero_embedding", 0) != 0
    if words.decoder_start not in words.target and not zero_start:
        raise ModelImportError(f"the target vocabulary lacks {words.decoder_start}, which the decoder begins with")
    return words


def _read_vocabulary(folder: Path, side: str) -> tuple[Path, list[str]]:
    """A side's list of tokens: JSON, or a token a line."""
    names = [f"{kind}_vocabulary.{ending}" for kind in (side, "shared") for ending in ("json", "txt")]
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise ModelImportError(f"{folder} has no {side} vocabulary: none of {', '.join(names)} is there")
    try:
        if found[0].suffix == ".json":
            tokens = json.loads(found[0].read_text(encoding="utf-8"))
        else:  # lines end with \n alone: a token may be any other break
            tokens = found[0].read_bytes().decode("utf-8").removesuffix("\n").split("\n")
            tokens = [token.removesuffix("\r") for token in tokens]
    except (OSError, ValueError) as error:
        raise ModelImportError(f"{found[0]} cannot be read: {error}") from error
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelImportError(f"{found[0]} is no list of tokens")
    return found[0], tokens
