"""Averages of weights: along a training run, as it goes, and over its last checkpoints, when it is done.

Both smooth out the noise of the last steps, and mostly are better than any one set of weights. Averaging checkpoints
pays once the learning rate has fallen: before, the weights still move too far from one to the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dragoman_training import checkpoint
from dragoman_training.changes import changed_fields
from dragoman_training.errors import CheckpointError
from dragoman_training.folders import explained
from dragoman_training.metrics import read_metrics


class MovingAverage:
    """An exponential moving average of a model's weights, in memory of its own.

    The n-th update (from 1) keeps ``min(decay, (1 + n) / (10 + n))`` of the old average: early on it forgets quickly,
    so that the random start leaves no trace.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.model_weights: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
        self.weights = {name: weight.clone() for name, weight in self.model_weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's present weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self.weights.values()), list(self.model_weights.values()), 1 - decay)

    @torch.no_grad()
    def restart(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Continue from a saved average of so many updates."""
        self.updates = updates
        for name, weight in self.weights.items():
            weight.copy_(weights[name])

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has the average for its weights inside, and its own again, bit by bit, outside."""
        own = {name: weight.clone() for name, weight in self.model_weights.items()}
        with torch.no_grad():
            for name, weight in self.model_weights.items():
                weight.copy_(self.weights[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in self.model_weights.items():
                    weight.copy_(own[name])


def newest_checkpoints(run: Path, number: int) -> list[Path]:
    """The checkpoints of a run's ``number`` newest validations, oldest first.

    ``CheckpointError`` where there are fewer, or where one between them is gone: an old best one is no neighbour of the
    newest. The state saved at a signal does not count.
    """
    folders = checkpoint.validated_checkpoints(run)
    if not folders:
        raise CheckpointError(f"{run} has no checkpoint of a validation: name a run, or wait for its first")
    if not 1 <= number <= len(folders):
        raise CheckpointError(
            f"{run} has {len(folders)} checkpoints of validations, not {number}: choose 1 to {len(folders)}, or train"
            " with a larger loop.keep_checkpoints"
        )
    newest = folders[-number:]
    there = [int(folder.name.removeprefix("step-")) for folder in newest]
    validated = [line["step"] for line in read_metrics(run / "metrics.jsonl")]
    if gone := [step for step in validated if there[0] < step < there[-1] and step not in there]:
        raise CheckpointError(
            f"{run} no longer has the checkpoint of step {gone[-1]}, and so not the {number} newest: choose a smaller"
            " number, or train with a larger loop.keep_checkpoints"
        )
    return newest


def average_checkpoints(folders: Sequence[Path], out: Path) -> None:
    """Write the arithmetic mean of some checkpoints' weights, summed in float64, as the checkpoint folder ``out``.

    It can be evaluated and exported, not trained on. Its config.json is the last one's and names all under
    ``averaged``. Refuses checkpoints of other shapes, tokenizers or special ids, and an ``out`` that exists or cannot
    be written.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists: choose another --out")
    records = [read_record(folder) for folder in folders]
    for folder, record in zip(folders, records, strict=True):
        for name, (last, own) in changed_fields(identity(records[-1]), identity(record)).items():
            remedy = "average checkpoints of one run"
            raise CheckpointError(f"{folder} has {name} {own!r}, {folders[-1]} has {last!r}: {remedy}")
    sums: dict[str, Tensor] = {}
    sources = []
    for folder in folders:
        path = folder / "model.safetensors"
        weights = checkpoint.read_weights(path)
        for name in sorted(weights.keys() ^ (sums or weights).keys()):
            raise CheckpointError(f"{path} does not fit the others: weight {name} is on one side only")
        for name, weight in weights.items():
            if name in sums and sums[name].shape != weight.shape:
                shapes = f"{tuple(weight.shape)}, the others have {tuple(sums[name].shape)}"
                raise CheckpointError(f"{path}: weight {name} has shape {shapes}")
            sums[name] = sums[name] + weight.double() if name in sums else weight.double()
        sources.append({"name": folder.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    mean = {name: (total / len(folders)).float() for name, total in sums.items()}
    tokenizers = checkpoint.load_tokenizers(folders[-1], records[-1])
    with explained(out, CheckpointError):
        checkpoint.write_checkpoint(out, mean, tokenizers, {**records[-1], "averaged": sources}, {})


def read_record(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint folder."""
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder} is no checkpoint folder: name RUN/checkpoints/step-…, or give --last")
    record: dict[str, Any] = checkpoint.read_json(folder / "config.json")
    return record


def identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """What checkpoints must share to be averaged. Dropout rates may change in a run."""
    shape = {name: value for name, value in record.get("model", {}).items() if "dropout" not in name}
    return {"model": shape, **{name: record.get(name) for name in ("format", "tokenizers", "special_ids")}}
