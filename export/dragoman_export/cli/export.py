"""Turn a checkpoint into a verified ONNX bundle.

Traces encoder and decoder with fused attention, quantises them where asked, counts the nodes of each graph as exported
and as ONNX Runtime optimises it, compares layers, logits, and greedy and beam output with PyTorch on the given sources,
measures what each precision costs on a test set, and writes the bundle. If any check fails, nothing is written and the
exit status is 2. What it is doing is told on stderr. Graphs lie in a hidden folder beside BUNDLE until that is whole.

Precisions: fp32; int8, smaller and faster, and as exact about who shares a batch; w8, for the lowest latency of a lone
request, whose answers may depend on the batch in their last digits; fp16, for CUDA, built and compared on the CPU here
and served with --provider cuda. A server uses the first that is for its provider unless told.

  dragoman export runs/g2p-en --sources g2p-data/dev.source --out bundles/g2p-en
  dragoman export runs/en-de --precision int8,fp32 --sources dev.en --test test.en test.de --out bundles/en-de
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman.bundle import TextRules
    from dragoman_export.exporter import ExportResult
    from dragoman_export.shortlist import ShortlistOptions

SUMMARY = "turn a checkpoint into a verified ONNX bundle"
EXTRA: str | None = "cpu,export"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", type=Path, metavar="RUN", help="a run (its best checkpoint) or one checkpoint")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="the folder to make")
    parser.add_argument(
        "--force", action="store_true", help="replace the bundle that is there, in one step when the new one is whole"
    )
    parser.add_argument("--name", help="the model's name in the service (default: the name of the folder)")
    parser.add_argument(
        "--model-version", default="1", metavar="VERSION", help="the model's version in the service (default: 1)"
    )
    parser.add_argument(
        "--precision",
        default="fp32",
        metavar="LIST",
        help="fp32, int8, w8, fp16, or several with commas between (default: fp32)",
    )
    parser.add_argument(
        "--sources",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="sources to compare with PyTorch on, one a line: the dev set's, or more (default: random ones, for a "
        "model that comes without data)",
    )
    parser.add_argument(
        "--test",
        type=Path,
        nargs=2,
        metavar=("SOURCES", "TARGETS"),
        help="a test set: what each precision costs is measured, written into the manifest, and limited",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="sources on which the range of int8 activations is found (default: those of --sources)",
    )
    parser.add_argument(
        "--activations",
        choices=("static", "row"),
        help="the scale of int8 activations: static, found by calibration, or one a row, found at run time, a little "
        "slower (default: static, or row where there is nothing to calibrate on)",
    )
    parser.add_argument(
        "--quality", type=Path, metavar="JSON", help="figures of `dragoman evaluate --json` for the manifest"
    )
    parser.add_argument(
        "--alignment",
        action="store_true",
        help="add a graph that tells which source token each target token comes from: the attention of one decoder "
        "layer, chosen by how well it aligns what was copied from the sources of --sources. With int8 or w8 it shares "
        "their weights; else the bundle grows by a decoder in fp32",
    )
    parser.add_argument(
        "--shortlist",
        type=Path,
        nargs=2,
        metavar=("SOURCES", "TARGETS"),
        help="the training text, aligned line by line: add a shortlist, by which a server can restrict int8's answers "
        "to the candidates of their source's tokens (dragoman serve --shortlist): faster, where the vocabulary is "
        "large. The bundle grows by the output projection of int8 and the candidates",
    )
    parser.add_argument(
        "--shortlist-candidates",
        type=int,
        metavar="N",
        help="how many target tokens a source token brings into the shortlist (default: 50)",
    )
    parser.add_argument(
        "--source-language",
        metavar="CODE",
        help="the language of the sources, as a code of ISO 639, such as en: servers can split their sentences then",
    )
    parser.add_argument(
        "--target-language", metavar="CODE", help="that of the answers, where they are of one (with --source-language)"
    )
    parser.add_argument(
        "--split-sentences",
        action="store_true",
        help="each sentence of a text is answered by itself, unless a server or request says otherwise: for models of "
        "single sentences (with --source-language)",
    )
    parser.add_argument(
        "--protect-with",
        type=lambda names: tuple(names.split(",")),
        metavar="LIST",
        help="what the model reads in the place of what a request protects, in the order of trying, with commas "
        "between: braces, as in {0}; code, such as X27; itself, the text as it is (default: braces,code,itself; with "
        "--source-language)",
    )
    parser.add_argument("--notice", type=Path, metavar="FILE", help="a licence notice to carry in the bundle")
    parser.add_argument("--quiet", action="store_true", help="do not tell on stderr what is being done")


def run(args: argparse.Namespace) -> int:
    """0, or 2 with one line on stderr. SIGTERM ends the process with 143, and nothing of the export stays."""
    from dragoman.errors import DragomanError
    from dragoman_export.errors import ExportError
    from dragoman_training.errors import TrainingError

    try:
        with _ended_by_sigterm():
            _export(args)
    except (ExportError, DragomanError, TrainingError, OSError) as error:
        print(f"dragoman export: error: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """In this block SIGTERM raises SystemExit, so that what was begun is removed on the way out. In the main thread."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _teller(*, quiet: bool) -> Callable[[str], None]:
    """Tells on stderr what is being done, after how many seconds."""
    started = time.monotonic()

    def tell(what: str) -> None:
        if not quiet:
            print(f"{time.monotonic() - started:7.1f} s  {what}", file=sys.stderr, flush=True)

    return tell


def _export(args: argparse.Namespace) -> None:
    from dragoman.bundle import check_free
    from dragoman_export.errors import ExportError
    from dragoman_export.exporter import ExportOptions, export
    from dragoman_export.quality import TestSet
    from dragoman_export.targets import INT8, W8, parse_precisions
    from dragoman_training.checkpoint import load_model
    from dragoman_training.corpus import read_lines

    def lines(files: list[Path] | None) -> tuple[str, ...] | None:
        return tuple(line for file in files for line in read_lines(file)) if files else None

    check_free(args.out, overwrite=args.force)  # before anything takes its time
    targets = parse_precisions(args.precision)
    for flag, value in (("--calibration", args.calibration), ("--activations", args.activations)):
        if value is not None and not {INT8, W8}.intersection(targets):
            raise ExportError(
                f"{flag} was given without a precision that has int8 activations: leave it out, or give --precision "
                "int8 or w8, alone or with others"
            )
    if args.calibration and args.activations == "row":
        raise ExportError("--calibration was given, and --activations row calibrates nothing: leave one of them out")
    if args.activations == "static" and not (args.sources or args.calibration):
        raise ExportError("--activations static needs sources to calibrate on: give --calibration or --sources")
    if args.shortlist_candidates is not None and args.shortlist is None:
        raise ExportError("--shortlist-candidates was given without --shortlist: give the training text, too")
    options = ExportOptions(
        name=(args.out.name or args.out.resolve().name) if args.name is None else args.name,
        version=args.model_version,
        targets=targets,
        sources=lines(args.sources),
        calibration=lines(args.calibration),
        row_scales=args.activations == "row",
        test=TestSet(*(tuple(read_lines(file)) for file in args.test)) if args.test else None,
        quality=_quality(args.quality) if args.quality else None,
        notice=args.notice.read_bytes() if args.notice else None,
        alignment=args.alignment,
        texts=_texts(args),
        shortlist=_shortlist(args.shortlist, args.shortlist_candidates) if args.shortlist else None,
    )
    checkpoint = load_model(args.checkpoint)
    _report(export(checkpoint, options, args.out, overwrite=args.force, tell=_teller(quiet=args.quiet)))


def _texts(args: argparse.Namespace) -> TextRules | None:
    from dragoman.bundle import PROTECTION_KINDS, TextRules
    from dragoman_export.errors import ExportError

    if args.source_language is not None:
        kinds = PROTECTION_KINDS if args.protect_with is None else args.protect_with
        return TextRules(args.source_language, args.target_language, args.split_sentences, kinds)
    for flag, value in (
        ("--target-language", args.target_language),
        ("--split-sentences", args.split_sentences),
        ("--protect-with", args.protect_with),
    ):
        if value:
            raise ExportError(f"{flag} was given without --source-language: give it, too")
    return None


def _report(result: ExportResult) -> None:
    from dragoman.inspection import describe_alignment, describe_shortlist, node_table
    from dragoman_export.verify import BEAM_SIZE

    manifest = result.bundle.manifest
    for side, entry in (("source", manifest.tokenizers.source), ("target", manifest.tokenizers.target)):
        print(f"{side}: {entry.file}, {entry.kind}, {entry.size} tokens, normalization {entry.normalization}")
    print(f"characters that the source vocabulary lacks: {manifest.unknown_policy}")
    for graphs in manifest.graphs:
        for graph in (graphs.encoder, graphs.decoder):
            print("\n".join(node_table(graph)))
    skipped = f" ({result.num_skipped_sources} more are none that it accepts)" if result.num_skipped_sources else ""
    shipped = {graphs.precision for graphs in manifest.graphs}
    for precision, proof in result.proofs.items():
        parity = proof.parity
        print(
            f"{precision}{'' if precision in shipped else ', the reference of the others, not in the bundle'}: logits "
            f"at most {parity.max_logit_difference:.2g} from PyTorch's at every step of ragged batches; of their size "
            f"{parity.relative_logit_difference:.2g}, of a layer's at most {parity.relative_layer_difference:.2g}, of "
            f"what a layer reads at most {proof.graphs.parity['relative_input_difference']:.2g}"
        )
        print(
            f"  greedy: {parity.num_greedy_equal} of {parity.num_greedy_sources} answers{skipped} equal to PyTorch's, "
            f"{len(parity.ties)} ties, {parity.token_error_rate:.2g} edits a token"
        )
        print(
            f"  beam of {BEAM_SIZE}: {parity.num_beam_equal} of {parity.num_beam_sources} equal to PyTorch's, "
            f"{parity.num_beam_ties} ties, {parity.beam_token_error_rate:.2g} edits a token"
        )
        for tie in parity.ties:
            print(f"  tie: source {tie.source}, token {tie.step}, logits {tie.gap:.2g} apart")
        print(f"  test set: {_costs(proof.graphs.quality)}")
        print(f"  golden set: {len(proof.golden)} sources")
    if (alignment := manifest.alignment) is not None:
        print("\n".join(node_table(alignment.graph)))
        grown = manifest.files[alignment.graph.file].bytes
        print(f"alignment, {grown / 1e6:.2f} MB: {describe_alignment(alignment)}")
    if (shortlist := manifest.shortlist) is not None:
        print("\n".join(node_table(shortlist.decoder)))
        grown = sum(manifest.files[file].bytes for file in (shortlist.table, shortlist.decoder.file))
        print(f"shortlist, {grown / 1e6:.2f} MB: {describe_shortlist(shortlist)}")
        print(f"  test set: {_costs(shortlist.quality)}")
    size = sum(entry.bytes for entry in manifest.files.values())
    print(f"{result.bundle.path}: {manifest.name} version {manifest.version}, {size / 1e6:.2f} MB")


def _costs(quality: Mapping[str, float | str]) -> str:
    return ", ".join(f"{name} {value:.5g}" for name, value in quality.items() if name != "status") or "none given"


def _shortlist(files: Sequence[Path], num_per_token: int | None) -> ShortlistOptions:
    from dragoman_export.shortlist import ShortlistOptions

    sources, targets = files
    return ShortlistOptions(sources, targets, **({} if num_per_token is None else {"num_per_token": num_per_token}))


def _quality(path: Path) -> dict[str, float | str]:
    """The numbers and strings of a flat JSON object. Raises ExportError."""
    from dragoman_export.errors import ExportError

    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ExportError(f"{path} holds no JSON object: give a file that `dragoman evaluate --json` wrote")
    figures = {
        key: float(v) if isinstance(v, int) else v for key, v in data.items() if isinstance(v, int | float | str)
    }
    if not figures or not all(math.isfinite(v) for v in figures.values() if isinstance(v, float)):
        raise ExportError(
            f"{path} holds no figures, or one that is no number: give a file that `dragoman evaluate --json` wrote"
        )
    return figures
