"""The picture of a run, and its figures for TensorBoard."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dragoman_training import report
from dragoman_training.errors import CheckpointError
from dragoman_training.tensorboard import RunWriter


def line(step: int, **more: float) -> str:
    values = {"step": step, "train_loss": 9 / step, "dev_loss": 10 / step, "tokens_per_second": 5000 + step}
    values |= {"learning_rate": 1e-3, "seconds": 60.0, "best_step": 200, "dev_exact_match": 0.1, **more}
    return json.dumps(values) + "\n"


def drawn_curves(run: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[float]]]:
    """Draw the picture of a run; the points of each curve by its label."""
    drawn: list[Figure] = []
    original = Figure.savefig

    def save(figure: Figure, *arguments: Any, **options: Any) -> None:
        drawn.append(figure)
        original(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", save)
    report.draw(run, run / "report.png")
    return {
        str(curve.get_label()): np.asarray(curve.get_xydata()).tolist()
        for axes in drawn[0].axes
        for curve in axes.lines
    }


@pytest.mark.parametrize(
    ("more", "quality"), [({"dev_bleu": 20.0, "dev_chrf": 45.0}, {"BLEU", "chrF"}), ({}, {"exact match"})]
)
def test_loss_quality_speed_and_rate_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, float], quality: set[str]
) -> None:
    """Every curve has the points of the metrics file; half a last line is nothing."""
    (tmp_path / "metrics.jsonl").write_text(line(100, **more) + line(200, **more) + '{"step": 3')
    curves = drawn_curves(tmp_path, monkeypatch)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert curves["training, as optimised"] == [[100, 0.09], [200, 0.045]]
    assert curves["dev"] == [[100, 0.1], [200, 0.05]]
    assert curves["target tokens"] == [[100, 5100], [200, 5200]]
    assert curves["learning rate"] == [[100, 1e-3], [200, 1e-3]]
    assert quality <= curves.keys()
    assert "best: step 200" in curves


def test_a_run_without_a_validation_is_refused(tmp_path: Path) -> None:
    """So is a folder that is no run, and a place that cannot be written."""
    with pytest.raises(CheckpointError, match="name the folder of a run"):
        report.draw(tmp_path, tmp_path / "report.png")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="no validation yet"):
        report.draw(tmp_path, tmp_path / "report.png")
    (tmp_path / "metrics.jsonl").write_text(line(100))
    with pytest.raises(CheckpointError, match="cannot be written"):
        report.draw(tmp_path, tmp_path / "nowhere" / "report.png")


def test_figures_that_were_no_numbers_and_damaged_lines_leave_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other validations are drawn."""
    lost = json.loads(line(200)) | {"train_loss": None, "dev_loss": None}
    lines = [line(100).encode(), json.dumps(lost).encode() + b"\n", b'{"step": 250\xff}\n', line(300).encode()]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    curves = drawn_curves(tmp_path, monkeypatch)
    assert curves["dev"] == [[100, 0.1], [200, pytest.approx(np.nan, nan_ok=True)], [300, 10 / 300]]
    assert curves["target tokens"] == [[100, 5100], [200, 5200], [300, 5300]]


@pytest.mark.parametrize(
    ("after", "expected"), [(3, [(1, 1.5), (5, 0.5)]), (0, [(5, 0.5)])], ids=["resumed", "begun anew"]
)
def test_tensorboard_reads_what_the_writer_wrote(tmp_path: Path, after: int, expected: list[tuple[int, float]]) -> None:
    """A run that went on after some step shows its own later steps, not those of the session that was killed."""
    first = RunWriter(tmp_path)
    first.scalars(1, {"dev/loss": 1.5, "train/loss": 2.5})
    first.scalars(5, {"dev/loss": 9.5})
    first.close()
    (old,) = (tmp_path / "tensorboard").iterdir()
    old.rename(old.with_name("events.out.tfevents.1000000000.first"))  # the names of one second would be equal
    second = RunWriter(tmp_path, after)
    second.scalars(5, {"dev/loss": 0.5})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("dev/loss")] == expected
    train_points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert train_points == ([(1, 2.5)] if after else [])
