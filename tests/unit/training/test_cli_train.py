"""The commands train and average: arguments, exit statuses, one line for each refusal."""

import argparse
import os
import signal
from pathlib import Path
from types import ModuleType

import pytest

from dragoman_training import checkpoint, data, report
from dragoman_training.cli import average, train


def run_command(command: ModuleType, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    status: int = command.run(parser.parse_args(arguments))
    return status


def test_a_setting_on_the_command_line_is_used(toy: Path) -> None:
    """In place of the file's."""
    assert run_command(train, "toy.toml", "--set", "schedule.steps=9", "--set", "loop.seed=5", "--out", "run") == 0
    record = checkpoint.read_json(toy / "run" / "config.json")
    assert (record["training"]["schedule"]["steps"], record["training"]["loop"]["seed"]) == (9, 5)


def test_a_run_is_resumed_with_an_allowed_change(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And refused without: status 2, one line that names the setting."""
    assert run_command(train, "toy.toml", "--out", "run") == 0
    longer = ["toy.toml", "--out", "run", "--resume", "--set", "schedule.steps=16"]
    capsys.readouterr()
    assert run_command(train, *longer) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "--allow-change schedule.steps" in errors
    assert run_command(train, *longer, "--allow-change", "schedule.steps") == 0
    assert (toy / "run" / "last").readlink().name == "step-00000016"


def test_an_existing_folder_needs_resume(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second start is refused in one line and changes nothing."""
    assert run_command(train, "toy.toml", "--out", "run") == 0
    before = (toy / "run" / "last" / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert run_command(train, "toy.toml", "--out", "run") == 2
    assert "--resume" in capsys.readouterr().err
    assert (toy / "run" / "last" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a preset (base, deep_shallow, en-de, g2p-en, small, tiny)"),
        (["toy.toml"], "--out is missing"),
        (["toy.toml", "run"], "unexpected 'run'"),
        (["toy.toml", "--out", "run", "--set", "loop.sed=1"], "known here"),
        (["toy.toml", "--out", "run", "--allow-change", "loop.seed"], "add --resume"),
        (["toy.toml", "--out", "run", "--resume"], "there is no run in run"),
        (["report"], "report needs a run"),
    ],
)
def test_wrong_use_is_refused_in_one_line(
    toy: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """Status 2, and nothing is made."""
    assert run_command(train, *arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("dragoman train: error: ") and errors.count("\n") == 1
    assert words in errors
    assert not (toy / "run").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_before_training_has_its_documented_status(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, status: int
) -> None:
    """And its one line."""
    monkeypatch.setattr(data, "run_tokenizers", lambda *_: os.kill(os.getpid(), number))
    assert run_command(train, "toy.toml", "--out", "run") == status
    words = f"run: stopped by {signal.Signals(number).name} before training began: the same command starts again\n"
    assert capsys.readouterr().err == words


def test_the_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with what it is for."""
    assert run_command(train, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["base", "deep_shallow", "en-de", "g2p-en", "small", "tiny"]
    assert all(len(line) > 30 for line in lines)


def test_report_draws_a_run(toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """To RUN/report.png, or to --out."""
    drawn: list[tuple[Path, Path]] = []
    monkeypatch.setattr(report, "draw", lambda run, out: drawn.append((run, out)))
    assert run_command(train, "report", "run") == 0
    assert run_command(train, "report", "run", "--out", "curves.png") == 0
    assert drawn == [(Path("run"), Path("run/report.png")), (Path("run"), Path("curves.png"))]
    assert capsys.readouterr().out.split() == ["run/report.png", "curves.png"]


def test_average_makes_a_checkpoint_of_a_run(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of its newest checkpoints, or of those named."""
    run_command(train, "toy.toml", "--out", "run")
    assert run_command(average, "run", "--last", "2", "--out", "mean") == 0
    assert "step-00000008, step-00000012" in capsys.readouterr().out
    named = [f"run/checkpoints/step-{step:08d}" for step in (8, 12)]
    assert run_command(average, *named, "--out", "same") == 0
    same = [(toy / name / "model.safetensors").read_bytes() for name in ("mean", "same")]
    assert same[0] == same[1]
    assert checkpoint.load_model(toy / "mean").max_source_tokens == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["run", "--out", "mean"], "is no checkpoint folder"), (["a", "b", "--last", "1", "--out", "mean"], "one run")],
)
def test_average_refuses_what_it_cannot_do(
    toy: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """Status 2 and one line."""
    assert run_command(average, *arguments) == 2
    assert words in capsys.readouterr().err
