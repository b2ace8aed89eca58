"""Which answers become the golden set."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the runtime alone has no tools of the export")

from dragoman.engine.replica import TokenRules
from dragoman.types import FinishReason, HypothesisResult
from dragoman_export import verify
from dragoman_export.errors import ExportError

RULES = TokenRules(decoder_start=1, eos=2, never_generated=(0,))
ANSWER = HypothesisResult((4,), FinishReason.STOP, score=-0.5)


def golden(monkeypatch, sources, undecided=(), answers=None):
    """The golden set of some sources, and how many of them were looked at."""
    seen = []

    def run_targets(runner, chosen, targets, start):
        assert len(chosen) == len(targets) <= runner.num_slots
        seen.extend(chosen)
        gaps = [0.05 if source in undecided else 0.2 for source in chosen]
        return [
            SimpleNamespace(logits=np.array([[9.0, 0.0, 0.0, 0.0, gap], [9.0, 0.0, gap, 0.0, 0.0]])) for gap in gaps
        ]

    monkeypatch.setattr(verify, "run_targets", run_targets)
    answers = answers or [ANSWER] * len(sources)
    texts = [f"text {len(source)}" for source in sources]
    return verify.golden_set(
        SimpleNamespace(num_slots=5), RULES, texts, sources, answers, ["a"] * len(sources), 0.1
    ), len(seen)


def of_lengths(lengths):
    return [(*[4] * (length - 1), 2) for length in lengths]


def test_golden_cases_are_of_all_lengths(monkeypatch):
    """From the shortest source to the longest, no long stretch between them left out; the work is bounded."""
    lengths = [length for length in range(1, 1001) for _ in range(3)]
    cases, num_seen = golden(monkeypatch, of_lengths(reversed(lengths)))
    found = [len(case.source) for case in cases]
    assert (len(found), found[0], found[-1]) == (32, 1, 1000)
    assert all(0 < longer - shorter < 50 for shorter, longer in pairwise(found))
    assert num_seen == 128


def test_a_long_source_that_does_not_decide_leaves_its_place_to_its_neighbours(monkeypatch):
    """Of the longest tenth, only the shorter half decides, and the longest of all did not end."""
    sources = of_lengths(range(1, 1001))
    answers = [ANSWER] * 999 + [HypothesisResult((4,), FinishReason.LENGTH, score=-0.5)]
    cases, _ = golden(monkeypatch, sources, undecided=set(sources[950:]), answers=answers)
    assert 940 < len(cases[-1].source) <= 950


def test_a_golden_set_of_few_sources_holds_all_that_decide(monkeypatch):
    """Each once, the shortest first."""
    sources = of_lengths([5, 3, 9])
    cases, _ = golden(monkeypatch, sources, undecided={sources[0]})
    assert [case.text for case in cases] == ["text 3", "text 9"]


def test_no_golden_case_is_an_error(monkeypatch):
    """With what to do."""
    sources = of_lengths([3, 5])
    with pytest.raises(ExportError, match="for none of 2 sources"):
        golden(monkeypatch, sources, undecided=set(sources))
