"""Reference decoding in plain PyTorch: the oracle for everything downstream. (Greedy; beam in progress.)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dragoman_training.data import pad
from dragoman_training.model import KeyValue, Transformer
from dragoman_training.tokenizer import SPECIAL_IDS, SpecialIds


@dataclass(frozen=True)
class Hypothesis:
    """One output. ``tokens`` lack the closing ``</s>``; ``log_probs`` include it when ``finish_reason`` is "stop"."""

    tokens: list[int]
    log_probs: list[float]
    score: float  # sum of log_probs, divided by length ** length_penalty in beam search
    finish_reason: str  # "stop" or "length"


def allowed_log_probs(logits: Tensor, special: SpecialIds) -> Tensor:
    """Log-probabilities over the ids that may be produced: the others are -inf and carry no mass. (R, V) to (R, V)."""
    logits = logits.float().clone()
    logits[:, list(special.never_produced)] = -math.inf
    return torch.log_softmax(logits, dim=-1)


def empty_caches(model: Transformer, rows: int, capacity: int, memory: list[KeyValue]) -> list[KeyValue]:
    """Zeroed self-attention caches, one a layer: 2 x (R, H, C, Dh)."""
    shape = (rows, model.config.num_heads, capacity, model.config.head_dim)
    return [KeyValue(layer.key.new_zeros(shape), layer.key.new_zeros(shape)) for layer in memory]


@torch.inference_mode()
def greedy(
    model: Transformer, sources: Sequence[Sequence[int]], max_new_tokens: int, special: SpecialIds = SPECIAL_IDS
) -> list[Hypothesis]:
    """The most probable token at each step. ``sources`` are closed by ``</s>``; finished rows leave the batch.

    ``max_new_tokens`` counts decoding steps, ``</s>`` included. Ties go to the lowest id. The model must be in
    evaluation mode.
    """
    lengths = torch.tensor([len(source) for source in sources], dtype=torch.int32)  # (R,)
    memory = model.keys_values(model.encode(pad(sources, special.pad), lengths))
    past = empty_caches(model, len(sources), max_new_tokens, memory)
    tokens = torch.full((len(sources),), special.decoder_start)  # (R,)
    alive = list(range(len(sources)))
    produced: list[list[int]] = [[] for _ in sources]
    log_probs: list[list[float]] = [[] for _ in sources]
    stopped = [False] * len(sources)
    for step in range(max_new_tokens):
        cached = torch.full((len(alive),), step, dtype=torch.int32)
        logits, past = model.step(tokens, cached, past, memory, lengths)  # (R, V)
        scores, tokens = allowed_log_probs(logits, special).max(dim=-1)
        going = []
        for row, (index, token, score) in enumerate(zip(alive, tokens.tolist(), scores.tolist(), strict=True)):
            log_probs[index].append(score)
            if token == special.eos:
                stopped[index] = True
            else:
                produced[index].append(token)
                going.append(row)
        if not going:
            break
        if len(going) < len(alive):
            keep = torch.tensor(going)
            alive = [alive[row] for row in going]
            tokens, lengths = tokens[keep], lengths[keep]
            memory = [KeyValue(layer.key[keep], layer.value[keep]) for layer in memory]
            past = [KeyValue(layer.key[keep], layer.value[keep]) for layer in past]
    return [
        Hypothesis(t, p, math.fsum(p), "stop" if s else "length")
        for t, p, s in zip(produced, log_probs, stopped, strict=True)
    ]


def greedy_all(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    max_new_tokens: int,
    special: SpecialIds = SPECIAL_IDS,
    batch_rows: int = 256,
) -> list[Hypothesis]:
    """Greedy output of any number of sources, in their order; those of near-equal length are decoded together."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    results: dict[int, Hypothesis] = {}
    for start in range(0, len(order), batch_rows):
        chosen = order[start : start + batch_rows]
        results.update(zip(chosen, greedy(model, [sources[i] for i in chosen], max_new_tokens, special), strict=True))
    return [results[i] for i in range(len(sources))]
