"""The largest of many numbers, in order. Pure numpy."""

from __future__ import annotations

import numpy as np

from dragoman.types import FloatArray, IntArray

BLOCK = 64  # of the vocabulary: large enough that there are few maxima, small enough that few tokens are sorted


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
        # Partitioning the maxima, where it does, takes a fraction of the time.
        numbers = values[:whole].reshape(-1, BLOCK).max(axis=1) if count * BLOCK < size else values
        threshold = np.partition(numbers, len(numbers) - count)[len(numbers) - count]
        (places,) = np.nonzero(values >= threshold)
    # Stable: places rise, so that of equal values the smaller comes first.
    order = np.argsort(-values[places], kind="stable")[:count]
    result: IntArray = places[order]
    return result
