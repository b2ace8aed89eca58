"""Checkpoint to bundle: encode -> trace -> quantise -> verify -> save. Nothing is written unless all checks pass."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dragoman.bundle import (
    Alignment,
    GoldenCase,
    Graph,
    GraphSet,
    Manifest,
    ModelBundle,
    Shortlist,
    TextRules,
    check_free,
    check_label,
    save_bundle,
)
from dragoman.engine.candidates import Candidates
from dragoman.engine.kv import kv_cache_bytes
from dragoman.engine.projection import Projection
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.served_model import token_rules
from dragoman.work_folder import work_folder
from dragoman_export.alignment import Example, Recorded, write_alignment
from dragoman_export.calibrate import calibrate
from dragoman_export.codec import Codec, Encoded
from dragoman_export.errors import ExportError
from dragoman_export.graph_sets import WrittenGraphs, write_graphs
from dragoman_export.half import check_range
from dragoman_export.layers import compare_layers
from dragoman_export.manifest import describe
from dragoman_export.quality import TestSet, check_measures, compare, compare_shortlist, figures
from dragoman_export.quantize import Range
from dragoman_export.shortlist import ShortlistOptions, find_candidates, to_bytes
from dragoman_export.targets import FP16, FP32, INT8, W8, Target
from dragoman_export.verify import (
    BEAM_SIZE,
    PARITY_ROWS,
    Parity,
    References,
    beam_places,
    check_shortlist,
    generate,
    golden_set,
    spread,
    verify,
)
from dragoman_training.beam import BeamOptions, beam_search_all
from dragoman_training.checkpoint import LoadedCheckpoint
from dragoman_training.decode import Hypothesis, greedy_all

VERIFY_SLOTS = 32
VERIFY_KV_CACHE_BYTES = 1 << 30  # a model that needs more is compared on fewer slots
NUM_GENERATED = 64
LAYER_ROWS = 8  # of which every layer is compared
BEAM_ROWS = 64  # that PyTorch decodes together: their caches are as large as a model's weights soon


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and what to prove it on.

    ``sources`` are what the comparison with PyTorch runs on; without any, random ones are made. Static scales are found
    on ``calibration``, or else on the sources, or else there are none: as with ``row_scales``, each row gets its own.
    ``test`` measures what each precision costs. ``alignment`` adds the graph that aligns answers with sources,
    ``shortlist`` what restricts int8's answers to a few candidates. ``texts`` goes into the manifest as it is.
    """

    name: str
    version: str
    targets: tuple[Target, ...] = (FP32,)
    sources: tuple[str, ...] | None = None
    calibration: tuple[str, ...] | None = None
    row_scales: bool = False
    test: TestSet | None = None
    quality: Mapping[str, float | str] | None = None
    notice: bytes | None = None
    alignment: bool = False
    shortlist: ShortlistOptions | None = None
    texts: TextRules | None = None

    def __post_init__(self) -> None:
        check_label("the model's name", self.name)
        check_label("the model's version", self.version)
        if self.shortlist is not None and INT8 not in self.targets:
            raise ExportError("a shortlist is for the graphs of int8: give --precision int8, alone or with others")


@dataclass(frozen=True)
class Proof:
    """A graph set with all figures, its golden cases, and the comparison with PyTorch."""

    graphs: GraphSet
    golden: list[GoldenCase]
    parity: Parity


@dataclass(frozen=True)
class ExportResult:
    """The saved bundle, and what its verification found by precision: of fp32, even where it is not in the bundle."""

    bundle: ModelBundle
    proofs: dict[str, Proof]
    num_skipped_sources: int  # blank, over the limit, or with characters that the model does not know


def export(
    checkpoint: LoadedCheckpoint,
    options: ExportOptions,
    out: Path,
    *,
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> ExportResult:
    """Make a bundle. Sources that the model would refuse are left out and counted.

    The same checkpoint and options give the same bundle, byte for byte, but for ``created`` and the manifest's
    checksum. ``tell`` hears what is being done. Graphs lie in a folder beside ``out`` until the bundle is whole.

    Raises ExportError when a check fails, BundleError when ``out`` exists (with ``overwrite``: and is no bundle).
    """
    check_free(out, overwrite=overwrite)
    with work_folder(out.resolve()) as folder:  # at once: it may turn out that nothing can be written there
        prover = _Prover(checkpoint, options, tell)
        if FP16 in options.targets:
            prover.check_range()
        ranges = prover.ranges() if {INT8, W8}.intersection(options.targets) else None
        # All others follow fp32's, which has to be exact: what they lack is the price of their precision.
        targets = tuple(dict.fromkeys((FP32, *options.targets)))
        written = write_graphs(
            checkpoint.model.eval(), targets, ranges, folder, shortlist=options.shortlist is not None, tell=tell
        )
        proofs = {target.precision: prover.prove(target, written.sets[target], folder) for target in targets}
        graphs = tuple(proofs[target.precision].graphs for target in options.targets)
        alignment = prover.align(folder, written, ranges) if options.alignment else None
        shortlist, shortlist_files = None, dict[str, bytes | Path]()
        if written.shortlist is not None:
            shortlist, shortlist_files = prover.shorten(*written.shortlist, proofs[INT8.precision].graphs, folder)
        manifest = dataclasses.replace(prover.manifest(graphs), alignment=alignment, shortlist=shortlist)
        files: dict[str, bytes | Path] = {
            **{file: folder / file for set_ in graphs for graph in set_.all_graphs() for file in graph.files},
            **{file: checkpoint.folder / file for file in checkpoint.tokenizer_files.values()},
            **{proofs[t.precision].graphs.golden: _golden_lines(proofs[t.precision].golden) for t in options.targets},
            **shortlist_files,
        }
        if alignment is not None:
            files |= {file: folder / file for file in alignment.graph.files}
        if options.notice is not None:
            files["NOTICE"] = options.notice
        tell(f"saving {len(files) + 1} files")
        bundle = save_bundle(manifest, files, out, overwrite=overwrite)
    return ExportResult(bundle, proofs, prover.num_skipped)


def verify_room(manifest: Manifest, element_bytes: int) -> tuple[int, int]:
    """Slots to compare on, and the bytes that they need at the model's limits: as many as fit, a whole beam at least.

    ``element_bytes``: of the caches' type.
    """
    limits = manifest.limits
    # A target that fills its limit is fed whole here: one step more than a server ever takes.
    one = kv_cache_bytes(
        manifest.model, 1, limits.max_source_tokens, limits.max_new_tokens + 1, element_bytes=element_bytes
    )
    num_slots = max(BEAM_SIZE, min(VERIFY_SLOTS, VERIFY_KV_CACHE_BYTES // one))
    return num_slots, num_slots * one


class _Prover:
    """Compares graph sets with PyTorch, whose own answers it finds once."""

    def __init__(self, checkpoint: LoadedCheckpoint, options: ExportOptions, tell: Callable[[str], None]) -> None:
        """Whatever can be wrong with the files that were given is found here, the quickest first."""
        self._checkpoint, self._options, self._tell = checkpoint, options, tell
        self._codec = Codec(checkpoint)
        self._recorded = Recorded.of(checkpoint)
        if options.alignment and options.sources is None and self._recorded is None:
            raise ExportError("alignment is chosen by the model's answers to real sources: give --sources")
        self._manifest = describe(
            checkpoint, self._codec.vocabularies, (), options.name, options.version, options.quality
        )
        self._encoded = self._accepted(options.sources, "--sources")
        self.num_skipped = 0 if options.sources is None else len(options.sources) - len(self._encoded)
        self._test = self._accepted(options.test.sources, "--test") if options.test is not None else []
        self._calibration = self._encoded
        if options.calibration is not None:
            self._calibration = self._accepted(options.calibration, "--calibration")
        self._candidates: Candidates | None = None
        if options.shortlist is not None:
            tell("learning the shortlist")
            vocabularies = self._codec.vocabularies
            self._candidates = find_candidates(
                options.shortlist, checkpoint, vocabularies["source"], vocabularies["target"]
            )
        self._test_figures: dict[str, float] = {}
        if self._test:
            tell(f"PyTorch answers {len(self._test):,} lines of the test set")
            self._test_figures = self._figures([answer.tokens for answer in self._answers(self._test)])
            check_measures(self._test_figures)
        places = beam_places(len(self._encoded))
        tell(f"PyTorch answers {len(self._encoded):,} sources, {len(places):,} of them by a beam of {BEAM_SIZE} too")
        greedy = self._answers(self._encoded)
        found = self._answers([self._encoded[i] for i in places], BEAM_SIZE)
        self._references = References(greedy, dict(zip(places, found, strict=True)))

    def manifest(self, graphs: tuple[GraphSet, ...]) -> Manifest:
        return dataclasses.replace(self._manifest, graphs=graphs, texts=self._options.texts)

    def align(self, folder: Path, written: WrittenGraphs, ranges: Mapping[str, Range] | None) -> Alignment:
        """The alignment graph, chosen on PyTorch's answers and compared with PyTorch. Raises ExportError.

        It is in 8 bits where others of those ``written`` are.
        """
        self._tell("alignment: choosing a layer, and tracing it")
        encoders = {FP32: written.sets[FP32].encoder}
        if eight := [written.sets[target].encoder for target in (INT8, W8) if target in written.sets]:
            encoders[INT8] = eight[0]
        return write_alignment(
            self._checkpoint.model,
            [
                Example(source, tuple(answer.tokens), self._codec.own(source))
                for (_, source), answer in zip(self._encoded, self._references.greedy, strict=True)
            ],
            self._checkpoint.special,
            self._codec.vocabularies["source"],
            self._codec.vocabularies["target"],
            folder,
            encoders,
            ranges,
            written.weights,
            self._recorded,
        )

    def ranges(self) -> dict[str, Range] | None:
        """Those of the activations; None where scales are found row by row."""
        options, checkpoint = self._options, self._checkpoint
        if options.row_scales or (options.sources is None and options.calibration is None):
            return None
        self._tell(f"calibrating on {len(self._calibration):,} sources")
        answers = self._references.greedy
        if options.calibration is not None:
            answers = self._answers(self._calibration)
        return calibrate(checkpoint.model, [source for _, source in self._calibration], answers, checkpoint.special)

    def check_range(self) -> None:
        """Raises ExportError where float16 has no room for what the model computes, or CUDA no kernel that fuses it."""
        if self._checkpoint.model.config.activation == "gelu_tanh":
            raise ExportError("fp16: this version fuses no Gelu by a tanh for CUDA: export another precision")
        sources = [source for _, source in self._encoded]
        check_range(self._checkpoint.model, sources, self._references.greedy, self._checkpoint.special)

    def prove(self, target: Target, graphs: GraphSet, folder: Path) -> Proof:
        """Open the graphs as a server would and compare. Raises ExportError beyond the target's tolerance."""
        manifest, model, references = self.manifest((graphs,)), self._checkpoint.model, self._references
        limits, rules = manifest.limits, token_rules(manifest)
        texts, sources = [text for text, _ in self._encoded], [source for _, source in self._encoded]
        tolerance = target.tolerance if self._options.sources is not None else target.tolerance_on_generated
        rows = spread(sorted(range(len(sources)), key=lambda i: len(sources[i])), LAYER_ROWS)
        self._tell(f"{target.precision}: comparing what every layer reads with PyTorch, on {len(rows)} sources")
        input_difference = compare_layers(
            model,
            graphs,
            folder,
            [sources[i] for i in rows],
            [tuple(references.greedy[i].tokens) for i in rows],
            rules.decoder_start,
            tolerance.relative,
        )
        self._tell(
            f"{target.precision}: comparing {len(sources):,} answers with PyTorch's, and {len(references.beam):,} of a "
            f"beam of {BEAM_SIZE}"
        )
        runner = self._runner(manifest, graphs, folder)
        parity, answers = verify(
            model,
            runner,
            rules,
            sources,
            references,
            manifest.tokenizers.source.end,
            limits.max_source_tokens,
            limits.max_new_tokens,
            tolerance,
        )
        decoded = self._codec.decode([answer.tokens for answer in answers])
        golden = golden_set(runner, rules, texts, sources, answers, decoded, target.golden_gap)
        quality: dict[str, float | str] = {"status": "unmeasured"}
        if self._test:
            self._tell(f"{target.precision}: measuring {len(self._test):,} lines of the test set")
            tests = generate(runner, rules, [source for _, source in self._test], limits.max_new_tokens)
            quality = self._measured(target, [answer.tokens for answer in tests])
        found = {**parity.figures(), "relative_input_difference": input_difference}
        return Proof(dataclasses.replace(graphs, parity=found, quality=quality), golden, parity)

    def shorten(
        self, graph: Graph, projection: Projection, int8: GraphSet, folder: Path
    ) -> tuple[Shortlist, dict[str, bytes | Path]]:
        """The shortlist, compared with the graphs that it is for, and its files. ``graph`` and ``projection`` are its.

        Raises ExportError where a logit is not theirs, bit for bit, or the shortlist costs more than it may.
        """
        candidates = self._candidates
        assert candidates is not None
        texts, sources = [text for text, _ in self._encoded], [source for _, source in self._encoded]
        self._tell(f"shortlist: answering {len(sources):,} sources and {len(self._test):,} lines of the test set")
        shortlist = Shortlist(
            provider=int8.provider,
            precision=int8.precision,
            table=INT8.file("shortlist", "npz"),
            decoder=graph,
            golden=INT8.file("golden.shortlist", "jsonl"),
            num_per_token=int(np.diff(candidates.offsets).max()),
            num_always=len(candidates.always),
            mean_candidates=float(np.mean([len(candidates.of(source)) for source in sources])),
            quality={"status": "unmeasured"},
        )
        table = to_bytes(candidates, projection)
        (folder / shortlist.table).write_bytes(table)
        manifest = self.manifest((int8,))
        rules, most = token_rules(manifest), manifest.limits.max_new_tokens
        runner = self._runner(manifest, int8, folder, shortlist)
        chosen = range(0, len(sources), -(-len(sources) // PARITY_ROWS))
        check_shortlist(
            self._runner(manifest, int8, folder),
            runner,
            candidates,
            [sources[i] for i in chosen],
            [tuple(self._references.greedy[i].tokens) for i in chosen],
            rules.decoder_start,
        )
        if self._test:
            tests = generate(runner, rules, [source for _, source in self._test], most)
            found = self._figures([answer.tokens for answer in tests])
            without = {name: float(int8.quality[name]) for name in found}
            quality = {"num_lines": int8.quality["num_lines"], **compare_shortlist(found, without)}
            shortlist = dataclasses.replace(shortlist, quality=quality)
        answers = generate(runner, rules, sources, most)
        decoded = self._codec.decode([answer.tokens for answer in answers])
        golden = golden_set(runner, rules, texts, sources, answers, decoded, INT8.golden_gap)
        return shortlist, {
            shortlist.table: table,
            shortlist.golden: _golden_lines(golden),
            graph.file: folder / graph.file,
        }

    def _runner(
        self, manifest: Manifest, graphs: GraphSet, folder: Path, shortlist: Shortlist | None = None
    ) -> OrtRunner:
        """As a server would open it."""
        model = OrtModel(manifest.model, graphs, folder.joinpath, torch.get_num_threads(), shortlist)
        num_slots, num_bytes = verify_room(manifest, np.dtype(model.cache_type).itemsize)
        return OrtRunner(model, num_slots, num_bytes)

    def _measured(self, target: Target, answers: Sequence[Sequence[int]]) -> dict[str, float | str]:
        """The test set's figures, of these answers and of PyTorch's."""
        assert self._options.test is not None
        counts = {"num_lines": len(self._test), "num_skipped": len(self._options.test.sources) - len(self._test)}
        return {
            **{name: float(count) for name, count in counts.items()},
            **compare(self._figures(answers), self._test_figures, target.precision),
        }

    def _figures(self, answers: Sequence[Sequence[int]]) -> dict[str, float]:
        """The test set's, of these answers."""
        assert self._options.test is not None
        is_text = self._checkpoint.target_tokenizer.kind != "plain"
        accepted = {text for text, _ in self._test}
        test = self._options.test
        targets = [t for s, t in zip(test.sources, test.targets, strict=True) if s in accepted]
        return figures(self._codec.decode(answers), targets, is_text=is_text)

    def _accepted(self, texts: Sequence[str] | None, option: str) -> Encoded:
        """Those texts that the service would accept; random ones where none were given."""
        encoded = self._codec.generated(NUM_GENERATED) if texts is None else self._codec.encode_all(texts)
        if not encoded:
            raise ExportError(
                f"{option}: the model accepts none of the {len(texts or ())} sources: give some that are like what it "
                "was trained on"
            )
        return encoded

    def _answers(self, encoded: Encoded, beam_size: int = 1) -> Sequence[Hypothesis]:
        """PyTorch's: greedy, or the best of a beam."""
        checkpoint, sources = self._checkpoint, [source for _, source in encoded]
        model, special, most = checkpoint.model.eval(), checkpoint.special, checkpoint.max_target_tokens
        if beam_size == 1:
            return greedy_all(model, sources, most, special)
        options = BeamOptions(beam_size=beam_size, max_new_tokens=most)
        return [found[0] for found in beam_search_all(model, sources, options, special, batch_rows=BEAM_ROWS)]


def _golden_lines(cases: Sequence[GoldenCase]) -> bytes:
    return "".join(json.dumps(dataclasses.asdict(case), ensure_ascii=False) + "\n" for case in cases).encode()
