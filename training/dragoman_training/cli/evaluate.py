"""Score a checkpoint, a bundle or a file of outputs against a test set. All figures but counts are shares of 1.

dragoman evaluate runs/g2p-en --source g2p-data/test.source --target g2p-data/test.target
dragoman evaluate --bundle bundles/g2p-en --source g2p-data/test.source --target g2p-data/test.target
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dragoman_training.errors import TrainingError

SUMMARY = "score a model on a test set"
EXTRA: str | None = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument("checkpoint", nargs="?", type=Path, metavar="RUN", help="a run (its best) or a checkpoint")
    origin.add_argument("--bundle", type=Path, metavar="DIR", help="score what `dragoman generate` makes of a bundle")
    origin.add_argument("--hypotheses", type=Path, metavar="FILE", help="score a file of outputs, one a line")
    parser.add_argument("--source", type=Path, required=True, metavar="FILE", help="what to decode, one a line")
    parser.add_argument("--target", type=Path, required=True, metavar="FILE", help="the right output of each line")
    parser.add_argument("--references", type=Path, metavar="FILE", help="all right outputs of each line, tab separated")
    parser.add_argument("--beam-size", type=int, default=1, metavar="N", help="1 (default) is greedy; checkpoints only")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the outputs, one a line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")


def run(args: argparse.Namespace) -> int:
    """Print one figure a line; 2 for a refusal."""
    try:
        summary = evaluate(args)
    except TrainingError as error:
        print(f"dragoman evaluate: error: {error}", file=sys.stderr)
        return 2
    for name, value in summary.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return 0


def evaluate(args: argparse.Namespace) -> dict[str, float | int]:
    """Decode or fetch the outputs, then score them."""
    from dragoman_training import evaluate as scoring
    from dragoman_training.checkpoint import load_model
    from dragoman_training.data import read_aligned, read_lines
    from dragoman_training.errors import DataError
    from dragoman_training.prepare import write_lines

    if args.beam_size < 1 or (args.beam_size > 1 and not args.checkpoint):
        raise DataError(f"--beam-size is {args.beam_size}: it must be at least 1, and 1 for outputs made elsewhere")
    sources, targets = read_aligned(args.source, args.target)
    references = scoring.read_references(args.references) if args.references else None
    unit = "piece"
    if args.checkpoint:
        checkpoint = load_model(args.checkpoint)
        unit = checkpoint.target_tokenizer.unit
        outputs = scoring.decode_checkpoint(checkpoint, sources, args.beam_size)
    elif args.bundle:
        outputs = scoring.run_bundle(args.bundle, args.source)
    else:
        outputs = scoring.Outputs(read_lines(args.hypotheses), 0.0)
    if args.output:
        write_lines(args.output, outputs.lines)
    return scoring.score(outputs, targets, references, unit).summary()
