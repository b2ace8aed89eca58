"""Have a teacher translate source lines, for a smaller student to learn from (sequence-level knowledge distillation).

The teacher is a run or checkpoint, a bundle, or a running server. OUT gets train.source and train.target, without what
no student should learn (empty, looping or cut outputs), and report.json. Stopped, the same command goes on.

  dragoman distill runs/teacher --beam-size 5 --source data/train.source --out distilled
  dragoman distill --server localhost:50051 --source data/train.source --out distilled
  dragoman train small --set data.train_source=distilled/train.source --set data.train_target=distilled/train.target \\
      --out runs/student
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dragoman_training.cli.evaluate import add_system_arguments, chosen_system
from dragoman_training.errors import TrainingError

SUMMARY = "have a teacher make training data for a student"
EXTRA: str | None = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_system_arguments(parser)
    parser.add_argument("--source", type=Path, required=True, metavar="FILE", help="what to translate, one a line")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--max-ratio", type=float, metavar="X", help="drop pairs with one side more than X times as long as the other"
    )
    parser.add_argument(
        "--part-lines", type=int, default=10_000, metavar="N", help="lines between two savings (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print what was kept and dropped; 2 for a refusal."""
    from dragoman_training.corpus import require_file
    from dragoman_training.distill import distill
    from dragoman_training.errors import DataError
    from dragoman_training.filtering import PairFilter

    try:
        if args.part_lines < 1:
            raise DataError(f"--part-lines is {args.part_lines}: it must be at least 1")
        pair_filter = PairFilter(max_ratio=args.max_ratio)
        require_file(args.source)  # before a model is loaded
        teacher = chosen_system(args)
        report = distill(teacher, args.source, args.out, pair_filter, args.part_lines, say)
    except TrainingError as error:
        print(f"dragoman distill: error: {error}", file=sys.stderr)
        return 2
    print(f"{report['lines']} lines, {report['kept']} pairs in {args.out}")
    for reason, count in report["dropped"].items():
        print(f"  {reason + ':':<28}{count}")
    return 0


def say(line: str) -> None:
    """Progress, for people."""
    print(line, file=sys.stderr)
