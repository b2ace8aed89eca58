"""KV rows: installed, moved, forked, grown; each row's content is its own."""

import numpy as np
import pytest

from dragoman.bundle import ModelShape
from dragoman.engine.kv import KvStore, capacity_for
from dragoman.errors import OverloadedError

SHAPE = ModelShape(
    d_model=16,
    num_heads=2,
    head_dim=8,
    encoder_layers=1,
    decoder_layers=2,
    source_vocab_size=9,
    target_vocab_size=9,
)


def source(value, length=5, padded=7):
    """Keys and values of one source, layer by layer: constant within a layer, and rubbish in the padding."""
    arrays = [np.full((2, padded, 8), value + layer, np.float32) for layer in range(2)]
    for array in arrays:
        array[:, length:] = np.nan
    return arrays


def store(num_slots=3, max_bytes=1 << 24):
    return KvStore(SHAPE, num_slots, max_bytes)


@pytest.mark.parametrize(("tokens", "capacity"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (500, 512)])
def test_capacity_steps(tokens, capacity):
    """Capacities go in doublings from 64."""
    assert capacity_for(tokens) == capacity


def test_install_copies_the_real_part_alone():
    """Padding, here NaN, never enters a slot; other slots keep their content."""
    kv = store()
    kv.install(1, source(10.0), source(20.0), length=5)
    assert (kv.cross_keys[0][1, :, :5] == 10).all() and (kv.cross_values[1][1, :, :5] == 21).all()
    assert not any(np.isnan(a).any() for a in (*kv.cross_keys, *kv.cross_values))
    assert not kv.cross_keys[0][[0, 2]].any()
    assert (kv.source_lengths[1], kv.cached[1]) == (5, 0)


def test_move_copies_source_and_prefix():
    """After a move the target row is the source row: cross and self state, and both lengths."""
    kv = store()
    kv.install(2, source(10.0), source(20.0), length=5)
    kv.self_keys[1][2, :, :3] = 7
    kv.self_values[0][2, :, :3] = 8
    kv.cached[2] = 3
    kv.move(2, 0)
    for arrays in (kv.cross_keys, kv.cross_values, kv.self_keys, kv.self_values):
        for array in arrays:
            assert np.array_equal(array[0], array[2])
    assert (kv.source_lengths[0], kv.cached[0]) == (5, 3)


def test_fork_copies_the_prefix_and_leaves_the_source():
    """A fork brings the target prefix only."""
    kv = store()
    kv.install(0, source(1.0), source(2.0), length=5)
    kv.install(1, source(3.0), source(4.0), length=4)
    kv.self_keys[0][0, :, :2] = 9
    kv.cached[0] = 2
    kv.fork(0, 1)
    assert (kv.self_keys[0][1, :, :2] == 9).all() and kv.cached[1] == 2
    assert (kv.cross_keys[0][1, :, :4] == 3).all() and kv.source_lengths[1] == 4


def test_growing_keeps_every_row():
    """Capacity grows for a longer request without losing what is stored, and says that addresses changed."""
    kv = store()
    kv.install(0, source(1.0), source(2.0), length=5)
    kv.self_values[1][0, :, :4] = 6
    generation = kv.generation
    kv.reserve(65, 300)
    assert (kv.source_capacity, kv.target_capacity) == (128, 512)
    assert (kv.cross_keys[0][0, :, :5] == 1).all() and (kv.self_values[1][0, :, :4] == 6).all()
    assert kv.generation != generation
    kv.reserve(10, 10)
    assert (kv.source_capacity, kv.target_capacity) == (128, 512)


def test_growth_beyond_the_budget_is_refused_before_anything_changes():
    """The budget holds: a request that needs more is refused by name, and what is stored stays usable."""
    kv = store(max_bytes=store().num_bytes)
    arrays, generation = list(kv.self_keys), kv.generation
    with pytest.raises(OverloadedError, match="65 source and 10 target tokens"):
        kv.reserve(65, 10)
    assert all(new is old for new, old in zip(kv.self_keys, arrays, strict=True)) and kv.generation == generation
