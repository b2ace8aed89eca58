"""Scores against worked examples, and the command over all origins of outputs."""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_training.checkpoint import load_model
from dragoman_training.cli import evaluate as command
from dragoman_training.configfile import load_config
from dragoman_training.errors import DataError
from dragoman_training.evaluate import Outputs, decode_checkpoint, edit_distance, run_bundle, score
from dragoman_training.train import train


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("abc", "abc", 0), ("ab", "ba", 2), ("abcd", "bcde", 2)],
)
def test_edit_distance(a: str, b: str, distance: int) -> None:
    """Worked examples."""
    assert edit_distance(a, b) == distance


@given(st.text("ab", max_size=6), st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_edit_distance_is_a_distance(a: str, b: str, c: str) -> None:
    """Symmetric, zero only for equals, and no detour is shorter."""
    assert edit_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


def test_a_worked_example() -> None:
    """Three lines: right; wrong but an accepted alternative; wrong for all. Two edits, nine tokens."""
    outputs = Outputs(["S L AO TH", "T UW", "K AE T S"], 1.5)
    scores = score(outputs, ["S L AO TH", "T AH", "K AE T"], [["S L AO TH"], ["T AH", "T UW"], ["K AE T", "K AA T"]])
    assert scores.summary() == {
        "lines": 3,
        "exact_match": pytest.approx(1 / 3),
        "word_error_rate": pytest.approx(2 / 3),
        "token_error_rate": pytest.approx(2 / 9),
        "any_match_error_rate": pytest.approx(1 / 3),
        "sentences_per_second": pytest.approx(2.0),
    }


def test_outputs_of_another_length_are_refused() -> None:
    """The message holds both counts."""
    with pytest.raises(DataError, match="1 outputs but 2 target lines"):
        score(Outputs(["a"], 0), ["a", "b"])


def test_a_checkpoint_is_decoded_in_order(toy: Path) -> None:
    """Blank lines come back unchanged, lines over the limit as nothing, and beam 1 is greedy."""
    train(load_config("toy.toml"), toy / "run")
    checkpoint = load_model(toy / "run")
    lines = ["abc", "", "  ", "abcdabcdabcd", "d"]
    outputs = decode_checkpoint(checkpoint, lines).lines
    assert outputs[1:4] == ["", "  ", ""]
    assert [decode_checkpoint(checkpoint, [line]).lines[0] for line in lines] == outputs
    assert len(decode_checkpoint(checkpoint, lines, beam_size=3).lines) == 5


def test_all_origins_are_scored_by_the_same_code(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint's outputs, written to a file and scored from there, give the same figures."""
    train(load_config("toy.toml"), toy / "run")
    data = ["--source", "dev.source", "--target", "dev.target"]
    assert run_command("run", *data, "--output", "out.txt", "--json", "a.json", "--references", "dev.target") == 0
    assert run_command("--hypotheses", "out.txt", *data, "--json", "b.json") == 0
    printed = capsys.readouterr().out
    a, b = (json.loads((toy / name).read_text()) for name in ("a.json", "b.json"))
    assert a["any_match_error_rate"] == a["word_error_rate"]
    assert {key: a[key] for key in b} == b
    assert f"word_error_rate: {a['word_error_rate']:.4f}" in printed


def test_beams_are_refused_for_outputs_made_elsewhere(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An option without effect is an error, not silence."""
    arguments = ["--hypotheses", "dev.target", "--source", "dev.source", "--target", "dev.target"]
    assert run_command(*arguments, "--beam-size", "4") == 2
    assert "--beam-size is 4" in capsys.readouterr().err


def test_a_bundle_is_run_as_a_process(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``dragoman generate --bundle DIR`` reads the source file and its lines are the outputs; its failure is told."""
    package = toy / "dragoman" / "cli"
    package.mkdir(parents=True)
    (toy / "dragoman" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "main.py").write_text(
        "import sys\n"
        "assert sys.argv[1:3] == ['generate', '--bundle']\n"
        "if sys.argv[3] == 'bad': sys.exit('error: no bundle here')\n"
        "for line in sys.stdin: print(line.strip().upper())\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(toy), *sys.path]))
    (toy / "words").write_text("ab\ncd\n")
    assert run_bundle(Path("good"), toy / "words").lines == ["AB", "CD"]
    with pytest.raises(DataError, match=r"bad ended with status 1: error: no bundle here"):
        run_bundle(Path("bad"), toy / "words")
