"""Average the weights of a run's last checkpoints, or of those named, into one checkpoint.

The result can be evaluated and exported like any checkpoint, but not trained on. It is best after a cool-down of the
learning rate; how many checkpoints a run keeps is loop.keep_checkpoints.

  dragoman average runs/mine --last 10 --out runs/mine-average
  dragoman average runs/mine/checkpoints/step-00007500 runs/mine/checkpoints/step-00008000 --out two
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dragoman_training.errors import CheckpointError, TrainingError

SUMMARY = "average checkpoints into one"
EXTRA: str | None = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN", help="a run with --last, or checkpoint folders")
    parser.add_argument("--last", type=int, metavar="N", help="average the N newest checkpoints of the run")
    parser.add_argument("--out", type=Path, required=True, metavar="CKPT", help="the new checkpoint folder")


def run(args: argparse.Namespace) -> int:
    """Print what was averaged; 2 for a refusal."""
    from dragoman_training.averaging import average_checkpoints, newest_checkpoints

    try:
        folders = args.folders
        if args.last is not None:
            if len(folders) != 1:
                raise CheckpointError(f"--last is for one run: {len(folders)} folders are named")
            folders = newest_checkpoints(folders[0], args.last)
        average_checkpoints(folders, args.out)
    except TrainingError as error:
        print(f"dragoman average: error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: average of {', '.join(folder.name for folder in folders)}")
    return 0
