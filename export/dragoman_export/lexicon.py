"""Which target tokens a source token becomes, learned from parallel text: IBM's model 1.

Brown et al. 1993, The mathematics of statistical machine translation: each target token of a pair was made by one
source token of it, or by none, whichever and wherever; expectation maximisation finds the probabilities p(target |
source) under which the pairs are most probable. Plain numpy; the same pairs give the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman_export.errors import ExportError

ITERATIONS = 5
MAX_LINKS = 1 << 25
"""Of a source token with a target token of the same pair: so many are held, at 4 bytes each and 8 for each kind."""
BLOCK_LINKS = 1 << 20

Pair = tuple[Sequence[int], Sequence[int]]
Pairs32 = tuple[NDArray[np.int32], NDArray[np.int32]]


@dataclass(frozen=True, eq=False)
class Lexicon:
    """p(target | source) of all tokens that met in a pair, ordered by source, then the most probable first."""

    source: NDArray[np.int64]  # (N,)
    target: NDArray[np.int64]  # (N,)
    probability: NDArray[np.float64]  # (N,)

    def best(self, count: int, least: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each source token at most ``count`` targets, those of probability ``least`` or more: sources, targets."""
        first = np.searchsorted(self.source, self.source)  # where each one's source begins
        chosen = (np.arange(len(self.source)) - first < count) & (self.probability >= least)
        return self.source[chosen], self.target[chosen]


class _Block(NamedTuple):
    """The links of some pairs: a row of S + 1 for each target token."""

    links: NDArray[np.int64]  # (N,), each source * target_size + target
    starts: NDArray[np.int64]  # of the rows
    lengths: NDArray[np.int64]


def learn_lexicon(pairs: Iterable[Pair], source_size: int, target_size: int) -> Lexicon:
    """The lexicon of pairs of token ids; those behind MAX_LINKS are left out.

    Raises ExportError where there is nothing to learn from.
    """
    kept = _within_limit(pairs)
    nothing = source_size  # the id of no source token, which each pair has in front
    kinds: NDArray[np.int64] = np.zeros(0, np.int64)  # the links that there are, ascending
    for block in _blocks(kept, nothing, target_size):
        kinds = _each_once(np.concatenate([kinds, _each_once(block.links)]))
    if not len(kinds):
        raise ExportError("the text for the shortlist holds no pair of lines that the model accepts: give its own")
    blocks = [
        (np.searchsorted(kinds, block.links).astype(np.int32), block.starts, block.lengths)
        for block in _blocks(kept, nothing, target_size)
    ]
    source, target = np.divmod(kinds, target_size)
    probability = np.full(len(kinds), 1 / target_size)
    for _ in range(ITERATIONS):
        expected = np.zeros(len(kinds))
        for kind, starts, lengths in blocks:
            shares = probability[kind]
            shares /= np.repeat(np.add.reduceat(shares, starts), lengths)
            expected += np.bincount(kind, shares, len(kinds))
        probability = expected / np.bincount(source, expected)[source]
    real = source != nothing
    source, target, probability = source[real], target[real], probability[real]
    order = np.lexsort((target, -probability, source))
    return Lexicon(source[order], target[order], probability[order])


def _each_once(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ascending. (NumPy's own ``unique`` hashes, which takes ten times as long for so many.)"""
    ascending = np.sort(values)
    return ascending[np.diff(ascending, prepend=-1) > 0]


def _within_limit(pairs: Iterable[Pair]) -> list[Pairs32]:
    kept, links = [], 0
    for source, target in pairs:
        links += (len(source) + 1) * len(target)
        if links > MAX_LINKS:
            break
        if source and target:
            kept.append((np.array(source, np.int32), np.array(target, np.int32)))
    return kept


def _blocks(pairs: Sequence[Pairs32], nothing: int, target_size: int) -> Iterator[_Block]:
    links: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    size = 0
    for index, (source, target) in enumerate(pairs, start=1):
        sources = np.concatenate([[nothing], source]).astype(np.int64, copy=False)  # (S + 1,)
        links.append((sources * target_size + target[:, None]).ravel())  # (T, S + 1), flat
        lengths.append(np.full(len(target), len(sources)))
        size += len(links[-1])
        if size >= BLOCK_LINKS or index == len(pairs):
            rows = np.concatenate(lengths)
            yield _Block(np.concatenate(links), np.cumsum(rows) - rows, rows)
            links, lengths, size = [], [], 0
