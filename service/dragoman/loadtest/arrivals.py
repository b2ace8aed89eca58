"""When an open-loop load test sends."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson_arrivals(rate: float, duration_seconds: float, seed: int) -> Iterator[float]:
    """Times in seconds from 0 up to, not including, ``duration_seconds``: on average ``rate`` a second, independent.

    The same arguments give the same times. Independent arrivals come in bursts, as those of many callers do; evenly
    spaced ones would hide the queueing that bursts cause.
    """
    gaps = random.Random(seed)
    time = gaps.expovariate(rate)
    while time < duration_seconds:
        yield time
        time += gaps.expovariate(rate)
