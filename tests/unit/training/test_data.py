"""Aligned files, limits and batches."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dragoman_training.data import (
    Pair,
    encode_pairs,
    epoch_batches,
    make_batch,
    plan_batches,
    read_aligned,
    read_lines,
)
from dragoman_training.errors import DataError
from dragoman_training.tokenizer import PlainTokenizer, SpecialIds

PAIRS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=60).map(
    lambda sizes: [Pair([4] * (s - 1) + [2], [5] * (t - 1) + [2]) for s, t in sizes]
)


def test_only_lf_and_crlf_end_a_line(tmp_path: Path) -> None:
    """Other separators of Unicode, a lone CR and form feeds are text."""
    path = tmp_path / "lines"
    path.write_bytes("a\u2028b\r\n\x0cc\rd\n\ne".encode())
    assert read_lines(path) == ["a\u2028b", "\x0cc\rd", "", "e"]


def test_files_of_unequal_length_are_refused_with_both_counts(tmp_path: Path) -> None:
    """Line n must belong to line n."""
    (tmp_path / "a").write_text("1\n2\n3\n")
    (tmp_path / "b").write_text("1\n2\n")
    with pytest.raises(DataError, match=r"a has 3 lines but .*b has 2"):
        read_aligned(tmp_path / "a", tmp_path / "b")


def test_missing_empty_and_undecodable_files_are_refused(tmp_path: Path) -> None:
    """Each with the file's name and what is wrong."""
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes(b"ok\n\xe9\n")
    with pytest.raises(DataError, match=r"missing.*prepare"):
        read_lines(tmp_path / "missing")
    with pytest.raises(DataError, match=r"latin is not UTF-8 at byte 3"):
        read_lines(tmp_path / "latin")
    with pytest.raises(DataError, match=r"empty"):
        read_aligned(tmp_path / "empty", tmp_path / "empty")


def test_pairs_over_a_limit_or_empty_are_dropped_and_counted() -> None:
    """The limits count ``</s>``."""
    source, target = PlainTokenizer.build("character", ["ab"]), PlainTokenizer.build("piece", ["A B"])
    dataset = encode_pairs(["ab", "abb", "a", ""], ["A B", "A B", "A A A", "A"], source, target, 3, 3)
    assert dataset.pairs == [Pair([4, 5, 2], [4, 5, 2])]
    assert dataset.dropped == 3


@given(PAIRS, st.integers(9, 40), st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 3.0]))
def test_an_epoch_holds_every_pair_once_within_the_budget(
    pairs: list[Pair], budget: int, seed: int, epoch: int, spread: float
) -> None:
    """And the same seed and epoch give the same batches."""
    plan = plan_batches(pairs, budget, seed, epoch, spread)
    assert sorted(i for batch in plan for i in batch) == list(range(len(pairs)))
    for batch in plan:
        assert batch
        assert len(batch) * max(max(len(pairs[i].source), len(pairs[i].target)) for i in batch) <= budget
    assert plan == plan_batches(pairs, budget, seed, epoch, spread)


def test_without_spread_batches_hold_near_equal_lengths_with_spread_they_mix() -> None:
    """Many pairs of two lengths far apart by less than the spread."""
    pairs = [Pair([4] * n + [2], [4] * n + [2]) for n in (2, 3)] * 200

    def mixed(spread: float) -> int:
        return sum(len({len(pairs[i].source) for i in batch}) > 1 for batch in plan_batches(pairs, 40, 1, 0, spread))

    assert mixed(0.0) <= 1
    assert mixed(3.0) > 10


def test_seed_and_epoch_change_the_order() -> None:
    """Each epoch meets the pairs in another order."""
    pairs = [Pair([4, 2], [4, 2])] * 50
    plans = [plan_batches(pairs, 20, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(plans) for b in plans[:i])


def test_a_position_in_an_epoch_is_reached_by_skipping() -> None:
    """Batches from position 3 on are those of the whole epoch without its first three."""
    pairs = [Pair([4] * n + [2], [5] * n + [2]) for n in range(1, 9)] * 4
    whole = list(epoch_batches(pairs, 30, 1, 2))
    rest = list(epoch_batches(pairs, 30, 1, 2, position=3))
    assert len(rest) == len(whole) - 3
    assert all(torch.equal(a.source, b.source) for a, b in zip(whole[3:], rest, strict=True))


def test_a_pair_over_the_budget_is_refused() -> None:
    """The message names both sizes."""
    with pytest.raises(DataError, match="5 tokens is over the batch budget of 4"):
        plan_batches([Pair([4, 4, 4, 4, 2], [4, 2])], 4, 0, 0)


def test_the_decoder_reads_the_start_id_and_then_the_labels_moved_by_one() -> None:
    """A worked example, with a start id of its own: it comes from one place."""
    batch = make_batch([Pair([4, 5, 2], [6, 2]), Pair([4, 2], [7, 8, 2])], SpecialIds(decoder_start=9))
    assert batch.source.tolist() == [[4, 5, 2], [4, 2, 0]]
    assert batch.source_lengths.tolist() == [3, 2]
    assert batch.target.tolist() == [[9, 6, 0], [9, 7, 8]]
    assert batch.labels.tolist() == [[6, 2, 0], [7, 8, 2]]
