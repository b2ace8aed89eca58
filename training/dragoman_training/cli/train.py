"""Train a model from a configuration file or a preset.

Each validation prints a line, appends to RUN/metrics.jsonl and writes a checkpoint; RUN/best and RUN/last link to two
of them. Ctrl-C and SIGTERM save before they end; --resume goes on from there, after a kill from the newest checkpoint.

  dragoman train g2p-en --out runs/g2p-en
  dragoman train my.toml --out runs/mine --resume
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from dragoman_training.errors import TrainingError

SUMMARY = "train a model"
EXTRA: str | None = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, or a preset's name such as g2p-en")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="the run's folder")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out after its newest checkpoint")


def run(args: argparse.Namespace) -> int:
    """0 at the end and after SIGTERM, 130 after Ctrl-C (both with the state saved), 2 for a refusal."""
    from dragoman_training.configfile import load_config
    from dragoman_training.train import train

    try:
        stopped_by = train(load_config(args.config), args.out, args.resume)
    except TrainingError as error:
        print(f"dragoman train: error: {error}", file=sys.stderr)
        return 2
    if stopped_by is not None:
        print(f"stopped by {signal.Signals(stopped_by).name}; continue with --resume", file=sys.stderr)
    return 130 if stopped_by == signal.SIGINT else 0
