"""The export's own gate: the ONNX graphs against PyTorch, through the runner and the decode loop that will serve them.

Nothing here is optional: a graph that differs is not saved. The figures go into the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dragoman.bundle import GoldenCase
from dragoman.config import EngineConfig
from dragoman.engine.replica import TokenRules, generate_all
from dragoman.errors import DragomanError
from dragoman.types import FloatArray, GenerationRequest, Runner
from dragoman_export.errors import ExportError
from dragoman_training.decode import Hypothesis, greedy_all
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import SpecialIds

MAX_LOGIT_DIFFERENCE = 1e-3  # fp32 sums in another order; a wrong weight or cache shows as 0.1 and more
TIE_GAP = 1e-4  # two logits closer than this may come out either way
GOLDEN_GAP = 0.1  # a golden case has no step at which another machine could choose otherwise
MAX_GOLDEN_CASES = 32
PARITY_ROWS = 64

Source = tuple[int, ...]


@dataclass(frozen=True)
class Tie:
    """A source on which ONNX Runtime and PyTorch went apart at a step with two best logits equal within TIE_GAP."""

    source: int  # its index
    step: int
    gap: float


@dataclass(frozen=True)
class Parity:
    """What the comparison found. Both figures are in the manifest."""

    max_logit_difference: float
    num_greedy_sources: int
    ties: tuple[Tie, ...]

    def figures(self) -> dict[str, float]:
        return {
            "max_logit_difference": self.max_logit_difference,
            "num_greedy_sources": float(self.num_greedy_sources),
            "num_greedy_ties": float(len(self.ties)),
        }


def step_logits(runner: Runner, sources: Sequence[Source], targets: Sequence[Source], start: int) -> list[FloatArray]:
    """Logits (T, V) for each target fed token by token, ragged rows side by side; a row that is done leaves."""
    runner.reserve(max(map(len, sources)), max(map(len, targets)) + 1)
    runner.admit(sources, range(len(sources)))
    rows = list(range(len(sources)))  # which source each row holds
    collected: list[list[FloatArray]] = [[] for _ in sources]
    step = 0
    while rows:
        inputs = [start if step == 0 else targets[index][step - 1] for index in rows]
        logits = runner.decode(np.array(inputs, np.int64))
        for row, index in enumerate(rows):
            collected[index].append(logits[row].copy())
        step += 1
        for row in reversed(range(len(rows))):
            if step > len(targets[rows[row]]):
                last = len(rows) - 1
                if row != last:
                    runner.move(last, row)
                    rows[row] = rows[last]
                rows.pop()
    return [np.stack(steps) for steps in collected]


@torch.inference_mode()
def reference_logits(model: Transformer, source: Source, target: Source, start: int) -> FloatArray:
    """The same logits (T, V) of one lone source, teacher-forced and without a cache."""
    lengths = torch.tensor([len(source)], dtype=torch.int32)
    logits = model(torch.tensor([source]), lengths, torch.tensor([[start, *target]]))
    array: FloatArray = logits[0].numpy()
    return array


def compare_logits(
    model: Transformer, runner: Runner, sources: Sequence[Source], targets: Sequence[Source], start: int
) -> float:
    """The largest difference at any step of any row. Raises ExportError above MAX_LOGIT_DIFFERENCE, NaN included."""
    worst = 0.0
    for begin in range(0, len(sources), runner.num_slots):
        group = slice(begin, begin + runner.num_slots)
        actual = step_logits(runner, sources[group], targets[group], start)
        for index, logits in enumerate(actual, start=begin):
            expected = reference_logits(model, sources[index], targets[index], start)
            difference = float(np.abs(logits - expected).max())
            if not difference <= MAX_LOGIT_DIFFERENCE:
                raise ExportError(
                    f"logits differ from PyTorch's by {difference:.3g} on source {index} of {len(sources[index])} "
                    f"tokens; at most {MAX_LOGIT_DIFFERENCE} is rounding: the graphs do not compute what the model does"
                )
            worst = max(worst, difference)
    return worst


def compare_greedy(
    model: Transformer,
    runner: Runner,
    rules: TokenRules,
    sources: Sequence[Source],
    references: Sequence[Hypothesis],
    max_new_tokens: int,
) -> list[Tie]:
    """Decode every source, continuously batched, and compare token by token. Returns the ties.

    Raises ExportError at the first source whose tokens differ otherwise.
    """
    requests = [GenerationRequest(source, max_new_tokens) for source in sources]
    ties = []
    for index, outcome in enumerate(generate_all(runner, rules, requests, EngineConfig())):
        if isinstance(outcome, DragomanError):
            raise ExportError(f"source {index} failed in the engine: {outcome}")
        actual = (*outcome.hypotheses[0].tokens, rules.eos)
        expected = (*references[index].tokens, rules.eos)
        if actual == expected:
            continue
        step = next(i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b)
        logits = reference_logits(model, sources[index], expected[:step], rules.decoder_start)[step]
        gap = abs(float(logits[actual[step]] - logits[expected[step]]))
        if gap > TIE_GAP:
            raise ExportError(
                f"source {index}: token {step} is {actual[step]}, PyTorch's is {expected[step]}, with logits {gap:.3g} "
                f"apart; only ties within {TIE_GAP} may differ"
            )
        ties.append(Tie(index, step, gap))
    return ties


def verify(
    model: Transformer,
    runner: Runner,
    rules: TokenRules,
    sources: Sequence[Source],
    max_new_tokens: int,
    special: SpecialIds,
) -> tuple[Parity, list[Hypothesis]]:
    """Both comparisons. Returns the figures and PyTorch's answers. Raises ExportError."""
    references = greedy_all(model, sources, max_new_tokens, special)
    # Of all lengths, the shortest and the longest among them.
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    step = max(1, len(order) // PARITY_ROWS)
    chosen = list(dict.fromkeys([*order[::step], order[-1]]))
    difference = compare_logits(
        model,
        runner,
        [sources[i] for i in chosen],
        [tuple(references[i].tokens) for i in chosen],
        rules.decoder_start,
    )
    ties = compare_greedy(model, runner, rules, sources, references, max_new_tokens)
    return Parity(difference, len(sources), tuple(ties)), references


def golden_set(
    model: Transformer,
    rules: TokenRules,
    texts: Sequence[str],
    sources: Sequence[Source],
    references: Sequence[Hypothesis],
    answers: Sequence[str],
) -> list[GoldenCase]:
    """Sources, short and long, whose every step is decided by at least GOLDEN_GAP.

    Raises ExportError if there is none.
    """
    cases: list[GoldenCase] = []
    candidates = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    stride = max(1, len(candidates) // (4 * MAX_GOLDEN_CASES))
    for index in candidates[::stride]:
        hypothesis = references[index]
        if hypothesis.finish_reason != "stop" or len(cases) == 2 * MAX_GOLDEN_CASES:
            continue
        logits = reference_logits(model, sources[index], tuple(hypothesis.tokens), rules.decoder_start).copy()
        logits[:, list(rules.never_generated)] = -np.inf
        best_two = np.sort(logits, axis=1)[:, -2:]  # (T, 2)
        if float((best_two[:, 1] - best_two[:, 0]).min()) >= GOLDEN_GAP:
            tokens = tuple(hypothesis.tokens)
            cases.append(GoldenCase(texts[index], sources[index], tokens, hypothesis.score, answers[index]))
    if not cases:
        raise ExportError(
            f"no golden set can be made: for none of {len(sources)} sources does the model prefer its best token to "
            f"the second by {GOLDEN_GAP} at every step. Either it has learned too little (see dragoman evaluate): "
            "train it further; or give more sources"
        )
    return cases[:: max(1, len(cases) // MAX_GOLDEN_CASES)][:MAX_GOLDEN_CASES]
