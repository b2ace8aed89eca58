"""Turn a checkpoint into a verified ONNX bundle.

Traces encoder and decoder with fused attention, counts the nodes of both as exported and as ONNX Runtime optimises
them, compares logits and greedy output with PyTorch on the given sources, and writes the bundle. If any check fails,
nothing is written and the exit status is 2.

  dragoman export runs/g2p-en --sources g2p-data/dev.source --out bundles/g2p-en
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

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
        "--sources",
        type=Path,
        required=True,
        nargs="+",
        metavar="FILE",
        help="sources to compare with PyTorch on, one a line: the dev set's, or more",
    )
    parser.add_argument(
        "--quality", type=Path, metavar="JSON", help="figures of `dragoman evaluate --json` for the manifest"
    )
    parser.add_argument("--notice", type=Path, metavar="FILE", help="a licence notice to carry in the bundle")


def run(args: argparse.Namespace) -> int:
    """0, or 2 with one line on stderr."""
    from dragoman.errors import DragomanError
    from dragoman_export.errors import ExportError
    from dragoman_training.errors import TrainingError

    try:
        _export(args)
    except (ExportError, DragomanError, TrainingError, OSError) as error:
        print(f"dragoman export: error: {error}", file=sys.stderr)
        return 2
    return 0


def _export(args: argparse.Namespace) -> None:
    from dragoman.bundle import check_free
    from dragoman.inspection import node_table
    from dragoman_export.exporter import export
    from dragoman_training.checkpoint import load_model
    from dragoman_training.corpus import read_lines

    check_free(args.out, overwrite=args.force)  # before anything takes its time
    checkpoint = load_model(args.checkpoint)
    result = export(
        checkpoint,
        [line for file in args.sources for line in read_lines(file)],
        args.out,
        name=args.name or args.out.name,
        version=args.model_version,
        quality=_quality(args.quality) if args.quality else None,
        notice=args.notice.read_bytes() if args.notice else None,
        overwrite=args.force,
    )
    manifest = result.bundle.manifest
    for side, entry in (("source", manifest.tokenizers.source), ("target", manifest.tokenizers.target)):
        print(f"{side}: {entry.file}, {entry.kind}, {entry.size} tokens, normalization {entry.normalization}")
    print(f"characters that the source vocabulary lacks: {manifest.unknown_policy}")
    graphs = manifest.graphs[0]
    size = sum(entry.bytes for entry in manifest.files.values())
    for graph in (graphs.encoder, graphs.decoder):
        print("\n".join(node_table(graph)))
    parity = result.parity
    print(f"logits: at most {parity.max_logit_difference:.2g} from PyTorch's, at every step of ragged batches")
    skipped = f" ({result.num_skipped_sources} more are none that it accepts)" if result.num_skipped_sources else ""
    print(f"greedy: {parity.num_greedy_sources} sources{skipped}, tokens equal to PyTorch's, {len(parity.ties)} ties")
    for tie in parity.ties:
        print(f"  tie: source {tie.source}, token {tie.step}, logits {tie.gap:.2g} apart")
    print(f"golden set: {result.num_golden_cases} sources")
    print(f"{args.out}: {manifest.name} version {manifest.version}, {size / 1e6:.2f} MB")


def _quality(path: Path) -> dict[str, float | str]:
    """The numbers and strings of a flat JSON object. Raises ExportError."""
    from dragoman_export.errors import ExportError

    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ExportError(f"{path} holds no JSON object: give a file that `dragoman evaluate --json` wrote")
    return {key: float(v) if isinstance(v, int) else v for key, v in data.items() if isinstance(v, int | float | str)}
