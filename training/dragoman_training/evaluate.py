"""How good outputs are: word, any-match and token error rates, and the speed at which they came.

One scorer for every origin: a checkpoint decoded here, a bundle run as a process, or a file of outputs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dragoman_training.checkpoint import LoadedCheckpoint
from dragoman_training.data import encode_source, read_lines
from dragoman_training.decode import BeamOptions, beam_search, greedy_all
from dragoman_training.errors import DataError
from dragoman_training.tokenizer import split_text


@dataclass(frozen=True)
class Outputs:
    """One output line a source line, and how long they took together (0: unknown, the outputs came from a file)."""

    lines: list[str]
    seconds: float


@dataclass(frozen=True)
class Scores:
    """Counts, from which the rates follow."""

    lines: int
    wrong: int  # differs from the target
    wrong_for_all: int | None  # differs from every reference; None without references
    edits: int  # token insertions, deletions and substitutions that turn outputs into targets
    target_tokens: int
    seconds: float

    def summary(self) -> dict[str, float | int]:
        """The rates as shares of 1, by name."""
        result: dict[str, float | int] = {
            "lines": self.lines,
            "exact_match": 1 - self.wrong / self.lines,
            "word_error_rate": self.wrong / self.lines,
            "token_error_rate": self.edits / max(self.target_tokens, 1),
        }
        if self.wrong_for_all is not None:
            result["any_match_error_rate"] = self.wrong_for_all / self.lines
        if self.seconds > 0:
            result["sentences_per_second"] = self.lines / self.seconds
        return result


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """The least number of insertions, deletions and substitutions that turn ``a`` into ``b`` (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def score(
    outputs: Outputs, targets: Sequence[str], references: Sequence[Sequence[str]] | None = None, unit: str = "piece"
) -> Scores:
    """Compare outputs with targets line by line; ``references`` holds all accepted lines of each."""
    for name, others in (("target", targets), ("reference", references)):
        if others is not None and len(others) != len(outputs.lines):
            raise DataError(f"{len(outputs.lines)} outputs but {len(others)} {name} lines: line n must match line n")
    if not targets:
        raise DataError("there are no lines to score: at least one is needed")
    any_wrong = None
    if references is not None:
        any_wrong = sum(out not in accepted for out, accepted in zip(outputs.lines, references, strict=True))
    tokens = [(split_text(unit, out), split_text(unit, t)) for out, t in zip(outputs.lines, targets, strict=True)]
    return Scores(
        lines=len(targets),
        wrong=sum(out != target for out, target in zip(outputs.lines, targets, strict=True)),
        wrong_for_all=any_wrong,
        edits=sum(edit_distance(out, target) for out, target in tokens),
        target_tokens=sum(len(target) for _, target in tokens),
        seconds=outputs.seconds,
    )


def read_references(path: Path) -> list[list[str]]:
    """A file of tab-separated accepted lines."""
    return [line.split("\t") for line in read_lines(path)]


def decode_checkpoint(checkpoint: LoadedCheckpoint, sources: Sequence[str], beam_size: int = 1) -> Outputs:
    """Decode with the reference. Blank lines come back unchanged, with no model run; too long ones give empty lines."""
    encoded = {i: encode_source(checkpoint.source_tokenizer, text) for i, text in enumerate(sources) if text.strip()}
    encoded = {i: ids for i, ids in encoded.items() if len(ids) <= checkpoint.max_source_tokens}
    limit, special = checkpoint.max_target_tokens, checkpoint.special
    start = time.perf_counter()
    if beam_size == 1:
        hypotheses = greedy_all(checkpoint.model, list(encoded.values()), limit, special)
    else:
        options = BeamOptions(beam_size=beam_size, max_new_tokens=limit)
        hypotheses = [beam_search(checkpoint.model, ids, options, special)[0] for ids in encoded.values()]
    seconds = time.perf_counter() - start
    decoded = dict(zip(encoded, hypotheses, strict=True))
    lines = [
        checkpoint.target_tokenizer.decode(decoded[i].tokens) if i in decoded else "" if text.strip() else text
        for i, text in enumerate(sources)
    ]
    return Outputs(lines, seconds)


def run_bundle(bundle: Path, source: Path) -> Outputs:
    """The output of ``dragoman generate --bundle BUNDLE < SOURCE``, run as a process; its start counts as time."""
    command = [sys.executable, "-m", "dragoman.cli.main", "generate", "--bundle", str(bundle)]
    start = time.perf_counter()
    try:
        with source.open("rb") as file:
            done = subprocess.run(command, stdin=file, capture_output=True, check=False)
    except OSError as error:
        raise DataError(f"{source} cannot be read ({error.strerror})") from error
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
        raise DataError(f"dragoman generate --bundle {bundle} ended with status {done.returncode}: {words[0]}")
    lines = done.stdout.decode("utf-8").split("\n")
    return Outputs(lines[:-1] if lines[-1] == "" else lines, time.perf_counter() - start)
