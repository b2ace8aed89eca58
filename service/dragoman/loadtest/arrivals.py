"""When an open loop sends, and how many callers a closed one has."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Arrivals(StrEnum):
    """How requests follow each other."""

    POISSON = "poisson"  # independently, in bursts, as those of many callers do
    CONSTANT = "constant"  # evenly spaced, which hides the queueing that bursts cause


@dataclass(frozen=True, slots=True)
class Stage:
    """A time in which the level, a rate or a number of callers, goes in a straight line from one value to another."""

    seconds: float
    from_level: float
    level: float

    @property
    def area(self) -> float:
        """Where the level is a rate: how many requests to expect."""
        return (self.from_level + self.level) / 2 * self.seconds


def arrival_times(stages: Sequence[Stage], kind: Arrivals, seed: int) -> Iterator[float]:
    """Times in seconds from 0 up to, not including, the end of the last stage, ascending.

    The same arguments give the same times. Arrivals at a rate of 1 are mapped to the stages' rates: what is due when n
    requests are expected to have been sent stays so (Lewis and Shedler 1979 call it inversion).
    """
    draw = random.Random(seed)
    begin = expected = 0.0  # seconds, and requests, of the stages before
    due = draw.expovariate(1.0) if kind == Arrivals.POISSON else 0.5
    for stage in stages:
        while due - expected < stage.area:
            yield begin + _seconds_until(due - expected, stage)
            due += draw.expovariate(1.0) if kind == Arrivals.POISSON else 1.0
        begin += stage.seconds
        expected += stage.area


def _seconds_until(requests: float, stage: Stage) -> float:
    """When so many are expected in a stage: solves from_level t + slope t² / 2 = requests, without cancellation."""
    slope = (stage.level - stage.from_level) / stage.seconds
    root = math.sqrt(max(stage.from_level**2 + 2 * slope * requests, 0.0))
    return 2 * requests / (stage.from_level + root)


def caller_changes(stages: Sequence[Stage]) -> Iterator[tuple[float, int]]:
    """When the number of callers changes, in seconds, and to what; the first at 0. A ramp goes one by one."""
    begin = 0.0
    for stage in stages:
        count, last = round(stage.from_level), round(stage.level)
        steps = abs(last - count)
        yield begin, count
        for step in range(steps):
            count += 1 if last > count else -1
            yield begin + stage.seconds * step / steps, count
        begin += stage.seconds
