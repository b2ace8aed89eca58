"""Runs and checkpoints on disk.

    RUN/config.json                   what the run is: see ``run_record``
    RUN/metrics.jsonl                 one JSON line a validation
    RUN/tokenizers/                   the tokenizers, trained once
    RUN/checkpoints/step-NNNNNNNN/    config.json, model.safetensors, tokenizer files, training_state.pt, metrics.json
    RUN/best, RUN/last                relative links to checkpoints
    RUN/.lock                         held by the process that trains the run

A checkpoint folder appears under its name complete or not at all (written aside, flushed to disk, renamed), whenever
the process is killed. Nothing is unpickled: tensors are safetensors, the training state is read with ``weights_only``.
model.safetensors holds what is validated and used: the moving average of the weights where the run keeps one, and then
the training state holds the weights themselves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dragoman_training.config import ModelConfig, TrainConfig, padded_vocab_size
from dragoman_training.errors import CheckpointError, TrainingError
from dragoman_training.folders import WRITING_PREFIX, flush, written_aside
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import SpecialIds, Tokenizer, file_names, load_tokenizer

LOG = logging.getLogger(__name__)
FORMAT = 1
CHECKPOINT_NAME = re.compile(r"step-[0-9]{8,}")
PAUSES_SECONDS = (1.0, 5.0)  # before the second and the third try of a failed write
Result = TypeVar("Result")


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


def config_record(config: TrainConfig) -> dict[str, Any]:
    """A configuration section by section. Data files go in by name, never by their place on a disk."""
    record = json.loads(json.dumps(asdict(config)))  # lists for tuples, as it will be read back
    for name in ("train_source", "train_target", "dev_source", "dev_target"):
        record["data"][name] = Path(record["data"][name]).name
    return dict(record)


def run_record(
    model: ModelConfig,
    special: SpecialIds,
    tokenizers: tuple[Tokenizer, Tokenizer],
    config: TrainConfig,
    data: Mapping[str, Any],
    processes: int = 1,
) -> dict[str, Any]:
    """The content of config.json. ``data`` tells what the files hold; ``history`` gets what ``--resume`` changed."""
    files = file_names(*tokenizers)
    training = config_record(config)
    del training["model"]  # "model" has it, with the vocabulary sizes
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
        "processes": processes,
        "data": json.loads(json.dumps(data)),
        "history": [],
        "tools": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }


def changed_fields(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The fields whose values differ, as ``section.name`` to the old and the new value (None where there is none)."""
    changed: dict[str, tuple[Any, Any]] = {}
    for key in [*saved, *(key for key in now if key not in saved)]:
        old, new = saved.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changed |= changed_fields(old, new, f"{prefix}{key}.")
        elif old != new:
            changed[f"{prefix}{key}"] = (old, new)
    return changed


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings in which two config.json differ, named as in a configuration file; files by ``data.NAME.sha256``."""
    try:
        (old, old_files), (new, new_files) = (
            ({"model": r["model"], **r["training"], "processes": r["processes"]}, {"data": r["data"]})
            for r in (saved, now)
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"config.json is incomplete: {error}") from error
    return changed_fields(old, new) | changed_fields(old_files, new_files)


def write_json(path: Path, content: object) -> None:
    """Replace a JSON file atomically."""
    temporary = path.with_name(f"{WRITING_PREFIX}{path.name}")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def read_json(path: Path) -> Any:
    """Read a JSON file; ``CheckpointError`` naming it otherwise."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def append_metrics(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line to metrics.jsonl, whole or not at all, and flush it to disk."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        flush(path)
        flush(path.parent)
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


def read_metrics(path: Path) -> list[tuple[int, str]]:
    """The lines of metrics.jsonl, each after its step. What is no such line is left out: half a one, say."""
    found: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        try:
            found.append((int(json.loads(line)["step"]), line))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def truncate_metrics(path: Path, step: int) -> None:
    """Keep the lines up to ``step``: a killed session may have written some, or half a one, of later steps."""
    if not path.exists():
        return
    kept = [line for its_step, line in read_metrics(path) if its_step <= step]
    temporary = path.with_name(f"{WRITING_PREFIX}{path.name}")
    temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    flush(temporary)
    temporary.replace(path)


def retried(write: Callable[[], Result], path: Path) -> Result:
    """``write()``, tried again after a pause when the disk fails it; ``CheckpointError`` when it fails for good."""
    for number, pause in enumerate((*PAUSES_SECONDS, None), 1):
        try:
            return write()
        except OSError as error:
            free = f"{path} could not be written ({error}), {free_space(path)} free"
            if pause is None:
                raise CheckpointError(f"{free}, in {number} tries: make room, then continue with --resume") from error
            LOG.warning("%s: next try in %g s", free, pause)
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def free_space(path: Path) -> str:
    """The free space of the disk that holds a path, for a person."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB"


def checkpoint_folders(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first. A folder of another name, as a copy has, is none of them."""
    found = [folder for folder in (run / "checkpoints").glob("step-*") if CHECKPOINT_NAME.fullmatch(folder.name)]
    # By number: names have eight digits, or more when a run is that long.
    return sorted(found, key=lambda folder: (len(folder.name), folder.name))


def validated_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints that a validation wrote, oldest first: not the state that was saved at a signal."""
    return [folder for folder in checkpoint_folders(run) if "dev_loss" in read_json(folder / "metrics.json")]


def save_checkpoint(
    run: Path,
    step: int,
    weights: Mapping[str, Tensor],
    tokenizers: tuple[Tokenizer, Tokenizer],
    record: Mapping[str, Any],
    state: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> Path:
    """Write ``RUN/checkpoints/step-NNNNNNNN`` atomically and return it; an existing one of that step stays as it is.

    Refuses weights that are not finite. Raises ``OSError`` when the disk fails.
    """
    folder = run / "checkpoints" / f"step-{step:08d}"
    if not folder.exists():
        raw: Mapping[str, Tensor] = state.get("weights", {})
        for name, weight in [*weights.items(), *raw.items()]:
            if not bool(torch.isfinite(weight).all()):
                raise TrainingError(f"weight {name} is not finite at step {step}: not saved; lower the learning rate")
        write_checkpoint(folder, weights, tokenizers, record, metrics, state)
    return folder


def write_checkpoint(
    folder: Path,
    weights: Mapping[str, Tensor],
    tokenizers: tuple[Tokenizer, Tokenizer],
    record: Mapping[str, Any],
    metrics: Mapping[str, Any],
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint folder, which appears complete or not at all. Without ``state`` it cannot be trained on."""
    whole = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    with written_aside(folder) as aside:
        write_json(aside / "config.json", record)
        write_json(aside / "metrics.json", metrics)
        for name, tokenizer in zip(file_names(*tokenizers).values(), tokenizers, strict=True):
            (aside / name).write_bytes(tokenizer.to_bytes())
        try:
            safetensors.torch.save_file(whole, aside / "model.safetensors")
            if state is not None:
                torch.save(dict(state), aside / "training_state.pt")
        except (RuntimeError, safetensors.SafetensorError) as error:  # what the libraries make of an OSError
            raise OSError(str(error)) from error


def point(link: Path, folder: Path) -> None:
    """Make ``link`` a relative link to ``folder``, replacing an older one atomically."""
    temporary = link.with_name(f"{WRITING_PREFIX}{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.relative_to(link.parent))
    temporary.replace(link)


def prune(run: Path, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints but the ``keep`` newest and the best, and what an interrupted writing left.

    The state saved at a signal does not count, and stays only as long as it is the newest: a run that was stopped keeps
    what one that was left alone keeps.
    """
    best = f"step-{best_step:08d}" if best_step is not None else None
    folders = checkpoint_folders(run)
    kept = {*validated_checkpoints(run)[-keep:], *folders[-1:]}
    for folder in folders:
        if folder not in kept and folder.name != best:
            shutil.rmtree(folder)
    for leftover in (run / "checkpoints").glob(f"{WRITING_PREFIX}*"):
        shutil.rmtree(leftover)


def load_weights(model: Transformer, path: Path) -> None:
    """Fill a model with saved weights; names and shapes must be the model's own."""
    fill_weights(model, read_weights(path), path)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a model.safetensors by name."""
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def fill_weights(model: Transformer, weights: Mapping[str, Tensor], path: Path) -> None:
    """Copy weights, which were read from ``path``, into a model; names and shapes must be the model's own."""
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
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
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
