"""What follows the logits on a device: the best token of each row, the most probable ones, and a row as it is.

The logits stay where they are. A step brings to the host what its rows ask for: 8 bytes a row for the best tokens; 8
for each of the most probable and 4 for the normaliser; and all of a row's logits for what nothing on the device
computes: tokens drawn by chance, logits that a request steers, scores of tokens that are not the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dragoman.bundle import DeviceGraphs
from dragoman.engine.choice import HostOffers, Ranked, as_slices
from dragoman.engine.device import Binding, Buffer, Content, Device
from dragoman.engine.sampling import Sampler
from dragoman.errors import DragomanError
from dragoman.types import FloatArray, IntArray, TokenIds

KEY_TOKENS = 1 << 21
"""A key is this times the logit in steps of 2^-24, plus this less one less the token's number: larger logits first,
then smaller numbers, and no two equal. See ``export/dragoman_export/device_graphs.py``, which makes keys."""
KEY_STEP = 2.0**-24
KEY_LOWEST = -(2.0**17)  # what was -inf


class Best(NamedTuple):
    """The best token of each row and its logit, infinite where one of the row's is NaN."""

    tokens: list[int]
    values: list[float]


class RankedRows(NamedTuple):
    """The most probable tokens of each row, falling, with their logits; and what makes probabilities of these."""

    tokens: list[list[int]]
    below: list[list[float]]  # how far each logit is from the row's largest: 0 or less
    num_possible: list[int]  # so many of a row's may come
    log_totals: list[float]  # log(sum(exp(logits - largest)))

    @property
    def width(self) -> int:
        """Tokens of a row, the impossible ones among them."""
        return len(self.tokens[0])


class DeviceTails:
    """The graphs that read the logits of a step, bound to their buffer."""

    def __init__(
        self,
        device: Device,
        graphs: DeviceGraphs,
        content: Content,
        logits: Buffer,
        never_generated: Sequence[int],
        copied: Counter[str],
    ) -> None:
        """``logits``: (slots, V). ``never_generated`` is never offered. Raises what ``Device.open`` does."""
        self._device, self._logits, self._copied = device, logits, copied
        self.never_generated = as_slices(never_generated)
        self._best_session = device.open(graphs.best, content)
        self._ranked_session = device.open(graphs.ranked, content)
        self._row_session = device.open(graphs.row, content)
        (self.num_tokens,) = logits.shape[1:]
        forbidden = np.zeros(self.num_tokens, np.bool_)
        forbidden[list(never_generated)] = True
        self._forbidden = Buffer(device, (self.num_tokens,), np.bool_)
        self._forbidden.write(forbidden)
        self._numbers = Buffer(device, (self.num_tokens,), np.float32)
        self._numbers.write(np.arange(self.num_tokens, dtype=np.float32))
        self._best: dict[int, tuple[Binding, FloatArray, FloatArray]] = {}  # by rows
        self._ranked: dict[tuple[int, int], tuple[Binding, IntArray, FloatArray]] = {}  # by rows and count

    def best(self, rows: int) -> Best:
        """Of rows 0 to ``rows`` - 1."""
        if rows not in self._best:
            tokens, values = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
            binding = self._bind_logits(Binding(self._device, self._best_session, self._copied), rows)
            binding.write_host("best", tokens)
            binding.write_host("value", values)
            self._best[rows] = binding, tokens, values
        binding, tokens, values = self._best[rows]
        binding.run("best")
        return Best(tokens.astype(np.int64).tolist(), values.tolist())

    def ranked(self, rows: int, count: int) -> RankedRows:
        """Of rows 0 to ``rows`` - 1, ``count`` or more tokens each, where there are so many."""
        count = min(self.num_tokens, 1 << (count - 1).bit_length())  # few different shapes, each bound once
        if (rows, count) not in self._ranked:
            keys, log_totals = np.zeros((rows, count), np.int64), np.zeros(rows, np.float32)
            binding = self._bind_logits(Binding(self._device, self._ranked_session, self._copied), rows)
            binding.read_host_in_place("count", np.array([count]))
            binding.write_host("keys", keys)
            binding.write_host("log_total", log_totals)
            self._ranked[rows, count] = binding, keys, log_totals
        binding, keys, log_totals = self._ranked[rows, count]
        binding.run("ranked")
        # Quotients and remainders are those of the whole number below, also where keys are negative.
        tokens = KEY_TOKENS - 1 - keys % KEY_TOKENS
        values = (keys // KEY_TOKENS).astype(np.float64) * KEY_STEP  # (R, K)
        num_possible = (values > KEY_LOWEST).sum(axis=1)
        return RankedRows(
            tokens.tolist(), (values - values[:, :1]).tolist(), num_possible.tolist(), log_totals.tolist()
        )

    def row(self, row: int, reason: str) -> FloatArray:
        """All logits of one row (1, V), nothing masked."""
        values = np.zeros((1, self.num_tokens), np.float32)
        binding = Binding(self._device, self._row_session, self._copied)
        binding.read("logits", self._logits, 1, row)
        binding.write_host("values", values)
        binding.run(reason)
        return values

    def _bind_logits(self, binding: Binding, rows: int) -> Binding:
        binding.read("logits", self._logits, rows)
        binding.read("forbidden", self._forbidden, self.num_tokens)
        binding.read("numbers", self._numbers, self.num_tokens)
        return binding


class DeviceOffers:
    """What a step's logits offer each row. An ``Offers``: asks the device when a row first asks, for all rows at once.

    Rows that need their logits whole are brought to the host one by one, and answered there from then on.
    """

    def __init__(self, tails: DeviceTails, num_rows: int) -> None:
        """``num_rows``: those that the step ran over, idle ones among them. To be asked before the next step."""
        self._tails, self._num_rows = tails, num_rows
        self._best: Best | None = None
        self._ranked: RankedRows | None = None
        self._on_host: dict[int, HostOffers] = {}
        self._failures: dict[int, DragomanError] = {}

    def best(self, row: int) -> int:
        host = self._on_host.get(row)
        return self._all_best().tokens[row] if host is None else host.best(0)

    def value(self, row: int) -> float:
        if row in self._failures:
            raise self._failures[row]
        host = self._on_host.get(row)
        return self._all_best().values[row] if host is None else host.value(0)

    def log_prob(self, row: int, token: int) -> float:
        if row not in self._on_host and token == self.best(row):
            return -self._all_ranked(1).log_totals[row]
        return self._whole(row, "scores").log_prob(0, token)

    def ranked(self, row: int, count: int, without: int | None = None) -> Ranked:
        if without is not None or row in self._on_host:  # without one, the others have another normaliser
            return self._whole(row, "alternatives").ranked(0, count, without)
        found = self._all_ranked(count)
        kept = min(count, found.num_possible[row])
        log_total = found.log_totals[row]
        return Ranked(found.tokens[row][:kept], [below - log_total for below in found.below[row][:kept]])

    def draw(self, row: int, sampler: Sampler) -> int:
        return self._whole(row, "sampling").draw(0, sampler)

    def edit(self, row: int, allowed: TokenIds = ()) -> FloatArray:
        return (self._on_host.get(row) or self._bring(row, "steering")).edit(0, allowed)

    def fail(self, row: int, error: DragomanError) -> None:
        self._failures[row] = error

    def _whole(self, row: int, reason: str) -> HostOffers:
        """A row on the host, of which the best is known: from there on, what is never generated is not offered."""
        host = self._on_host.get(row) or self._bring(row, reason)
        host.best(0)
        return host

    def _bring(self, row: int, reason: str) -> HostOffers:
        self._on_host[row] = host = HostOffers(self._tails.row(row, reason), self._tails.never_generated)
        return host

    def _all_best(self) -> Best:
        if self._best is None:
            self._best = self._tails.best(self._num_rows)
        return self._best

    def _all_ranked(self, count: int) -> RankedRows:
        if self._ranked is None or self._ranked.width < min(count, self._tails.num_tokens):
            self._ranked = self._tails.ranked(self._num_rows, count)
        return self._ranked
