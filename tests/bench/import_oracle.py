"""An imported model against CTranslate2 itself: tokens and scores of every search, by PyTorch and by the engine.

    dragoman import ../shared/data/ct2-aren-transliteration --out imported
    dragoman export imported --precision fp32 --sources sources.txt --out bundle
    python tests/bench/import_oracle.py ../shared/data/ct2-aren-transliteration imported --bundle bundle --count 1000

The sources are generated. For each setting: how many answers (every hypothesis, tokens and scores within 1e-4) are
equal, and how many differ only by a tie, that is with scores as good. Exit status 1 on any other difference. Without
--bundle, the answers are the plain PyTorch reference's. What the two programs understand differently is settled in
``theirs``, with the reasons; training/README.md has the table.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from dragoman.bundle import ModelBundle
from dragoman.config import EngineConfig
from dragoman.engine.replica import generate_all
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.served_model import token_rules
from dragoman.types import GenerationRequest, GenerationResult, SearchOptions, Steering, TokenIds
from dragoman_training.alternatives import alternatives
from dragoman_training.beam import BeamOptions, beam_search_together
from dragoman_training.checkpoint import LoadedCheckpoint, load_model
from dragoman_training.decode import greedy, score
from dragoman_training.steering import Steering as ReferenceSteering
from dragoman_training.tokenizer import PlainTokenizer

ctranslate2: Any = importlib.import_module("ctranslate2")

TOLERANCE = 1e-4
ROWS = 64
MOST = 20  # tokens behind the prefix
PREFIX = 2  # tokens of a prefix

Answer = list[tuple[list[int], float]]
"""The hypotheses of one source: tokens with the prefix, and the score."""


@dataclass(frozen=True)
class Setting:
    """One way to decode, as the engine has it."""

    search: SearchOptions = field(default_factory=SearchOptions)
    steering: Steering = field(default_factory=Steering)
    prefixes: bool = False
    most: int = MOST

    def describe(self) -> str:
        """What is not as usual."""
        parts = [
            f"{item.name} {getattr(part, item.name)}"
            for part in (self.search, self.steering)
            for item in fields(part)
            if getattr(part, item.name) != item.default
        ]
        parts += [f"at most {self.most}"] * (self.most != MOST) + ["behind prefixes"] * self.prefixes
        return ", ".join(parts) or "greedy"


def beams(size: int, **options: float) -> SearchOptions:
    """A beam that returns all it has."""
    return SearchOptions(beam_size=size, num_hypotheses=size, **options)  # type: ignore[arg-type]  # numbers by name


def settings() -> Iterator[Setting]:
    """Greedy, beams of 2, 4 and 8; each option with one of them at least."""
    yield from (Setting(), Setting(steering=Steering(min_new_tokens=1)), Setting(prefixes=True), Setting(most=3))
    for size in (2, 4, 8):
        yield from (Setting(beams(size, length_penalty=penalty)) for penalty in (1.0, 0.0, 0.6))
        yield Setting(beams(size, length_penalty=0.0), prefixes=True)
    yield Setting(beams(4, patience=2.0))
    for steering in (
        Steering(min_new_tokens=9),
        Steering(repetition_penalty=1.4),
        Steering(no_repeat_ngram_size=1),
        Steering(no_repeat_ngram_size=2),
        Steering(suppressed=(3, 7), suppressed_sequences=((4, 6), (8, 9, 10), (5, 2))),
    ):
        yield from (Setting(steering=steering), Setting(beams(4), steering))
    yield Setting(beams(4), most=3)
    yield Setting(SearchOptions(num_hypotheses=5, alternatives=True))
    yield Setting(SearchOptions(num_hypotheses=5, alternatives=True), prefixes=True)


class Oracle:
    """The model there. Ids are ours: they are the same."""

    def __init__(self, folder: Path, checkpoint: LoadedCheckpoint) -> None:
        self.translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32", intra_threads=1)
        source, target = checkpoint.source_tokenizer, checkpoint.target_tokenizer
        assert isinstance(source, PlainTokenizer) and isinstance(target, PlainTokenizer)
        self.source_tokens, self.target_tokens = source.tokens, target.tokens
        self.ids = {token: index for index, token in enumerate(target.tokens)}

    def answers(self, setting: Setting, sources: Sequence[TokenIds], prefixes: Sequence[TokenIds]) -> list[Answer]:
        """Its hypotheses of each source.

        Theirs counts the prefix in lengths, so that behind one the limits are shifted, and scores compared as plain
        sums; an end right behind the prefix must be the most probable token there, so that one token is asked for. Its
        greedy score is divided by the length like a beam's, ours is the plain sum.
        """
        search, steering = setting.search, setting.steering
        plain = search.beam_size == 1
        shift = PREFIX if setting.prefixes else 0
        suppressed = [*((one,) for one in steering.suppressed), *steering.suppressed_sequences]
        results = self.translator.translate_batch(
            [[self.source_tokens[i] for i in source] for source in sources],
            target_prefix=[[self.target_tokens[i] for i in prefix] for prefix in prefixes] if shift else None,
            beam_size=search.beam_size,
            num_hypotheses=search.num_hypotheses,
            return_alternatives=search.alternatives,
            length_penalty=0.0 if plain else search.length_penalty,
            patience=search.patience,
            max_decoding_length=setting.most + shift,
            min_decoding_length=max(steering.min_new_tokens, bool(shift)) + shift,
            repetition_penalty=steering.repetition_penalty,
            no_repeat_ngram_size=steering.no_repeat_ngram_size,
            suppress_sequences=[[self.target_tokens[i] for i in sequence] for sequence in suppressed],
            return_scores=True,
            max_batch_size=256,
        )
        return [
            [([self.ids[t] for t in tokens], score) for tokens, score in zip(r.hypotheses, r.scores, strict=True)]
            for r in results
        ]

    def scores(self, sources: Sequence[TokenIds], targets: Sequence[TokenIds]) -> list[list[float]]:
        """The log-probability of each token of given targets, and of their ends."""
        results = self.translator.score_batch(
            [[self.source_tokens[i] for i in source] for source in sources],
            [[self.target_tokens[i] for i in target] for target in targets],
            max_batch_size=256,
        )
        return [list(result.log_probs) for result in results]


class Reference:
    """The plain PyTorch reference."""

    def __init__(self, checkpoint: LoadedCheckpoint) -> None:
        self.checkpoint = checkpoint

    def answers(self, setting: Setting, sources: Sequence[TokenIds], prefixes: Sequence[TokenIds]) -> list[Answer]:
        """Its hypotheses of each source."""
        model, special, search, given = self.checkpoint.model, self.checkpoint.special, setting.search, setting.steering
        steering = ReferenceSteering(**{item.name: getattr(given, item.name) for item in fields(ReferenceSteering)})
        if search.alternatives:
            found = [
                alternatives(
                    model, source, search.num_hypotheses, setting.most, special, prefix=prefix, steering=steering
                )
                for source, prefix in zip(sources, prefixes, strict=True)
            ]
        elif search.beam_size == 1:
            best = greedy(model, sources, setting.most, special, prefixes=prefixes, steering=steering)
            found = [[one] for one in best]
        else:
            options = BeamOptions(
                beam_size=search.beam_size,
                max_new_tokens=setting.most,
                num_hypotheses=search.num_hypotheses,
                length_penalty=search.length_penalty,
                patience=search.patience,
                steering=steering,
            )
            found = []
            for begin in range(0, len(sources), ROWS):
                group = slice(begin, begin + ROWS)
                found += beam_search_together(model, sources[group], options, special, prefixes=prefixes[group])
        return [[(one.tokens, one.score) for one in hypotheses] for hypotheses in found]

    def scores(self, sources: Sequence[TokenIds], targets: Sequence[TokenIds]) -> list[list[float]]:
        """Of given targets."""
        model, special = self.checkpoint.model, self.checkpoint.special
        return [score(model, source, target, special) for source, target in zip(sources, targets, strict=True)]


class Engine:
    """The engine that serves, over the bundle's fp32 graphs."""

    def __init__(self, bundle: ModelBundle) -> None:
        self.rules = token_rules(bundle.manifest)
        self.runner = OrtRunner(
            OrtModel(bundle.manifest.model, bundle.graph_set("cpu", "fp32"), bundle.read), ROWS, 1 << 30
        )

    def answers(self, setting: Setting, sources: Sequence[TokenIds], prefixes: Sequence[TokenIds]) -> list[Answer]:
        """Its hypotheses of each source."""
        steering = None if setting.steering == Steering() else setting.steering
        results = self._results(
            GenerationRequest(source, setting.most, True, prefix=prefix, search=setting.search, steering=steering)
            for source, prefix in zip(sources, prefixes, strict=True)
        )
        return [[(list(one.tokens), one.score or 0.0) for one in result.hypotheses] for result in results]

    def scores(self, sources: Sequence[TokenIds], targets: Sequence[TokenIds]) -> list[list[float]]:
        """Of given targets."""
        results = self._results(
            GenerationRequest(source, 1, True, prefix=target, score_prefix=True)
            for source, target in zip(sources, targets, strict=True)
        )
        return [list(result.hypotheses[0].token_scores or ()) for result in results]

    def _results(self, requests: Iterator[GenerationRequest]) -> list[GenerationResult]:
        outcomes = generate_all(self.runner, self.rules, list(requests), EngineConfig())
        for outcome in outcomes:
            if not isinstance(outcome, GenerationResult):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, GenerationResult)]


def near(ours: float, theirs: float) -> bool:
    """Whether two scores are one."""
    return abs(ours - theirs) <= TOLERANCE


def compare(ours: Sequence[Answer], theirs: Sequence[Answer]) -> tuple[int, int, list[str]]:
    """How many sources have equal answers, how many differ by ties alone, and a line for each that differs else."""
    equal, ties, wrong = 0, 0, []
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        close = len(a) == len(b) and all(near(x[1], y[1]) for x, y in zip(a, b, strict=False))
        same = [tokens for tokens, _ in a] == [tokens for tokens, _ in b]
        equal, ties = equal + (same and close), ties + (close and not same)
        if not close:
            wrong.append(f"source {index}: {a}, CTranslate2 has {b}")
    return equal, ties, wrong


def check(
    folder: Path,
    checkpoint: LoadedCheckpoint,
    count: int,
    answerer: Reference | Engine,
    say: Callable[[str], object],
    chosen: Sequence[Setting] | None = None,
) -> int:
    """Tell the figures of each setting, or of the chosen, and of given targets; returns how many answers differ."""
    oracle, rng = Oracle(folder, checkpoint), random.Random(0)
    letters = [range(3, len(tokens) - 1) for tokens in (oracle.source_tokens, oracle.target_tokens)]
    sources = [tuple(rng.choices(letters[0], k=rng.randint(1, 12))) for _ in range(count)]
    prefixes = [tuple(rng.choices(letters[1], k=PREFIX)) for _ in sources]
    differ = 0
    for setting in chosen or settings():
        given = prefixes if setting.prefixes else [()] * count
        if setting.prefixes and not setting.steering.min_new_tokens:
            setting = Setting(setting.search, Steering(min_new_tokens=1), True, setting.most)
        equal, ties, wrong = compare(answerer.answers(setting, sources, given), oracle.answers(setting, sources, given))
        say(f"{equal} equal, {ties} ties, {len(wrong)} differ: {setting.describe()}")
        for line in wrong[:3]:
            say(f"  {line}")
        differ += len(wrong)
    targets = [tuple(rng.choices(letters[1], k=rng.randint(0, 9))) for _ in sources]
    pairs = list(zip(answerer.scores(sources, targets), oracle.scores(sources, targets), strict=True))
    wrong_scores = sum(len(a) != len(b) or not all(map(near, a, b)) for a, b in pairs)
    say(f"{count - wrong_scores} equal, 0 ties, {wrong_scores} differ: scores of given targets")
    return differ + wrong_scores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model in CTranslate2's format, its tokens between blanks")
    parser.add_argument("checkpoint", type=Path, help="what dragoman import made of it")
    parser.add_argument("--bundle", type=Path, help="what dragoman export made of that, with fp32 graphs")
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = load_model(args.checkpoint)
    answerer = Engine(ModelBundle.load(args.bundle)) if args.bundle else Reference(checkpoint)
    return min(1, check(args.folder, checkpoint, args.count, answerer, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
