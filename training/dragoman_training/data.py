"""The data of a training run: text files to datasets of token ids, and these to batches of padded tensors.

Pairs of near-equal source and target length share a batch, so that almost nothing is padding; a batch's size is limited
in tokens, not rows. The order is a pure function of seed and epoch, which is what makes an exact resume possible: a
position in an epoch is one integer. Of the training text, memory holds the pairs' lengths and an epoch's order, a few
dozen bytes a pair, besides a sample of bounded size while a vocabulary is learned and one or two shards of bounded size
while the text is tokenized. The dev text and its ids are held in full.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from dragoman_training.config import TokenizerConfig, TrainConfig
from dragoman_training.corpus import check_aligned, count_lines, file_sha256, iterate_pairs, read_aligned
from dragoman_training.errors import CheckpointError, DataError
from dragoman_training.filtering import PairFilter
from dragoman_training.folders import locked, written_aside
from dragoman_training.shards import (
    FORMAT,
    Encode,
    Limits,
    Shard,
    encoded_shards,
    nameless,
    open_shards,
    write_shards,
)
from dragoman_training.tokenizer import (
    SPECIAL_IDS,
    SentencePieceTokenizer,
    SpecialIds,
    Tokenizer,
    file_names,
    load_tokenizer,
    train_tokenizers,
)

FILES = ("train_source", "train_target", "dev_source", "dev_target")
SHARDS_FOLDER = ".dragoman-shards"


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


class Dataset:
    """The pairs that fit the limits, in file order, and how many did not, by reason. Not changed once made."""

    def __init__(self, shards: Iterable[Shard], dropped: Mapping[str, int]) -> None:
        self._shards = list(shards)
        self.dropped = dict(sorted(dropped.items()))
        sizes = [len(shard.source.offsets) - 1 for shard in self._shards]
        self._starts = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        none = np.zeros(0, np.int32)
        self.source_lengths: NDArray[np.int32] = np.concatenate(
            [none, *(np.diff(shard.source.offsets).astype(np.int32) for shard in self._shards)]
        )
        self.target_lengths: NDArray[np.int32] = np.concatenate(
            [none, *(np.diff(shard.target.offsets).astype(np.int32) for shard in self._shards)]
        )

    def reasons(self) -> str:
        """What was dropped, for a person: nothing where nothing was."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items() if count)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int | np.integer[Any]) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        number = bisect_right(self._starts, int(index)) - 1
        row = int(index) - self._starts[number]
        source, target = (rows.ids[rows.offsets[row] : rows.offsets[row + 1]].tolist() for rows in self._shards[number])
        return Pair(source, target)

    def __iter__(self) -> Iterator[Pair]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True)
class Datasets:
    """All that a run reads. ``record`` tells the SHA-256 and the number of lines of each file."""

    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    train: Dataset
    dev: Dataset
    dev_sources: list[str]  # all lines, also those that ``dev`` lacks
    dev_targets: list[str]
    record: dict[str, dict[str, object]]
    config: TrainConfig
    shards_folder: Path

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Of the source and the target side; the same object twice when they are joint."""
        return self.source_tokenizer, self.target_tokenizer

    def train_for_epoch(self, epoch: int) -> Dataset:
        """The training pairs, segmented anew for this epoch where ``tokenizer.sampling`` says so.

        The same epoch always gives the same ids; the limits apply to each segmentation. With sampling, this reads the
        whole text and takes its time (see sampling.py) before it returns; nothing interrupts it.
        """
        sampling = self.config.tokenizer.sampling
        if not sampling:
            return self.train
        source_tokenizer, target_tokenizer = self.tokenizers
        assert isinstance(source_tokenizer, SentencePieceTokenizer)  # TokenizerConfig checks
        assert isinstance(target_tokenizer, SentencePieceTokenizer)

        def encode(chunk: int, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]]]:
            seeds = np.random.SeedSequence([self.config.loop.seed, epoch, chunk]).generate_state(2).tolist()
            sources = source_tokenizer.sample([source for source, _ in pairs], sampling, seeds[0])
            targets = target_tokenizer.sample([target for _, target in pairs], sampling, seeds[1])
            return [[*ids, SPECIAL_IDS.eos] for ids in sources], [[*ids, SPECIAL_IDS.eos] for ids in targets]

        dropped: Counter[str] = Counter()
        shards = training_shards(self.config, self.tokenizers, encode, dropped)
        dataset = Dataset(nameless(shards, self.shards_folder), dropped)
        if not len(dataset):
            raise DataError(f"no training pair fits the limits when segmented with tokenizer.sampling = {sampling}")
        return dataset


def encode_source(tokenizer: Tokenizer, text: str, special: SpecialIds = SPECIAL_IDS) -> list[int]:
    """The source sequence: tokens, then ``</s>``, or what else ``special`` has around them."""
    return special.source(tokenizer.encode(text))


def encode_chunk(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, _: int, pairs: Sequence[tuple[str, str]]
) -> tuple[list[list[int]], list[list[int]]]:
    """The best segmentation of each text, whatever the chunk's number."""
    sources = [encode_source(source_tokenizer, source) for source, _ in pairs]
    return sources, [[*target_tokenizer.encode(target), SPECIAL_IDS.eos] for _, target in pairs]


def encode_pairs(
    sources: Iterable[str],
    targets: Iterable[str],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    max_source_tokens: int,
    max_target_tokens: int,
) -> Dataset:
    """Tokenize both sides, in memory; pairs that are blank on a side or over a limit are dropped and counted."""
    dropped: Counter[str] = Counter()
    pairs = PairFilter().kept(zip(sources, targets, strict=True), dropped)
    encode = partial(encode_chunk, source_tokenizer, target_tokenizer)
    limits = Limits(max_source_tokens, max_target_tokens)
    sizes = len(source_tokenizer), len(target_tokenizer)
    return Dataset(list(encoded_shards(pairs, encode, sizes, limits, dropped)), dropped)


# -- the files of a run ----------------------------------------------------------------------------------------------


def load_datasets(config: TrainConfig, run: Path) -> Datasets:
    """Read, tokenize and check all that a run needs.

    The tokenizers are trained once and kept in ``run``/tokenizers. The ids of the training pairs are kept beside the
    training text, or in ``run``/shards if nothing can be written there, and found again by any run with the same text,
    tokenizers and limits. Processes that load the same run at once wait for one another. Raises ``DataError``.
    """
    paths = {name: Path(getattr(config.data, name)) for name in FILES}
    record: dict[str, dict[str, object]] = {}
    for split in ("train", "dev"):
        source, target = paths[f"{split}_source"], paths[f"{split}_target"]
        check_aligned(source, target, source_lines := count_lines(source), target_lines := count_lines(target))
        record[f"{split}_source"] = {"sha256": file_sha256(source), "lines": source_lines}
        record[f"{split}_target"] = {"sha256": file_sha256(target), "lines": target_lines}
    dev_sources, dev_targets = read_aligned(paths["dev_source"], paths["dev_target"])
    tokenizers = run_tokenizers(config, run)
    limits = config.data.max_source_tokens, config.data.max_target_tokens
    dev = encode_pairs(dev_sources, dev_targets, *tokenizers, *limits)
    root = shards_root(paths["train_source"].parent, run)
    train = open_or_build(config, tokenizers, record, root)
    for dataset, kind in ((train, "training"), (dev, "dev")):
        refuse_empty(dataset, kind, limits)
    return Datasets(*tokenizers, train, dev, dev_sources, dev_targets, record, config, root)


def refuse_empty(dataset: Dataset, kind: str, limits: tuple[int, int]) -> None:
    """``DataError`` where no pair is left, with the remedy for why they were dropped."""
    if len(dataset):
        return
    if any(" over " in reason for reason in dataset.dropped):
        remedy = "raise data.max_source_tokens and data.max_target_tokens"
        raise DataError(f"no {kind} pair fits the limits {limits} (dropped: {dataset.reasons()}): {remedy}")
    raise DataError(f"no {kind} pair has text on both sides (dropped: {dataset.reasons()}): give pairs that have")


def training_pairs(config: TrainConfig, dropped: Counter[str]) -> Iterator[tuple[str, str]]:
    """The training text from its files, without what the filter drops."""
    return PairFilter().kept(iterate_pairs(Path(config.data.train_source), Path(config.data.train_target)), dropped)


def run_tokenizers(config: TrainConfig, run: Path) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers in ``run``/tokenizers, trained and written there if they are not there yet."""
    folder = run / "tokenizers"
    run.mkdir(parents=True, exist_ok=True)
    with locked(run / ".tokenizers.lock"):
        if not folder.exists():
            pairs = partial(training_pairs, config, Counter())
            trained = train_tokenizers(config.tokenizer, pairs, config.loop.seed)
            with written_aside(folder) as aside:
                for tokenizer, name in zip(trained, file_names(*trained).values(), strict=True):
                    (aside / name).write_bytes(tokenizer.to_bytes())
    names = tokenizer_names(config.tokenizer)
    for name in names:
        if not (folder / name).is_file():
            remedy = f"copy it from a folder in {run}/checkpoints, or choose another --out"
            raise CheckpointError(f"{folder} lacks {name}: {remedy}")
    loaded = [load_tokenizer(folder / name) for name in names]
    return loaded[0], loaded[-1]


def tokenizer_names(config: TokenizerConfig) -> list[str]:
    """How ``file_names`` calls the files of such tokenizers: the source's, then the target's, once where it is one."""
    if config.kind == "plain":
        return ["source.tokenizer.json", "target.tokenizer.json"]
    return ["tokenizer.model"] if config.joint else ["source.tokenizer.model", "target.tokenizer.model"]


def shards_root(beside: Path, run: Path) -> Path:
    """The folder for shards: in that of the training text, else in the run's."""
    for root in (beside / SHARDS_FOLDER, run / "shards"):
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):  # can be written: no lock, which another text's build may hold
                return root
        except OSError as error:  # the next one, then
            reason = error
    raise DataError(f"token shards can be written neither beside {beside} nor in {run}: {reason}")


def open_or_build(
    config: TrainConfig, tokenizers: tuple[Tokenizer, Tokenizer], record: Mapping[str, Mapping[str, object]], root: Path
) -> Dataset:
    """The training pairs from the shards in ``root``, which are built if they are not there or damaged."""
    limits = [config.data.max_source_tokens, config.data.max_target_tokens]
    hashes = [record[name]["sha256"] for name in ("train_source", "train_target")]
    hashes += [hashlib.sha256(tokenizer.to_bytes()).hexdigest() for tokenizer in tokenizers]
    folder = root / hashlib.sha256(json.dumps([FORMAT, limits, hashes]).encode()).hexdigest()[:32]
    with locked(root / f".{folder.name}.lock"):
        found = open_shards(folder)
        if found is None:
            shutil.rmtree(folder, ignore_errors=True)  # mostly not there; if it stays, writing it below will tell
            print(f"tokenizing {record['train_source']['lines']} pairs, to be kept in {folder}", file=sys.stderr)
            dropped: Counter[str] = Counter()
            shards = training_shards(config, tokenizers, partial(encode_chunk, *tokenizers), dropped)
            with written_aside(folder) as aside:
                write_shards(aside, shards, dropped)
            found = open_shards(folder)
    if found is None:
        raise DataError(f"{folder} is damaged right after it was written: check the disk")
    return Dataset(*found)


def training_shards(
    config: TrainConfig, tokenizers: tuple[Tokenizer, Tokenizer], encode: Encode, dropped: Counter[str]
) -> Iterator[Shard]:
    """The training text as shards, with a progress bar on a terminal."""
    pairs = training_pairs(config, dropped)
    shown = tqdm(pairs, desc="tokenizing", unit="pair", unit_scale=True, leave=False, disable=not sys.stderr.isatty())
    limits = Limits(config.data.max_source_tokens, config.data.max_target_tokens)
    return encoded_shards(shown, encode, (len(tokenizers[0]), len(tokenizers[1])), limits, dropped)


# -- batches ---------------------------------------------------------------------------------------------------------


def plan_batches(
    dataset: Dataset, batch_tokens: int, seed: int, epoch: int, length_spread: float = 0.0
) -> list[NDArray[np.int32]]:
    """The epoch's batches as indices into the dataset: every pair once, rows x longest side at most ``batch_tokens``.

    Neighbours in (source length, target length) share a batch; which of the equals meet, and the order of the batches,
    are drawn anew each epoch. With a ``length_spread``, pairs are sorted by their longer side plus a random number up
    to it instead: a batch then mixes lengths, at the price of padding. Raises ``DataError`` for a single pair over the
    budget.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(dataset))
    source_lengths, target_lengths = dataset.source_lengths[order], dataset.target_lengths[order]
    sizes = np.maximum(source_lengths, target_lengths)
    if (longest := int(sizes.max())) > batch_tokens:
        raise DataError(f"a pair of {longest} tokens is over the batch budget of {batch_tokens}: raise batch_tokens")
    if length_spread:
        ranks = np.argsort(sizes + random.uniform(0, length_spread, len(sizes)), kind="stable")
    else:
        # Target lengths rise for even and fall for odd source lengths: no jump where one source length ends.
        snake = np.where(source_lengths % 2 == 0, target_lengths, -target_lengths)
        ranks = np.lexsort((snake, source_lengths))
    indices, sizes = order[ranks].astype(np.int32), sizes[ranks]
    batches: list[NDArray[np.int32]] = []
    start = 0
    while start < len(indices):
        window = sizes[start : start + batch_tokens // int(sizes[start])]  # more rows than these never fit
        tokens = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)  # of the first 1, 2, ... rows, padded
        stop = start + int(np.searchsorted(tokens, batch_tokens, side="right"))
        batches.append(indices[start:stop])
        start = stop
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
