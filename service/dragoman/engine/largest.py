"""The largest of many numbers, in order. Pure numpy."""

from __future__ import annotations

from typing import Final

import numpy as np

from dragoman.types import FloatArray, IntArray

BLOCK: Final = 64  # values: large enough that there are few maxima, small enough that few values are sorted
_FEW: Final = 128


def largest(values: FloatArray, count: int) -> IntArray:
    """The places of the ``count`` largest of (V,), in falling order; of equal values, the smaller place first.

    Only what reaches a threshold is sorted. At least ``count`` blocks have a maximum of at least the ``count``-th
    largest one's, and so as many values do; where there are too few blocks, it is the ``count``-th largest value.
    """
    size = len(values)
    if count >= size:
        places = np.arange(size)
    else:
        whole = size // BLOCK * BLOCK
        # Partitioning the maxima, where it does, takes a fraction of the time. A block's values lie apart, so that
        # numpy takes many blocks' maxima at once.
        numbers = values[:whole].reshape(BLOCK, -1).max(axis=0) if count * BLOCK < size else values
        threshold = np.partition(numbers, len(numbers) - count)[len(numbers) - count]
        (places,) = np.nonzero(values >= threshold)
    return _sorted(values[places], places)[:count]


def _sorted(values: FloatArray, places: IntArray) -> IntArray:
    """Places, which rise, by falling value; of equal values, the smaller place first. No value is NaN."""
    if len(places) <= _FEW:
        order: IntArray = places[np.argsort(-values, kind="stable")]
        return order
    # Whole numbers of a value and its place, of which no two are equal, are sorted several times faster.
    bits = (values + np.float32(0)).view(np.uint32)  # zero of either sign has the bits of 0.0
    falling = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF))  # the larger the value, the smaller
    keys = falling.astype(np.uint64) << np.uint64(32) | places.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
