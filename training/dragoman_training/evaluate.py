"""Scoring a system on a test set, alone or against a second one: the figures as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman_training.corpus import read_lines
from dragoman_training.scoring import Scores, check_aligned, score
from dragoman_training.systems import FileSystem, Outputs, System, Task

if TYPE_CHECKING:
    from dragoman_training.bootstrap import Comparison

ABSENT = {
    "token_error_rate": "the targets hold no token",
    "number_copy_rate": "the sources hold no number",
    "placeholder_copy_rate": "the sources hold no placeholder",
    "length_ratio": "the targets are empty",
}
"""Why a figure is None."""


@dataclass(frozen=True)
class Evaluation:
    """One system's scores, and how they compare with a second system's."""

    system: str
    outputs: Outputs
    scores: Scores
    against: str | None = None
    comparisons: dict[str, Comparison] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """For JSON: the figures by name, null where they do not apply, the signatures, and the comparison if any."""
        text = self.scores.text
        result: dict[str, object] = {**self.scores.summary()}
        if text is not None:
            result["signatures"] = text.signatures
        if self.against is not None:
            figures = {name: comparison.as_dict() for name, comparison in self.comparisons.items()}
            result["against"] = {"system": self.against, **figures}
        return result

    def table(self) -> str:
        """For people: a figure a line; those that do not apply say why."""
        signatures = self.scores.text.signatures if self.scores.text is not None else {}
        rows = []
        for name, value in self.scores.summary().items():
            if value is None:
                shown = f"absent: {ABSENT[name]}"
            elif isinstance(value, int):
                shown = str(value)
            else:
                shown = f"{value:.2f}  {signatures[name]}" if name in signatures else f"{value:.4f}"
            rows.append(f"{name + ':':<26}{shown}")
        if self.against is not None:
            rows.append(f"\nagainst {self.against}, mean and 95 % interval of the samples:")
        for name, one in self.comparisons.items():
            rows.append(
                f"{name + ':':<14}{one.score:6.2f} ({one.mean:.2f} +- {one.confidence:.2f}) against"
                f" {one.baseline_score:6.2f} ({one.baseline_mean:.2f} +- {one.baseline_confidence:.2f}),"
                f" p = {one.p_value:.4f}  {one.signature}"
            )
        return "\n".join(rows)


def evaluate(
    system: System,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    references: Sequence[Sequence[str]] | None = None,
    against: System | None = None,
    bleu_tokenizer: str | None = None,
    target_unit: str | None = None,
) -> Evaluation:
    """Have a system (and a second one) translate the sources, and score it. See ``scoring.score`` for the figures.

    ``target_unit`` replaces what the system itself knows of its tokens. What does not match is refused before anything
    is translated, which may take hours.
    """
    check_aligned(sources, targets, "target")
    if references is not None:
        check_aligned(sources, references, "reference")
    if isinstance(against, FileSystem):
        against.outputs(sources)  # refuses what does not match; nothing is translated
    if against is not None:
        from dragoman_training.bootstrap import check_size, compare  # slow to import

        check_size(targets)
    task = Task(system.task.is_text, target_unit or system.task.unit)
    outputs = system.outputs(sources)
    scores = score(outputs, sources, targets, references, task, bleu_tokenizer)
    if against is None:
        return Evaluation(system.name, outputs, scores)
    tokenizer = None if scores.text is None else bleu_tokenizer or "13a"
    comparisons = compare(outputs.lines, against.outputs(sources).lines, targets, tokenizer)
    return Evaluation(system.name, outputs, scores, against.name, comparisons)


def read_references(path: Path) -> list[list[str]]:
    """A file of tab-separated accepted lines."""
    return [line.split("\t") for line in read_lines(path)]
