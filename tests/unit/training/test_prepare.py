"""Parallel text to training files: what is left out, how dev and test are split off, and when files appear."""

import argparse
import errno
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman_training.cli import prepare as command
from dragoman_training.errors import DataError
from dragoman_training.filtering import PairFilter
from dragoman_training.prepare import prepare_pairs

Texts = list[tuple[str, str]]


def prepare(folder: Path, *arguments: object) -> tuple[int, dict[str, list[str]]]:
    """Run the command in ``folder``; its status, and the lines of each file in ``folder``/out."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    status = command.run(parser.parse_args(["pairs", "--out", str(folder / "out"), *map(str, arguments)]))
    out = folder / "out"
    files = [path for path in out.iterdir() if path.suffix != ".json"] if out.exists() else []
    return status, {path.name: path.read_bytes().decode().split("\n")[:-1] for path in files}


def report_of(folder: Path) -> Any:
    return json.loads((folder / "out" / "report.json").read_text())


def write(folder: Path, name: str, lines: list[str]) -> Path:
    (folder / name).write_bytes("".join(f"{line}\n" for line in lines).encode())
    return folder / name


def test_blank_lines_go_on_both_sides_and_the_rest_stays_aligned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """200 pairs, blank source at 3 and 77, blank target at 78, both blank at 200, no final line feed."""
    sources, targets = [f"s{n}" for n in range(1, 201)], [f"t{n}" for n in range(1, 201)]
    sources[2], sources[76], targets[77] = "", " \t", ""
    (tmp_path / "a").write_text("\n".join([*sources[:199], ""]))
    (tmp_path / "b").write_text("\r\n".join([*targets[:199], ""]))
    (tmp_path / "a").write_text((tmp_path / "a").read_text() + " ")
    (tmp_path / "b").write_text((tmp_path / "b").read_text() + " ")
    status, files = prepare(tmp_path, "--source", tmp_path / "a", "--target", tmp_path / "b")
    kept = [n for n in range(1, 200) if n not in (3, 77, 78)]
    assert status == 0
    assert files == {"train.source": [f"s{n}" for n in kept], "train.target": [f"t{n}" for n in kept]}
    report = report_of(tmp_path)
    assert report["read"] == {"train": 200}
    assert report["dropped"] == {"blank source": 3, "blank target": 1}
    assert report["kept"] == {"train": 196}
    printed = capsys.readouterr().out.splitlines()
    assert [line.rsplit(maxsplit=1) for line in printed[:4]] == [
        ["read: train", "200"],
        ["left out: blank source", "3"],
        ["left out: blank target", "1"],
        ["kept: train", "196"],
    ]


def test_unequal_files_are_refused_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both counts stand in the message; no file appears, not even a half one."""
    a, b = write(tmp_path, "a", ["x"] * 100), write(tmp_path, "b", ["y"] * 99)
    assert prepare(tmp_path, "--source", a, "--target", b) == (2, {})
    assert "a has 100 lines but" in (message := capsys.readouterr().err) and "b has 99" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    """No normalisation, no stripping; a CR inside a text stays, a pair that cannot be a line goes and is counted."""
    pairs = [("\ufeff e\u0301\u2028ﬁ ", "２０ m²\x85 \rx"), ("a\nb", "c"), ("a", "b\r"), ("ok", "1\t2")]
    lines = [json.dumps({"en": source, "de": target}) for source, target in pairs]
    status, files = prepare(tmp_path, "--jsonl", write(tmp_path, "t.jsonl", lines), "--keys", "en", "de")
    assert status == 0
    assert files == {"train.source": [pairs[0][0], "ok"], "train.target": [pairs[0][1], "1\t2"]}
    assert report_of(tmp_path)["dropped"] == {"line break in a text": 2}


def test_tsv_in_gzip_with_chosen_columns_and_limits(tmp_path: Path) -> None:
    """Each limit counts under its own reason, and the same pair is kept once."""
    rows = ["7\ta b\tc", "8\ta b c d\tc d", "9\ta\tbbbbbb", "9\ta b\tc", "9\ta b\td", "9\tlongestone\tlongestone"]
    (tmp_path / "t.tsv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    limits = ["--max-words", 3, "--max-ratio", 5, "--max-characters", 9]
    status, files = prepare(tmp_path, "--tsv", tmp_path / "t.tsv.gz", "--columns", 2, 3, *limits)
    assert status == 0
    assert files == {"train.source": ["a b", "a b"], "train.target": ["c", "d"]}
    assert report_of(tmp_path)["dropped"] == {
        "length ratio over 5": 1,
        "over 3 words": 1,
        "over 9 characters": 1,
        "same pair before": 1,
    }


def test_dev_and_test_split_off_share_no_source_with_anything(tmp_path: Path) -> None:
    """All pairs of a source go together; the choice depends neither on the order nor on the other split."""
    sources = [f"s{n % 300}" for n in range(900)]
    targets = [f"t{n // 300}" for n in range(900)]
    a, b = write(tmp_path, "a", sources), write(tmp_path, "b", targets)
    status, files = prepare(tmp_path, "--source", a, "--target", b, "--dev", 20, "--test", 30)
    assert status == 0
    sets = {split: set(files[f"{split}.source"]) for split in ("train", "dev", "test")}
    assert sum(map(len, sets.values())) == len(set().union(*sets.values())) == 300
    assert (len(files["dev.source"]), len(files["test.source"])) == (21, 30)  # whole sources of three pairs
    pairs = [pair for split in sets for pair in zip(files[f"{split}.source"], files[f"{split}.target"], strict=True)]
    assert sorted(pairs) == sorted(zip(sources, targets, strict=True))
    assert report_of(tmp_path)["kept"] == {"train": 849, "dev": 21, "test": 30}

    other = tmp_path / "other"
    other.mkdir()
    a, b = write(other, "a", sources[::-1]), write(other, "b", targets[::-1])
    _, again = prepare(other, "--source", a, "--target", b, "--test", 30)
    assert set(again["test.source"]) == sets["test"]


def test_sources_of_given_dev_and_test_sets_leave_the_training_text(tmp_path: Path) -> None:
    """They are compared as whole sources; dev and test keep all that is no blank, whatever the limits."""
    train = write(tmp_path, "train.tsv", ["a\t1", "b\t2", "c\t3", "a\t4", "d e f\t5"])
    dev = write(tmp_path, "dev.tsv", ["a\t9", "a\t9", "x y z\t9", "\t9"])
    (a, b) = write(tmp_path, "test.a", ["c", "a"]), write(tmp_path, "test.b", ["8", "8"])
    arguments = ["--tsv", train, "--dev-tsv", dev, "--test-source", a, "--test-target", b, "--max-words", 2]
    status, files = prepare(tmp_path, *arguments)
    assert status == 0
    assert files["train.source"] == ["b"]
    assert files["dev.source"] == ["a", "a", "x y z"]
    assert files["test.source"] == ["c", "a"]
    report = report_of(tmp_path)
    assert report["read"] == {"train": 5, "dev": 4, "test": 2}
    assert report["dropped"] == {"blank source (dev)": 1, "over 2 words": 1, "source in dev or test": 3}
    assert report["kept"] == {"train": 1, "dev": 3, "test": 2}
    assert (report["train_sources_in_dev_or_test"], report["dev_sources_in_test"]) == (0, 1)


def test_overlap_is_kept_and_reported_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a test set split off beside a given dev set still has none of its sources."""
    train = write(tmp_path, "train.tsv", [f"s{n}\t1" for n in range(20)])
    dev = write(tmp_path, "dev.tsv", [f"s{n}\t2" for n in range(10)])
    status, files = prepare(tmp_path, "--tsv", train, "--dev-tsv", dev, "--test", 4, "--keep-overlap")
    assert status == 0
    assert {f"s{n}" for n in range(10)} <= set(files["train.source"])
    assert not set(files["test.source"]) & set(files["dev.source"] + files["train.source"])
    assert report_of(tmp_path)["train_sources_in_dev_or_test"] == 10
    assert "overlap: train sources in dev or test" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no training text: give --source"),
        (["--source", "a"], "--source: give a source with its target"),
        (["--source", "a", "--target", "a", "--tsv", "a"], "--source, --target, --tsv: give"),
        (["--tsv", "missing"], "missing cannot be read (No such file or directory): check the path"),
        (["--tsv", "."], ". is a folder: name a file"),
        (["--tsv", "/dev/zero"], "/dev/zero is no regular file"),
        (["--tsv", "a", "--dev", "1", "--dev-tsv", "a"], "--dev 1 and files of a dev set: choose one"),
        (["--tsv", "a", "--dev", "4"], "4 pairs for dev are wanted, 3 are left"),
        (
            ["--tsv", "a", "--dev", "2", "--test", "1"],
            "none of 3 pairs is left to train on (split off for dev: 2, split off for test: 1): split off fewer",
        ),
        (["--tsv", "a", "--max-characters", "1", "--max-ratio", "1", "--dev-tsv", "a"], "in dev or test: 3): loosen"),
        (["--tsv", "a", "--max-ratio", "inf"], "max_ratio is inf: it must be a number of at least 1"),
        (["--tsv", "a", "--dev-tsv", "empty"], "the dev set has no pair of two texts (it is empty): name other files"),
        (["--tsv", "a", "--test-tsv", "blank"], "the test set has no pair of two texts (blank source: 2): name other"),
        (["--tsv", "a", "--max-words", "0"], "max_words is 0: it must be a number of at least 1"),
        (["--tsv", "empty"], "the training text is empty: at least one pair is needed"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """With what is wrong and the remedy, before anything is written."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a", ["a\t1", "b\t2", "c\t3"])
    write(tmp_path, "empty", [])
    write(tmp_path, "blank", [" \t1", "\t2"])
    assert prepare(tmp_path, *arguments) == (2, {})
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob(".writing-*"))


def test_a_filled_folder_is_refused_and_an_empty_one_is_used(tmp_path: Path) -> None:
    """Nothing is overwritten."""
    tsv = write(tmp_path, "t.tsv", ["a\t1"])
    (tmp_path / "out").mkdir()
    assert prepare(tmp_path, "--tsv", tsv)[0] == 0
    before = (tmp_path / "out" / "report.json").read_bytes()
    assert prepare(tmp_path, "--tsv", tsv)[0] == 2
    assert (tmp_path / "out" / "report.json").read_bytes() == before


def test_a_mount_point_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty volume of a container: the finished folder could not take its place, when all the work is done."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == tmp_path / "out")
    assert prepare(tmp_path, "--tsv", write(tmp_path, "t.tsv", ["a\t1"])) == (2, {})
    assert "out is a mount point: name a folder inside it" in capsys.readouterr().err


def test_a_full_disk_is_told_with_the_folder_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with a bare error number; nothing is left."""
    tsv = write(tmp_path, "t.tsv", ["a\t1"])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dragoman_training.folders.flush", full)
    assert prepare(tmp_path, "--tsv", tsv) == (2, {})
    assert "out could not be written (No space left on device), " in (told := capsys.readouterr().err)
    assert "make room, or choose another --out" in told
    assert list(tmp_path.iterdir()) == [tsv]


def test_a_text_that_changes_between_the_readings_is_refused(tmp_path: Path) -> None:
    """Its pairs could not be told apart any more; nothing is written."""
    readings: list[Texts] = [[("a", "1"), ("b", "2")], [("a", "1"), ("x", ""), ("b", "2"), ("c", "3")]]

    def changing() -> Iterator[tuple[str, str]]:
        return iter(readings.pop(0))

    with pytest.raises(DataError, match="changed while it was read"):
        prepare_pairs(tmp_path / "out", changing, {}, {}, PairFilter())
    assert list(tmp_path.iterdir()) == []


def test_preparing_needs_neither_torch_nor_sentencepiece(tmp_path: Path) -> None:
    """It runs where only the service is installed, and starts at once."""
    program = (
        "import argparse, sys\n"
        "from dragoman_training.cli import prepare\n"
        "parser = argparse.ArgumentParser()\n"
        "prepare.add_arguments(parser)\n"
        "status = prepare.run(parser.parse_args(['pairs', '--tsv', 't.tsv', '--out', 'out']))\n"
        "sys.exit(status or bool({'torch', 'sentencepiece', 'tqdm'} & sys.modules.keys()))\n"
    )
    write(tmp_path, "t.tsv", ["a\tb"])
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
