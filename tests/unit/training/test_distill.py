"""Distillation: what is kept, what is dropped, stopped jobs, and from teacher to student at toy size."""

import argparse
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from dragoman_training.cli import distill as command
from dragoman_training.configfile import load_config
from dragoman_training.distill import distill
from dragoman_training.errors import DataError
from dragoman_training.filtering import PairFilter
from dragoman_training.systems import CheckpointSystem, Outputs, Task
from dragoman_training.train import train


class Teacher:
    """Answers in capitals; has its bad moments."""

    name = "teacher"
    task = Task()

    def __init__(self, fail_at: int = -1, number: int = 1) -> None:
        self.asked: list[list[str]] = []
        self.fail_at, self.number = fail_at, number

    def identity(self) -> dict[str, object]:
        return {"teacher": self.number}

    def outputs(self, sources: Sequence[str]) -> Outputs:
        if len(self.asked) == self.fail_at:
            raise DataError("the server is gone")
        self.asked.append(list(sources))
        lines = [{"empty": "", "loop": "NO NO NO NO"}.get(source, source.upper()) for source in sources]
        cut = frozenset(n for n, source in enumerate(sources) if source == "cut")
        refused = frozenset(n for n, source in enumerate(sources) if source == "refused")
        return Outputs(lines, 1.0, cut, refused)


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def test_no_student_learns_from_bad_outputs(tmp_path: Path) -> None:
    """Dropped and counted by reason: blank, refused, empty, cut and looping; a loop that the source has stays."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.write_text("a\nempty\nloop\n\ncut\nrefused\nha ha ha ha\nb\u2028c\n")
    report = distill(Teacher(), source, out, PairFilter(), part_lines=100)
    assert (out / "train.source").read_text() == "a\nha ha ha ha\nb\u2028c\n"
    assert (out / "train.target").read_text() == "A\nHA HA HA HA\nB\u2028C\n"
    assert report == json.loads((out / "report.json").read_text())
    assert (report["lines"], report["kept"]) == (8, 3)
    reasons = ["blank source", "cut at the teacher's limit", "empty output", "looping output", "refused by the teacher"]
    assert report["dropped"] == dict.fromkeys(reasons, 1)
    assert report["teacher"] == {"teacher": 1}
    assert sorted(path.name for path in out.iterdir()) == ["report.json", "train.source", "train.target"]


def test_a_stopped_job_goes_on_where_it_was(tmp_path: Path) -> None:
    """No finished part is asked for again, nothing is visible before the end, and the result is that of one go."""
    source = tmp_path / "source"
    source.write_text("".join(f"line {n}\n" for n in range(10)))
    with pytest.raises(DataError, match="gone"):
        distill(Teacher(fail_at=2), source, tmp_path / "out", PairFilter(), part_lines=3)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["parts"]
    teacher = Teacher()
    distill(teacher, source, tmp_path / "out", PairFilter(), part_lines=3)
    assert teacher.asked == [["line 6", "line 7", "line 8"], ["line 9"]]
    distill(Teacher(), source, tmp_path / "once", PairFilter(), part_lines=100)
    for name in ("train.source", "train.target"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()


def test_parts_of_another_job_are_refused(tmp_path: Path) -> None:
    """Another teacher, other sources, or another division into parts; and a folder that holds something else."""
    source = tmp_path / "source"
    source.write_text("a\nb\n")
    with pytest.raises(DataError, match="gone"):
        distill(Teacher(fail_at=1), source, tmp_path / "out", PairFilter(), part_lines=1)
    with pytest.raises(DataError, match="teacher differs"):
        distill(Teacher(number=2), source, tmp_path / "out", PairFilter(), part_lines=1)
    with pytest.raises(DataError, match="part_lines differs"):
        distill(Teacher(), source, tmp_path / "out", PairFilter(), part_lines=2)
    source.write_text("a\nc\n")
    with pytest.raises(DataError, match="source_sha256 differs"):
        distill(Teacher(), source, tmp_path / "out", PairFilter(), part_lines=1)
    with pytest.raises(DataError, match="exists: choose another --out"):
        distill(Teacher(), source, tmp_path, PairFilter(), part_lines=1)


def test_sources_that_hold_nothing_or_only_once_are_refused(tmp_path: Path) -> None:
    """An empty file, and a pipe, whose lines would be gone after the first look; nothing is made."""
    (tmp_path / "empty").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for name, told in (("empty", "empty is empty: at least one line"), ("pipe", "pipe is no regular file")):
        with pytest.raises(DataError, match=told):
            distill(Teacher(), tmp_path / name, tmp_path / "out", PairFilter(), part_lines=1)
    assert not (tmp_path / "out").exists()


def test_the_same_job_a_second_time_is_refused_while_it_runs(tmp_path: Path) -> None:
    """It would do the same work twice, and get in the way; the first one ends as if alone."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.write_text("a\nb\n")
    refused = []

    class Busy(Teacher):
        def outputs(self, sources: Sequence[str]) -> Outputs:
            with pytest.raises(
                DataError, match=r"another process works on .*out: wait for it, or choose another --out"
            ):
                distill(Teacher(), source, out, PairFilter(), part_lines=1)
            refused.append(sources)
            return super().outputs(sources)

    distill(Busy(), source, out, PairFilter(), part_lines=1)
    assert len(refused) == 2
    assert (out / "train.target").read_text() == "A\nB\n"
    assert sorted(path.name for path in out.iterdir()) == ["report.json", "train.source", "train.target"]


def test_a_failed_writing_is_told_with_the_folder_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same command goes on from the parts that were saved."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.write_text("a\nb\n")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("dragoman_training.distill.flush", full)  # when the parts are joined
        with pytest.raises(DataError, match=r"out could not be written \(No space left on device\), .*make room"):
            distill(Teacher(), source, out, PairFilter(), part_lines=1)
    teacher = Teacher()
    distill(teacher, source, out, PairFilter(), part_lines=1)
    assert teacher.asked == []
    assert (out / "train.target").read_text() == "A\nB\n"


def test_the_command_refuses_in_one_line(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, the value and the remedy."""
    assert run_command("nowhere", "--source", "dev.source", "--out", "out") == 2
    assert run_command("nowhere", "--source", "dev.source", "--out", "out", "--part-lines", "0") == 2
    assert run_command("nowhere", "--source", "dev.source", "--out", "out", "--max-ratio", "0.5") == 2
    assert run_command("nowhere", "--source", "missing", "--out", "out") == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert "missing cannot be read (No such file" in errors[3]  # before a teacher is loaded
    assert "--part-lines is 0" in errors[1]
    assert "max_ratio is 0.5" in errors[2]


def test_from_teacher_to_student(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A teacher that reverses letters labels new words, and a student that never saw a true answer learns from it.

    The student's data are the teacher's outputs, line by line; trained on them, it often agrees with its teacher.
    """
    config = (toy / "toy.toml").read_text()
    learning = (
        config.replace("d_model = 8", "d_model = 24")
        .replace("[optimizer]", '[optimizer]\nkind = "muon"')
        .replace("steps = 12", "steps = 80")
    )
    learning = learning.replace("validate_every = 4", "validate_every = 80")
    (toy / "teacher.toml").write_text(learning)
    train(load_config("teacher.toml"), toy / "teacher")
    assert run_command("teacher", "--beam-size", "2", "--source", "train.source", "--out", "distilled") == 0
    assert "60 lines, " in capsys.readouterr().out
    sources = (toy / "distilled" / "train.source").read_text().splitlines()
    taught = (toy / "distilled" / "train.target").read_text().splitlines()
    assert taught == CheckpointSystem(toy / "teacher", beam_size=2).outputs(sources).lines
    student = learning.replace('train_source = "', 'train_source = "distilled/')
    student = student.replace('train_target = "', 'train_target = "distilled/').replace(
        "encoder_layers = 1", "encoder_layers = 2"
    )
    (toy / "student.toml").write_text(student)
    train(load_config("student.toml"), toy / "student")
    agreed = sum(map(str.__eq__, CheckpointSystem(toy / "student").outputs(sources).lines, taught))
    assert agreed > 10  # of about 45, each of up to six tokens: by chance it would be none or one
