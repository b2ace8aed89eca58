"""Any parallel text to aligned training files, cleaned, with a report of what was left out and why.

Written are ``{train,dev,test}.{source,target}``, one pair a line, and ``report.json``; all of them at once, at the end.
A pair is left out of the training text when the filter says so, when the same pair came before, or when its source is
one of dev or test. Dev and test are given, and then only lose pairs that are blank or no line, or are split off: those
pairs whose sources have the smallest hashes, so that the choice does not depend on the order, and that all pairs of one
source fall in one split.

The text is read twice and never held in memory; what is held are hashes of 64 bits, up to 40 bytes a pair.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman_training.errors import DataError
from dragoman_training.filtering import PairFilter
from dragoman_training.folders import explained, written_aside

Pairs = Callable[[], Iterable[tuple[str, str]]]
"""Starts to read pairs anew."""

TRAIN, DEV, TEST, DUPLICATE, OVERLAP = range(5)  # what becomes of a pair
SPLITS = {"train": TRAIN, "dev": DEV, "test": TEST}


def text_hash(text: str) -> int:
    """64 bits of BLAKE2b: two of ten million texts have the same with a chance of one in 400,000."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


class Survey:
    """What a first reading finds: the pairs that pass the filter, as hashes in reading order."""

    def __init__(self, pairs: Iterable[tuple[str, str]], pair_filter: PairFilter) -> None:
        self.dropped: Counter[str] = Counter()
        sources, both = array("Q"), array("Q")
        for source, target in pair_filter.kept(pairs, self.dropped):
            sources.append(text_hash(source))
            both.append(text_hash(f"{source}\n{target}"))
        self.sources = np.array(sources, dtype=np.uint64)
        self.pairs = np.array(both, dtype=np.uint64)

    @property
    def read(self) -> int:
        """How many pairs there are, left out or not."""
        return len(self.pairs) + self.dropped.total()

    def repeated(self) -> NDArray[np.bool_]:
        """Which pairs came before."""
        order = np.argsort(self.pairs, kind="stable")
        hashes = self.pairs[order]
        result = np.zeros(len(hashes), dtype=np.bool_)
        result[order[1:][hashes[1:] == hashes[:-1]]] = True
        return result


def prepare_pairs(
    folder: Path,
    train: Pairs,
    given: Mapping[str, Pairs],
    split_off: Mapping[str, int],
    pair_filter: PairFilter,
    keep_overlap: bool = False,
) -> dict[str, Any]:
    """Write the files into ``folder``, new or empty, and return the content of ``report.json``.

    ``given`` has the pairs of ``dev`` and ``test`` where there are files of them, ``split_off`` how many pairs of the
    training text to take instead, at least 1. With ``keep_overlap``, sources of the given dev and test may stay in the
    training text. Raises ``DataError`` for text that cannot be used and for a folder that cannot be written.
    """
    refuse_unfit(folder)
    found = Survey(train(), pair_filter)
    if not found.read:
        raise DataError("the training text is empty: at least one pair is needed")
    evaluation = survey_given(given)
    held_out = np.unique(np.concatenate([np.zeros(0, np.uint64), *(survey.sources for survey in evaluation.values())]))
    overlap = np.isin(found.sources, held_out)
    fate = np.full(len(found.pairs), TRAIN, dtype=np.uint8)
    if not keep_overlap:
        fate[overlap] = OVERLAP
    fate[found.repeated()] = DUPLICATE
    take_off(fate, np.where(overlap, np.uint8(OVERLAP), fate), found.sources, split_off)
    dropped = dict(found.dropped)
    for reason, value in (("same pair before", DUPLICATE), ("source in dev or test", OVERLAP)):
        if count := int(np.count_nonzero(fate == value)):
            dropped[reason] = count
    for name, survey in evaluation.items():
        dropped |= {f"{reason} ({name})": count for reason, count in survey.dropped.items()}
    report: dict[str, Any] = {
        "read": {"train": found.read, **{name: survey.read for name, survey in evaluation.items()}},
        "dropped": dict(sorted(dropped.items())),
        "kept": {"train": int(np.count_nonzero(fate == TRAIN))}
        | {name: int(np.count_nonzero(fate == SPLITS[name])) for name in split_off}
        | {name: len(survey.pairs) for name, survey in evaluation.items()},
        "train_sources_in_dev_or_test": int(np.count_nonzero(overlap & (fate == TRAIN))),
        "dev_sources_in_test": shared_sources(evaluation),
        "filter": asdict(pair_filter),
    }
    if not report["kept"]["train"]:
        gone = dropped | {f"split off for {name}": report["kept"][name] for name in split_off}
        remedy = "split off fewer, or add text" if split_off else "loosen the limits, or add text"
        raise DataError(f"none of {found.read} pairs is left to train on ({describe_counts(gone)}): {remedy}")
    with explained(folder, DataError), written_aside(folder) as aside:
        write_split(aside, train, pair_filter, fate, ["train", *split_off])
        write_given(aside, given, evaluation)
        (aside / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def survey_given(given: Mapping[str, Pairs]) -> dict[str, Survey]:
    """A first reading of the given dev and test sets; ``DataError`` for one without a pair."""
    evaluation = {name: Survey(pairs(), PairFilter()) for name, pairs in given.items()}
    for name, survey in evaluation.items():
        if not len(survey.pairs):
            counts = describe_counts(survey.dropped) or "it is empty"
            raise DataError(f"the {name} set has no pair of two texts ({counts}): name other files, or none")
    return evaluation


def write_given(folder: Path, given: Mapping[str, Pairs], evaluation: Mapping[str, Survey]) -> None:
    """The second reading of the given sets: their files."""
    for name, pairs in given.items():
        fates = np.full(len(evaluation[name].pairs), SPLITS[name], dtype=np.uint8)
        write_split(folder, pairs, PairFilter(), fates, [name])


def refuse_unfit(folder: Path) -> None:
    """Nothing that is there is overwritten, and a mount point cannot give its place to a folder written aside."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is no empty folder: choose another --out, or remove it")
    if os.path.ismount(folder):
        raise DataError(f"{folder} is a mount point: name a folder inside it")


def take_off(
    fate: NDArray[np.uint8], eligible: NDArray[np.uint8], sources: NDArray[np.uint64], counts: Mapping[str, int]
) -> None:
    """Make ``fate`` test or dev for the pairs with the smallest source hashes among those ``eligible`` (``TRAIN``).

    Test comes first, so that it stays the same when a dev set is wanted too. A source's pairs stay together: a split
    may be a few pairs larger than asked for.
    """
    candidates = np.sort(sources[eligible == TRAIN])
    taken = 0
    for name in sorted(counts, reverse=True):
        if taken + counts[name] > len(candidates):
            raise DataError(
                f"{counts[name]} pairs for {name} are wanted, {len(candidates) - taken} are left: ask for less"
            )
        first, last = candidates[taken], candidates[taken + counts[name] - 1]
        fate[(eligible == TRAIN) & (first <= sources) & (sources <= last)] = SPLITS[name]
        taken = int(np.searchsorted(candidates, last, side="right"))


def shared_sources(evaluation: Mapping[str, Survey]) -> int:
    """How many different sources the given dev and test sets share."""
    if len(evaluation) < 2:
        return 0
    return len(np.intersect1d(evaluation["dev"].sources, evaluation["test"].sources))


def write_split(
    folder: Path, pairs: Pairs, pair_filter: PairFilter, fate: NDArray[np.uint8], names: Iterable[str]
) -> None:
    """The second reading: write each pair that passes the filter to the files of its split."""
    with ExitStack() as stack:
        files = {
            SPLITS[name]: [
                stack.enter_context((folder / f"{name}.{side}").open("w", encoding="utf-8", newline="\n"))
                for side in ("source", "target")
            ]
            for name in names
        }
        number = 0
        for number, pair in enumerate(pair_filter.kept(pairs(), Counter()), start=1):
            if number > len(fate):
                break
            if split := files.get(int(fate[number - 1])):
                for file, text in zip(split, pair, strict=True):
                    file.write(f"{text}\n")
    if number != len(fate):
        raise DataError("a file changed while it was read (it is read twice): use files that stay as they are")


def describe_counts(counts: Mapping[str, int]) -> str:
    """Reasons and counts for a message."""
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items()))
