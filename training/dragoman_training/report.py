"""A run in one picture: loss, quality, speed and learning rate over its steps, from RUN/metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dragoman_training.errors import CheckpointError
from dragoman_training.metrics import read_metrics

Lines = Sequence[Mapping[str, Any]]


def draw(run: Path, out: Path) -> None:
    """Write the picture as PNG to ``out``; ``CheckpointError`` for a run without a validation, or where it cannot."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise CheckpointError(f"{path} is not there: name the folder of a run")
    if not (lines := read_metrics(path)):
        raise CheckpointError(f"{path} has no validation yet: wait for the first")
    figure = Figure(figsize=(11, 7), layout="constrained")  # not pyplot: it needs no screen and keeps no global state
    figure.suptitle(f"{run.resolve().name}: {len(lines)} validations, {lines[-1]['seconds'] / 60:.1f} minutes")
    (loss, quality), (speed, rate) = figure.subplots(2, 2, sharex=True)
    plot(loss, lines, {"train_loss": "training, as optimised", "dev_loss": "dev"}, "loss a token (nats)")
    if any("dev_bleu" in line for line in lines):
        plot(quality, lines, {"dev_bleu": "BLEU", "dev_chrf": "chrF"}, "quality of the dev set, greedy")
    else:
        plot(quality, lines, {"dev_exact_match": "exact match"}, "share of dev lines right, greedy")
    plot(speed, lines, {"tokens_per_second": "target tokens"}, "target tokens a second")
    plot(rate, lines, {"learning_rate": "learning rate"}, "learning rate")
    best = lines[-1]["best_step"]
    for axes in (loss, quality):
        if best is not None:  # no loss was a number
            axes.axvline(best, color="0.7", linestyle=":", label=f"best: step {best}")
        axes.legend()
    for axes in (speed, rate):
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
    try:
        figure.savefig(out, format="png", dpi=120)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written ({error.strerror}): choose another --out") from error


def plot(axes: Axes, lines: Lines, names: Mapping[str, str], title: str) -> None:
    """One curve for each name, through the lines that have it; null, for what was no number, leaves a gap."""
    for name, label in names.items():
        points = [(line["step"], math.nan if line[name] is None else line[name]) for line in lines if name in line]
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 100 else "", label=label)
    axes.set_title(title)
    axes.grid(alpha=0.3)
