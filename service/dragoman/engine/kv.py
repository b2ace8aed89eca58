"""The KV state of one replica's rows: the one owner of all KV memory and movement.

Per decoder layer there are four arrays: self keys and values (slots, H, C, Dh), cross keys and values
(slots, H, L, Dh). A step writes into the self arrays in place; nothing is concatenated, re-padded or allocated in a
step. The capacities C and L grow in doublings, only through ``reserve``, and never beyond the byte budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dragoman.bundle import ModelShape
from dragoman.errors import OverloadedError
from dragoman.types import FloatArray

MIN_CAPACITY = 64

Cache = NDArray[np.float32 | np.float16]


def capacity_for(num_tokens: int) -> int:
    """The smallest capacity step that holds so many tokens: 64, 128, 256, 512, ..."""
    capacity = MIN_CAPACITY
    while capacity < num_tokens:
        capacity *= 2
    return capacity


def kv_cache_bytes(
    shape: ModelShape, num_slots: int, num_source_tokens: int, num_target_tokens: int, element_bytes: int = 4
) -> int:
    """Memory of so many slots with room for such lengths; an element of fp32 has 4 bytes, one of float16 has 2."""
    token_bytes = shape.decoder_layers * shape.num_heads * shape.head_dim * element_bytes * 2  # keys and values
    return num_slots * token_bytes * (capacity_for(num_source_tokens) + capacity_for(num_target_tokens))


class KvStore:
    """Rows of keys and values. Row r of every array belongs to slot r."""

    def __init__(
        self,
        shape: ModelShape,
        num_slots: int,
        max_bytes: int,
        dtype: type[np.float32] | type[np.float16] = np.float32,
    ) -> None:
        """``dtype`` is that of the graphs' caches."""
        self._shape = shape
        self._dtype = dtype
        self.num_slots = num_slots
        self._max_bytes = max_bytes
        self.target_capacity = 0  # C
        self.source_capacity = 0  # L
        self.generation = 0  # changes when the arrays are replaced, so that whoever bound their addresses binds again
        self.self_keys: list[Cache] = []
        self.self_values: list[Cache] = []
        self.cross_keys: list[Cache] = []
        self.cross_values: list[Cache] = []
        self.cached: NDArray[np.int32] = np.zeros(num_slots, np.int32)  # target tokens stored, by slot
        self.source_lengths: NDArray[np.int32] = np.ones(num_slots, np.int32)
        self.reserve(1, 1)

    @property
    def num_bytes(self) -> int:
        return self._bytes(self.source_capacity, self.target_capacity)

    def reserve(self, num_source_tokens: int, num_target_tokens: int) -> None:
        """Make room for a row of such lengths, keeping what is stored.

        Raises OverloadedError, with everything as it was, when that would exceed the byte budget.
        """
        source_capacity = max(self.source_capacity, capacity_for(num_source_tokens))
        target_capacity = max(self.target_capacity, capacity_for(num_target_tokens))
        if (source_capacity, target_capacity) == (self.source_capacity, self.target_capacity):
            return
        needed = self._bytes(source_capacity, target_capacity)
        if needed > self._max_bytes:
            raise OverloadedError(
                f"{num_source_tokens} source and {num_target_tokens} target tokens need a KV cache of {needed} bytes "
                f"for {self.num_slots} slots, over the budget of {self._max_bytes}: shorten the text or max_new_tokens"
            )
        self.self_keys = self._grown(self.self_keys, target_capacity)
        self.self_values = self._grown(self.self_values, target_capacity)
        self.cross_keys = self._grown(self.cross_keys, source_capacity)
        self.cross_values = self._grown(self.cross_values, source_capacity)
        self.source_capacity, self.target_capacity = source_capacity, target_capacity
        self.generation += 1

    def _bytes(self, source_capacity: int, target_capacity: int) -> int:
        size = np.dtype(self._dtype).itemsize
        return kv_cache_bytes(self._shape, self.num_slots, source_capacity, target_capacity, size)

    def _grown(self, old: list[Cache], capacity: int) -> list[Cache]:
        if old and old[0].shape[2] == capacity:
            return old
        size = (self.num_slots, self._shape.num_heads, capacity, self._shape.head_dim)
        new: list[Cache] = [np.empty(size, self._dtype) for _ in range(self._shape.decoder_layers)]
        for layer, array in enumerate(new):
            array.fill(0)  # touches every page now: lazily zeroed pages would slow the first steps down
            if old:
                array[:, :, : old[layer].shape[2]] = old[layer]
        return new

    def install(self, slot: int, keys: Sequence[Cache], values: Sequence[Cache], length: int) -> None:
        """Start a row: copy one source's cross keys and values, (H, S, Dh) a layer, of which ``length`` are real."""
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            self.cross_keys[layer][slot, :, :length] = key[:, :length]
            self.cross_values[layer][slot, :, :length] = value[:, :length]
        self.source_lengths[slot] = length
        self.cached[slot] = 0

    def row(self, slot: int) -> dict[str, FloatArray]:
        """Copies in fp32 of what a slot holds, (H, tokens, Dh) each, by the names that the decoder's inputs have."""
        cached, length = int(self.cached[slot]), int(self.source_lengths[slot])
        arrays = {
            "past_key": (self.self_keys, cached),
            "past_value": (self.self_values, cached),
            "cross_key": (self.cross_keys, length),
            "cross_value": (self.cross_values, length),
        }
        return {
            f"{name}_{layer}": array[slot, :, :count].astype(np.float32)
            for name, (layers, count) in arrays.items()
            for layer, array in enumerate(layers)
        }

    def move(self, source: int, target: int) -> None:
        """Copy a row's whole state over another row: its source and its target prefix."""
        length = int(self.source_lengths[source])
        for arrays in (self.cross_keys, self.cross_values):
            for array in arrays:
                array[target, :, :length] = array[source, :, :length]
        self.source_lengths[target] = length
        self.fork(source, target)

    def fork(self, source: int, target: int) -> None:
        """Copy a row's target prefix over another row that has the same source (beam search reorders its rows so)."""
        cached = int(self.cached[source])
        for arrays in (self.self_keys, self.self_values):
            for array in arrays:
                array[target, :, :cached] = array[source, :, :cached]
        self.cached[target] = cached
