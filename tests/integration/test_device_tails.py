"""What follows the logits on a device: the same choices as on the host, and nothing else is brought back."""

import math
from collections import Counter

import numpy as np
import pytest

from dragoman.engine.choice import HostOffers, as_slices
from dragoman.engine.device import Buffer, Device
from dragoman.engine.device_tails import DeviceOffers, DeviceTails
from dragoman.engine.sampling import Sampler
from dragoman.errors import RowError
from dragoman.types import SearchOptions
from dragoman_export import device_graphs
from dragoman_export.device_graphs import write_device_graphs
from dragoman_export.errors import ExportError
from dragoman_export.targets import FP16
from dragoman_training.config import ModelConfig

SLOTS, SIZE = 8, 200
NEVER = (0, 1, 3, 199)


def config(size=SIZE):
    return ModelConfig(
        d_model=64,
        num_heads=2,
        ffn_dim=96,
        encoder_layers=1,
        decoder_layers=1,
        source_vocab_size=8,
        target_vocab_size=size,
    )


class Tails:
    """The graphs over logits that a test writes."""

    def __init__(self, folder):
        device, self.copied = Device("cuda-dry"), Counter()
        self.logits = Buffer(device, (SLOTS, SIZE), np.float32)
        graphs = write_device_graphs(config(), FP16, folder)
        self.tails = DeviceTails(device, graphs, folder.joinpath, self.logits, NEVER, self.copied)

    def offers(self, rows):
        """What the rows offer on the device, and on the host."""
        everything = np.full((SLOTS, SIZE), 7, np.float32)
        everything[: len(rows)] = rows
        self.logits.write(everything)
        self.copied.clear()
        return DeviceOffers(self.tails, len(rows)), HostOffers(np.array(rows, np.float32), as_slices(NEVER))


@pytest.fixture(scope="module")
def tails(tmp_path_factory):
    return Tails(tmp_path_factory.mktemp("tails"))


def half(rng, *shape, spread=4.0):
    """As a decoder of float16 makes them: so many equal ones that ties are common."""
    return (rng.standard_normal(shape) * spread).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("spread", [0.001, 0.05, 4.0, 4000.0])
def test_a_device_chooses_as_the_host_does(tails, spread):
    """Best tokens, their logits and the most probable ones, ties to the smaller number; log-probabilities to fp32."""
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 8, 16, 100, 300):
        rows = half(rng, SLOTS, SIZE, spread=spread)
        rows[rng.random(rows.shape) < 0.2] = rows.max()  # each row has its best many times
        rows[0, 10:] = -np.inf
        device, host = tails.offers(rows)
        for row in range(SLOTS):
            assert (device.best(row), device.value(row)) == (host.best(row), host.value(row))
            found, expected = device.ranked(row, count), host.ranked(row, count)
            assert found.tokens == expected.tokens
            assert found.log_probs == pytest.approx(expected.log_probs, rel=1e-6, abs=2e-6)
            token = device.best(row)
            assert device.log_prob(row, token) == pytest.approx(host.log_prob(row, token), rel=1e-6, abs=2e-6)


def test_every_width_of_a_beam_is_told_from_the_same_logits(tails):
    """Rows that ask for more than others did: the first ones are the same."""
    device, host = tails.offers(half(np.random.default_rng(1), SLOTS, SIZE))
    for row, count in enumerate((4, 16, 2, 64, 8, 1, 32, 3)):
        assert device.value(row) == host.value(row)
        assert device.ranked(row, count).tokens == host.ranked(row, count).tokens


def test_a_row_that_cannot_be_used_says_so_and_harms_no_other(tails):
    """NaN and infinity give a value that is not finite; where all is forbidden, it is minus infinity, and no token."""
    rows = half(np.random.default_rng(2), SLOTS, SIZE)
    rows[1, 50], rows[2, 60], rows[3] = np.nan, np.inf, -np.inf
    rows[4, list(NEVER)] = np.nan  # these never come, whatever they are
    device, host = tails.offers(rows)
    assert not math.isfinite(device.value(1)) and device.value(1) > 0
    assert device.value(2) == math.inf
    assert device.value(3) == -math.inf
    assert device.ranked(3, 4).tokens == []
    for row in (0, 4, 5):
        assert (device.best(row), device.value(row)) == (host.best(row), host.value(row))
        assert device.ranked(row, 6).tokens == host.ranked(row, 6).tokens
    device.fail(5, RowError("its own"))
    with pytest.raises(RowError, match="its own"):
        device.value(5)
    assert device.value(6) == host.value(6)


def test_what_a_row_offers_is_the_same_in_any_company(tails):
    """Bit for bit, whatever the others hold and how many there are."""
    rng = np.random.default_rng(3)
    row = half(rng, 1, SIZE)
    for rows in (1, 2, 4, 8):
        for _ in range(5):
            others = half(rng, rows - 1, SIZE, spread=rng.choice([0.1, 4.0, 100.0]))
            device, _ = tails.offers(np.concatenate([others, row]))
            found = device.best(rows - 1), device.value(rows - 1), device.ranked(rows - 1, 9)
            if rows == 1:
                first = found
            assert found == first


def test_steered_drawn_and_odd_rows_come_to_the_host_one_by_one(tails):
    """What the host then says of them is what it would of its own logits; of the other rows, nothing is brought."""
    rows = half(np.random.default_rng(4), SLOTS, SIZE)
    device, host = tails.offers(rows)
    for offers in (device, host):
        offers.edit(2)[17] = 1000.0
        offers.edit(3, (199,))[199] += 100
        offers.edit(3)[0] = 1000  # never generated
    for offers in (device, host):
        assert (offers.best(2), offers.best(3)) == (17, 199)
    assert device.ranked(2, 5) == host.ranked(2, 5)
    options = SearchOptions(temperature=0.8, seed=5)
    assert [device.draw(4, s) for s in [Sampler(options, 0)] * 3] == [
        host.draw(4, s) for s in [Sampler(options, 0)] * 3
    ]
    assert device.ranked(5, 4, without=device.best(5)) == host.ranked(5, 4, without=host.best(5))
    other = (device.best(6) + 1) % 190 + 4
    assert device.log_prob(6, other) == host.log_prob(6, other)
    row = SIZE * 4
    whole = {"steering": 2 * row, "sampling": row, "alternatives": row, "scores": row}
    assert {reason: tails.copied[reason] for reason in whole} == whole
    assert set(tails.copied) <= {*whole, "best", "ranked"}


def test_a_step_brings_back_ids_scores_and_top_tokens_alone(tails):
    """Counted: 8 bytes a row for the best; for the most probable 8 each, and 4 a row: once a step."""
    device, _ = tails.offers(half(np.random.default_rng(5), 4, SIZE))
    for row in range(4):
        device.best(row)
        device.value(row)
    assert tails.copied == {"best": 4 * 8}
    for row in range(4):
        device.ranked(row, 6)
        device.log_prob(row, device.best(row))
    assert tails.copied == {"best": 4 * 8, "ranked": 4 * (8 * 8 + 4)}


def test_a_graph_that_cuda_has_no_kernel_for_is_refused(tmp_path, monkeypatch):
    """Before it is written: by file and operator."""
    monkeypatch.setattr(device_graphs, "KERNELS", device_graphs.KERNELS - {"TopK"})
    with pytest.raises(ExportError, match=r"ranked\.cuda\.fp16\.onnx has TopK, of which .* no CUDA kernel"):
        write_device_graphs(config(), FP16, tmp_path)


def test_equal_models_give_equal_files(tmp_path):
    """Written twice, the same bytes."""
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        write_device_graphs(config(), FP16, folder)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
