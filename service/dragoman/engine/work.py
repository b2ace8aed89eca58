"""How much work a request is, told before any of it is done: what fairness between callers and forecasts count with.

The length of an answer is not known beforehand; that of a translation is roughly its source's. Where it is another
multiple of it, all requests are off by the same factor: shares stay fair, and the forecast measures the factor.
"""

from __future__ import annotations

from dragoman.engine.sequence import Sequence
from dragoman.types import GenerationRequest


def expected_steps(request: GenerationRequest) -> int:
    """Decoding steps from the first to the last token, 1 or more: the prefix and, behind it, as many as the source."""
    return len(request.prefix) + (1 if request.score_prefix else min(request.max_new_tokens, len(request.source)))


def expected_work(sequence: Sequence) -> int:
    """The same for all of its rows: row-steps, 1 or more."""
    return expected_steps(sequence.request) * len(sequence.hypotheses)
