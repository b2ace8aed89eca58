"""KV rows on a device: installed, moved and forked by a graph, against rows that are lists."""

import random
from collections import Counter

import numpy as np
import onnxruntime as ort
import pytest

from dragoman.bundle import ModelShape
from dragoman.engine.device import Device
from dragoman.engine.device_kv import DeviceKvStore
from dragoman_export.device_graphs import write_device_graphs
from dragoman_export.targets import FP16
from dragoman_training.config import ModelConfig

LAYERS, HEADS, HEAD_DIM, SLOTS, SOURCE, TARGET = 2, 2, 8, 7, 12, 10
NAMES = ["key_0", "value_0", "key_1", "value_1"]
SHAPE = ModelShape(HEADS * HEAD_DIM, HEADS, HEAD_DIM, 1, LAYERS, 9, 9)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Opens a store over one file of the copy graph."""
    folder = tmp_path_factory.mktemp("kv")
    config = ModelConfig(
        d_model=HEADS * HEAD_DIM,
        num_heads=HEADS,
        ffn_dim=32,
        encoder_layers=1,
        decoder_layers=LAYERS,
        source_vocab_size=8,
        target_vocab_size=8,
    )
    copy = write_device_graphs(config, FP16, folder).copy
    device = Device("cuda-dry")
    return lambda: DeviceKvStore(device, copy, folder.joinpath, SHAPE, SLOTS, SOURCE, TARGET, Counter())


def encoded(rng, batch, padded):
    """Keys and values of each layer, as the encoder leaves them on the device; padding is rubbish."""
    return [rng.standard_normal((batch, HEADS, padded, HEAD_DIM)).astype(np.float16) for _ in NAMES]


class Rows:
    """What a store should hold: a list of rows, each of which is its arrays and lengths."""

    def __init__(self):
        empty = np.zeros((HEADS, TARGET, HEAD_DIM), np.float16)
        self.target = [[empty] * len(NAMES)] * SLOTS
        self.source = [[empty[:, :0]] * len(NAMES)] * SLOTS
        self.cached, self.lengths = [0] * SLOTS, [1] * SLOTS

    def move(self, source, target):
        self.source[target], self.lengths[target] = self.source[source], self.lengths[source]
        self.fork(source, target)

    def fork(self, source, target):
        self.target[target], self.cached[target] = self.target[source], self.cached[source]


def check(kv, rows):
    kv.settle()
    assert kv.cached.tolist() == rows.cached and kv.source_lengths.tolist() == rows.lengths
    for index, name in enumerate(NAMES):
        target, source = kv.self_buffers[name].read(), kv.cross_buffers[name].read()
        for slot in range(SLOTS):
            expected = rows.target[slot][index]
            assert np.array_equal(target[slot, :, : rows.cached[slot]], expected[:, : rows.cached[slot]])
            real = rows.source[slot][index][:, : rows.lengths[slot]]
            assert np.array_equal(source[slot, :, : real.shape[1]], real)
        assert np.isfinite(source.astype(np.float32)).all()


@pytest.mark.parametrize("seed", range(12))
def test_rows_hold_what_was_installed_moved_and_forked(opened, seed):
    """Any order of installs, steps, moves and forks, carried out together or one by one."""
    rng, chance = np.random.default_rng(seed), random.Random(seed)
    kv, rows = opened(), Rows()
    for _ in range(30):
        action = chance.choice(["install", "step", "move", "fork", "fork", "check"])
        if action == "install":
            slots = chance.sample(range(SLOTS), chance.randint(1, 4))
            padded = chance.choice([4, 8, SOURCE])
            lengths = [chance.randint(1, padded) for _ in slots]
            sources = [chance.randrange(3) for _ in slots]
            outputs = encoded(rng, 4, padded)
            kv.install([ort.OrtValue.ortvalue_from_numpy(o) for o in outputs], slots, sources, lengths)
            for slot, source, length in zip(slots, sources, lengths, strict=True):
                rows.source[slot] = [output[source] for output in outputs]
                rows.lengths[slot], rows.cached[slot] = length, 0
        elif action == "step":  # as a decoder writes: each row at its own place
            kv.settle()
            for index, name in enumerate(NAMES):
                held = kv.self_buffers[name].read()
                for slot in range(SLOTS):
                    held[slot, :, rows.cached[slot]] = rng.standard_normal((HEADS, HEAD_DIM))
                    rows.target[slot] = [
                        held[slot].copy() if i == index else a for i, a in enumerate(rows.target[slot])
                    ]
                kv.self_buffers[name].write(held)
            kv.cached += 1
            rows.cached = [n + 1 for n in rows.cached]
        elif action == "check":
            check(kv, rows)
        else:
            source, target = chance.sample(range(SLOTS), 2)
            getattr(kv, action)(source, target)
            getattr(rows, action)(source, target)
        if max(rows.cached) == TARGET:
            kv.cached[:] = 0
            rows.cached = [0] * SLOTS
    check(kv, rows)


def test_rows_that_change_places_do_not_read_each_others_copies(opened):
    """Two rows swapped by way of a third: all three from what was there before."""
    kv = opened()
    for index, buffer in enumerate(kv.self_buffers.values()):
        held = buffer.read()
        held[:] = (10 * index + np.arange(SLOTS))[:, None, None, None]
        buffer.write(held)
    kv.cached[:] = TARGET
    for source, target in ((0, 6), (1, 0), (6, 1)):
        kv.fork(source, target)
    kv.settle()
    for index, buffer in enumerate(kv.self_buffers.values()):
        assert (buffer.read()[:, 0, 0, 0] - 10 * index).tolist() == [1, 0, 2, 3, 4, 5, 0]


def test_copies_stay_on_the_device_and_buffers_where_they_are(opened):
    """Nothing is brought to the host, and no address changes: what was captured stays valid."""
    kv = opened()
    addresses = [buffer.address() for buffer in (*kv.self_buffers.values(), *kv.cross_buffers.values())]
    outputs = encoded(np.random.default_rng(0), 4, 8)
    kv.install([ort.OrtValue.ortvalue_from_numpy(o) for o in outputs], [0, 1, 4], [0, 0, 3], [8, 8, 2])
    kv.move(4, 2)
    kv.settle()
    assert not kv._copied
    assert addresses == [buffer.address() for buffer in (*kv.self_buffers.values(), *kv.cross_buffers.values())]
    assert kv.num_bytes == SLOTS * 2 * LAYERS * HEADS * HEAD_DIM * (SOURCE + TARGET) * 2
