"""Reference decoding in plain PyTorch: greedy and beam search, the oracle for everything downstream.

Both follow the semantics of CTranslate2's ``translate_batch`` (version 4; checked against the library itself):

- One rule about ids: ``<pad>``, ``<s>``, ``<unk>`` and the decoder start are never produced. Their logits become -inf
  before the log-softmax, so that scores are log-probabilities over the ids that may be produced.
- ``max_new_tokens`` is the number of decoding steps; a closing ``</s>`` takes one.
- A hypothesis' length counts its ``</s>``; a beam score is the sum of log-probabilities / length ** length_penalty.

Deliberate differences: ``<unk>`` is never produced (there an option, ``disable_unk``), nor are ``<pad>`` and ``<s>``;
``</s>`` may come first (there ``min_decoding_length`` is 1 by default); greedy returns the plain sum of
log-probabilities (there it is divided by the length as in beam search).

What is not here: prefixes, sampling, coverage, penalties, patience other than 1.
"""

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
    score: float  # the sum of log_probs; in beam search divided by length ** length_penalty
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """How to search. ``num_hypotheses`` is at most ``beam_size``."""

    beam_size: int
    max_new_tokens: int
    num_hypotheses: int = 1
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1")
        if not 1 <= self.num_hypotheses <= self.beam_size:
            raise ValueError(f"num_hypotheses is {self.num_hypotheses}: it must be 1 to beam_size ({self.beam_size})")


@dataclass(frozen=True)
class Candidate:
    """A continuation of one beam by one token."""

    total: float
    origin: int  # the row it continues
    tokens: list[int]
    log_probs: list[float]


def allowed_log_probs(logits: Tensor, special: SpecialIds) -> Tensor:
    """Log-probabilities over the ids that may be produced: the others are -inf and carry no mass. (R, V) to (R, V)."""
    logits = logits.float().clone()
    logits[:, list(special.never_produced)] = -math.inf
    return torch.log_softmax(logits, dim=-1)


def empty_caches(model: Transformer, rows: int, capacity: int, memory: list[KeyValue]) -> list[KeyValue]:
    """Zeroed self-attention caches, one a layer: 2 x (R, H, C, Dh)."""
    shape = (rows, model.config.num_heads, capacity, model.config.head_dim)
    return [KeyValue(layer.key.new_zeros(shape), layer.key.new_zeros(shape)) for layer in memory]


def take_rows(caches: list[KeyValue], rows: Tensor) -> list[KeyValue]:
    """The given rows of all caches, copied: rows may repeat."""
    return [KeyValue(layer.key[rows], layer.value[rows]) for layer in caches]


@torch.inference_mode()
def greedy(
    model: Transformer, sources: Sequence[Sequence[int]], max_new_tokens: int, special: SpecialIds = SPECIAL_IDS
) -> list[Hypothesis]:
    """The most probable token at each step. ``sources`` are closed by ``</s>``; finished rows leave the batch.

    Ties go to the lowest id. The model must be in evaluation mode.
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
            memory, past = take_rows(memory, keep), take_rows(past, keep)
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


def best_continuations(beams: list[Candidate], log_probs: Tensor, count: int) -> list[Candidate]:
    """The ``count`` best of all beams x vocabulary, best first; ties go to the earlier beam, then the lower id.

    log_probs: (R, V) of the next token. Impossible continuations (-inf) are left out, so there may be fewer.
    """
    totals = torch.tensor([beam.total for beam in beams], dtype=torch.float64)[:, None] + log_probs.double()  # (R, V)
    values, indices = torch.sort(totals.flatten(), descending=True, stable=True)
    result = []
    for total, index in zip(values[:count].tolist(), indices[:count].tolist(), strict=True):
        origin, token = divmod(index, log_probs.shape[1])
        if total > -math.inf:
            step = float(log_probs[origin, token])
            beam = beams[origin]
            result.append(Candidate(total, origin, [*beam.tokens, token], [*beam.log_probs, step]))
    return result


def finish(candidate: Candidate, length_penalty: float, eos: int) -> Hypothesis:
    """A finished candidate with its normalised score."""
    score = candidate.total / len(candidate.tokens) ** length_penalty
    if candidate.tokens[-1] == eos:
        return Hypothesis(candidate.tokens[:-1], candidate.log_probs, score, "stop")
    return Hypothesis(candidate.tokens, candidate.log_probs, score, "length")


@torch.inference_mode()
def beam_search(
    model: Transformer, source: Sequence[int], options: BeamOptions, special: SpecialIds = SPECIAL_IDS
) -> list[Hypothesis]:
    """The best ``num_hypotheses`` that a beam finds for one source closed by ``</s>``, best first.

    Each step ranks the 2 x ``beam_size`` best continuations. Of the first ``beam_size``, those that end with ``</s>``
    are finished, and their places go to the next continuations that do not end; endings of lower rank are dropped. In
    the last step, all of the first ``beam_size`` are finished. The search stops when ``beam_size`` hypotheses are
    finished; without length penalty already when one that was ranked first, and ``num_hypotheses`` in all, are.
    """
    memory = model.keys_values(model.encode(torch.tensor([list(source)]), torch.tensor([len(source)]).int()))
    past = empty_caches(model, 1, options.max_new_tokens, memory)
    beams = [Candidate(0.0, 0, [], [])]
    finished: list[Hypothesis] = []
    first_finished = False
    for step in range(options.max_new_tokens):
        rows = len(beams)
        tokens = torch.tensor([beam.tokens[-1] if beam.tokens else special.decoder_start for beam in beams])  # (R,)
        cached, lengths = (torch.full((rows,), n, dtype=torch.int32) for n in (step, len(source)))
        logits, past = model.step(tokens, cached, past, take_rows(memory, torch.zeros(rows).long()), lengths)
        ranked = best_continuations(beams, allowed_log_probs(logits, special), 2 * options.beam_size)
        last = step + 1 == options.max_new_tokens
        spare = iter([c for c in ranked[options.beam_size :] if c.tokens[-1] != special.eos])
        beams = []
        for rank, candidate in enumerate(ranked[: options.beam_size]):
            if last or candidate.tokens[-1] == special.eos:
                finished.append(finish(candidate, options.length_penalty, special.eos))
                first_finished = first_finished or rank == 0
                beams.extend(c for c in [next(spare, None)] if c is not None)
            else:
                beams.append(candidate)
        enough = len(finished) >= options.beam_size
        if options.length_penalty == 0:
            enough = first_finished and len(finished) >= options.num_hypotheses
        if last or enough or not beams:
            break
        past = take_rows(past, torch.tensor([beam.origin for beam in beams]))
    finished.sort(key=lambda hypothesis: -hypothesis.score)
    return finished[: options.num_hypotheses]
