"""``dragoman explain``: the embedded model, shown to people and to programs."""

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from dragoman.cli import explain as command
from dragoman.cli import main as cli
from dragoman.errors import ConfigError


@pytest.fixture
def explain(capsys, monkeypatch):
    """Runs the command in this process; returns its exit status, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        status = command.run(parser.parse_args(["--model", "g2p-en", *map(str, arguments)]))
        return status, *capsys.readouterr()

    return run


def test_each_phoneme_is_printed_with_its_letters(explain):
    """The text, its answer, and a line a phoneme: "F" comes from an f."""
    status, out, err = explain("giraffe")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[:3] == ["giraffe", "JH ER AE F", ""]
    assert [line.split()[0] for line in lines[3:]] == ["JH", "ER", "AE", "F"]
    assert lines[3].split()[1] == "g" and lines[6].split()[1].startswith("f[")


def test_text_draws_all_weights(explain):
    """Below the lines: letters above, shades below, a legend."""
    _, out, _ = explain("--text", "giraffe")
    drawn = out.split("\n\n")[2].splitlines()
    assert drawn[0].split() == [*"giraffe", "</s>"]
    assert [line.split()[0] for line in drawn[1:]] == ["JH", "ER", "AE", "F"]
    assert drawn[1][3] in "▒▓█"  # JH below g
    assert out.splitlines()[-1].startswith("░ from 5%")


def test_json_has_tokens_and_words(explain):
    """One object; rows add up to all the attention that there is."""
    status, out, _ = explain("--json", "giraffe")
    data = json.loads(out)
    assert status == 0
    assert (data["model"], data["text"], data["answer"]) == ("g2p-en", "giraffe", "JH ER AE F")
    for name in ("tokens", "words"):  # letters and phonemes: the same
        assert data[name]["target"] == ["JH", "ER", "AE", "F"]
        assert data[name]["source"][slice(*data[name]["own"])] == list("giraffe")
        assert [sum(row) for row in data[name]["weights"]] == pytest.approx([1] * 4, abs=1e-3)


def test_shades_are_written_whatever_the_locale():
    """Latin-1 has none: the output is UTF-8, as that of generate."""
    program = "import argparse, sys\nfrom dragoman.cli import explain\nparser = argparse.ArgumentParser()\n"
    program += "explain.add_arguments(parser)\nsys.exit(explain.run(parser.parse_args()))\n"
    command = [sys.executable, "-c", program, "--model", "g2p-en", "--text", "giraffe"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "█ from 70%" in done.stdout.decode("utf-8")


def test_another_answer_can_be_explained(explain):
    """What the model would not have said."""
    _, out, _ = explain("--answer", "G IH R", "--tokens", "giraffe")
    assert out.splitlines()[1] == "G IH R"
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["G", "IH", "R"]


def test_png_writes_a_picture(explain, tmp_path):
    """A file of some size; the lines are printed all the same."""
    pytest.importorskip("matplotlib")
    status, out, err = explain("--png", tmp_path / "out.png", "giraffe")
    assert (status, err) == (0, "") and out.startswith("giraffe\n")
    content = (tmp_path / "out.png").read_bytes()
    assert content.startswith(b"\x89PNG") and int.from_bytes(content[16:20], "big") > 400


def test_a_picture_that_has_no_place_is_refused_before_any_work(explain, tmp_path, capsys):
    """Nothing is printed by then."""
    pytest.importorskip("matplotlib")
    for path in (tmp_path, tmp_path / "none" / "out.png"):
        with pytest.raises(ConfigError, match="name a file in a folder that is there"):
            explain("--png", path, "giraffe")
    assert capsys.readouterr().out == ""


def test_drawings_and_json_exclude_each_other(explain):
    """What would have no effect is refused."""
    for flag in ("--text", "--tokens"):
        with pytest.raises(ConfigError, match="--json was given with"):
            explain("--json", flag, "giraffe")


def test_what_cannot_be_opened_or_written_is_one_line(monkeypatch, capsys, tmp_path):
    """Exit status 2, through the console script."""
    entries = [EntryPoint("explain", "dragoman.cli.explain", cli.GROUP)]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)
    assert cli.main(["explain", "--bundle", str(tmp_path), "abc"]) == 2
    assert "is no bundle" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    missing = tmp_path / "missing" / "out.png"
    assert cli.main(["explain", "--model", "g2p-en", "--png", str(missing), "abc"]) == 2
    assert "name a file in a folder that is there" in capsys.readouterr().err


def test_a_missing_matplotlib_is_said_before_any_work_with_the_extra_to_install(monkeypatch, capsys, tmp_path):
    """The bundle is not even looked at."""
    entries = [EntryPoint("explain", "dragoman.cli.explain", cli.GROUP)]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["explain", "--bundle", str(tmp_path), "--png", "x.png", "abc"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "dragoman explain needs matplotlib" in line and "'.[cpu,explain]'" in line
