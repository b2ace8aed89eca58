"""One bundle being served: verified, opened, self-tested, then running."""

from __future__ import annotations

import math
from pathlib import Path

from dragoman.bundle import GoldenCase, GraphSet, Manifest, ModelBundle, TokenizerEntry
from dragoman.config import EngineConfig
from dragoman.engine.engine import Engine
from dragoman.engine.kv import kv_cache_bytes
from dragoman.engine.replica import TokenRules, generate_all
from dragoman.errors import BundleError, ConfigError, DragomanError, RequestError
from dragoman.pipeline import TextLimits, TextPipeline
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import GenerationRequest, GenerationResult, Runner, StatsListener
from dragoman.vocabulary import Vocabulary, load_vocabulary

GOLDEN_SCORE_TOLERANCE = 1e-3
"""Of a sum of log-probabilities, relative to 1 + its size: far above fp32 rounding, far below any change of weights."""


class ServedModel:
    """A model with its engine and pipeline. ``load`` blocks and may take seconds; everything else is quick."""

    def __init__(self, bundle: ModelBundle, graphs: GraphSet, engine: Engine, pipeline: TextPipeline) -> None:
        self.name = bundle.manifest.name
        self.version = bundle.manifest.version
        self.bundle = bundle
        self.graphs = graphs
        self.engine = engine
        self.pipeline = pipeline

    @classmethod
    def load(
        cls,
        path: Path,
        config: EngineConfig,
        limits: TextLimits,
        listener: StatsListener | None = None,
        *,
        provider: str = "cpu",
        precision: str = "fp32",
    ) -> ServedModel:
        """Check every byte of a bundle, open its graphs, and replay its golden set, which is the warm-up too.

        Raises BundleError naming the file at fault, before anything is served.
        """
        from dragoman.engine.runner import (
            OrtModel,
            OrtRunner,
        )  # heavy, and not needed to use this class with another runner

        bundle = ModelBundle.load(path)
        graphs = bundle.graph_set(provider, precision)
        source, target = load_tokenizers(bundle)
        cases = list(bundle.golden(graphs))
        check_golden_texts(source, target, cases, graphs.golden)
        model = OrtModel(bundle.manifest.model, graphs, bundle.read, config.num_threads)
        check_kv_cache(bundle.manifest, config)
        runners = [OrtRunner(model, config.num_slots, config.max_kv_cache_bytes) for _ in range(config.num_replicas)]
        rules = token_rules(bundle.manifest)
        for runner in runners:
            replay_golden(runner, rules, cases, config, graphs.golden)
        engine = Engine(runners, rules, config, listener)
        return cls(bundle, graphs, engine, TextPipeline(bundle.manifest, source, target, engine, limits))

    def start(self) -> None:
        """Start the engine on the running event loop."""
        self.engine.start()

    async def close(self) -> None:
        """Stop the engine; requests that still wait or run end with NotReadyError."""
        await self.engine.close()


def check_kv_cache(manifest: Manifest, config: EngineConfig) -> None:
    """Raises ConfigError if some request within the model's limits could ever exceed the KV budget.

    So whatever is accepted can be served, whoever came before: capacities only grow, and never beyond this.
    """
    limits = manifest.limits
    needed = kv_cache_bytes(manifest.model, config.num_slots, limits.max_source_tokens, limits.max_new_tokens)
    if needed > config.max_kv_cache_bytes:
        raise ConfigError(
            f"{config.num_slots} slots of {limits.max_source_tokens} source and {limits.max_new_tokens} target tokens "
            f"may need {needed} bytes of KV cache, the limit is {config.max_kv_cache_bytes}: lower --slots or raise "
            "--max-kv-cache-bytes"
        )


def token_rules(manifest: Manifest) -> TokenRules:
    """The manifest's special ids as the engine wants them."""
    ids = manifest.special_ids
    return TokenRules(ids.decoder_start, ids.eos, ids.never_generated)


def load_tokenizers(bundle: ModelBundle) -> tuple[SourceTokenizer, TargetTokenizer]:
    """Both sides. Raises BundleError when a file is not what the manifest says of it."""
    manifest = bundle.manifest
    sides = manifest.tokenizers
    source, target = _load_vocabulary(bundle, sides.source), _load_vocabulary(bundle, sides.target)
    if source.unknown_policy != manifest.unknown_policy:
        raise BundleError(
            f"unknown_policy is {manifest.unknown_policy!r}; what {sides.source.file} can do is "
            f"{source.unknown_policy!r}: export the checkpoint again"
        )
    return SourceTokenizer(source, sides.source.start, sides.source.end), TargetTokenizer(target)


def _load_vocabulary(bundle: ModelBundle, entry: TokenizerEntry) -> Vocabulary:
    vocabulary = load_vocabulary(entry.kind, bundle.file(entry.file))
    if len(vocabulary.tokens) != entry.size:
        raise BundleError(
            f"{entry.file} has {len(vocabulary.tokens)} tokens, the manifest says {entry.size}: it belongs to another "
            "model"
        )
    if vocabulary.normalization != entry.normalization:
        raise BundleError(
            f"{entry.file} normalises by {vocabulary.normalization!r}, the manifest says {entry.normalization!r}: it "
            "belongs to another model"
        )
    return vocabulary


def check_golden_texts(source: SourceTokenizer, target: TargetTokenizer, cases: list[GoldenCase], name: str) -> None:
    """Raises BundleError unless the tokenizers make of every golden case's texts the tokens that belong to them."""
    for case in cases:
        try:
            encoded = source.encode(case.text)
        except RequestError as error:
            raise BundleError(f"{name}: the source tokenizer refuses {case.text!r}: {error}") from error
        for side, found, expected in (
            ("source", list(encoded), list(case.source)),
            ("target", target.decode(case.tokens), case.answer),
        ):
            if found != expected:
                raise BundleError(
                    f"{name}: the {side} tokenizer gives {found!r} for {case.text!r}, expected {expected!r}: it "
                    "belongs to another model"
                )


def replay_golden(runner: Runner, rules: TokenRules, cases: list[GoldenCase], config: EngineConfig, name: str) -> None:
    """Generate every golden case; raises BundleError at the first that differs, and for an empty set."""
    if not cases:
        raise BundleError(f"{name} holds no case: a bundle that cannot prove itself is not served")
    requests = [GenerationRequest(case.source, len(case.tokens) + 1, return_scores=True) for case in cases]
    try:
        outcomes = generate_all(runner, rules, requests, config)
    except Exception as error:  # ONNX Runtime raises many unrelated types
        raise BundleError(f"{name}: the graphs fail on the golden set: {error}") from error
    for case, outcome in zip(cases, outcomes, strict=True):
        problem = _difference(case, outcome)
        if problem:
            raise BundleError(f"{name}: this machine does not reproduce the golden answer to {case.text!r}: {problem}")


def _difference(case: GoldenCase, outcome: GenerationResult | DragomanError) -> str | None:
    if isinstance(outcome, DragomanError):
        return str(outcome)
    best = outcome.hypotheses[0]
    if best.tokens != case.tokens:
        return f"tokens {list(best.tokens)}, expected {list(case.tokens)}"
    assert best.score is not None
    if not math.isclose(best.score, case.score, abs_tol=GOLDEN_SCORE_TOLERANCE * (1 + abs(case.score))):
        return f"score {best.score:.6f}, expected {case.score:.6f}"
    return None
