"""The largest of many numbers, in order. Pure numpy."""

from __future__ import annotations

import numpy as np

from dragoman.types import FloatArray, IntArray

BLOCK = 64  # of the vocabulary: large enough that there are few maxima, small enough that few tokens are sorted


def largest(values: FloatArray, count: int) -> IntArray:
    """The places of the ``count`` largest of (V,), in falling order; of equal values, the smaller place first.

    At least ``count`` blocks have a maximum of at least the ``count``-th largest one's, and so as many values do: only
    what reaches that is sorted. Sorting or partitioning the whole takes several times as long.
    """
    size = len(values)
    if count * BLOCK < size:
        whole = size // BLOCK * BLOCK
        maxima = values[:whole].reshape(-1, BLOCK).max(axis=1)  # (V / BLOCK,)
        threshold = np.partition(maxima, len(maxima) - count)[len(maxima) - count]
        (places,) = np.nonzero(values >= threshold)
    else:
        places = np.arange(size)
    # Stable: places rise, so that of equal values the smaller comes first.
    order = np.argsort(-values[places], kind="stable")[:count]
    result: IntArray = places[order]
    return result
