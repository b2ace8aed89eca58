"""The highest rate that holds a service level, and how many servers a wanted rate needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

_HALVINGS: Final = 6  # below the first rate, before it counts as none


def find_capacity(holds: Callable[[float], bool], *, first_rate: float, max_rate: float, precision: float) -> float:
    """The highest rate tried that holds, with one tried that does not at most ``1 + precision`` times as high.

    Doubles from ``first_rate`` until a rate does not hold (or halves it until one does), then tries the geometric mean
    of the two again and again. ``max_rate`` where that holds; 0 where no rate does. ``holds`` ought to be true below
    the capacity and false above; a rate is missed when it does not hold twice, as one stray pause is no finding.
    """

    def held(rate: float) -> bool:
        return holds(rate) or holds(rate)

    rate = min(first_rate, max_rate)
    good, bad = (rate, math.inf) if held(rate) else (0.0, rate)
    while bad == math.inf:
        if good >= max_rate:
            return good
        rate = min(2 * good, max_rate)
        if held(rate):
            good = rate
        else:
            bad = rate
    for _ in range(_HALVINGS):
        if good > 0:
            break
        rate = bad / 2
        if held(rate):
            good = rate
        else:
            bad = rate
    while good > 0 and bad / good > 1 + precision:
        rate = math.sqrt(good * bad)
        if held(rate):
            good = rate
        else:
            bad = rate
    return good


def num_replicas(wanted_rate: float, capacity: float, utilization: float) -> int:
    """Servers for a rate, each used to that share of its capacity: the rest is for bursts, and for one that fails."""
    return math.ceil(wanted_rate / (capacity * utilization) - 1e-9)
