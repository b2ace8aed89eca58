"""The paired bootstrap: what it says of equal, slightly and plainly different systems, and that it repeats itself."""

import numpy as np
import pytest

from dragoman_training import bootstrap
from dragoman_training.bootstrap import compare
from dragoman_training.errors import DataError

TARGETS = [f"the {n} cats of line {n} sit on the {n % 7} mats ." for n in range(60)]


def spoiled(count: int) -> list[str]:
    """The targets with another word in the first ``count`` lines."""
    return [line.replace("cats", "dogs") if n < count else line for n, line in enumerate(TARGETS)]


def test_a_plainly_better_system_is_no_chance() -> None:
    """All lines right against half of them: every figure says so."""
    found = compare(TARGETS, spoiled(30), TARGETS, "none")
    assert list(found) == ["exact_match", "bleu", "chrf"]
    for one in found.values():
        assert one.score == pytest.approx(100)
        assert one.baseline_score < 95
        assert one.p_value < 0.01
        assert one.confidence == pytest.approx(0, abs=1e-3)
        assert one.baseline_confidence > 0
    assert found["exact_match"].baseline_score == pytest.approx(50)
    assert found["bleu"].signature.startswith("BLEU|nrefs:1|bs:1000|seed:12345|case:mixed|eff:no|tok:none")


def test_one_line_in_sixty_may_be_chance() -> None:
    """And a system against itself certainly is."""
    assert compare(TARGETS, spoiled(1), TARGETS, None)["exact_match"].p_value > 0.05
    same = compare(spoiled(9), spoiled(9), TARGETS, None)["exact_match"]
    assert same.score == same.baseline_score
    assert same.p_value == 1


def test_the_interval_is_that_of_the_samples() -> None:
    """Half the distance between the 2.5 % and 97.5 % quantiles, drawn here with another seed."""
    found = compare(spoiled(20), spoiled(20), TARGETS, None)["exact_match"]
    right = np.array([0] * 20 + [1] * 40)
    samples = np.random.default_rng(1).choice(right, (20000, 60)).mean(axis=1) * 100
    low, high = np.quantile(samples, [0.025, 0.975])
    assert found.confidence == pytest.approx((high - low) / 2, rel=0.1)
    assert found.mean == pytest.approx(100 * 40 / 60, abs=1)


def test_the_same_comparison_gives_the_same_numbers() -> None:
    """The seed is fixed."""
    assert compare(TARGETS, spoiled(3), TARGETS, "13a") == compare(TARGETS, spoiled(3), TARGETS, "13a")


def test_more_lines_than_fit_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit; lines that do not match, too."""
    monkeypatch.setattr(bootstrap, "MAX_LINES", 59)
    with pytest.raises(DataError, match="60 lines are over the 59"):
        compare(TARGETS, TARGETS, TARGETS, None)
    with pytest.raises(DataError, match="59 outputs but 60 target lines"):
        compare(TARGETS, TARGETS[1:], TARGETS, None)
