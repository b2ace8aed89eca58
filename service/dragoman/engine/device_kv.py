"""The KV state of a device runner's rows, on the device: installed, moved and forked there by one graph of copies.

Per decoder layer there are four buffers: self keys and values (slots, H, C, Dh), cross keys and values (slots, H, L,
Dh). The capacities C and L are the model's limits from the start: addresses and shapes never change, so that what was
bound and captured stays valid. How many tokens each row has is known on the host alone.

Moves and forks are noted, and carried out together before a run reads rows: one launch of kernels for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dragoman.bundle import Graph, ModelShape
from dragoman.engine.device import Binding, Buffer, Content, Device, Value
from dragoman.types import IntArray


class DeviceKvStore:
    """Rows of keys and values on a device. Row r of every buffer belongs to slot r."""

    def __init__(
        self,
        device: Device,
        copy: Graph,
        content: Content,
        shape: ModelShape,
        num_slots: int,
        source_capacity: int,
        target_capacity: int,
        copied: Counter[str],
    ) -> None:
        """Allocates everything. Raises ConfigError where the device has no room, and what ``Device.open`` does."""
        self._device = device
        self._session = device.open(copy, content)
        self._copied = copied
        self._names = [f"{part}_{layer}" for layer in range(shape.decoder_layers) for part in ("key", "value")]
        self.num_slots = num_slots
        self.source_capacity = source_capacity  # L
        self.target_capacity = target_capacity  # C
        heads, head_dim = shape.num_heads, shape.head_dim
        self.self_buffers = {
            name: Buffer(device, (num_slots, heads, target_capacity, head_dim), np.float16) for name in self._names
        }
        self.cross_buffers = {
            name: Buffer(device, (num_slots, heads, source_capacity, head_dim), np.float16) for name in self._names
        }
        self.cached: NDArray[np.int32] = np.zeros(num_slots, np.int32)  # target tokens stored, by slot
        self.source_lengths: NDArray[np.int32] = np.ones(num_slots, np.int32)
        # Which row holds what belongs into each: itself, but for what was moved or forked and not copied yet.
        self._self_origins: IntArray = np.arange(num_slots)
        self._cross_origins: IntArray = np.arange(num_slots)

    @property
    def num_bytes(self) -> int:
        buffers = [*self.self_buffers.values(), *self.cross_buffers.values()]
        return sum(buffer.row_bytes * self.num_slots for buffer in buffers)

    def install(
        self, outputs: Sequence[Value], slots: Sequence[int], rows: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Start rows: slot by slot, the cross keys and values of which row of the encoder's, and its length.

        ``outputs`` are keys and values (B, H, S, Dh) of each layer. Slots need not be in order.
        """
        self.settle()
        order = np.argsort(np.asarray(slots), kind="stable")
        sorted_slots, sorted_rows = np.asarray(slots)[order], np.asarray(rows)[order]
        self.source_lengths[sorted_slots] = np.asarray(lengths)[order]
        self.cached[sorted_slots] = 0
        padding = np.zeros(8, np.int64)  # before and behind each of the four axes
        padding[6] = self.source_capacity - outputs[0].shape()[2]
        # One run for each stretch of slots side by side, which there is seldom more than one of.
        for stretch in np.split(np.arange(len(order)), np.flatnonzero(np.diff(sorted_slots) != 1) + 1):
            binding = Binding(self._device, self._session, self._copied)
            binding.read_host("index", sorted_rows[stretch])
            binding.read_host("padding", padding)
            for name, output in zip(self._names, outputs, strict=True):
                binding.read_value(name, output)
                start = int(sorted_slots[stretch[0]])
                binding.write(f"copied_{name}", self.cross_buffers[name], len(stretch), start)
            binding.run("install")

    def move(self, source: int, target: int) -> None:
        """Copy a row's whole state over another row: its source and its target prefix."""
        self._cross_origins[target] = self._cross_origins[source]
        self.source_lengths[target] = self.source_lengths[source]
        self.fork(source, target)

    def fork(self, source: int, target: int) -> None:
        """Copy a row's target prefix over another row that has the same source."""
        self._self_origins[target] = self._self_origins[source]
        self.cached[target] = self.cached[source]

    def settle(self) -> None:
        """Carry out what was moved and forked: to be done before a run reads or writes rows."""
        for origins, buffers in (
            (self._self_origins, self.self_buffers),
            (self._cross_origins, self.cross_buffers),
        ):
            changed = np.flatnonzero(origins != np.arange(self.num_slots))
            if not len(changed):
                continue
            start, end = int(changed[0]), int(changed[-1]) + 1
            binding = Binding(self._device, self._session, self._copied)
            binding.read_host("index", origins[start:end].copy())
            binding.read_host("padding", np.zeros(8, np.int64))
            for name, buffer in buffers.items():
                binding.read(name, buffer, self.num_slots)
                binding.write(f"copied_{name}", buffer, end - start, start)
            binding.run("settle")
            origins[:] = np.arange(self.num_slots)
