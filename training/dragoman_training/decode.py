"""Reference decoding in plain PyTorch, the oracle for everything downstream: greedy search, scores of given targets.

``beam.py`` is the beam search, ``alternatives.py`` what else may come at a position, ``steering.py`` what may come at
all. They follow the semantics of CTranslate2's ``translate_batch`` and ``score_batch`` (version 4; checked against the
library itself):

- One rule about ids: ``<pad>``, ``<s>``, ``<unk>`` and the decoder start are never produced. Their logits become -inf
  before the log-softmax, so that scores are log-probabilities over the ids that may be produced.
- A target prefix is fed a token a step; it costs nothing and belongs to the answer.
- ``max_new_tokens`` is the number of decoding steps behind the prefix; a closing ``</s>`` takes one.
- A hypothesis' length counts its ``</s>``; a beam score is the sum of log-probabilities / length ** length_penalty.

Deliberate differences: ``<unk>`` is never produced (there an option, ``disable_unk``), nor are ``<pad>`` and ``<s>``,
and scores of given targets know the same rule; ``</s>`` may come first (there ``min_decoding_length`` is 1 by default),
and right behind a prefix it competes like any other token (there it must be the most probable); lengths and limits are
counted behind the prefix (there with it); greedy returns the plain sum of log-probabilities (there it is divided by the
length as in beam search); alternatives are steered by the prefix too.

Many sources are decoded together for speed: each follows its own search, and what it finds is what it would find alone,
but for the rounding of products of another size.

What is not here: sampling, biased prefixes, vocabulary maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dragoman_training.data import pad
from dragoman_training.errors import DecodingError
from dragoman_training.model import KeyValue, Transformer
from dragoman_training.steering import NO_STEERING, Steering, Written, allowed_log_probs, check_limits
from dragoman_training.tokenizer import SPECIAL_IDS, SpecialIds

Found = TypeVar("Found")

FIRST_CAPACITY = 16  # of the self-attention caches, which double when full: a step costs what is cached, not the limit


@dataclass(frozen=True)
class Hypothesis:
    """One output. ``tokens`` lack the closing ``</s>``; ``log_probs`` include it when ``finish_reason`` is "stop"."""

    tokens: list[int]  # with the prefix
    log_probs: list[float]  # of what comes behind the prefix
    score: float  # the sum of log_probs; in beam search divided by length ** length_penalty, plus the coverage penalty
    finish_reason: str  # "stop" or "length"


def empty_caches(model: Transformer, rows: int, capacity: int, memory: list[KeyValue]) -> list[KeyValue]:
    """Zeroed self-attention caches, one a layer: 2 x (R, H, C, Dh)."""
    shape = (rows, model.config.num_heads, capacity, model.config.head_dim)
    return [KeyValue(layer.key.new_zeros(shape), layer.key.new_zeros(shape)) for layer in memory]


def with_room(caches: list[KeyValue], position: int) -> list[KeyValue]:
    """The self-attention caches with a place for ``position``: twice as long if they are full."""
    capacity = caches[0].key.shape[2]
    if position < capacity:
        return caches
    return [KeyValue(*(F.pad(half, (0, 0, 0, capacity)) for half in layer)) for layer in caches]


def take_rows(caches: list[KeyValue], rows: Tensor) -> list[KeyValue]:
    """The given rows of all caches, copied: rows may repeat."""
    return [KeyValue(layer.key[rows], layer.value[rows]) for layer in caches]


def encode_sources(
    model: Transformer, sources: Sequence[Sequence[int]], special: SpecialIds
) -> tuple[Tensor, list[KeyValue], list[KeyValue]]:
    """Lengths (R,), cross-attention keys and values, and empty self-attention caches of sources closed by ``</s>``."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(source) for source in sources], dtype=torch.int32, device=device)
    memory = model.keys_values(model.encode(pad(sources, special.pad).to(device), lengths))
    return lengths, memory, empty_caches(model, len(sources), FIRST_CAPACITY, memory)


def each_prefix(sources: Sequence[Sequence[int]], prefixes: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """A prefix for each source. Raises ValueError where their numbers differ."""
    if prefixes is None:
        return [[] for _ in sources]
    if len(prefixes) != len(sources):
        raise ValueError(f"there are {len(prefixes)} prefixes for {len(sources)} sources: give one for each")
    return [list(prefix) for prefix in prefixes]


@torch.inference_mode()
def greedy(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    max_new_tokens: int,
    special: SpecialIds = SPECIAL_IDS,
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
    steering: Steering = NO_STEERING,
) -> list[Hypothesis]:
    """The most probable token at each step. ``sources`` are closed by ``</s>``; finished rows leave the batch.

    ``prefixes``, one a source, are what the outputs begin with. Ties go to the lowest id. The model must be in
    evaluation mode. Raises ``DecodingError`` where the steering leaves no token to choose.
    """
    check_limits(max_new_tokens, steering)
    forced = each_prefix(sources, prefixes)
    lengths, memory, past = encode_sources(model, sources, special)
    tokens = torch.full((len(sources),), special.decoder_start, device=lengths.device)  # (R,)
    alive = list(range(len(sources)))
    written = [Written([], len(prefix)) for prefix in forced]
    log_probs: list[list[float]] = [[] for _ in sources]
    stopped = [False] * len(sources)
    step = 0
    while alive:
        cached = torch.full_like(lengths, step)  # (R,)
        logits, past = model.step(tokens, cached, with_room(past, step), memory, lengths)  # (R, V)
        scores, best = allowed_log_probs(logits, special, steering, [written[i] for i in alive]).max(dim=-1)
        going = []
        for row, (index, token, score) in enumerate(zip(alive, best.tolist(), scores.tolist(), strict=True)):
            if written[index].num_new < 0:
                written[index].tokens.append(forced[index][step])
                going.append(row)
                continue
            if score == -math.inf:
                raise nothing_left(index, step)
            log_probs[index].append(score)
            if token == special.eos:
                stopped[index] = True
                continue
            written[index].tokens.append(token)
            if written[index].num_new < max_new_tokens:
                going.append(row)
        keep = torch.tensor(going, dtype=torch.int64, device=lengths.device)
        if len(going) < len(alive):
            alive = [alive[row] for row in going]
            lengths, memory, past = lengths[keep], take_rows(memory, keep), take_rows(past, keep)
        tokens = torch.tensor([written[i].tokens[-1] for i in alive], dtype=torch.int64, device=lengths.device)
        step += 1
    return [
        Hypothesis(so_far.tokens, p, math.fsum(p), "stop" if s else "length")
        for so_far, p, s in zip(written, log_probs, stopped, strict=True)
    ]


def nothing_left(index: int, step: int) -> DecodingError:
    """The error of a search of the source with this index that may choose no token in this step."""
    return DecodingError(f"source {index}: no token may come at position {step}: loosen what is suppressed or required")


@torch.inference_mode()
def score(
    model: Transformer, source: Sequence[int], target: Sequence[int], special: SpecialIds = SPECIAL_IDS
) -> list[float]:
    """The log-probability of each token of a given target, and of ``</s>`` behind it: len(target) + 1 numbers.

    Those that a search which writes this target gives without steering; -inf for ids that are never produced. The
    source is closed by ``</s>``, the target is not. The model must be in evaluation mode.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([len(source)], dtype=torch.int32, device=device)
    read = torch.tensor([[special.decoder_start, *target]], device=device)  # (1, T)
    logits = model(torch.tensor([list(source)], device=device), lengths, read)[0]  # (T, V)
    labels = torch.tensor([*target, special.eos], device=device)  # (T,)
    chosen: list[float] = allowed_log_probs(logits, special).gather(1, labels[:, None])[:, 0].tolist()
    return chosen


def greedy_all(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    max_new_tokens: int,
    special: SpecialIds = SPECIAL_IDS,
    batch_rows: int = 256,
) -> list[Hypothesis]:
    """Greedy output of any number of sources, in their order; those of near-equal length are decoded together."""
    return in_groups(
        sources, batch_rows, lambda groups: (greedy(model, group, max_new_tokens, special) for group in groups)
    )


def near_equal(sources: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Indices of the sources by rising length, in groups of ``count``."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    return [order[start : start + count] for start in range(0, len(order), count)]


def in_groups(
    sources: Sequence[Sequence[int]],
    count: int,
    search: Callable[[list[list[Sequence[int]]]], Iterable[Sequence[Found]]],
) -> list[Found]:
    """What ``search`` finds for each source, in their order, though it gets them in groups of near-equal length.

    ``search`` gets all groups of at most ``count`` sources and gives a result a source, group by group, in order.
    """
    groups = near_equal(sources, count)
    found = search([[sources[i] for i in group] for group in groups])
    results: dict[int, Found] = {}
    for group, part in zip(groups, found, strict=True):
        results.update(zip(group, part, strict=True))
    return [results[i] for i in range(len(sources))]
