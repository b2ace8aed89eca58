"""The data of a run: tokenizers, limits, datasets and batches."""

import gzip
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_training.config import TrainConfig
from dragoman_training.configfile import load_config
from dragoman_training.data import Dataset, Pair, encode_pairs, load_datasets, make_batch, plan_batches
from dragoman_training.errors import CheckpointError, DataError
from dragoman_training.shards import GrowingRows, Shard
from dragoman_training.tokenizer import PlainTokenizer, SpecialIds


def dataset_of(sizes: list[tuple[int, int]]) -> Dataset:
    """Pairs of these lengths."""
    rows = GrowingRows(10), GrowingRows(10)
    for size in sizes:
        for side, length in zip(rows, size, strict=True):
            side.append([4] * (length - 1) + [2])
    return Dataset([Shard(rows[0].finished(), rows[1].finished())], {})


SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=60)


@pytest.fixture
def config(toy: Path) -> TrainConfig:
    """The toy task's configuration."""
    return load_config(str(toy / "toy.toml"))


@pytest.fixture
def sampling(toy: Path) -> TrainConfig:
    """The same with BPE dropout."""
    pieces = 'kind = "bpe"\nvocab_size = 24\nbyte_fallback = false\nsampling = 0.3'
    text = (toy / "toy.toml").read_text().replace('kind = "plain"', pieces)
    lines = [line for line in text.split("\n") if "_unit" not in line]
    (toy / "sampling.toml").write_text("\n".join(lines))
    return load_config(str(toy / "sampling.toml"))


# -- limits ----------------------------------------------------------------------------------------------------------


def test_pairs_over_a_limit_or_empty_are_dropped_and_counted() -> None:
    """The limits count ``</s>``; each pair counts under one reason."""
    source, target = PlainTokenizer.build("character", ["ab"]), PlainTokenizer.build("piece", ["A B"])
    texts = [("ab", "A B"), ("abb", "A B"), ("a", "A A A"), ("", "A"), ("a", " "), ("abb", "A A A")]
    dataset = encode_pairs([a for a, _ in texts], [b for _, b in texts], source, target, 3, 3)
    assert list(dataset) == [Pair([4, 5, 2], [4, 5, 2])]
    assert dataset.dropped == {
        "blank source": 1,
        "blank target": 1,
        "source over 3 tokens": 2,
        "target over 3 tokens": 1,
    }


def test_one_line_over_the_limit_neither_stops_training_nor_grows_a_batch(toy: Path, config: TrainConfig) -> None:
    """900 letters among short words, and one just at the limit: the first is dropped, all batches keep the budget."""
    for side, letters in (("source", ("a" * 900, "b" * 7)), ("target", ("A " * 899 + "A", "B " * 6 + "B"))):
        with (toy / f"train.{side}").open("a") as file:
            file.write("".join(f"{text}\n" for text in letters))
    train = load_datasets(config, toy / "run").train
    assert train.dropped == {"source over 8 tokens": 1}
    assert len(train) == 61 and len(train[60].source) == 8
    for batch in plan_batches(train, 64, 1, 0):
        assert make_batch([train[i] for i in batch]).labels.numel() <= 64


def test_text_without_a_pair_that_fits_is_refused(toy: Path, config: TrainConfig) -> None:
    """The message names the limits and what was dropped, for either file."""
    for kind in ("train", "dev"):
        before = (toy / f"{kind}.source").read_text()
        (toy / f"{kind}.source").write_text("".join("a" * 20 + "\n" for _ in before.splitlines()))
        name = {"train": "training", "dev": "dev"}[kind]
        with pytest.raises(
            DataError, match=rf"no {name} pair fits the limits \(8, 8\) \(dropped: .*source over 8.*raise"
        ):
            load_datasets(config, toy / "run")
        (toy / f"{kind}.source").write_text(before)


def test_blank_lines_alone_are_refused_without_talk_of_limits(toy: Path, config: TrainConfig) -> None:
    """Higher limits would not help."""
    (toy / "dev.source").write_text("\n \n")
    (toy / "dev.target").write_text("A\nB\n")
    words = r"no dev pair has text on both sides \(dropped: 2 blank source\): give pairs that have"
    with pytest.raises(DataError, match=words):
        load_datasets(config, toy / "run")


# -- the files of a run ----------------------------------------------------------------------------------------------


def test_a_run_s_data_are_its_files(toy: Path, config: TrainConfig) -> None:
    """Worked example: ids of the first pair by hand, all dev lines as text, the files described."""
    (toy / "dev.source").write_text("ab\n\nabababab\n")
    (toy / "dev.target").write_text("B A\nA\nB A\n")
    datasets = load_datasets(config, toy / "run")
    letters = {letter: index for index, letter in enumerate("abcd", start=4)}
    word = (toy / "train.source").read_text().split("\n")[0]
    ids = [letters[letter] for letter in word]
    assert datasets.train[0] == Pair([*ids, 2], [*ids[::-1], 2])
    assert list(datasets.dev) == [Pair([4, 5, 2], [5, 4, 2])]
    assert datasets.dev.dropped == {"blank source": 1, "source over 8 tokens": 1}
    assert datasets.dev_sources == ["ab", "", "abababab"]
    assert datasets.dev_targets == ["B A", "A", "B A"]
    assert datasets.record["dev_source"]["lines"] == 3
    assert datasets.record["train_target"]["lines"] == 60
    assert datasets.record["dev_source"]["sha256"] == (
        "395135a245659ff9ae2169a4c22d838d4c02f1cc8965d8db2b469cd3b768fc26"  # sha256sum
    )
    assert datasets.train_for_epoch(3) is datasets.train


def test_packed_text_gives_the_same_data(toy: Path, config: TrainConfig) -> None:
    """Files whose names end in .gz."""
    plain = load_datasets(config, toy / "run")
    for side in ("source", "target"):
        (toy / f"train.{side}.gz").write_bytes(gzip.compress((toy / f"train.{side}").read_bytes()))
    packed = replace(config.data, train_source="train.source.gz", train_target="train.target.gz")
    assert list(load_datasets(replace(config, data=packed), toy / "other").train) == list(plain.train)


def test_unequal_files_are_refused_before_anything_is_made(toy: Path, config: TrainConfig) -> None:
    """Both counts; no tokenizer, no shard."""
    for name in ("train.target", "dev.target"):
        before = (toy / name).read_text()
        (toy / name).write_text(before + "X\n")
        lines = before.count("\n")
        with pytest.raises(DataError, match=rf"source has {lines} lines but {name} has {lines + 1}"):
            load_datasets(config, toy / "run")
        (toy / name).write_text(before)
    assert not (toy / "run").exists() and not (toy / ".dragoman-shards").exists()


def test_tokenizers_are_trained_once_a_run(toy: Path, sampling: TrainConfig) -> None:
    """The second start reads those of the first, whatever the text is by now; joint sides share one object."""
    first = load_datasets(sampling, toy / "run")
    assert first.source_tokenizer is first.target_tokenizer
    assert [path.name for path in (toy / "run" / "tokenizers").iterdir()] == ["tokenizer.model"]
    for side in ("source", "target"):
        lines = (toy / f"train.{side}").read_text().splitlines()
        (toy / f"train.{side}").write_text("".join(f"{line}\n" for line in lines[:40]))
    second = load_datasets(sampling, toy / "run")
    assert second.source_tokenizer is second.target_tokenizer
    assert second.source_tokenizer.to_bytes() == first.source_tokenizer.to_bytes()
    fresh = load_datasets(sampling, toy / "fresh")
    assert fresh.source_tokenizer.to_bytes() != first.source_tokenizer.to_bytes()


def test_sides_keep_their_own_tokenizer(toy: Path, config: TrainConfig) -> None:
    """From the first start and from the files, the source's stays the source's."""
    for _ in range(2):
        datasets = load_datasets(config, toy / "run")
        assert datasets.source_tokenizer.encode("ab") == [4, 5]
        assert datasets.target_tokenizer.encode("A B") == [4, 5]
        assert datasets.target_tokenizer.encode("ab") == [3]
        assert datasets.tokenizers == (datasets.source_tokenizer, datasets.target_tokenizer)


def test_a_damaged_tokenizer_of_a_run_is_refused_by_name(toy: Path, sampling: TrainConfig) -> None:
    """It is not silently trained again: the weights belong to it."""
    load_datasets(sampling, toy / "run")
    (toy / "run" / "tokenizers" / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is no tokenizer file"):
        load_datasets(sampling, toy / "run")


@pytest.mark.parametrize("name", ["source.tokenizer.json", "target.tokenizer.json"])
def test_a_tokenizer_file_that_is_gone_is_named(toy: Path, config: TrainConfig, name: str) -> None:
    """With where to find it again; the other side's is not taken for it."""
    load_datasets(config, toy / "run")
    (toy / "run" / "tokenizers" / name).unlink()
    with pytest.raises(CheckpointError, match=rf"tokenizers lacks {name}: copy it from .*checkpoints"):
        load_datasets(config, toy / "run")


def test_what_else_lies_beside_the_tokenizers_is_left_alone(toy: Path, config: TrainConfig) -> None:
    """Whatever a file manager or a person puts there, before or after them in the alphabet."""
    first = load_datasets(config, toy / "run")
    for name in (".DS_Store", "zz.model", "zz.json"):
        (toy / "run" / "tokenizers" / name).write_text("{}")
    second = load_datasets(config, toy / "run")
    for before, after in zip(first.tokenizers, second.tokenizers, strict=True):
        assert after.to_bytes() == before.to_bytes()


def test_separate_vocabularies_are_found_again(toy: Path, sampling: TrainConfig) -> None:
    """SentencePiece without a joint one: each side reads its own."""
    for side in ("source", "target"):  # words enough for 16 tokens
        (toy / f"train.{side}").write_text((toy / f"train.{side}").read_text().replace(" ", ""))
    own = replace(sampling, tokenizer=replace(sampling.tokenizer, joint=False, vocab_size=16))
    first, second = (load_datasets(own, toy / "run").tokenizers for _ in range(2))
    assert first[0].to_bytes() == second[0].to_bytes() != second[1].to_bytes() == first[1].to_bytes()


# -- sampling --------------------------------------------------------------------------------------------------------


def test_each_epoch_segments_anew_and_repeats_with_seed_and_epoch(toy: Path, sampling: TrainConfig) -> None:
    """Also after a restart; the text stays the same, and the dev pairs are never sampled."""
    datasets = load_datasets(sampling, toy / "run")
    epochs = [list(datasets.train_for_epoch(epoch)) for epoch in range(3)]
    assert all(a != b for i, a in enumerate([*epochs, list(datasets.train)]) for b in epochs[:i])
    restarted = load_datasets(sampling, toy / "run")
    assert list(restarted.train_for_epoch(2)) == epochs[2]
    assert list(restarted.train_for_epoch(1)) == epochs[1]
    assert list(restarted.dev) == list(datasets.dev)
    other_seed = replace(sampling, loop=replace(sampling.loop, seed=4))
    assert list(load_datasets(other_seed, toy / "run").train_for_epoch(1)) != epochs[1]
    sources = (toy / "train.source").read_text().split("\n")[:-1]
    decoded = Counter(datasets.source_tokenizer.decode(pair.source[:-1]) for pair in epochs[0])
    assert decoded <= Counter(sources)


def test_the_limits_hold_for_every_segmentation(toy: Path, sampling: TrainConfig) -> None:
    """What fits in one epoch may not in another; it is counted each time."""
    tight = replace(sampling, data=replace(sampling.data, max_source_tokens=6, max_target_tokens=6))
    datasets = load_datasets(tight, toy / "run")
    for epoch in range(3):
        dataset = datasets.train_for_epoch(epoch)
        assert max(dataset.source_lengths) <= 6 and max(dataset.target_lengths) <= 6
        assert len(dataset) + sum(dataset.dropped.values()) == 60
        assert sum(dataset.dropped.values()) > sum(datasets.train.dropped.values())


def test_sampled_epochs_leave_no_files(toy: Path, sampling: TrainConfig) -> None:
    """Their shards have no names: a killed run leaves nothing behind either."""
    datasets = load_datasets(sampling, toy / "run")
    before = sorted(toy.rglob("*"))
    dataset = datasets.train_for_epoch(0)
    assert sorted(toy.rglob("*")) == before
    assert len(list(dataset)) == len(dataset) > 0


# -- batches ---------------------------------------------------------------------------------------------------------


def packed_greedily(dataset: Dataset, budget: int, seed: int, epoch: int, spread: float) -> list[list[int]]:
    """The same plan, pair by pair: the order's definition and then one row after another while the budget lasts."""
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(dataset)).tolist()
    lengths = [(len(dataset[i].source), len(dataset[i].target)) for i in order]
    keys: list[tuple[float, ...]] = [(s, t if s % 2 == 0 else -t) for s, t in lengths]
    if spread:
        keys = [
            (max(size) + noise,) for size, noise in zip(lengths, random.uniform(0, spread, len(order)), strict=True)
        ]
    ranks = sorted(range(len(order)), key=lambda rank: keys[rank])
    batches: list[list[int]] = [[]]
    longest = 0
    for rank in ranks:
        longest = max(longest, *lengths[rank])
        if longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = max(lengths[rank])
        batches[-1].append(order[rank])
    return [batches[i] for i in random.permutation(len(batches))]


@settings(deadline=None)
@given(SIZES, st.integers(9, 40), st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 3.0]))
def test_an_epoch_holds_every_pair_once_within_the_budget(
    sizes: list[tuple[int, int]], budget: int, seed: int, epoch: int, spread: float
) -> None:
    """It is the plan that packing pair by pair gives, and so the same for the same seed and epoch."""
    dataset = dataset_of(sizes)
    plan = [batch.tolist() for batch in plan_batches(dataset, budget, seed, epoch, spread)]
    assert sorted(i for batch in plan for i in batch) == list(range(len(sizes)))
    for batch in plan:
        assert batch
        assert len(batch) * max(max(sizes[i]) for i in batch) <= budget
    assert plan == packed_greedily(dataset, budget, seed, epoch, spread)


def test_without_spread_batches_hold_near_equal_lengths_with_spread_they_mix() -> None:
    """Many pairs of two lengths far apart by less than the spread."""
    dataset = dataset_of([(n, n) for n in (3, 4)] * 200)

    def mixed(spread: float) -> int:
        plan = plan_batches(dataset, 40, 1, 0, spread)
        return sum(len(set(dataset.source_lengths[batch].tolist())) > 1 for batch in plan)

    assert mixed(0.0) <= 1
    assert mixed(3.0) > 10


def test_seed_and_epoch_change_the_order() -> None:
    """Each epoch meets the pairs in another order."""
    dataset = dataset_of([(2, 2)] * 50)
    plans = [
        [batch.tolist() for batch in plan_batches(dataset, 20, seed, epoch)] for seed in (0, 1) for epoch in (0, 1)
    ]
    assert all(a != b for i, a in enumerate(plans) for b in plans[:i])


def test_a_pair_over_the_budget_is_refused() -> None:
    """The message names both sizes."""
    with pytest.raises(DataError, match="5 tokens is over the batch budget of 4"):
        plan_batches(dataset_of([(5, 2)]), 4, 0, 0)


def test_the_plan_of_many_pairs_takes_few_bytes_a_pair() -> None:
    """Measured, as it is made and after: a list of Python's would take some 40 bytes a pair for good."""
    dataset = dataset_of([(8, 8)] * 20_000)
    tracemalloc.start()
    try:
        plan = plan_batches(dataset, 800, 0, 0)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(plan) == 200
    assert held < 10 * 20_000
    assert peak < 100 * 20_000


def test_the_decoder_reads_the_start_id_and_then_the_labels_moved_by_one() -> None:
    """A worked example, with a start id of its own: it comes from one place."""
    batch = make_batch([Pair([4, 5, 2], [6, 2]), Pair([4, 2], [7, 8, 2])], SpecialIds(decoder_start=9))
    assert batch.source.tolist() == [[4, 5, 2], [4, 2, 0]]
    assert batch.source_lengths.tolist() == [3, 2]
    assert batch.target.tolist() == [[9, 6, 0], [9, 7, 8]]
    assert batch.labels.tolist() == [[6, 2, 0], [7, 8, 2]]
