"""Score a model on a test set: a run or checkpoint, a bundle, a running server, or a file of outputs.

The same figures from the same code, whoever made the outputs; BLEU and chrF are sacreBLEU's, on detokenised text, with
its signature. --against asks whether a second system differs by more than chance. Rates are shares of 1.

  dragoman evaluate runs/g2p-en --source g2p-data/test.source --target g2p-data/test.target
  dragoman evaluate runs/en-de --source test.en --target test.de --beam-size 5
  dragoman evaluate --bundle bundles/en-de --source test.en --target test.de --against runs/older
  dragoman evaluate --server localhost:50051 --source test.en --target test.de
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman_training.config import BLEU_TOKENIZERS, TOKENIZER_UNITS
from dragoman_training.errors import TrainingError

if TYPE_CHECKING:  # heavy
    from dragoman_training.evaluate import Evaluation
    from dragoman_training.systems import System

SUMMARY = "score a model on a test set"
EXTRA: str | None = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_system_arguments(parser).add_argument(
        "--hypotheses", type=Path, metavar="FILE", help="score a file of outputs, one a line"
    )
    parser.add_argument("--source", type=Path, required=True, metavar="FILE", help="what to decode, one a line")
    parser.add_argument("--target", type=Path, required=True, metavar="FILE", help="the right output of each line")
    parser.add_argument("--references", type=Path, metavar="FILE", help="all right outputs of each line, tab separated")
    parser.add_argument(
        "--against", type=Path, metavar="PATH", help="compare with this run, bundle or file: paired bootstrap"
    )
    parser.add_argument(
        "--bleu-tokenizer",
        choices=BLEU_TOKENIZERS,
        help="sacreBLEU's --tokenize (default: 13a; without it, plain units get no BLEU);\nnone: already tokenized",
    )
    parser.add_argument(
        "--target-unit",
        choices=TOKENIZER_UNITS,
        help="what a token is for the token error rate (default: the model's own, else piece: blank-separated)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the outputs, one a line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")


def add_system_arguments(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Declare who translates: a run, a bundle or a server. Returns the group, for more of them."""
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument("checkpoint", nargs="?", type=Path, metavar="RUN", help="a run (its best) or a checkpoint")
    origin.add_argument("--bundle", type=Path, metavar="DIR", help="what `dragoman generate` makes of a bundle")
    origin.add_argument("--server", metavar="HOST:PORT", help="what a running server answers")
    parser.add_argument(
        "--beam-size", type=int, metavar="N", help="checkpoints only: width of the beam (default: 1, greedy)"
    )
    return origin


def chosen_system(args: argparse.Namespace) -> System:
    """The system that ``add_system_arguments`` declared."""
    from dragoman_training.errors import DataError
    from dragoman_training.systems import CheckpointSystem, ServedSystem

    if args.bundle:
        return ServedSystem.of_bundle(args.bundle)
    if args.server:
        return ServedSystem.of_server(args.server)
    if (args.checkpoint / "manifest.json").is_file():
        raise DataError(f"{args.checkpoint} is a bundle: name it with --bundle {args.checkpoint}")
    return CheckpointSystem(args.checkpoint, beam_size(args))


def beam_size(args: argparse.Namespace) -> int:
    """How wide a beam was asked for."""
    return 1 if args.beam_size is None else int(args.beam_size)


def run(args: argparse.Namespace) -> int:
    """Print one figure a line; 2 for a refusal, or where a file could not be written after all."""
    try:
        evaluation = evaluate(args)
        print(evaluation.table())
        write_results(args, evaluation)
    except TrainingError as error:
        print(f"dragoman evaluate: error: {error}", file=sys.stderr)
        return 2
    return 0


def evaluate(args: argparse.Namespace) -> Evaluation:
    """Decode or fetch the outputs, then score them."""
    from dragoman_training import evaluate as scoring
    from dragoman_training.corpus import read_aligned, unequal
    from dragoman_training.errors import DataError
    from dragoman_training.systems import CheckpointSystem, FileSystem, system_at

    sources, targets = read_aligned(args.source, args.target)
    references = scoring.read_references(args.references) if args.references else None
    if references is not None and len(references) != len(sources):
        raise unequal(args.references, args.source, len(references), len(sources))
    for option, path in (("--output", args.output), ("--json", args.json)):
        if path is not None and not can_be_written(path):
            raise DataError(f"{option} {path} cannot be written: name a file in a folder that is there and writable")
    system = FileSystem(args.hypotheses) if args.hypotheses else chosen_system(args)
    against = system_at(args.against, beam_size(args)) if args.against else None
    if args.beam_size is not None and not any(isinstance(one, CheckpointSystem) for one in (system, against)):
        raise DataError(f"--beam-size is {args.beam_size}: leave it out, nothing is decoded here")
    return scoring.evaluate(
        system,
        sources,
        targets,
        references=references,
        against=against,
        bleu_tokenizer=args.bleu_tokenizer,
        target_unit=args.target_unit,
    )


def can_be_written(path: Path) -> bool:
    """Whether a file could be written there now. Nothing is made: a refusal that follows would leave an empty file."""
    return os.access(path if path.exists() else path.parent, os.W_OK) and not path.is_dir()


def write_results(args: argparse.Namespace, evaluation: Evaluation) -> None:
    """The files asked for; ``DataError`` where the disk fails."""
    from dragoman_training.corpus import write_lines
    from dragoman_training.errors import DataError

    outputs = [line.replace("\n", " ") for line in evaluation.outputs.lines]  # byte pieces may spell a line feed
    figures = [json.dumps(evaluation.as_dict(), indent=2)]
    for path, lines in ((args.output, outputs), (args.json, figures)):
        try:
            if path is not None:
                write_lines(path, lines)
        except OSError as error:
            raise DataError(f"{path} could not be written ({error.strerror}): make room, and run it again") from error
