"""The engine's searches over fp32 graphs against the plain PyTorch reference, source by source.

    dragoman export runs/g2p-en --precision fp32 --sources g2p-data/dev.source --out bundles/g2p-fp32
    python tests/bench/decoding.py runs/g2p-en bundles/g2p-fp32 g2p-data/test.source --count 500

For each setting: how many answers (every hypothesis, tokens and scores within 1e-4) are equal, and how many differ only
in order or by a tie, that is with scores as good. Exit status 1 on any other difference. Coverage penalties are among
the settings where the bundle has an alignment graph and no graphs but fp32, from whose weights the others' differ.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from dragoman.bundle import ModelBundle
from dragoman.config import EngineConfig
from dragoman.coverage import coverage_penalty
from dragoman.engine.aligner import OrtForcedPass
from dragoman.engine.replica import generate_all
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.errors import DragomanError
from dragoman.served_model import token_rules
from dragoman.types import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    HypothesisResult,
    SearchOptions,
    Steering,
    TokenIds,
)
from dragoman_training.alternatives import alternatives
from dragoman_training.beam import BeamOptions, beam_search_together
from dragoman_training.checkpoint import LoadedCheckpoint, load_model
from dragoman_training.corpus import read_lines
from dragoman_training.data import encode_source
from dragoman_training.decode import Hypothesis, greedy
from dragoman_training.steering import Steering as ReferenceSteering

TOLERANCE = 1e-4
ROWS = 64


@dataclass(frozen=True)
class Setting:
    """One way to decode, as both sides have it."""

    search: SearchOptions
    steering: Steering = field(default_factory=Steering)
    prefixes: bool = False

    def describe(self) -> str:
        """What is not as usual."""
        parts = [
            f"{item.name} {getattr(part, item.name)}"
            for part in (self.search, self.steering)
            for item in fields(part)
            if getattr(part, item.name) != item.default
        ]
        return ", ".join(parts + ["behind prefixes"] * self.prefixes) or "greedy"


def settings(*, coverage: bool) -> Iterator[Setting]:
    """Greedy, beams of 1 to 8 with all penalties, n-best, alternatives; each also steered, and behind prefixes."""
    steerings = [
        Steering(),
        Steering(min_new_tokens=6),
        Steering(repetition_penalty=1.3, no_repeat_ngram_size=2),
        Steering(suppressed=(5, 7), suppressed_sequences=((4, 6), (8, 9, 10))),
    ]
    yield from (Setting(SearchOptions(), steering, prefixes) for steering in steerings for prefixes in (False, True))
    for index, size in enumerate(range(2, 9)):
        for penalty, patience in ((1.0, 1.0), (0.0, 1.0), (0.6, 2.0)):
            search = SearchOptions(beam_size=size, num_hypotheses=size, length_penalty=penalty, patience=patience)
            yield Setting(search, steerings[index % 4], prefixes=index % 2 == 1)
            if coverage and size in (2, 5, 8):
                search = replace(search, coverage_penalty=(0.2, 1.0, -0.5)[(index + (patience > 1)) % 3])
                yield Setting(search, steerings[index % 4], prefixes=index % 2 == 1)
    yield Setting(SearchOptions(num_hypotheses=5, alternatives=True), prefixes=True)


def reference(
    checkpoint: LoadedCheckpoint, setting: Setting, sources: Sequence[TokenIds], prefixes: Sequence[TokenIds], most: int
) -> list[list[Hypothesis]]:
    """PyTorch's hypotheses of each source."""
    model, special, search = checkpoint.model, checkpoint.special, setting.search
    given = setting.steering
    steering = ReferenceSteering(
        min_new_tokens=given.min_new_tokens,
        suppressed=given.suppressed,
        suppressed_sequences=given.suppressed_sequences,
        repetition_penalty=given.repetition_penalty,
        no_repeat_ngram_size=given.no_repeat_ngram_size,
    )
    if search.alternatives:
        return [
            alternatives(model, source, search.num_hypotheses, most, special, prefix=prefix, steering=steering)
            for source, prefix in zip(sources, prefixes, strict=True)
        ]
    if search.beam_size == 1:
        return [[found] for found in greedy(model, sources, most, special, prefixes=prefixes, steering=steering)]
    options = BeamOptions(
        beam_size=search.beam_size,
        max_new_tokens=most,
        num_hypotheses=search.num_hypotheses,
        length_penalty=search.length_penalty,
        patience=search.patience,
        coverage_penalty=search.coverage_penalty,
        steering=steering,
    )
    found: list[list[Hypothesis]] = []
    for begin in range(0, len(sources), ROWS):
        group = slice(begin, begin + ROWS)
        found += beam_search_together(model, sources[group], options, special, prefixes=prefixes[group])
    return found


def compare(
    checkpoint: LoadedCheckpoint, bundle: ModelBundle, setting: Setting, sources: Sequence[TokenIds], most: int
) -> tuple[int, int, list[str]]:
    """How many sources have equal answers, how many differ by ties alone, and a line for each that differs else."""
    rules = token_rules(bundle.manifest)
    model = OrtModel(bundle.manifest.model, bundle.graph_set("cpu", "fp32"), bundle.read)
    runner = OrtRunner(model, ROWS, 1 << 30)
    rng = random.Random(0)
    allowed = [
        i for i in range(bundle.manifest.model.target_vocab_size) if i not in (*rules.never_generated, rules.eos)
    ]
    prefixes = [tuple(rng.choices(allowed, k=rng.randint(1, 3))) if setting.prefixes else () for _ in sources]
    steering = None if setting.steering == Steering() else setting.steering
    requests = [
        GenerationRequest(source, most, True, prefix=prefix, search=setting.search, steering=steering)
        for source, prefix in zip(sources, prefixes, strict=True)
    ]
    outcomes = generate_all(runner, rules, requests, EngineConfig())
    equal, ties, wrong = 0, 0, []
    for index, expected in enumerate(reference(checkpoint, setting, sources, prefixes, most)):
        outcome = outcomes[index]
        if isinstance(outcome, DragomanError):
            wrong.append(f"source {index}: {outcome}")
            continue
        if setting.search.coverage_penalty:
            outcome = replace(outcome, hypotheses=covered(bundle, model, setting.search, requests[index], outcome))
        close = len(outcome.hypotheses) == len(expected) and all(
            abs((a.score or 0.0) - e.score) <= TOLERANCE * (1 + abs(e.score))
            for a, e in zip(outcome.hypotheses, expected, strict=False)
        )
        same = [list(h.tokens) for h in outcome.hypotheses] == [h.tokens for h in expected]
        equal, ties = equal + (same and close), ties + (close and not same)
        if not close:
            wrong.append(
                f"source {index}: {[(h.tokens, h.score) for h in outcome.hypotheses]}, PyTorch has "
                f"{[(h.tokens, h.score) for h in expected]}"
            )
    return equal, ties, wrong


def covered(
    bundle: ModelBundle, model: OrtModel, search: SearchOptions, request: GenerationRequest, result: GenerationResult
) -> tuple[HypothesisResult, ...]:
    """All that the engine collected, ranked with the coverage penalty."""
    assert bundle.manifest.alignment is not None
    forced_pass = OrtForcedPass(
        bundle.manifest.alignment, model.encoder, bundle.manifest.special_ids.decoder_start, bundle.read
    )
    found = []
    for one in result.hypotheses:
        num_steps = len(one.tokens) + (one.finish_reason is FinishReason.STOP)
        weights = forced_pass.coverage(request.source, one.tokens)[:num_steps]
        found.append(replace(one, score=(one.score or 0.0) + search.coverage_penalty * coverage_penalty(weights)))
    found.sort(key=lambda one: -(one.score or 0.0))
    return tuple(found[: search.num_hypotheses])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--count", type=int, default=500)
    args = parser.parse_args()
    checkpoint, bundle = load_model(args.checkpoint), ModelBundle.load(args.bundle)
    texts = itertools.islice(read_lines(args.sources), args.count)
    sources = [tuple(encode_source(checkpoint.source_tokenizer, text)) for text in texts]
    most, differences = min(30, bundle.manifest.limits.max_new_tokens - 3), 0
    has_exact_weights = bundle.manifest.alignment is not None and len(bundle.manifest.graphs) == 1
    for setting in settings(coverage=has_exact_weights):
        equal, ties, wrong = compare(checkpoint, bundle, setting, sources, most)
        differences += len(wrong)
        print(f"{equal} equal, {ties} ties, {len(wrong)} differ: {setting.describe()}", flush=True)
        print("".join(f"  {line}\n" for line in wrong[:3]), end="")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
