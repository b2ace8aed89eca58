"""A token by chance, the same for the same seed in any company. Pure numpy, one row at a time.

Temperature, then top-k, then top-p (Holtzman et al. 2020), then min-p (Nguyen et al. 2024), each over what the one
before has left. Every hypothesis has a generator of its own, keyed by seed and number: what others draw, and when,
changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dragoman.engine.largest import largest
from dragoman.types import FloatArray, IntArray, SearchOptions

FIRST_CANDIDATES = 256
"""So many tokens are sorted at first to find those that top-p and min-p leave; where that is not enough, all."""


class Sampler:
    """Draws one hypothesis' tokens."""

    def __init__(self, options: SearchOptions, number: int) -> None:
        """``number`` tells the hypotheses of one request apart."""
        self._options = options
        self._random = np.random.Generator(np.random.Philox(key=np.array([options.seed, number], np.uint64)))

    def draw(self, logits: FloatArray) -> int:
        """A token of one row (V,), of which at least one value is finite, and none is NaN. One number is drawn."""
        weights = logits.astype(np.float64) - float(logits.max())
        weights /= self._options.temperature
        np.exp(weights, out=weights)  # (V,), the largest is 1
        places = self._candidates(logits, weights)
        chosen = weights if places is None else weights[places]
        cumulated = np.cumsum(chosen)
        index = int(np.searchsorted(cumulated, self._random.random() * cumulated[-1], side="right"))
        index = min(index, len(cumulated) - 1)  # where rounding made the number reach the end
        return index if places is None else int(places[index])

    def _candidates(self, logits: FloatArray, weights: NDArray[np.float64]) -> IntArray | None:
        """Places of the tokens that top-k, top-p and min-p leave, the most probable first; None for all."""
        options, size = self._options, len(logits)
        if options.top_k == 0 and options.top_p == 1.0 and options.min_p == 0.0:
            return None
        if options.top_k:
            places = largest(logits, min(options.top_k, size))
            return places[: self._kept(weights[places], float(weights[places].sum()))]
        total = float(weights.sum())
        for count in (min(FIRST_CANDIDATES, size), size):
            places = largest(logits, count)
            kept = self._kept(weights[places], total)
            if kept < count:
                break
        return places[:kept]

    def _kept(self, weights: NDArray[np.float64], total: float) -> int:
        """How many of the tokens with these weights, falling, are left: one at least."""
        kept = len(weights)
        if self._options.top_p < 1.0:
            # The fewest whose mass reaches top_p.
            kept = int(np.searchsorted(np.cumsum(weights), self._options.top_p * total)) + 1
        if self._options.min_p > 0.0:
            kept = min(kept, int((weights >= self._options.min_p * weights[0]).sum()))
        return max(1, min(kept, len(weights)))
