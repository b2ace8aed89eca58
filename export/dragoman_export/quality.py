"""What a precision costs: a test set translated by PyTorch in fp32 and by the graphs, and both scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dragoman_export.errors import ExportError
from dragoman_training.scoring import loops, score_text

MAX_BLEU_LOSS = 0.2
MAX_WORD_ERROR_RATE_LOSS = 0.003


@dataclass(frozen=True)
class TestSet:
    """Texts and what they should become, a line each."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.targets) or not self.sources:
            raise ExportError(
                f"the test set has {len(self.sources)} sources and {len(self.targets)} targets: one target a source, "
                "and one source at least, are needed"
            )


def figures(outputs: Sequence[str], targets: Sequence[str], *, is_text: bool) -> dict[str, float]:
    """Greedy output against targets: BLEU and chrF of text, the share of lines that differ (``word_error_rate``), and
    counts of outputs that are empty or loop. Raises DataError unless there is one output a target."""
    result: dict[str, float] = {}
    if is_text:
        scores = score_text(outputs, targets)
        result |= {"bleu": scores.bleu, "chrf": scores.chrf}
    wrong = sum(output != target for output, target in zip(outputs, targets, strict=True))
    result["word_error_rate"] = wrong / len(targets)
    result["num_empty"] = float(sum(not output.strip() for output in outputs))
    result["num_looping"] = float(sum(map(loops, outputs)))
    return result


def check_measures(pytorch: dict[str, float]) -> None:
    """Raises ExportError where PyTorch's own figures are such that no loss could show."""
    if pytorch["word_error_rate"] == 1 and pytorch.get("bleu", 0.0) < 1:
        raise ExportError(
            "all of PyTorch's own answers to the test set are wrong, so that it can measure no loss: are its targets "
            "those of its sources?"
        )


def compare(graphs: dict[str, float], pytorch: dict[str, float], precision: str) -> dict[str, float | str]:
    """Both as figures of one manifest entry. Raises ExportError where the precision costs more than it may."""
    _check_loss(graphs, pytorch, precision, "try --activations row, or another precision")
    return {**graphs, **{f"{name}_of_pytorch": value for name, value in pytorch.items()}}


def compare_shortlist(short: dict[str, float], full: dict[str, float]) -> dict[str, float | str]:
    """Figures with a shortlist and without. Raises ExportError where it costs more than a precision may."""
    _check_loss(short, full, "the shortlist", "raise --shortlist-candidates, or give more training text")
    return {**short, **{f"{name}_without": value for name, value in full.items()}}


def _check_loss(found: dict[str, float], reference: dict[str, float], what: str, remedy: str) -> None:
    if "bleu" in found:
        loss, limit, name = reference["bleu"] - found["bleu"], MAX_BLEU_LOSS, "BLEU"
    else:
        loss = found["word_error_rate"] - reference["word_error_rate"]
        limit, name = MAX_WORD_ERROR_RATE_LOSS, "word error rate"
    if loss > limit:
        raise ExportError(f"{what} costs {loss:.3g} {name} on the test set; at most {limit} is allowed: {remedy}")
