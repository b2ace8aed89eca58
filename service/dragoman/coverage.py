"""How much attention each source token got: the coverage penalty of Wu et al. 2016, section 7, as CTranslate2 has it.

It takes no part in the search: it changes the scores of what is finished.
"""

from __future__ import annotations

import numpy as np

from dragoman.types import FloatArray


def coverage_penalty(weights: FloatArray) -> float:
    """The sum over source positions of log(min(attention in all steps, 1)): 0 at most, not yet weighted.

    weights: (T, S), the last decoder layer's cross-attention, the mean of its heads, for each step, those of a prefix
    included. A position that got none at all is left out, as it is there.
    """
    coverage = weights.sum(axis=0, dtype=np.float64)  # (S,)
    return float(np.log(np.minimum(coverage[coverage > 0], 1.0)).sum())
