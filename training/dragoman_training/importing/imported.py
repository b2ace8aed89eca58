"""A model that was read from another toolkit's files, and the checkpoint that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman_training.checkpoint import write_checkpoint
from dragoman_training.config import ModelConfig, ModelShape, padded_vocab_size
from dragoman_training.errors import CheckpointError, ConfigError, ModelImportError
from dragoman_training.folders import explained
from dragoman_training.importing.ct2_file import Floats
from dragoman_training.model import Transformer
from dragoman_training.record import FORMAT, tokenizer_record, tool_record
from dragoman_training.tokenizer import SpecialIds, Tokenizer

MOST_TOKENS = 512  # the limit of a text: no toolkit records how long its training texts were
PADDING_TOKENS = ("<pad>", "<blank>")


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A model in this package's terms. ``weights`` are named as the model's parameters are, vocabularies rounded up."""

    config: ModelConfig
    weights: dict[str, Floats]
    tokenizers: tuple[Tokenizer, Tokenizer]
    special: SpecialIds
    max_tokens: int  # of a source and of a target, each with its closing </s>
    origin: dict[str, Any]  # where it comes from: goes into config.json as "import"
    alignment: dict[str, int | None] | None = None  # the decoder layer and head that the model was aligned with
    notes: tuple[str, ...] = field(default=())  # what a person should know


def refuse(reasons: Sequence[str]) -> None:
    """``ModelImportError`` with all reasons, if there are any."""
    if reasons:
        raise ModelImportError(f"it has what is not supported here: {'; '.join(reasons)}")


def model_config(shape: Mapping[str, Any], source_tokens: int, target_tokens: int) -> ModelConfig:
    """The configuration of a model of these tokens. Raises ``ModelImportError`` for a shape that no model can have."""
    try:
        return ModelShape(**shape).with_vocabularies(source_tokens, target_tokens)
    except ConfigError as error:
        raise ModelImportError(f"the model has a shape that cannot be: {error}") from error


def with_rows(values: Floats, num_tokens: int, name: str, num_appended: int = 0) -> Floats:
    """An array with rows of zeros behind its own: embeddings and biases of a vocabulary that is rounded up.

    The last ``num_appended`` tokens are not the file's, and have rows of zeros too. Raises ``ModelImportError`` for an
    array that has not a row for each of the others.
    """
    if len(values) != num_tokens - num_appended:
        raise ModelImportError(f"{name} has {len(values)} rows for a vocabulary of {num_tokens - num_appended} tokens")
    padding = padded_vocab_size(num_tokens) - len(values)
    return np.concatenate([values, np.zeros((padding, *values.shape[1:]), np.float32)])


def tied_embeddings(source: Floats, target: Floats, projection: Floats) -> str:
    """Which of the three are one, whose gradients would be shared: a value of ``ModelShape.tied_embeddings``."""
    if not np.array_equal(target, projection):
        return "none"
    return "all" if np.array_equal(source, target) else "target"


def padding_ids(num_tokens: int) -> tuple[int, ...]:
    """The ids that only round up a vocabulary."""
    return tuple(range(num_tokens, padded_vocab_size(num_tokens)))


def padding_id(source_tokens: Sequence[str], target_tokens: Sequence[str]) -> int:
    """An id that may stand behind the end of a row on both sides, best that of a padding token; nobody reads it."""
    for token in PADDING_TOKENS:
        if token in target_tokens and (found := target_tokens.index(token)) < len(source_tokens):
            return found
    return 0


def _fitting(imported: Imported) -> dict[str, torch.Tensor]:
    """The weights of the model's parameters, each once.

    Raises ``ModelImportError`` unless there is one of the right shape for each parameter, and none beside. No memory is
    taken for what a file merely says.
    """
    with torch.device("meta"):
        model = Transformer(imported.config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    if unknown := sorted(imported.weights.keys() - shapes.keys()):
        raise ModelImportError(
            f"the model has {unknown[0]}, for which its shape has no place: it does not fit together"
        )
    needed = [name for name, _ in model.named_parameters()]
    for name in needed:
        found = imported.weights[name].shape if name in imported.weights else None
        if found != shapes[name]:
            raise ModelImportError(f"weight {name} is {found or 'missing'}; the model's shape wants {shapes[name]}")
    return {name: torch.from_numpy(imported.weights[name]) for name in needed}


def write_checkpoint_of(imported: Imported, folder: Path) -> None:
    """Write a checkpoint folder, which appears complete or not at all.

    Raises ``ModelImportError`` for weights that are not finite or do not fit the shape, ``CheckpointError`` where the
    disk fails.
    """
    kept = _fitting(imported)
    for name, weight in kept.items():
        if not bool(torch.isfinite(weight).all()):
            raise ModelImportError(f"weight {name} has values that are no numbers: the model is damaged")
    record = {
        "format": FORMAT,
        "model": asdict(imported.config),
        "special_ids": imported.special.as_dict(),
        "tokenizers": tokenizer_record(imported.tokenizers),
        "limits": {"max_source_tokens": imported.max_tokens, "max_target_tokens": imported.max_tokens},
        "import": imported.origin,
        "tools": tool_record(),
    }
    if imported.alignment is not None:
        record["alignment"] = imported.alignment
    with explained(folder, CheckpointError):
        write_checkpoint(folder, kept, imported.tokenizers, record, {})
