"""Is one system better than another, or is it chance? sacreBLEU's paired bootstrap (Koehn 2004) over the test lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sacrebleu.metrics.base import Metric, Score
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from dragoman_training.errors import DataError
from dragoman_training.scoring import check_aligned

SAMPLES = 1000
MAX_LINES = 20_000  # each figure holds samples x lines x 18 numbers: 1.4 GB


@dataclass(frozen=True)
class Comparison:
    """One figure of two systems. ``p_value``: how probable so great a difference is if it were chance.

    ``confidence`` and ``baseline_confidence`` are half the width of the 95 % interval around each mean of the samples.
    """

    score: float
    baseline_score: float
    p_value: float
    mean: float
    confidence: float
    baseline_mean: float
    baseline_confidence: float
    signature: str

    def as_dict(self) -> dict[str, float | str]:
        """For JSON."""
        return asdict(self)


class ExactMatch(Metric):
    """The percentage of lines that are equal to their target, in the shape of a metric of sacreBLEU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # sacreBLEU leaves it untyped

    def _preprocess_segment(self, sent: str) -> str:
        return sent

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {"refs": refs}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[int]:
        return [int(hypothesis in ref_kwargs["refs"]), 1]

    def _compute_score_from_stats(self, stats: Any) -> Score:
        return Score("exact_match", 100 * float(stats[0]) / float(stats[1]))

    def _aggregate_and_compute(self, stats: list[list[int]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])


def check_size(targets: Sequence[str]) -> None:
    """Refuse more lines than ``MAX_LINES``."""
    if len(targets) > MAX_LINES:
        raise DataError(f"{len(targets)} lines are over the {MAX_LINES} that fit in memory: compare on a part of them")


def compare(
    outputs: Sequence[str], baseline: Sequence[str], targets: Sequence[str], bleu_tokenizer: str | None
) -> dict[str, Comparison]:
    """Exact match (in percent) and, unless ``bleu_tokenizer`` is None, BLEU and chrF of two systems on the same lines.

    The same samples each time: sacreBLEU's seed is fixed, and part of the signature. Raises ``DataError`` for lines
    that do not match, and for more of them than ``MAX_LINES``.
    """
    for lines in (outputs, baseline):
        check_aligned(lines, targets, "target")
    check_size(targets)
    metrics: dict[str, Metric] = {"exact_match": ExactMatch()}
    if bleu_tokenizer is not None:
        metrics |= {"bleu": BLEU(tokenize=bleu_tokenizer, force=True), "chrf": CHRF()}
    systems = [("baseline", baseline), ("system", outputs)]
    signatures, results = PairedTest(systems, metrics, [targets], test_type="bs", n_samples=SAMPLES)()
    equal = list(outputs) == list(baseline)  # sacreBLEU would call the difference of nothing significant
    compared = {}
    for name, own_name in zip(metrics, signatures, strict=True):  # sacreBLEU calls them BLEU and chrF2
        base, result = (vars(entry) for entry in results[own_name])
        compared[name] = Comparison(
            score=float(result["score"]),
            baseline_score=float(base["score"]),
            p_value=1.0 if equal else float(result["p_value"]),
            mean=float(result["mean"]),
            confidence=float(result["ci"]),
            baseline_mean=float(base["mean"]),
            baseline_confidence=float(base["ci"]),
            signature=f"{own_name}|{signatures[own_name]}",
        )
    return compared
