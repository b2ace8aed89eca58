"""metrics.jsonl: whole lines, valid JSON, and nothing else read from it."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dragoman_training import metrics


def test_a_line_is_written_whole_or_not_at_all(
    tmp_path: Path, small_files_only: Callable[[int], AbstractContextManager[None]]
) -> None:
    """A write error in the middle of a line takes the line away again."""
    path = tmp_path / "metrics.jsonl"
    metrics.append_metrics(path, {"step": 1})
    with small_files_only(20), pytest.raises(OSError, match="too large"):
        metrics.append_metrics(path, {"step": 2, "dev_loss": 3.25})
    assert path.read_text() == '{"step": 1}\n'


def test_a_line_is_on_the_disk_before_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File and folder are flushed, with the line in it."""
    flushed: dict[Path, str] = {}
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setattr(metrics, "flush", lambda what: flushed.update({what: path.read_text()}))
    metrics.append_metrics(path, {"step": 1})
    assert flushed == {path: '{"step": 1}\n', tmp_path: '{"step": 1}\n'}


def test_a_figure_that_is_no_finite_number_is_null(tmp_path: Path) -> None:
    """JSON has neither NaN nor infinity, and a strict reader stops at them."""
    path = tmp_path / "metrics.jsonl"
    metrics.append_metrics(path, {"step": 1, "dev_loss": float("nan"), "train_loss": float("-inf"), "dev_bleu": 0.5})
    assert path.read_text() == '{"step": 1, "dev_loss": null, "train_loss": null, "dev_bleu": 0.5}\n'


def test_truncating_keeps_the_lines_up_to_a_step(tmp_path: Path) -> None:
    """Byte for byte; whatever else stands there goes."""
    path = tmp_path / "metrics.jsonl"
    metrics.append_metrics(path, {"step": 4, "dev_loss": 0.1 + 0.2, "signatures": {"bleu": "é"}})
    kept = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"loss": 1}\n[4]\n4\n{"step": null}\n{"step": 5, "dev_loss": "\xff"}\n\xff\xfe\n')
        file.write(b'{"step": 8}\n{"step": 12}\n{"step"')
    metrics.truncate_metrics(path, 8)
    assert path.read_bytes() == kept + b'{"step": 8}\n'
    assert [line["step"] for line in metrics.read_metrics(path)] == [4, 8]
    metrics.truncate_metrics(tmp_path / "none.jsonl", 8)
    assert metrics.read_metrics(tmp_path / "none.jsonl") == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_with_nan_of_an_older_run_is_read_and_becomes_valid(tmp_path: Path) -> None:
    """Python's reader knows NaN; rewritten, it is null."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "dev_loss": NaN}\n')
    metrics.truncate_metrics(path, 1)
    assert json.loads(path.read_text()) == {"step": 1, "dev_loss": None}
