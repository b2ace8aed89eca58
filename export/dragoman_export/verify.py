"""The export's own gate: the ONNX graphs against PyTorch, through the runner and the decode loop that will serve them.

Nothing here is optional: a graph that differs by more than its target allows is not saved. The figures go into the
manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dragoman.bundle import GoldenCase
from dragoman.config import EngineConfig
from dragoman.engine.candidates import Candidates
from dragoman.engine.replica import TokenRules, generate_all
from dragoman.engine.runner import OrtRunner
from dragoman.errors import DragomanError
from dragoman.types import FloatArray, GenerationRequest, HypothesisResult, SearchOptions
from dragoman_export.errors import ExportError
from dragoman_export.heads import cached_head_dim
from dragoman_export.targets import Tolerance
from dragoman_training.attention import split_heads
from dragoman_training.decode import Hypothesis
from dragoman_training.model import DecoderLayer, Transformer
from dragoman_training.scoring import edit_distance

TIE_GAP = 1e-4  # two logits closer than this may come out either way
MAX_GOLDEN_CASES = 32
MAX_GOLDEN_CANDIDATES = 4 * MAX_GOLDEN_CASES  # each costs as many steps as its answer has
PARITY_ROWS = 64
BEAM_SIZE = 4
MAX_BEAM_SOURCES = 2500  # evenly taken from those given

Source = tuple[int, ...]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Tie:
    """A source on which ONNX Runtime and PyTorch went apart at a step with two best logits equal within TIE_GAP."""

    source: int  # its index
    step: int
    gap: float


@dataclass(frozen=True)
class Parity:
    """What the comparison found. All but the ties' places is in the manifest."""

    max_logit_difference: float
    relative_logit_difference: float
    relative_layer_difference: float  # of the layer that differs most
    num_greedy_sources: int
    num_greedy_equal: int
    token_error_rate: float
    ties: tuple[Tie, ...]
    num_beam_sources: int
    num_beam_equal: int
    num_beam_ties: int
    beam_token_error_rate: float

    def figures(self) -> dict[str, float]:
        return {
            "max_logit_difference": self.max_logit_difference,
            "relative_logit_difference": self.relative_logit_difference,
            "relative_layer_difference": self.relative_layer_difference,
            "num_greedy_sources": float(self.num_greedy_sources),
            "num_greedy_equal": float(self.num_greedy_equal),
            "num_greedy_ties": float(len(self.ties)),
            "greedy_token_error_rate": self.token_error_rate,
            "num_beam_sources": float(self.num_beam_sources),
            "num_beam_equal": float(self.num_beam_equal),
            "num_beam_ties": float(self.num_beam_ties),
            "beam_token_error_rate": self.beam_token_error_rate,
        }


@dataclass(frozen=True)
class Activations:
    """What one row made of a known target: logits (T, V), and keys and values (H, S or T, Dh) by layer and kind.

    Dh is a head's width in the caches.
    """

    logits: FloatArray
    layers: dict[str, FloatArray]


class Differences:
    """Sums over rows of squares: of differences, and of the values that they are differences to."""

    def __init__(self) -> None:
        self.max_logit = 0.0
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, actual: Activations, expected: Activations) -> None:
        self.max_logit = _larger(self.max_logit, float(np.abs(actual.logits - expected.logits).max()))
        self.add_values("logits", actual.logits, expected.logits)
        for name, values in expected.layers.items():
            self.add_values(name, actual.layers[name], values)

    def add_values(self, name: str, actual: FloatArray, expected: FloatArray) -> None:
        wrong, size = self._sums.get(name, (0.0, 0.0))
        difference = actual.astype(np.float64) - expected
        self._sums[name] = wrong + float((difference**2).sum()), size + float((expected.astype(np.float64) ** 2).sum())

    def relative(self) -> dict[str, float]:
        """The root mean square of the differences as a share of the values', by name: ``logits`` and the layers'."""
        return {name: (wrong / size) ** 0.5 if size else wrong for name, (wrong, size) in self._sums.items()}


def run_targets(
    runner: OrtRunner, sources: Sequence[Source], targets: Sequence[Source], start: int
) -> list[Activations]:
    """Feed each target token by token, ragged rows side by side; a row that is done leaves."""
    runner.reserve(max(map(len, sources)), max(map(len, targets)) + 1)
    runner.admit(sources, [[slot] for slot in range(len(sources))])
    rows = list(range(len(sources)))  # which source each row holds
    logits: list[list[FloatArray]] = [[] for _ in sources]
    layers: list[dict[str, FloatArray]] = [{} for _ in sources]
    step = 0
    while rows:
        inputs = [start if step == 0 else targets[index][step - 1] for index in rows]
        chosen = runner.decode(np.array(inputs, np.int64))
        for row, index in enumerate(rows):
            logits[index].append(chosen[row].copy())
        step += 1
        for row in reversed(range(len(rows))):
            if step > len(targets[rows[row]]):
                layers[rows[row]] = runner.kv.row(row)
                last = len(rows) - 1
                if row != last:
                    runner.move(last, row)
                    rows[row] = rows[last]
                rows.pop()
    return [Activations(np.stack(logits[index]), layers[index]) for index in range(len(sources))]


@torch.inference_mode()
def reference_activations(model: Transformer, source: Source, target: Source, start: int) -> Activations:
    """The same of one lone source by PyTorch, teacher-forced and without a cache."""
    heads, layers = model.config.num_heads, dict[str, FloatArray]()

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def see(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            keys = split_heads(output, heads)[0].numpy()
            layers[name] = np.pad(keys, ((0, 0), (0, 0), (0, cached_head_dim(model.config) - keys.shape[2])))

        return module.register_forward_hook(see)

    handles = [
        watch(name, module)
        for index, layer in enumerate(model.decoder_layers())
        for name, module in _keys_and_values(index, layer)
    ]
    try:
        lengths = torch.tensor([len(source)], dtype=torch.int32)
        logits = model(torch.tensor([source]), lengths, torch.tensor([[start, *target]]))
    finally:
        for handle in handles:
            handle.remove()
    return Activations(logits[0].numpy(), layers)


def _keys_and_values(index: int, layer: DecoderLayer) -> Iterator[tuple[str, nn.Module]]:
    """The projections whose outputs are cached, by the names that ``KvStore.row`` has for them."""
    for kind, attention in (("past", layer.self_attention), ("cross", layer.cross_attention)):
        yield f"{kind}_key_{index}", attention.key
        yield f"{kind}_value_{index}", attention.value


def edge_cases(
    sources: Sequence[Source],
    answers: Sequence[Hypothesis],
    source_end: Source,
    eos: int,
    max_source_tokens: int,
    max_new_tokens: int,
) -> tuple[list[Source], list[Source]]:
    """Sources and targets whose lengths are the limits' edges (1, the limit less one, the limit), of real tokens.

    ``source_end`` closes a source.
    """
    tokens = [token for source in sources for token in source if token not in source_end] or list(source_end)
    produced = [token for answer in answers for token in answer.tokens] or [eos]
    lengths = [1, max(1, max_source_tokens - 1), max_source_tokens]
    steps = [1, max(1, max_new_tokens - 1), max_new_tokens]
    pairs = [(length, step) for length in lengths for step in steps]
    return (
        [(*_cycle(tokens, length - len(source_end)), *source_end) for length, _ in pairs],
        [_cycle(produced, step - 1) for _, step in pairs],  # the decoder's first input is the start token
    )


def _cycle(tokens: Sequence[int], count: int) -> Source:
    return tuple(tokens[i % len(tokens)] for i in range(count))


def compare_activations(
    model: Transformer,
    runner: OrtRunner,
    sources: Sequence[Source],
    targets: Sequence[Source],
    start: int,
    tolerance: Tolerance,
) -> Differences:
    """The differences at every step of every row. Raises ExportError beyond the tolerance, NaN included."""
    differences = Differences()
    for begin in range(0, len(sources), runner.num_slots):
        group = slice(begin, begin + runner.num_slots)
        for index, actual in enumerate(run_targets(runner, sources[group], targets[group], start), start=begin):
            expected = reference_activations(model, sources[index], targets[index], start)
            differences.add(actual, expected)
            if not differences.max_logit <= tolerance.logits:
                raise ExportError(
                    f"logits differ from PyTorch's by {differences.max_logit:.3g} on source {index} of "
                    f"{len(sources[index])} tokens; at most {tolerance.logits} is rounding: the graphs do not compute "
                    "what the model does"
                )
    for name, relative in differences.relative().items():
        if not relative <= tolerance.relative:
            raise ExportError(
                f"{name} differ from PyTorch's by {relative:.3g} of their size; at most {tolerance.relative} is "
                "allowed: the graphs do not compute what the model does, or its values spread too far for this "
                "precision"
            )
    return differences


@dataclass(frozen=True)
class References:
    """PyTorch's answers to some sources: greedy ones to all, the best of a beam to those at some places."""

    greedy: Sequence[Hypothesis]
    beam: dict[int, Hypothesis]


def beam_places(count: int) -> range:
    """The places of the sources that beam search is compared on."""
    return range(0, count, -(-count // MAX_BEAM_SOURCES) or 1)


def generate(
    runner: OrtRunner, rules: TokenRules, sources: Sequence[Source], max_new_tokens: int, beam_size: int = 1
) -> list[HypothesisResult]:
    """The best answers with scores, continuously batched. Raises ExportError where the engine fails."""
    search = SearchOptions(beam_size=beam_size)
    requests = [GenerationRequest(source, max_new_tokens, return_scores=True, search=search) for source in sources]
    results = []
    for index, outcome in enumerate(generate_all(runner, rules, requests, EngineConfig())):
        if isinstance(outcome, DragomanError):
            raise ExportError(f"source {index} failed in the engine: {outcome}")
        results.append(outcome.hypotheses[0])
    return results


def find_ties(
    model: Transformer,
    rules: TokenRules,
    sources: Sequence[Source],
    references: Sequence[Hypothesis],
    answers: Sequence[HypothesisResult],
) -> list[Tie]:
    """The answers that are not PyTorch's because two logits were equal within TIE_GAP.

    Raises ExportError at the first answer that differs otherwise.
    """
    ties = []
    for index, answer in enumerate(answers):
        actual = (*answer.tokens, rules.eos)
        expected = (*references[index].tokens, rules.eos)
        if actual == expected:
            continue
        step = next(i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b)
        logits = reference_activations(model, sources[index], expected[:step], rules.decoder_start).logits[step]
        gap = abs(float(logits[actual[step]] - logits[expected[step]]))
        if gap > TIE_GAP:
            raise ExportError(
                f"source {index}: token {step} is {actual[step]}, PyTorch's is {expected[step]}, with logits {gap:.3g} "
                f"apart; only ties within {TIE_GAP} may differ"
            )
        ties.append(Tie(index, step, gap))
    return ties


def count_beam_ties(references: Sequence[Hypothesis], answers: Sequence[HypothesisResult]) -> int:
    """How many answers of a beam are not PyTorch's, but as good within TIE_GAP of a score.

    Raises ExportError at the first answer that differs otherwise.
    """
    ties = 0
    for index, (answer, reference) in enumerate(zip(answers, references, strict=True)):
        assert answer.score is not None
        gap = abs(answer.score - reference.score)
        if gap > TIE_GAP * (1 + abs(reference.score)):
            raise ExportError(
                f"source {index}: the best of a beam of {BEAM_SIZE} has the score {answer.score:.6f} and tokens "
                f"{list(answer.tokens)}, PyTorch's {reference.score:.6f} and {reference.tokens}; only ties may differ"
            )
        ties += list(answer.tokens) != reference.tokens
    return ties


def token_error_rate(references: Sequence[Hypothesis], answers: Sequence[HypothesisResult]) -> float:
    """The edits that turn answers into references, a token of these."""
    pairs = list(zip(answers, references, strict=True))
    edits = sum(
        edit_distance([*map(str, a.tokens)], [*map(str, r.tokens)]) for a, r in pairs if list(a.tokens) != r.tokens
    )
    return edits / max(1, sum(len(r.tokens) for _, r in pairs))


def count_equal(references: Sequence[Hypothesis], answers: Sequence[HypothesisResult]) -> int:
    """How many answers have the references' tokens."""
    return sum(list(answer.tokens) == r.tokens for answer, r in zip(answers, references, strict=True))


def verify(
    model: Transformer,
    runner: OrtRunner,
    rules: TokenRules,
    sources: Sequence[Source],
    references: References,
    source_end: Source,
    max_source_tokens: int,
    max_new_tokens: int,
    tolerance: Tolerance,
) -> tuple[Parity, list[HypothesisResult]]:
    """All comparisons. Returns the figures, and the greedy answers. Raises ExportError beyond the tolerance."""
    greedy = references.greedy
    # Of all lengths, the shortest and the longest among them.
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    step = max(1, len(order) // PARITY_ROWS)
    chosen = list(dict.fromkeys([*order[::step], order[-1]]))
    edges = edge_cases(sources, greedy, source_end, rules.eos, max_source_tokens, max_new_tokens)
    differences = compare_activations(
        model,
        runner,
        [*(sources[i] for i in chosen), *edges[0]],
        [*(tuple(greedy[i].tokens) for i in chosen), *edges[1]],
        rules.decoder_start,
        tolerance,
    )
    answers = generate(runner, rules, sources, max_new_tokens)
    beam = list(references.beam.values())
    beam_answers = generate(runner, rules, [sources[i] for i in references.beam], max_new_tokens, BEAM_SIZE)
    ties: list[Tie] = []
    num_beam_ties = 0
    if tolerance.token_error_rate == 0:
        ties = find_ties(model, rules, sources, greedy, answers)
        num_beam_ties = count_beam_ties(beam, beam_answers)
    for kind, expected, actual in (("greedy", greedy, answers), ("beam", beam, beam_answers)):
        rate = token_error_rate(expected, actual)
        if tolerance.token_error_rate and rate > tolerance.token_error_rate:
            raise ExportError(
                f"{kind} answers differ from PyTorch's by {rate:.3g} edits a token; at most "
                f"{tolerance.token_error_rate} is allowed: this precision is not for this model"
            )
    relative = differences.relative()
    parity = Parity(
        max_logit_difference=differences.max_logit,
        relative_logit_difference=relative.pop("logits"),
        relative_layer_difference=max(relative.values()),
        num_greedy_sources=len(sources),
        num_greedy_equal=count_equal(greedy, answers),
        token_error_rate=token_error_rate(greedy, answers),
        ties=tuple(ties),
        num_beam_sources=len(beam),
        num_beam_equal=count_equal(beam, beam_answers),
        num_beam_ties=num_beam_ties,
        beam_token_error_rate=token_error_rate(beam, beam_answers),
    )
    return parity, answers


def golden_set(
    runner: OrtRunner,
    rules: TokenRules,
    texts: Sequence[str],
    sources: Sequence[Source],
    answers: Sequence[HypothesisResult],
    decoded: Sequence[str],
    gap: float,
) -> list[GoldenCase]:
    """Sources of all lengths, the shortest first, whose every step is decided by at least ``gap``.

    Raises ExportError if there is none.
    """
    cases: list[GoldenCase] = []
    ended = [index for index, answer in enumerate(answers) if answer.finish_reason == "stop"]
    ended.sort(key=lambda index: len(sources[index]))
    candidates = spread(ended, MAX_GOLDEN_CANDIDATES)
    for begin in range(0, len(candidates), runner.num_slots):
        group = candidates[begin : begin + runner.num_slots]
        targets = [answers[index].tokens for index in group]
        found = run_targets(runner, [sources[index] for index in group], targets, rules.decoder_start)
        for index, activations in zip(group, found, strict=True):
            answer, logits = answers[index], activations.logits.copy()
            logits[:, list(rules.never_generated)] = -np.inf
            best_two = np.partition(logits, -2, axis=1)[:, -2:]  # (T, 2)
            if float((best_two[:, 1] - best_two[:, 0]).min()) >= gap:
                assert answer.score is not None
                cases.append(GoldenCase(texts[index], sources[index], answer.tokens, answer.score, decoded[index]))
    if not cases:
        raise ExportError(
            f"no golden set can be made: for none of {len(sources)} sources does the model prefer its best token to "
            f"the second by {gap} at every step. Either it has learned too little (see dragoman evaluate): "
            "train it further; or give more sources"
        )
    return spread(cases, MAX_GOLDEN_CASES)


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many, evenly taken, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[place * (len(items) - 1) // (most - 1)] for place in range(most)]


def check_shortlist(
    full: OrtRunner,
    short: OrtRunner,
    candidates: Candidates,
    sources: Sequence[Source],
    targets: Sequence[Source],
    start: int,
) -> None:
    """Raises ExportError unless each row's logits are, bit for bit, those without the shortlist, and -inf beside them.

    ``full`` and ``short`` are runners without the shortlist and with it. Rows are ragged and keep each other company.
    """
    for begin in range(0, len(sources), full.num_slots):
        batch = slice(begin, begin + full.num_slots)
        pairs = zip(
            run_targets(full, sources[batch], targets[batch], start),
            run_targets(short, sources[batch], targets[batch], start),
            strict=True,
        )
        for index, (expected, actual) in enumerate(pairs, start=begin):
            own = candidates.of(sources[index])
            shown = np.full_like(expected.logits, -np.inf)
            shown[:, own] = expected.logits[:, own]
            if not np.array_equal(actual.logits, shown):
                raise ExportError(
                    f"source {index}: its logits with the shortlist are not those without it: this machine's products "
                    "of 8 bits are not exact"
                )


def _larger(one: float, other: float) -> float:
    """The larger of two, or NaN if either is."""
    return float(np.maximum(one, other))
