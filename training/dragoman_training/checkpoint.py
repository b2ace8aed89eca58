"""Runs and checkpoints on disk.

    RUN/config.json                   what the run is: see ``run_record``
    RUN/metrics.jsonl                 one JSON line a validation
    RUN/checkpoints/step-NNNNNNNN/    config.json, model.safetensors, tokenizer files, training_state.pt, metrics.json
    RUN/best, RUN/last                relative links to checkpoints

A checkpoint folder appears under its name complete or not at all (written aside, flushed to disk, renamed), whenever
the process is killed. Nothing is unpickled: tensors are safetensors, the training state is read with ``weights_only``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from dragoman_training.config import ModelConfig, TrainConfig, padded_vocab_size
from dragoman_training.errors import CheckpointError, TrainingError
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import SpecialIds, Tokenizer, file_names, load_tokenizer

FORMAT = 1
TEMPORARY_PREFIX = ".writing-"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A trained model, in evaluation mode, with all that its use needs. The limits count ``</s>``."""

    folder: Path
    model: Transformer
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    tokenizer_files: dict[str, str]  # side to file name in ``folder``
    special: SpecialIds
    max_source_tokens: int
    max_target_tokens: int
    record: dict[str, Any]  # the whole config.json


def run_record(
    model: ModelConfig,
    special: SpecialIds,
    tokenizers: tuple[Tokenizer, Tokenizer],
    config: TrainConfig,
    data: Mapping[str, Mapping[str, object]],
) -> dict[str, Any]:
    """The content of config.json. Data files go in by name, SHA-256 and line count, never by their place on a disk."""
    files = file_names(*tokenizers)
    training = asdict(config)
    del training["model"]  # "model" has it, with the vocabulary sizes
    for name in data:
        training["data"][name] = Path(training["data"][name]).name
    return {
        "format": FORMAT,
        "model": asdict(model),
        "special_ids": special.as_dict(),
        "tokenizers": {
            side: {
                "kind": tokenizer.kind,
                "file": files[side],
                "sha256": hashlib.sha256(tokenizer.to_bytes()).hexdigest(),
                "num_tokens": len(tokenizer),
                "normalization": tokenizer.normalization,
            }
            for side, tokenizer in zip(("source", "target"), tokenizers, strict=True)
        },
        "limits": {
            "max_source_tokens": config.data.max_source_tokens,
            "max_target_tokens": config.data.max_target_tokens,
        },
        "training": training,
        "data": {name: dict(entry) for name, entry in data.items()},
        "tools": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }


def changed_field(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str | None:
    """The first field whose value differs, as ``section.name is 2, was 1``; None if all are equal. Tools may differ."""
    for key in [*saved, *(key for key in now if key not in saved)]:
        old, new = saved.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            if key != "tools" and (found := changed_field(old, new, f"{prefix}{key}.")):
                return found
        elif old != new:
            return f"{prefix}{key} is {new!r}, was {old!r}"
    return None


def write_json(path: Path, content: object) -> None:
    """Replace a JSON file atomically."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Have the operating system put a file's or folder's content on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """Read a JSON file; ``CheckpointError`` naming it otherwise."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def checkpoint_folders(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def save_checkpoint(
    run: Path,
    step: int,
    model: Transformer,
    tokenizers: tuple[Tokenizer, Tokenizer],
    record: Mapping[str, Any],
    state: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> Path:
    """Write ``RUN/checkpoints/step-NNNNNNNN`` atomically and return it; an existing one of that step stays as it is.

    Refuses weights that are not finite.
    """
    parent = run / "checkpoints"
    folder = parent / f"step-{step:08d}"
    if folder.exists():
        return folder
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}  # a tied weight once
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise TrainingError(f"weight {name} is not finite at step {step}: not saved; lower the learning rate")
    temporary = parent / f"{TEMPORARY_PREFIX}{folder.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_json(temporary / "config.json", record)
    write_json(temporary / "metrics.json", metrics)
    safetensors.torch.save_file(weights, temporary / "model.safetensors")
    for name, tokenizer in zip(file_names(*tokenizers).values(), tokenizers, strict=True):
        (temporary / name).write_bytes(tokenizer.to_bytes())
    torch.save(dict(state), temporary / "training_state.pt")
    for path in [*temporary.iterdir(), temporary]:
        flush(path)
    temporary.rename(folder)
    flush(parent)
    return folder


def point(link: Path, folder: Path) -> None:
    """Make ``link`` a relative link to ``folder``, replacing an older one atomically."""
    temporary = link.with_name(f"{TEMPORARY_PREFIX}{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.relative_to(link.parent))
    temporary.replace(link)


def prune(run: Path, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints but the ``keep`` newest and the best, and what an interrupted writing left."""
    best = f"step-{best_step:08d}" if best_step is not None else None
    for folder in checkpoint_folders(run)[:-keep]:
        if folder.name != best:
            shutil.rmtree(folder)
    for leftover in (run / "checkpoints").glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(leftover)


def load_weights(model: Transformer, path: Path) -> None:
    """Fill a model with saved weights; names and shapes must be the model's own."""
    try:
        weights = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    parameters = dict(model.named_parameters())
    for name in sorted(weights.keys() ^ parameters.keys()):
        raise CheckpointError(f"{path} does not fit its config.json: weight {name} is on one side only")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if weights[name].shape != parameter.shape:
                shapes = f"{tuple(weights[name].shape)}, config.json says {tuple(parameter.shape)}"
                raise CheckpointError(f"{path}: weight {name} has shape {shapes}")
            parameter.copy_(weights[name])


def load_state(folder: Path) -> dict[str, Any]:
    """The training state of a checkpoint (tensors and plain values only)."""
    path = folder / "training_state.pt"
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return state


def load_model(folder: Path) -> LoadedCheckpoint:
    """Load a checkpoint folder, or of a run folder its best checkpoint."""
    if not (folder / "model.safetensors").is_file():
        if not (folder / "best").exists():
            raise CheckpointError(f"{folder} is neither a checkpoint nor a run with one: train first")
        folder = folder / "best"
    folder = folder.resolve()
    record = read_json(folder / "config.json")
    try:
        if record["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {record['format']}: this version reads {FORMAT}")
        config = ModelConfig(**record["model"])
        if missing := {f.name for f in fields(SpecialIds)} - record["special_ids"].keys():
            raise CheckpointError(f"{folder}/config.json lacks special_ids.{min(missing)}")
        special = SpecialIds(**{**record["special_ids"], "unused": tuple(record["special_ids"]["unused"])})
        limits = record["limits"]["max_source_tokens"], record["limits"]["max_target_tokens"]
    except (KeyError, TypeError, AttributeError) as error:  # the latter two for a value of another type
        raise CheckpointError(f"{folder}/config.json is incomplete: {error}") from error
    tokenizers = load_tokenizers(folder, record)
    sizes = (config.source_vocab_size, config.target_vocab_size)
    if tuple(padded_vocab_size(len(tokenizer)) for tokenizer in tokenizers) != sizes:
        raise CheckpointError(f"{folder}: tokenizers of {[len(t) for t in tokenizers]} tokens, model of {list(sizes)}")
    model = Transformer(config)
    load_weights(model, folder / "model.safetensors")
    files = {side: record["tokenizers"][side]["file"] for side in ("source", "target")}
    return LoadedCheckpoint(folder, model.eval(), *tokenizers, files, special, *limits, record)


def load_tokenizers(folder: Path, record: Mapping[str, Any]) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers that config.json names: of their size and content, no others. Joint ones are one object."""
    loaded: dict[str, Tokenizer] = {}
    sides = []
    for side in ("source", "target"):
        try:
            entry = record["tokenizers"][side]
            name, size, sha256 = entry["file"], entry["num_tokens"], entry["sha256"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{folder}/config.json is incomplete: tokenizers.{side}: {error}") from error
        tokenizer = loaded[name] = loaded.get(name) or load_tokenizer(folder / name)
        if len(tokenizer) != size:
            raise CheckpointError(f"{folder / name} has {len(tokenizer)} tokens: the model was trained with {size}")
        if hashlib.sha256(tokenizer.to_bytes()).hexdigest() != sha256:
            raise CheckpointError(f"{folder / name} is not the tokenizer that the model was trained with")
        sides.append(tokenizer)
    return sides[0], sides[1]
