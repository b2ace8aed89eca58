"""Runs and checkpoints on disk.

    RUN/config.json                   what the run is: see record.py
    RUN/metrics.jsonl                 one JSON line a validation: see metrics.py
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
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dragoman_training.config import ModelConfig, padded_vocab_size
from dragoman_training.errors import CheckpointError, TrainingError
from dragoman_training.folders import WRITING_PREFIX, flush, free_space, written_aside
from dragoman_training.metrics import finite
from dragoman_training.model import Transformer
from dragoman_training.record import FORMAT
from dragoman_training.tokenizer import SpecialIds, Tokenizer, file_names, load_tokenizer

LOG = logging.getLogger(__name__)
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


def retried(write: Callable[[], Result], path: Path) -> Result:
    """``write()``, tried again after a pause when the disk fails it; ``CheckpointError`` when it fails for good."""
    for number, pause in enumerate((*PAUSES_SECONDS, None), 1):
        try:
            return write()
        except OSError as error:
            free = f"{path} could not be written ({error.strerror or error}), {free_space(path)} free"
            if pause is None:
                raise CheckpointError(f"{free}, in {number} tries: make room, then continue with --resume") from error
            LOG.warning("%s: next try in %g s", free, pause)
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def checkpoint_folders(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first. What has another name, as a copy has, is none of them."""
    present = (run / "checkpoints").glob("step-*")
    found = [folder for folder in present if CHECKPOINT_NAME.fullmatch(folder.name) and folder.is_dir()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was saved, from its name."""
    return int(folder.name.removeprefix("step-"))


def validated_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints that a validation wrote, oldest first: not the state that was saved at a signal."""
    return [folder for folder in checkpoint_folders(run) if _is_validated(folder)]


def _is_validated(folder: Path) -> bool:
    """Whether a validation wrote it. One that is damaged does not end the run, which may never need it: it did not."""
    try:
        metrics = read_json(folder / "metrics.json")
    except CheckpointError as error:
        LOG.warning("%s: %s is taken for one of no validation", error, folder.name)
        return False
    return isinstance(metrics, dict) and "dev_loss" in metrics


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
    """Write a checkpoint folder, which appears complete or not at all. Without ``state`` it cannot be trained on.

    Raises ``OSError`` when the disk fails.
    """
    whole = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    with written_aside(folder) as aside:
        write_json(aside / "config.json", record)
        write_json(aside / "metrics.json", finite(metrics))
        for name, tokenizer in zip(file_names(*tokenizers).values(), tokenizers, strict=True):
            (aside / name).write_bytes(tokenizer.to_bytes())
        with as_os_errors():
            safetensors.torch.save_file(whole, aside / "model.safetensors")
            if state is not None:
                with (aside / "training_state.pt").open("wb") as file:  # by its name, torch would not tell what failed
                    torch.save(dict(state), file)


@contextmanager
def as_os_errors() -> Iterator[None]:
    """What the libraries make of an ``OSError`` becomes one again, with the disk's reason and without their own words.

    torch raises its own error while it handles that of the file; safetensors ends its text with the reason.
    """
    try:
        yield
    except (RuntimeError, safetensors.SafetensorError) as error:
        hidden = error.__context__
        reason = hidden.strerror if isinstance(hidden, OSError) else None
        raise OSError(reason or str(error).rpartition("I/O error: ")[2]) from error


def settle(run: Path, newest: Path, best_step: int | None, keep: int) -> None:
    """Links and pruning after the checkpoint ``newest`` was written, or found on resuming."""
    point(run / "last", newest)
    if best_step is not None:
        point(run / "best", run / "checkpoints" / f"step-{best_step:08d}")
    prune(run, keep, best_step)


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
    except (FileNotFoundError, PermissionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # torch raises many kinds for a damaged file, and its words lead astray
        raise CheckpointError(f"{path} is damaged: remove {folder} to go on from the checkpoint before it") from error
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
        special = SpecialIds.from_record(record["special_ids"])
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
