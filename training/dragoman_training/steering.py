"""What a search may not choose, or is talked out of, given what it has written; and log-probabilities of the rest.

The semantics are those of CTranslate2's options of like names, in its order: repetition penalty on the logits, then
what is forbidden, then the softmax, so that scores are log-probabilities over what may come. Written for clarity, a row
and a token at a time: this is the reference, not the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman_training.tokenizer import SpecialIds


class Written(NamedTuple):
    """What one hypothesis holds so far. While the prefix is incomplete, the rest of it is forced, not chosen."""

    tokens: list[int]  # with the prefix, as far as it was fed
    num_prefix: int  # tokens of the whole prefix

    @property
    def num_new(self) -> int:
        """Tokens behind the prefix; negative while the prefix is incomplete."""
        return len(self.tokens) - self.num_prefix


@dataclass(frozen=True, kw_only=True)
class Steering:
    """What may come. All ids are the target side's; what was written includes the prefix, but not the decoder start.

    Raises ValueError for values without a meaning. An id that is not in the vocabulary is an IndexError of the search.
    """

    min_new_tokens: int = 0  # ``</s>`` may not come before so many tokens behind the prefix
    suppressed: tuple[int, ...] = ()  # may never come
    suppressed_sequences: tuple[tuple[int, ...], ...] = ()  # the last of each may not come behind the others
    repetition_penalty: float = 1.0  # divides the positive logits of what was written, multiplies the negative ones
    no_repeat_ngram_size: int = 0  # no sequence of so many tokens may come twice; 0: any may

    def __post_init__(self) -> None:
        for name in ("min_new_tokens", "no_repeat_ngram_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 0")
        if not 0 < self.repetition_penalty < math.inf:  # written so that NaN fails
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}: it must be a number above 0")
        if () in self.suppressed_sequences:
            raise ValueError("suppressed_sequences has an empty sequence: each must have at least one token")
        lowest = min((id for ids in (self.suppressed, *self.suppressed_sequences) for id in ids), default=0)
        if lowest < 0:
            raise ValueError(f"suppressed ids hold {lowest}: each must be at least 0")

    def forbidden(self, written: Written, eos: int) -> set[int]:
        """The ids that may not come next."""
        ids, tokens = set(self.suppressed), written.tokens
        if written.num_new < self.min_new_tokens:
            ids.add(eos)
        for *others, last in self.suppressed_sequences:
            if tokens[max(0, len(tokens) - len(others)) :] == others:
                ids.add(last)
        size = self.no_repeat_ngram_size
        if size:
            for start in range(len(tokens) - size + 1):
                *others, last = tokens[start : start + size]
                if tokens[len(tokens) - len(others) :] == others:
                    ids.add(last)
        return ids

    def apply(self, logits: Tensor, written: Written, eos: int) -> None:
        """Change one row's logits (V,) in place."""
        if self.repetition_penalty != 1.0 and written.tokens:
            ids = torch.tensor(sorted(set(written.tokens)), device=logits.device)
            values = logits[ids]
            penalised = torch.where(values < 0, values * self.repetition_penalty, values / self.repetition_penalty)
            logits[ids] = penalised
        logits[sorted(self.forbidden(written, eos))] = -math.inf


NO_STEERING = Steering()


def check_limits(max_new_tokens: int, steering: Steering) -> None:
    """Raises ValueError for a limit that leaves no step, or one below the minimum."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
    if steering.min_new_tokens > max_new_tokens:
        raise ValueError(
            f"min_new_tokens is {steering.min_new_tokens}: it must be at most max_new_tokens ({max_new_tokens})"
        )


def allowed_log_probs(
    logits: Tensor, special: SpecialIds, steering: Steering = NO_STEERING, written: Sequence[Written] = ()
) -> Tensor:
    """Log-probabilities over the ids that may come: the others are -inf and carry no mass. (R, V) to (R, V).

    ``written`` has an entry for each row; it may be left out where nothing is steered. A row in which no id may come is
    -inf throughout.
    """
    logits = logits.float().clone()
    logits[:, list(special.never_produced)] = -math.inf
    if steering != NO_STEERING:
        for row, so_far in zip(logits, written, strict=True):
            steering.apply(row, so_far, special.eos)
    # log_softmax of -inf throughout is NaN
    return torch.log_softmax(logits, dim=-1).masked_fill(logits == -math.inf, -math.inf)
