"""Token ids of a corpus on disk, memory-mapped: made once, in one pass, and found again by what they are made of.

    ROOT/<hash>/shards.json                  format, sizes of the files, what was left out
    ROOT/<hash>/00000.source.ids.npy         the ids of many pairs, one after another
    ROOT/<hash>/00000.source.offsets.npy     where each begins, and where the last ends

A shard ends with the pair that brings both sides together to ``TOKENS_PER_SHARD`` tokens. The hash is of all that the
ids depend on. A folder is there whole or not at all; one whose files have other sizes than
were written counts as not there.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORMAT = 1
TOKENS_PER_SHARD = 16_000_000  # a shard is built in memory: 2 or 4 bytes a token, and as the next begins, twice
CHUNK = 1_000  # pairs that are tokenized together, some 40 bytes a token
SIDES = ("source", "target")

Encode = Callable[[int, Sequence[tuple[str, str]]], tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]]
"""Chunk n of the pairs to the ids of its sources and of its targets, ``</s>`` included."""


@dataclass(frozen=True)
class Limits:
    """The longest pair that is kept, ``</s>`` included."""

    max_source_tokens: int
    max_target_tokens: int

    def reason(self, source: Sequence[int], target: Sequence[int]) -> str | None:
        """Why this pair is left out, None if it is not. A text that is not blank may still have no token."""
        if len(source) <= 1:
            return "no source tokens"
        if len(target) <= 1:
            return "no target tokens"
        if len(source) > self.max_source_tokens:
            return f"source over {self.max_source_tokens} tokens"
        if len(target) > self.max_target_tokens:
            return f"target over {self.max_target_tokens} tokens"
        return None


class Rows(NamedTuple):
    """Ids of texts, one text after another, and where each begins; the last offset is the end."""

    ids: NDArray[Any]  # uint16 where the vocabulary allows, else uint32
    offsets: NDArray[np.int64]


class Shard(NamedTuple):
    """Some pairs of the corpus, in order."""

    source: Rows
    target: Rows


class GrowingRows:
    """``Rows`` in the making, in a few bytes a token."""

    def __init__(self, num_tokens: int) -> None:
        self.ids = array("H" if num_tokens <= 1 << 16 else "I")
        self.offsets = array("q", [0])

    def append(self, row: Sequence[int]) -> None:
        """One more text."""
        self.ids.extend(row)
        self.offsets.append(len(self.ids))

    def finished(self) -> Rows:
        """The arrays, not copied: nothing can be appended any more."""
        return Rows(np.asarray(self.ids), np.asarray(self.offsets))


def encoded_shards(
    pairs: Iterable[tuple[str, str]],
    encode: Encode,
    num_tokens: tuple[int, int],
    limits: Limits,
    dropped: Counter[str],
    tokens_per_shard: int = TOKENS_PER_SHARD,
) -> Iterator[Shard]:
    """Tokenize pairs, one shard after another; those over a limit are counted in ``dropped`` by their reason."""
    pairs = iter(pairs)
    rows = [GrowingRows(size) for size in num_tokens]
    number = 0
    while chunk := list(islice(pairs, CHUNK)):
        for pair in zip(*encode(number, chunk), strict=True):
            if reason := limits.reason(*pair):
                dropped[reason] += 1
                continue
            for side, ids in zip(rows, pair, strict=True):
                side.append(ids)
            if len(rows[0].ids) + len(rows[1].ids) >= tokens_per_shard:
                yield Shard(rows[0].finished(), rows[1].finished())
                rows = [GrowingRows(size) for size in num_tokens]
        number += 1
    if len(rows[0].offsets) > 1:
        yield Shard(rows[0].finished(), rows[1].finished())


def write_shards(folder: Path, shards: Iterable[Shard], dropped: Mapping[str, int]) -> None:
    """Write all shards, and then what ``dropped`` has come to."""
    for number, shard in enumerate(shards):
        for side, rows in zip(SIDES, shard, strict=True):
            np.save(folder / f"{number:05d}.{side}.ids.npy", rows.ids)
            np.save(folder / f"{number:05d}.{side}.offsets.npy", rows.offsets)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    content = {"format": FORMAT, "dropped": dict(sorted(dropped.items())), "files": sizes}
    (folder / "shards.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def open_shards(folder: Path) -> tuple[list[Shard], dict[str, int]] | None:
    """The shards, memory-mapped, and what was left out; None if the folder is missing or damaged."""
    try:
        content = json.loads((folder / "shards.json").read_text(encoding="utf-8"))
        if any((folder / name).stat().st_size != size for name, size in content["files"].items()):
            return None
        dropped: dict[str, int] = content["dropped"]
        count = len(content["files"]) // (2 * len(SIDES))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # the caller makes them anew

    def rows(number: int, side: str) -> Rows:
        names = (f"{number:05d}.{side}.{part}.npy" for part in ("ids", "offsets"))
        # asarray: slices of the base class are several times as fast as those of a memory map
        return Rows(*(np.asarray(np.load(folder / name, mmap_mode="r")) for name in names))

    return [Shard(rows(number, "source"), rows(number, "target")) for number in range(count)], dropped


def nameless(shards: Iterable[Shard], folder: Path) -> Iterator[Shard]:
    """The same shards, memory-mapped from files in ``folder`` without a name: gone when nobody uses them any more."""

    def mapped(values: NDArray[Any]) -> NDArray[Any]:
        with tempfile.TemporaryFile(dir=folder) as file:
            values.tofile(file)
            return np.asarray(np.memmap(file, dtype=values.dtype, mode="r", shape=values.shape))

    for shard in shards:
        yield Shard(*(Rows(mapped(rows.ids), mapped(rows.offsets)) for rows in shard))
