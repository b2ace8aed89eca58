"""What else may come at one position: CTranslate2's ``return_alternatives``, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dragoman_training.beam import BeamOptions, beam_search
from dragoman_training.decode import Hypothesis, greedy
from dragoman_training.model import Transformer
from dragoman_training.steering import NO_STEERING, Steering, check_limits
from dragoman_training.tokenizer import SPECIAL_IDS, SpecialIds


def alternatives(
    model: Transformer,
    source: Sequence[int],
    count: int,
    max_new_tokens: int,
    special: SpecialIds = SPECIAL_IDS,
    *,
    prefix: Sequence[int] = (),
    steering: Steering = NO_STEERING,
) -> list[Hypothesis]:
    """The ``count`` most probable tokens behind the prefix, each continued greedily; the most probable token first.

    The order is that of these tokens, not of the scores of what became of them, which are plain sums of
    log-probabilities. ``</s>`` is no alternative. There are fewer where fewer tokens may come. The limits count what
    comes behind the prefix.
    """
    check_limits(max_new_tokens, steering)
    first = beam_search(
        model,
        source,
        BeamOptions(
            beam_size=count, num_hypotheses=count, max_new_tokens=1, steering=replace(steering, min_new_tokens=1)
        ),
        special,
        prefix=prefix,
    )
    if max_new_tokens == 1:
        return first
    continued = greedy(
        model,
        [source] * len(first),
        max_new_tokens - 1,
        special,
        prefixes=[one.tokens for one in first],
        steering=replace(steering, min_new_tokens=max(0, steering.min_new_tokens - 1)),
    )
    joined = [(rest, [*one.log_probs, *rest.log_probs]) for one, rest in zip(first, continued, strict=True)]
    return [replace(rest, log_probs=log_probs, score=math.fsum(log_probs)) for rest, log_probs in joined]
