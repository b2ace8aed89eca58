"""The command, over all origins of outputs."""

import argparse
import json
from pathlib import Path

import pytest

from dragoman_training.cli import evaluate as command
from dragoman_training.configfile import load_config
from dragoman_training.train import train

DATA = ["--source", "dev.source", "--target", "dev.target"]


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def read(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(path.read_text())
    return content


def test_all_origins_are_scored_by_the_same_code(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint's outputs, written to a file and scored from there, give the same figures."""
    train(load_config("toy.toml"), toy / "run")
    asked = [*DATA, "--bleu-tokenizer", "none"]
    assert run_command("run", *asked, "--output", "out.txt", "--json", "a.json", "--references", "dev.target") == 0
    printed = capsys.readouterr().out
    assert run_command("--hypotheses", "out.txt", *asked, "--json", "b.json") == 0
    a, b = read(toy / "a.json"), read(toy / "b.json")
    assert a["any_match_error_rate"] == a["word_error_rate"]
    assert {key: a[key] for key in b if key != "cut_outputs"} == {key: b[key] for key in b if key != "cut_outputs"}
    assert f"{a['word_error_rate']:.4f}" in printed
    assert "tok:none" in printed
    assert "number_copy_rate:         absent: the sources hold no number" in printed
    assert a["number_copy_rate"] is None


def test_a_second_system_is_compared(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The right lines against the sources: no chance. The figures stand in JSON and table."""
    asked = [*DATA, "--against", "dev.source", "--json", "a.json"]
    assert run_command("--hypotheses", "dev.target", *asked) == 0
    against = read(toy / "a.json")["against"]
    assert isinstance(against, dict)
    assert against["system"] == "dev.source"
    assert list(against) == ["system", "exact_match", "bleu", "chrf"]
    assert against["exact_match"]["score"] == 100
    assert against["exact_match"]["p_value"] < 0.01
    printed = capsys.readouterr().out
    assert "against dev.source" in printed
    assert "seed:12345" in printed


def test_plain_units_are_compared_by_exact_match_alone(toy: Path) -> None:
    """BLEU of phonemes means nothing here either."""
    train(load_config("toy.toml"), toy / "run")
    assert run_command("run", *DATA, "--against", "dev.target", "--beam-size", "2", "--json", "a.json") == 0
    content = read(toy / "a.json")
    assert "bleu" not in content
    assert list(content["against"]) == ["system", "exact_match"]  # type: ignore[call-overload]  # a dict


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--references", "short"], "short has 1 lines but dev.source has 10: line n must match line n"),
        (["--against", "short"], "short has 1 lines but there are 10 sources: line n must match line n"),
        (["--json", "no/a.json"], "--json no/a.json cannot be written: name a file in a folder that is there"),
        (["--output", "dev"], "--output dev cannot be written"),
    ],
)
def test_what_would_fail_afterwards_is_refused_before_anything_is_translated(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """A beam search over a test set may take an hour. Nothing is written."""

    def translate(*_: object) -> None:
        raise AssertionError("translated")

    monkeypatch.setattr("dragoman_training.systems.ServedSystem.outputs", translate)
    (toy / "short").write_text("a\n")
    (toy / "dev").mkdir()
    before = sorted(toy.iterdir())
    assert run_command("--server", "localhost:1", *DATA, *arguments) == 2
    assert message in capsys.readouterr().err
    assert sorted(toy.iterdir()) == before


def test_more_lines_than_can_be_compared_are_refused_before_anything_is_translated(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the limit."""
    monkeypatch.setattr("dragoman_training.bootstrap.MAX_LINES", 9)
    assert run_command("--server", "localhost:1", *DATA, "--against", "dev.target") == 2
    assert "10 lines are over the 9" in capsys.readouterr().err


def test_the_table_is_printed_where_a_file_cannot_be_written_after_all(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that fills up meanwhile costs the file, not the figures."""
    assert run_command("--hypotheses", "dev.target", *DATA, "--output", "/dev/full") == 2
    printed = capsys.readouterr()
    assert "exact_match:" in printed.out
    assert "/dev/full could not be written (No space left on device)" in printed.err


def test_a_bundle_in_the_place_of_a_run_is_told_to_be_one(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the option that it belongs to."""
    (toy / "b").mkdir()
    (toy / "b" / "manifest.json").write_text("{}")
    assert run_command("b", *DATA) == 2
    assert "b is a bundle: name it with --bundle b" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["1", "4"])
def test_beams_are_refused_for_outputs_made_elsewhere(toy: Path, capsys: pytest.CaptureFixture[str], size: str) -> None:
    """An option without effect is an error, not silence."""
    assert run_command("--hypotheses", "dev.target", *DATA, "--beam-size", size) == 2
    assert f"--beam-size is {size}" in capsys.readouterr().err


def test_a_beam_of_nothing_is_refused(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not taken for the default."""
    train(load_config("toy.toml"), toy / "run")
    assert run_command("run", *DATA, "--beam-size", "0") == 2
    assert "beam size is 0" in capsys.readouterr().err
