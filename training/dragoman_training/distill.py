"""Sequence-level knowledge distillation (Kim and Rush 2016): a teacher translates, a student learns from the result.

Written are ``OUT/train.source``, ``OUT/train.target`` (a pair a line, for the student's training) and
``OUT/report.json``. Sources are read and translated in parts; a finished part is kept in ``OUT/parts``, so that a job
that was stopped goes on where it was. The three files appear at the end, complete.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from dragoman_training.checkpoint import read_json, write_json
from dragoman_training.corpus import file_sha256, iterate_lines, write_lines
from dragoman_training.errors import DataError
from dragoman_training.filtering import PairFilter
from dragoman_training.folders import explained, flush, locked
from dragoman_training.scoring import loops
from dragoman_training.systems import Outputs, System

RECORD = "job.json"  # in the folder of parts: what they are parts of
LOCK = ".lock"  # there, too: held by the process that works on them


def distill(
    teacher: System,
    source: Path,
    out: Path,
    pair_filter: PairFilter,
    part_lines: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Do the whole job, or the rest of it; returns the report: pairs kept, and dropped by reason.

    ``part_lines`` lie between two savings. Dropped is what a student should not learn: see ``reason``. Raises
    ``DataError`` for a source that is empty or no regular file, and where ``out`` holds something else, or parts of
    another job, or cannot be written, or another process works on it.
    """
    if next(iterate_lines(source), None) is None:
        raise DataError(f"{source} is empty: at least one line is needed")
    job = {
        "teacher": teacher.identity(),
        "source_sha256": file_sha256(source),
        "part_lines": part_lines,
        "filter": asdict(pair_filter),
    }
    parts = out / "parts"
    with claimed(out, parts):
        start(out, parts, job)
        for number, lines in enumerate(in_parts(iterate_lines(source), part_lines)):
            path = parts / f"{number:06d}.json"
            told = f"lines {number * part_lines + 1} to {number * part_lines + len(lines)}"
            if path.exists():
                say(f"{told}: done earlier")
                continue
            began = time.monotonic()
            outputs = teacher.outputs(lines)
            seconds = time.monotonic() - began
            part = {**kept_and_dropped(lines, outputs, pair_filter), "lines": len(lines), "seconds": seconds}
            with explained(out, DataError):
                write_json(path, part)
            say(f"{told}: {seconds:.1f} s")
        with explained(out, DataError):
            return finish(out, parts, job)


@contextmanager
def claimed(out: Path, parts: Path) -> Iterator[None]:
    """Make the folder, if there is none, and keep other processes from working on it: ``DataError`` for them."""
    refuse_other(out, parts)
    with ExitStack() as stack:
        with explained(out, DataError):
            parts.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(locked(parts / LOCK, wait=False))
            except BlockingIOError as error:
                raise DataError(f"another process works on {out}: wait for it, or choose another --out") from error
        yield


def refuse_other(out: Path, parts: Path) -> None:
    """Nothing is overwritten: a folder may be there with the parts of a job, but nothing else."""
    if (parts / RECORD).exists():
        return  # it was stopped, perhaps between its last files
    if out.exists() and (not out.is_dir() or any(path != parts for path in out.iterdir())):
        raise DataError(f"{out} exists: choose another --out")


def start(out: Path, parts: Path, job: dict[str, object]) -> None:
    """Record the job, or see that the parts are of this very one."""
    refuse_other(out, parts)  # again: another process may have finished before this one had the lock
    if (parts / RECORD).exists():
        saved = read_json(parts / RECORD)
        if changed := [name for name in job if saved.get(name) != json.loads(json.dumps(job[name]))]:
            raise DataError(f"{parts} is of another job ({changed[0]} differs): remove it, or choose another --out")
        return
    with explained(out, DataError):
        write_json(parts / RECORD, job)


def in_parts(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    """The lines in lists of ``size``."""
    while part := list(islice(lines, size)):
        yield part


def kept_and_dropped(sources: Sequence[str], outputs: Outputs, pair_filter: PairFilter) -> dict[str, object]:
    """The pairs to learn from, and how many are not, by reason."""
    kept, dropped = [], Counter[str]()
    for number, (source, output) in enumerate(zip(sources, outputs.lines, strict=True)):
        why = reason(number, source, output, outputs) or pair_filter.reason(source, output)
        if why is None:
            kept.append([source, output])
        else:
            dropped[why] += 1
    return {"kept": kept, "dropped": dict(dropped)}


def reason(number: int, source: str, output: str, outputs: Outputs) -> str | None:
    """Why a teacher's output is no example: the source was refused (too long, say), the output was cut at the teacher's
    limit, is empty, or loops while its source does not. None if it may be one.
    """
    if number in outputs.refused:
        return "refused by the teacher"
    if number in outputs.cut:
        return "cut at the teacher's limit"
    if source.strip() and not output.strip():
        return "empty output"
    if loops(output) and not loops(source):
        return "looping output"
    return None


def finish(out: Path, parts: Path, job: dict[str, object]) -> dict[str, Any]:
    """Join the parts to the files, write the report and remove the parts."""
    paths = sorted(parts.glob("[0-9]*.json"))
    lines, seconds, kept, dropped = 0, 0.0, 0, Counter[str]()
    for path in paths:
        part = read_json(path)
        lines, seconds, kept = lines + part["lines"], seconds + part["seconds"], kept + len(part["kept"])
        dropped.update(part["dropped"])
    for side, name in enumerate(("train.source", "train.target")):
        temporary = parts / name
        write_lines(temporary, (pair[side] for path in paths for pair in read_json(path)["kept"]))
        flush(temporary)
        temporary.replace(out / name)
    report = {
        "lines": lines,
        "kept": kept,
        "dropped": dict(sorted(dropped.items())),
        "sentences_per_second": lines / seconds if seconds else None,
        **job,
    }
    write_json(out / "report.json", report)
    shutil.rmtree(parts)
    return report
