"""One bundle being served: verified, opened, self-tested, then running."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dragoman.alignment import Aligner, ForcedPass
from dragoman.bundle import GoldenCase, GraphSet, Manifest, ModelBundle, Shortlist, TokenizerEntry
from dragoman.config import DeviceConfig, EngineConfig
from dragoman.engine.engine import Engine
from dragoman.engine.kv import kv_cache_bytes
from dragoman.engine.replica import TokenRules, generate_all
from dragoman.errors import BundleError, ConfigError, DragomanError, RequestError
from dragoman.pipeline import TextLimits, TextPipeline
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import GenerationRequest, GenerationResult, Runner, StatsListener
from dragoman.vocabulary import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from dragoman.engine.device_memory import MemoryPlan
    from dragoman.engine.device_runner import DeviceRunner, Progress
    from dragoman.engine.runner import OrtRunner


GRAPHS = {"cuda-dry": "cuda"}
"""The graphs that a provider runs, where they are another's."""


class ServedModel:
    """A model with its engine and pipeline. ``load`` blocks and may take seconds; everything else is quick."""

    def __init__(
        self,
        bundle: ModelBundle,
        graphs: GraphSet,
        engine: Engine,
        pipeline: TextPipeline,
        shortlist: Shortlist | None = None,
        plan: MemoryPlan | None = None,
    ) -> None:
        """``shortlist``: what answers are restricted by; None where they are not.

        ``plan``: what a replica takes of the device's memory; None on the CPU. Raises BundleError for a bundle that
        says of no time when it was made.
        """
        self.name = bundle.manifest.name
        self.version = bundle.manifest.version
        self.created = creation_time(bundle.manifest)
        self.bundle = bundle
        self.graphs = graphs
        self.shortlist = shortlist
        self.engine = engine
        self.pipeline = pipeline
        self.plan = plan

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
        device: DeviceConfig = DeviceConfig(),  # noqa: B008  # frozen
        progress: Progress | None = None,
    ) -> ServedModel:
        """Check every byte of a bundle, open its graphs, and replay its golden set, which is the warm-up too.

        Without ``precision``, the first that the bundle has for the provider. With ``shortlist``, answers are made of
        the candidates that the bundle's shortlist has for their sources, by the graphs that it is for. ``device`` is
        for the providers ``cuda`` and ``cuda-dry``, which are warmed up first; ``progress`` hears what is warmed up,
        how many of its shapes are done, and how many there are.

        Raises BundleError naming the file at fault, before anything is served, and ConfigError where the provider
        cannot be used here.
        """
        if provider == "cuda":
            from dragoman.engine.provider import check_available

            found = check_available(device.device_id)
            device = replace(device, mem_limit_bytes=device.mem_limit_bytes or found.memory_bytes)
        from dragoman.engine.aligner import OrtForcedPass  # heavy, as what opens the graphs

        bundle = ModelBundle.load(path)
        check_provider(bundle, provider, precision)
        chosen = find_shortlist(bundle, provider, precision) if shortlist else None
        graphs = bundle.graph_set(GRAPHS.get(provider, provider), precision if chosen is None else chosen.precision)
        proof = graphs if chosen is None else chosen
        source, target = load_tokenizers(bundle)
        cases = list(bundle.golden(proof))
        if not cases:
            raise BundleError(f"{proof.golden} holds no case: a bundle that cannot prove itself is not served")
        check_golden_texts(source, target, cases, proof.golden)
        rules = token_rules(bundle.manifest)

        def prove(runner: Runner) -> None:
            replay_golden(runner, rules, cases, config, proof.golden, graphs.score_tolerance)

        runners: Sequence[Runner]
        plan = None
        if provider == "cpu":
            runners = cpu_runners = open_runners(bundle, graphs, config, chosen)
            encoder = cpu_runners[0].encoder
            for runner in runners:
                prove(runner)
        else:
            device_runners = open_device_runners(bundle, graphs, config, provider, device)
            runners, plan, encoder = device_runners, device_runners[0].plan, device_runners[0].encoder
        aligner = None
        if (alignment := bundle.manifest.alignment) is not None:
            forced_pass = OrtForcedPass(alignment, encoder, rules.decoder_start, bundle.read, config.num_threads)
            check_alignment(forced_pass, cases[0], alignment.graph.file)
            check_alignment(forced_pass.coverage, cases[0], alignment.graph.file, num_more=1)
            aligner = Aligner(forced_pass, config.max_waiting, forced_pass.coverage)
        engine = Engine(runners, rules, config, listener)
        if provider != "cpu":
            engine.prepare(lambda runner: warm_up(runner, prove, progress))
        pipeline = TextPipeline(bundle.manifest, source, target, engine, limits, aligner)
        return cls(bundle, graphs, engine, pipeline, chosen, plan)

    def start(self) -> None:
        """Start the engine on the running event loop."""
        self.engine.start()

    async def close(self) -> None:
        """Stop the engine; requests that still wait or run end with NotReadyError."""
        await self.engine.close()
        self.pipeline.close()


def open_runners(
    bundle: ModelBundle, graphs: GraphSet, config: EngineConfig, shortlist: Shortlist | None
) -> list[OrtRunner]:
    """The replicas' runners on the CPU, over one copy of the weights. Raises BundleError and ConfigError."""
    from dragoman.engine.runner import OrtModel, OrtRunner  # heavy, and not needed with another runner

    model = OrtModel(bundle.manifest.model, graphs, bundle.read, config.num_threads, shortlist)
    check_kv_cache(bundle.manifest, config, np.dtype(model.cache_type).itemsize)
    return [OrtRunner(model, config.num_slots, config.max_kv_cache_bytes) for _ in range(config.num_replicas)]


def open_device_runners(
    bundle: ModelBundle, graphs: GraphSet, config: EngineConfig, provider: str, device: DeviceConfig
) -> list[DeviceRunner]:
    """The replicas' runners on a device, each with weights of its own. Raises BundleError and ConfigError."""
    from dragoman.engine.device import Device
    from dragoman.engine.device_runner import DeviceRunner

    manifest = bundle.manifest
    check_kv_cache(manifest, config, element_bytes=2)
    own = replace(device, mem_limit_bytes=device.mem_limit_bytes // config.num_replicas)
    return [
        DeviceRunner(
            Device(provider, own),
            manifest.model,
            graphs,
            bundle.read,
            config.num_slots,
            manifest.limits,
            config.max_encode_tokens,
            manifest.special_ids.never_generated,
        )
        for _ in range(config.num_replicas)
    ]


def warm_up(runner: Runner, prove: Callable[[Runner], None], progress: Progress | None) -> None:
    """Make a device runner's first runs, and let it prove itself.

    Raises BundleError where a run fails, and ConfigError where it lacks memory.
    """
    from dragoman.engine.device import is_out_of_memory
    from dragoman.engine.device_runner import DeviceRunner

    assert isinstance(runner, DeviceRunner)
    try:
        runner.warm_up(progress or (lambda what, done, total: None))
    except Exception as error:  # ONNX Runtime raises many unrelated types
        if is_out_of_memory(error):
            raise ConfigError(
                f"the device has no room for the largest runs ({'; '.join(runner.plan.lines())}): lower --slots or "
                "--max-encode-tokens, free its memory, or raise --gpu-mem-limit"
            ) from error
        raise BundleError(f"the graphs fail on the device: {error}") from error
    prove(runner)


def check_provider(bundle: ModelBundle, provider: str, precision: str | None) -> None:
    """Raises BundleError where the bundle has such a precision for another provider alone, or nothing for this one."""
    graphs, wanted = bundle.manifest.graphs, GRAPHS.get(provider, provider)
    usable = [g.precision for g in graphs if g.provider == wanted]
    if precision in usable or (precision is None and usable):
        return
    others = sorted({g.provider for g in graphs if precision in (None, g.precision)})
    if others:
        asked = f"its {precision} graphs are" if precision else "its graphs are"
        have = ", ".join(usable) or f"none; export the checkpoint with a precision for {wanted}"
        raise BundleError(
            f"bundle {bundle.manifest.name!r}: {asked} for {', '.join(others)}, and --provider is {provider}: choose "
            f"another provider, or a precision that the bundle has for this one ({have})"
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


def creation_time(manifest: Manifest) -> datetime:
    """When the bundle was made. Raises BundleError."""
    try:
        created = datetime.fromisoformat(manifest.created)
    except ValueError as error:
        raise BundleError(f"manifest.created is {manifest.created!r}; it must be an RFC 3339 time: {error}") from error
    if created.tzinfo is None:
        raise BundleError(f"manifest.created is {manifest.created!r}; it must be an RFC 3339 time: it lacks its zone")
    return created


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
    """Generate every golden case; raises BundleError at the first that differs."""
    requests = [GenerationRequest(case.source, len(case.tokens) + 1, return_scores=True) for case in cases]
    try:
        outcomes = generate_all(runner, rules, requests, config)
    except Exception as error:  # ONNX Runtime raises many unrelated types
        raise BundleError(f"{name}: the graphs fail on the golden set: {error}") from error
    for case, outcome in zip(cases, outcomes, strict=True):
        problem = _difference(case, outcome, score_tolerance)
        if problem:
            raise BundleError(f"{name}: this machine does not reproduce the golden answer to {case.text!r}: {problem}")


def check_alignment(forced_pass: ForcedPass, case: GoldenCase, name: str, num_more: int = 0) -> None:
    """Run the alignment graph once; raises BundleError where it gives anything but shares that sum to 1.

    There must be a row for each token, and ``num_more``.
    """
    try:
        sums = forced_pass(case.source, case.tokens).sum(axis=1).tolist()  # (T,)
    except Exception as error:  # ONNX Runtime raises many unrelated types
        raise BundleError(f"{name} fails on the golden set: {error}") from error
    if len(sums) != len(case.tokens) + num_more or not all(math.isclose(total, 1, abs_tol=1e-3) for total in sums):
        raise BundleError(f"{name} gives weights for {case.text!r} that sum to {sums}, not to 1 for each step")


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
