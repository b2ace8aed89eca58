"""Runs a bundle's graphs with all state on a device: a GPU, or in tests the CPU in its place.

A step runs over a bucket of rows: the least power of two that holds those that are used, or all slots. Its inputs and
outputs are bound once a bucket and never again, and with CUDA graphs its kernels are captured once a bucket and
replayed. Rows beyond the used ones are idle: they feed token 0 at position 0 of a source of length 1, into slots that
hold nothing. A step sends its tokens and lengths to the device, and brings back what its rows ask for.

The encoder runs over buckets, too, of sources and of their lengths: the first run of a shape costs more than all later
ones. ``warm_up`` makes each first run before anything is served. It has to be called on the thread that runs the steps:
CUDA graphs and cuDNN's plans are a thread's own.

The graphs' signatures are those in ``runner.py``, with caches of float16, and in the export's ``device_graphs.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.bundle import GraphSet, Limits, ModelShape
from dragoman.engine.device import Binding, Buffer, Content, Device, is_out_of_memory
from dragoman.engine.device_kv import DeviceKvStore
from dragoman.engine.device_memory import plan_memory
from dragoman.engine.device_tails import DeviceOffers, DeviceTails
from dragoman.errors import BundleError, OverloadedError
from dragoman.types import IntArray, TokenIds

Progress = Callable[[str, int, int], None]
"""Hears what is being warmed up, how many of its shapes are done, and how many there are."""

Counts = NDArray[np.int32]

CAPACITY_STEP = 64
"""Rows have room for the model's limits, rounded up to it."""

MIN_ENCODE_LENGTH = 16
"""Shorter sources are padded to it: a warm-up for each of their lengths would cost more than that does."""


class DeviceRunner:
    """The rows of one replica on a device. Implements ``dragoman.types.Runner``; used by one thread at a time.

    It has sessions of its own: CUDA graphs are captured for one thread and one set of buffers.
    """

    def __init__(
        self,
        device: Device,
        shape: ModelShape,
        graphs: GraphSet,
        content: Content,
        num_slots: int,
        limits: Limits,
        max_encode_tokens: int,
        never_generated: Sequence[int],
    ) -> None:
        """Opens the graphs and allocates all state: rows have room for the model's limits from the start.

        Raises BundleError when a graph does not load or is not for a device, ConfigError when the device has too little
        memory or CUDA does not load.
        """
        if graphs.device is None:
            raise BundleError(
                f"the bundle's {graphs.provider}/{graphs.precision} graphs come without those for a device: export the "
                "checkpoint again"
            )
        self._device, self._shape, self._max_encode_tokens = device, shape, max_encode_tokens
        self._capacities = _rounded(limits.max_source_tokens), _rounded(limits.max_new_tokens)
        self.row_buckets = _powers_of_two(1, num_slots)
        self._lengths = _powers_of_two(MIN_ENCODE_LENGTH, self._capacities[0])
        self.copied: Counter[str] = Counter()
        """Bytes that were brought to the host, by reason."""
        most_encoded = max(batch * length for batch, length in self.encode_shapes())
        self.plan = plan_memory(
            shape,
            [content(graph.file) for graph in (graphs.encoder, graphs.decoder)],
            num_slots,
            sum(self._capacities),
            most_encoded,
            device.config.mem_limit_bytes,
        )
        self.plan.check()
        self._encoder = device.open(graphs.encoder, content, mem_limit=self.plan.for_sessions)
        self._decoder = device.open(graphs.decoder, content, mem_limit=self.plan.for_sessions, captured=True)
        self.kv = DeviceKvStore(
            device,
            graphs.device.copy,
            content,
            shape,
            num_slots,
            *self._capacities,
            self.copied,
        )
        self._tokens = Buffer(device, (num_slots,), np.int64)
        self._cached = Buffer(device, (num_slots,), np.int32)
        self._source_lengths = Buffer(device, (num_slots,), np.int32)
        self._sent_lengths: Counts = np.zeros(num_slots, np.int32)  # what the device has of them
        self.logits = Buffer(device, (num_slots, shape.target_vocab_size), np.float32)
        self._tails = DeviceTails(device, graphs.device, content, self.logits, never_generated, self.copied)
        # Kernels read these two on the host; a captured step has them for ever.
        self._target_capacity = np.array([self.kv.target_capacity], np.int32)
        self._source_capacity = np.array([self.kv.source_capacity], np.int32)
        self._bindings = {rows: self._bind(rows) for rows in self.row_buckets}
        self._options = {rows: device.capture_options(rows) for rows in self.row_buckets}

    @property
    def encoder(self) -> PaddedEncoder:
        """The encoder alone, for any number of threads."""
        return PaddedEncoder(self._encoder, self._lengths)

    @property
    def num_slots(self) -> int:
        return self.kv.num_slots

    @property
    def kv_cache_bytes(self) -> int:
        return self.kv.num_bytes

    def reserve(self, num_source_tokens: int, max_new_tokens: int) -> None:
        source, target = self._capacities
        if num_source_tokens > source or max_new_tokens > target:
            raise OverloadedError(
                f"{num_source_tokens} source and {max_new_tokens} target tokens were asked for; a row has room for "
                f"{source} and {target}: shorten the text or max_new_tokens"
            )

    def admit(
        self, sources: Sequence[TokenIds], slots: Sequence[Sequence[int]], prefixes: Sequence[TokenIds] = ()
    ) -> None:
        lengths = [len(source) for source in sources]
        batch = np.zeros(self._encode_shape(len(sources), max(lengths)), np.int64)  # (B, S)
        for row, source in enumerate(sources):
            batch[row, : len(source)] = source
        self.kv.settle()  # rows that run are copied: what fails halfway there can be neither repeated nor refused
        try:
            self._encode(batch, lengths, slots)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            if not is_out_of_memory(error):
                raise
            raise OverloadedError(
                f"the device lacks the memory to read {batch.size} source tokens together: retry, or lower "
                "--max-encode-tokens"
            ) from error

    def decode(self, tokens: IntArray) -> DeviceOffers:
        rows = len(tokens)
        self.kv.settle()
        bucket = _bucket(self.row_buckets, rows)
        used = np.arange(self.num_slots) < rows
        fed = np.zeros(self.num_slots, np.int64)
        fed[:rows] = tokens
        self._step(bucket, fed, self.kv.cached * used, np.where(used, self.kv.source_lengths, np.int32(1)))
        self.kv.cached[:rows] += 1
        return DeviceOffers(self._tails, bucket)

    def move(self, source_slot: int, target_slot: int) -> None:
        self.kv.move(source_slot, target_slot)

    def fork(self, source_slot: int, target_slot: int) -> None:
        self.kv.fork(source_slot, target_slot)

    def warm_up(self, progress: Progress = lambda what, done, total: None) -> None:
        """Make the first run of every shape of encoder and decoder that can come. No row may be in use.

        Raises what a run raises.
        """
        shapes = self.encode_shapes()
        for done, (batch, length) in enumerate(shapes, start=1):
            self._encode(np.zeros((batch, length), np.int64), [length] * batch, [[slot] for slot in range(batch)])
            progress("encoder", done, len(shapes))
        for slot in range(1, self.num_slots):
            self.kv.move(0, slot)
        self.kv.settle()  # all rows at once: later there are fewer
        idle = np.zeros(self.num_slots, np.int32)
        for done, rows in enumerate(self.row_buckets, start=1):
            for _ in range(2):  # the first is captured, the second replayed
                self._step(rows, idle.astype(np.int64), idle, idle + 1)
            self._tails.best(rows)
            self._tails.ranked(rows, 1)
            progress("decoder", done, len(self.row_buckets))
        self.copied.clear()

    def encode_shapes(self) -> list[tuple[int, int]]:
        """The buckets (B, S) of encoder runs: those that a batch within ``max_encode_tokens`` falls into."""
        shapes = []
        for batch in self.row_buckets:
            for length in self._lengths:
                fewest = batch // 2 + 1, (length // 2 + 1 if length > self._lengths[0] else 1)
                if batch == 1 or fewest[0] * fewest[1] <= self._max_encode_tokens:
                    shapes.append((batch, length))
        return shapes

    def _encode_shape(self, num_sources: int, longest: int) -> tuple[int, int]:
        return _bucket(self.row_buckets, num_sources), _bucket(self._lengths, longest)

    def _encode(self, batch: IntArray, lengths: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        """Encode a bucket (B, S), and install each of the first sources in its slots."""
        all_lengths = np.ones(len(batch), np.int32)  # attention over nothing is no number
        all_lengths[: len(lengths)] = lengths
        binding = Binding(self._device, self._encoder, self.copied)
        binding.read_host("source", batch)
        binding.read_host("source_lengths", all_lengths)
        for layer in range(self._shape.decoder_layers):
            binding.write_new(f"cross_key_{layer}")
            binding.write_new(f"cross_value_{layer}")
        binding.run("encode")
        places = [(slot, row) for row, own in enumerate(slots) for slot in own]
        if places:
            rows = [row for _, row in places]
            self.kv.install(binding.outputs(), [slot for slot, _ in places], rows, [lengths[row] for row in rows])

    def _step(self, bucket: int, tokens: IntArray, cached: Counts, source_lengths: Counts) -> None:
        """Run a bucket. All of the arrays are (slots,)."""
        self._tokens.write(tokens)
        self._cached.write(cached)
        if not np.array_equal(source_lengths, self._sent_lengths):  # few steps change them
            self._source_lengths.write(source_lengths)
            self._sent_lengths = source_lengths
        self._bindings[bucket].run("decode", self._options[bucket])

    def _bind(self, rows: int) -> Binding:
        binding = Binding(self._device, self._decoder, self.copied)
        binding.read("tokens", self._tokens, rows)
        binding.read("cached", self._cached, rows)
        binding.read("source_lengths", self._source_lengths, rows)
        binding.read_host_in_place("target_capacity", self._target_capacity)
        binding.read_host_in_place("source_capacity", self._source_capacity)
        for name, buffer in self.kv.self_buffers.items():
            binding.read(f"past_{name}", buffer, rows)
            binding.write(f"present_{name}", buffer, rows)
        for name, buffer in self.kv.cross_buffers.items():
            binding.read(f"cross_{name}", buffer, rows)
        binding.write("logits", self.logits, rows)
        return binding


class PaddedEncoder:
    """Encodes sources of any length in few shapes: on a GPU, the first run of each costs a good part of a second."""

    def __init__(self, session: Any, lengths: Sequence[int]) -> None:
        """``lengths``: those that sources are padded to, rising."""
        self._session, self._lengths = session, lengths

    def run(self, output_names: Sequence[str], feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """As a session's: ``source`` (B, S) and ``source_lengths`` (B,) -> arrays (B, H, S, Dh) on the host."""
        source = feeds["source"]
        padding = _bucket(self._lengths, source.shape[1]) - source.shape[1]
        padded = {**feeds, "source": np.pad(source, ((0, 0), (0, padding)))}
        return [output[:, :, : source.shape[1]] for output in self._session.run(output_names, padded)]


def _bucket(buckets: Sequence[int], size: int) -> int:
    """The least that holds so many."""
    return next(bucket for bucket in buckets if bucket >= size)


def _powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """From ``first`` on, doubled each time; and ``last``, whatever it is."""
    found = [first]
    while 2 * found[-1] < last:
        found.append(2 * found[-1])
    return tuple(dict.fromkeys((*found, last)))


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // CAPACITY_STEP) * CAPACITY_STEP
