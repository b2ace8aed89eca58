"""Aligned text files to batches of padded tensors.

Pairs of near-equal source and target length share a batch, so that almost nothing is padding; a batch's size is limited
in tokens, not rows. The order is a pure function of seed and epoch, which is what makes an exact resume possible: a
position in an epoch is one integer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dragoman_training.errors import DataError
from dragoman_training.tokenizer import SPECIAL_IDS, SpecialIds, Tokenizer


class Pair(NamedTuple):
    """Token ids of one example, both sides closed by ``</s>``."""

    source: list[int]
    target: list[int]


@dataclass(frozen=True)
class Batch:
    """Right-padded rows. The decoder reads ``target`` (starting with the decoder start id) and predicts ``labels``."""

    source: Tensor  # (B, S)
    source_lengths: Tensor  # (B,) int32
    target: Tensor  # (B, T)
    labels: Tensor  # (B, T)


@dataclass(frozen=True)
class Dataset:
    """The pairs that fit the limits, in file order, and how many did not."""

    pairs: list[Pair]
    dropped: int


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file. Only LF and CRLF end a line: U+2028, form feeds and the like are text."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): prepare the data first") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}: convert it") from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def read_aligned(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """The lines of two files that belong together; ``DataError`` with both counts when they cannot."""
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise DataError(f"{source} has {len(sources)} lines but {target} has {len(targets)}: line n must match line n")
    if not sources:
        raise DataError(f"{source} and {target} are empty: at least one pair is needed")
    return sources, targets


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def encode_source(tokenizer: Tokenizer, text: str) -> list[int]:
    """The source sequence: tokens, then ``</s>``."""
    return [*tokenizer.encode(text), SPECIAL_IDS.eos]


def encode_pairs(
    sources: Sequence[str],
    targets: Sequence[str],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    max_source_tokens: int,
    max_target_tokens: int,
) -> Dataset:
    """Tokenize both sides and drop (and count) the pairs with an empty side or over a limit, ``</s>`` included."""
    pairs = []
    for source, target in zip(sources, targets, strict=True):
        pair = Pair(encode_source(source_tokenizer, source), [*target_tokenizer.encode(target), SPECIAL_IDS.eos])
        fits = 1 < len(pair.source) <= max_source_tokens and 1 < len(pair.target) <= max_target_tokens
        if fits:
            pairs.append(pair)
    return Dataset(pairs, len(sources) - len(pairs))


def plan_batches(
    pairs: Sequence[Pair], batch_tokens: int, seed: int, epoch: int, length_spread: float = 0.0
) -> list[list[int]]:
    """The epoch's batches as indices into ``pairs``: every pair once, rows x longest side at most ``batch_tokens``.

    Neighbours in (source length, target length) share a batch; which of the equals meet, and the order of the batches,
    are drawn anew each epoch. With a ``length_spread``, pairs are sorted by their longer side plus a random number up
    to it instead: a batch then mixes lengths, at the price of padding. Raises ``DataError`` for a single pair over the
    budget.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(pairs))
    source_lengths = np.array([len(pairs[i].source) for i in order])
    target_lengths = np.array([len(pairs[i].target) for i in order])
    # Target lengths rise for even and fall for odd source lengths: no jump where one source length ends.
    snake = np.where(source_lengths % 2 == 0, target_lengths, -target_lengths)
    ranks = np.lexsort((snake, source_lengths))
    if length_spread:
        noise = random.uniform(0, length_spread, len(pairs))
        ranks = np.argsort(np.maximum(source_lengths, target_lengths) + noise, kind="stable")
    batches: list[list[int]] = []
    current: list[int] = []
    longest = 0
    for index in order[ranks].tolist():
        size = max(len(pairs[index].source), len(pairs[index].target))
        if size > batch_tokens:
            raise DataError(f"a pair of {size} tokens is over the batch budget of {batch_tokens}: raise batch_tokens")
        longest = max(longest, size)
        if current and longest * (len(current) + 1) > batch_tokens:
            batches.append(current)
            current, longest = [], size
        current.append(index)
    batches.append(current)
    return [batches[i] for i in random.permutation(len(batches))]


def pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Rows of ids to one right-padded tensor (B, longest)."""
    result = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for line, row in zip(result, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(result)


def make_batch(pairs: Sequence[Pair], special: SpecialIds = SPECIAL_IDS) -> Batch:
    """Pad pairs to tensors; the decoder input is the labels moved right behind ``special.decoder_start``."""
    return Batch(
        source=pad([pair.source for pair in pairs], special.pad),
        source_lengths=torch.tensor([len(pair.source) for pair in pairs], dtype=torch.int32),
        target=pad([[special.decoder_start, *pair.target[:-1]] for pair in pairs], special.pad),
        labels=pad([pair.target for pair in pairs], special.pad),
    )


def epoch_batches(
    pairs: Sequence[Pair], batch_tokens: int, seed: int, epoch: int, position: int = 0
) -> Iterator[Batch]:
    """The batches of an epoch from ``position`` on."""
    for indices in plan_batches(pairs, batch_tokens, seed, epoch)[position:]:
        yield make_batch([pairs[i] for i in indices])
