"""One model, everywhere the same numbers: the trainer's validation, the checkpoint, the bundle and a running server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.processes import dragoman

from dragoman_training.checkpoint import load_model
from dragoman_training.configfile import load_config
from dragoman_training.data import load_datasets
from dragoman_training.validate import validate
from dragoman_training.workers import Workers

FILES = ("--source", "dev.source", "--target", "dev.target", "--bleu-tokenizer", "none")
FIGURES = ("exact_match", "word_error_rate", "token_error_rate", "bleu", "chrf", "length_ratio", "looping_outputs")


@pytest.fixture(scope="module")
def address(reverse_bundle: Path) -> Iterator[str]:
    """A server of the bundle, as a process."""
    command = [sys.executable, "-m", "dragoman.cli.main", "serve", str(reverse_bundle)]
    command += ["--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        yield f"127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        process.terminate()


def evaluated(folder: Path, *system: object) -> dict[str, Any]:
    """The figures that the command writes."""
    dragoman("evaluate", *system, *FILES, "--output", "outputs.txt", "--json", "figures.json", cwd=folder)
    content: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    content["outputs"] = (folder / "outputs.txt").read_text()
    return content


def test_validation_checkpoint_bundle_and_server_give_equal_scores(
    reverse_data: Path, reverse_run: Path, reverse_bundle: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text from all of them, hence the same figures, with the same signature."""
    checkpoint = evaluated(reverse_data, "run")
    assert checkpoint["bleu"] > 20  # it did learn something
    for system in (("--bundle", reverse_bundle), ("--server", address), ("--hypotheses", "outputs.txt")):
        other = evaluated(reverse_data, *system, "--target-unit", "piece")
        assert other["outputs"] == checkpoint["outputs"]
        assert {name: other[name] for name in FIGURES} == {name: checkpoint[name] for name in FIGURES}
        assert other["signatures"] == checkpoint["signatures"]
    monkeypatch.chdir(reverse_data)
    config = load_config("reverse.toml")
    config = replace(config, loop=replace(config.loop, metric="bleu", bleu_tokenizer="none"))
    loaded = load_model(reverse_run)
    with Workers(loaded.model, 2, smoothing=0.0) as workers:
        validation = validate(workers, load_datasets(config, reverse_run), config, loaded.special)
    assert "".join(f"{line}\n" for line in validation.outputs) == checkpoint["outputs"]
    found = validation.metrics()
    assert {name: found[name] for name in ("bleu", "chrf", "exact_match")} == {
        name: checkpoint[name] for name in ("bleu", "chrf", "exact_match")
    }
    assert validation.signatures == checkpoint["signatures"]


def test_a_student_learns_from_a_served_teacher(reverse_data: Path, reverse_bundle: Path, address: str) -> None:
    """The documented way: distil, train, evaluate. The student never saw a true answer, and gets most of them right.

    Through a bundle or through a server, the student's data are the same.
    """
    for system, out in ((("--bundle", reverse_bundle), "distilled"), (("--server", address), "served")):
        dragoman("distill", *system, "--source", "train.source", "--out", out, cwd=reverse_data)
    for name in ("train.source", "train.target"):
        assert (reverse_data / "distilled" / name).read_bytes() == (reverse_data / "served" / name).read_bytes()
    changes = ["data.train_source=distilled/train.source", "data.train_target=distilled/train.target"]
    changes += ["model.d_model=32", "optimizer.kind=muon", "schedule.steps=300", "schedule.cooldown_steps=150"]
    settings = [word for change in changes for word in ("--set", change)]
    dragoman("train", "reverse.toml", *settings, "--out", "student", cwd=reverse_data)
    assert evaluated(reverse_data, "student")["exact_match"] > 0.5
