"""One bundle being served: verified, opened, self-tested, then running."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from dragoman.alignment import Aligner, ForcedPass
from dragoman.bundle import GoldenCase, GraphSet, Manifest, ModelBundle, Shortlist, TokenizerEntry
from dragoman.config import EngineConfig
from dragoman.engine.engine import Engine
from dragoman.engine.kv import kv_cache_bytes
from dragoman.engine.replica import TokenRules, generate_all
from dragoman.errors import BundleError, ConfigError, DragomanError, RequestError
from dragoman.pipeline import TextLimits, TextPipeline
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import GenerationRequest, GenerationResult, Runner, StatsListener
from dragoman.vocabulary import Vocabulary, load_vocabulary


class ServedModel:
    """A model with its engine and pipeline. ``load`` blocks and may take seconds; everything else is quick."""

    def __init__(
        self,
        bundle: ModelBundle,
        graphs: GraphSet,
        engine: Engine,
        pipeline: TextPipeline,
        shortlist: Shortlist | None = None,
    ) -> None:
        """``shortlist``: what answers are restricted by; None where they are not."""
        self.name = bundle.manifest.name
        self.version = bundle.manifest.version
        self.bundle = bundle
        self.graphs = graphs
        self.shortlist = shortlist
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
        precision: str | None = None,
        shortlist: bool = False,
    ) -> ServedModel:
        """Check every byte of a bundle, open its graphs, and replay its golden set, which is the warm-up too.

        Without ``precision``, the first that the bundle has for the provider. With ``shortlist``, answers are made of
        the candidates that the bundle's shortlist has for their sources, by the graphs that it is for.

        Raises BundleError naming the file at fault, before anything is served.
        """
        from dragoman.engine.aligner import OrtForcedPass
        from dragoman.engine.runner import (
            OrtModel,
            OrtRunner,
        )  # heavy, and not needed to use this class with another runner

        bundle = ModelBundle.load(path)
        check_provider(bundle, provider, precision)
        chosen = find_shortlist(bundle, provider, precision) if shortlist else None
        graphs = bundle.graph_set(provider, precision if chosen is None else chosen.precision)
        proof = graphs if chosen is None else chosen
        source, target = load_tokenizers(bundle)
        cases = list(bundle.golden(proof))
        check_golden_texts(source, target, cases, proof.golden)
        model = OrtModel(bundle.manifest.model, graphs, bundle.read, config.num_threads, chosen)
        check_kv_cache(bundle.manifest, config, np.dtype(model.cache_type).itemsize)
        runners = [OrtRunner(model, config.num_slots, config.max_kv_cache_bytes) for _ in range(config.num_replicas)]
        rules = token_rules(bundle.manifest)
        for runner in runners:
            replay_golden(runner, rules, cases, config, proof.golden, graphs.score_tolerance)
        aligner = None
        if (alignment := bundle.manifest.alignment) is not None:
            forced_pass = OrtForcedPass(alignment, rules.decoder_start, bundle.read, config.num_threads)
            check_alignment(forced_pass, cases[0], alignment.graph.file)
            aligner = Aligner(forced_pass, config.max_waiting)
        engine = Engine(runners, rules, config, listener)
        pipeline = TextPipeline(bundle.manifest, source, target, engine, limits, aligner)
        return cls(bundle, graphs, engine, pipeline, chosen)

    def start(self) -> None:
        """Start the engine on the running event loop."""
        self.engine.start()

    async def close(self) -> None:
        """Stop the engine; requests that still wait or run end with NotReadyError."""
        await self.engine.close()
        self.pipeline.close()


def check_provider(bundle: ModelBundle, provider: str, precision: str | None) -> None:
    """Raises BundleError when the graphs that are asked for are for another provider than the CPU."""
    providers = {g.provider for g in bundle.manifest.graphs if g.precision == precision} or {provider}
    if "cpu" not in providers:
        asked = f"its {precision} graphs are" if precision else "graphs are asked for that are"
        usable = ", ".join(g.precision for g in bundle.manifest.graphs if g.provider == "cpu") or "none"
        raise BundleError(
            f"bundle {bundle.manifest.name!r}: {asked} for {', '.join(sorted(providers))}, and this version of "
            f"dragoman runs graphs on the CPU alone: choose a precision that the bundle has for it ({usable})"
        )


def find_shortlist(bundle: ModelBundle, provider: str, precision: str | None) -> Shortlist:
    """The bundle's shortlist. Raises BundleError where it has none, or one for other graphs than are asked for."""
    shortlist = bundle.manifest.shortlist
    if shortlist is None:
        raise BundleError(
            f"bundle {bundle.manifest.name!r} has no shortlist: serve it without --shortlist, or export the checkpoint "
            "with --shortlist and its training text"
        )
    if provider != shortlist.provider or precision not in (None, shortlist.precision):
        asked = provider if precision is None else f"{provider}/{precision}"
        raise BundleError(
            f"bundle {bundle.manifest.name!r} has a shortlist for {shortlist.provider}/{shortlist.precision}, not for "
            f"{asked}: leave --shortlist out, or choose that precision"
        )
    return shortlist


def check_kv_cache(manifest: Manifest, config: EngineConfig, element_bytes: int) -> None:
    """Raises ConfigError if some request within the model's limits could ever exceed the KV budget.

    So whatever is accepted can be served, whoever came before: capacities only grow, and never beyond this.
    ``element_bytes``: of the caches' type.
    """
    limits = manifest.limits
    needed = kv_cache_bytes(
        manifest.model, config.num_slots, limits.max_source_tokens, limits.max_new_tokens, element_bytes
    )
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


def replay_golden(
    runner: Runner, rules: TokenRules, cases: list[GoldenCase], config: EngineConfig, name: str, score_tolerance: float
) -> None:
    """Generate every golden case; raises BundleError at the first that differs, and for an empty set."""
    if not cases:
        raise BundleError(f"{name} holds no case: a bundle that cannot prove itself is not served")
    requests = [GenerationRequest(case.source, len(case.tokens) + 1, return_scores=True) for case in cases]
    try:
        outcomes = generate_all(runner, rules, requests, config)
    except Exception as error:  # ONNX Runtime raises many unrelated types
        raise BundleError(f"{name}: the graphs fail on the golden set: {error}") from error
    for case, outcome in zip(cases, outcomes, strict=True):
        problem = _difference(case, outcome, score_tolerance)
        if problem:
            raise BundleError(f"{name}: this machine does not reproduce the golden answer to {case.text!r}: {problem}")


def check_alignment(forced_pass: ForcedPass, case: GoldenCase, name: str) -> None:
    """Run the alignment graph once; raises BundleError where it gives anything but shares that sum to 1."""
    try:
        sums = forced_pass(case.source, case.tokens).sum(axis=1).tolist()  # (T,)
    except Exception as error:  # ONNX Runtime raises many unrelated types
        raise BundleError(f"{name} fails on the golden set: {error}") from error
    if len(sums) != len(case.tokens) or not all(math.isclose(total, 1, abs_tol=1e-3) for total in sums):
        raise BundleError(f"{name} gives weights for {case.text!r} that sum to {sums}, not to 1 for each token")


def _difference(case: GoldenCase, outcome: GenerationResult | DragomanError, tolerance: float) -> str | None:
    if isinstance(outcome, DragomanError):
        return str(outcome)
    best = outcome.hypotheses[0]
    if best.tokens != case.tokens:
        return f"tokens {list(best.tokens)}, expected {list(case.tokens)}"
    assert best.score is not None
    if not math.isclose(best.score, case.score, abs_tol=tolerance * (1 + abs(case.score))):
        return f"score {best.score:.6f}, expected {case.score:.6f}"
    return None
