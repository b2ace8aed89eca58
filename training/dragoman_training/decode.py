"""Reference decoding in plain PyTorch: greedy and beam search, the oracle for everything downstream.

Both follow the semantics of CTranslate2's ``translate_batch`` (version 4; checked against the library itself):

- One rule about ids: ``<pad>``, ``<s>``, ``<unk>`` and the decoder start are never produced. Their logits become -inf
  before the log-softmax, so that scores are log-probabilities over the ids that may be produced.
- ``max_new_tokens`` is the number of decoding steps; a closing ``</s>`` takes one.
- A hypothesis' length counts its ``</s>``; a beam score is the sum of log-probabilities / length ** length_penalty.

Deliberate differences: ``<unk>`` is never produced (there an option, ``disable_unk``), nor are ``<pad>`` and ``<s>``;
``</s>`` may come first (there ``min_decoding_length`` is 1 by default); greedy returns the plain sum of
log-probabilities (there it is divided by the length as in beam search).

Many sources are decoded together for speed: each follows its own search, and what it finds is what it would find alone,
but for the rounding of products of another size.

What is not here: prefixes, sampling, coverage, penalties, patience other than 1.
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
from dragoman_training.model import KeyValue, Transformer
from dragoman_training.tokenizer import SPECIAL_IDS, SpecialIds

Found = TypeVar("Found")

FIRST_CAPACITY = 16  # of the self-attention caches, which double when full: a step costs what is cached, not the limit


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
    origin: int  # the beam it continues
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


@torch.inference_mode()
def greedy(
    model: Transformer, sources: Sequence[Sequence[int]], max_new_tokens: int, special: SpecialIds = SPECIAL_IDS
) -> list[Hypothesis]:
    """The most probable token at each step. ``sources`` are closed by ``</s>``; finished rows leave the batch.

    Ties go to the lowest id. The model must be in evaluation mode.
    """
    lengths, memory, past = encode_sources(model, sources, special)
    tokens = torch.full((len(sources),), special.decoder_start, device=lengths.device)  # (R,)
    alive = list(range(len(sources)))
    produced: list[list[int]] = [[] for _ in sources]
    log_probs: list[list[float]] = [[] for _ in sources]
    stopped = [False] * len(sources)
    for step in range(max_new_tokens):
        cached = torch.full_like(lengths, step)  # (R,)
        logits, past = model.step(tokens, cached, with_room(past, step), memory, lengths)  # (R, V)
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
            keep = torch.tensor(going, device=lengths.device)
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


def most_probable(log_probs: Tensor, count: int) -> tuple[list[list[float]], list[list[int]]]:
    """The ``count`` largest of each row and their ids, in no order; of equal ones those with the lower id. (R, V)."""
    values, ids = log_probs.topk(min(count + 1, log_probs.shape[1]))
    if values.shape[1] > count:
        # topk does not promise which of equal values it takes: where the last one taken has an equal, sort.
        tied = (values[:, count - 1] == values[:, count]) & (values[:, count] > -math.inf)
        for row in tied.nonzero().flatten().tolist():
            ordered, order = torch.sort(log_probs[row], descending=True, stable=True)
            values[row], ids[row] = ordered[: count + 1], order[: count + 1]
    return values[:, :count].tolist(), ids[:, :count].tolist()


def best_continuations(
    beams: Sequence[Candidate], log_probs: Sequence[Sequence[float]], ids: Sequence[Sequence[int]], count: int
) -> list[Candidate]:
    """The ``count`` best of all continuations, best first; ties go to the earlier beam, then the lower id.

    ``log_probs`` and ``ids`` are the ``count`` most probable next tokens of each beam. Impossible ones (-inf) are left
    out, so there may be fewer.
    """
    ranked = sorted(
        (-(beam.total + log_prob), origin, token, log_prob)
        for origin, beam in enumerate(beams)
        for log_prob, token in zip(log_probs[origin], ids[origin], strict=True)
        if log_prob > -math.inf
    )
    return [
        Candidate(-cost, origin, [*beams[origin].tokens, token], [*beams[origin].log_probs, log_prob])
        for cost, origin, token, log_prob in ranked[:count]
    ]


def finish(candidate: Candidate, length_penalty: float, eos: int) -> Hypothesis:
    """A finished candidate with its normalised score."""
    score = candidate.total / len(candidate.tokens) ** length_penalty
    if candidate.tokens[-1] == eos:
        return Hypothesis(candidate.tokens[:-1], candidate.log_probs, score, "stop")
    return Hypothesis(candidate.tokens, candidate.log_probs, score, "length")


class Search:
    """The beam search of one source: which beams live, what is finished. It knows no tensors.

    Each step ranks the 2 x ``beam_size`` best continuations. Of the first ``beam_size``, those that end with ``</s>``
    are finished, and their places go to the next continuations that do not end; endings of lower rank are dropped. In
    the last step, all of the first ``beam_size`` are finished. The search stops when ``beam_size`` hypotheses are
    finished; without length penalty already when one that was ranked first, and ``num_hypotheses`` in all, are.
    """

    def __init__(self, options: BeamOptions, eos: int) -> None:
        self.options, self.eos = options, eos
        self.beams = [Candidate(0.0, 0, [], [])]
        self.finished: list[Hypothesis] = []
        self.first_finished = False

    def advance(self, ranked: Sequence[Candidate], last: bool) -> None:
        """Take the ranked continuations of one step; no beam is left when the search has stopped."""
        options = self.options
        spare = iter([c for c in ranked[options.beam_size :] if c.tokens[-1] != self.eos])
        self.beams = []
        for rank, candidate in enumerate(ranked[: options.beam_size]):
            if last or candidate.tokens[-1] == self.eos:
                self.finished.append(finish(candidate, options.length_penalty, self.eos))
                self.first_finished = self.first_finished or rank == 0
                self.beams.extend(c for c in [next(spare, None)] if c is not None)
            else:
                self.beams.append(candidate)
        enough = len(self.finished) >= options.beam_size
        if options.length_penalty == 0:
            enough = self.first_finished and len(self.finished) >= options.num_hypotheses
        if last or enough:
            self.beams = []

    def best(self) -> list[Hypothesis]:
        """The best ``num_hypotheses`` finished, best first."""
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        return self.finished[: self.options.num_hypotheses]


def beam_search(
    model: Transformer, source: Sequence[int], options: BeamOptions, special: SpecialIds = SPECIAL_IDS
) -> list[Hypothesis]:
    """The best ``num_hypotheses`` that a beam finds for one source closed by ``</s>``, best first. See ``Search``."""
    return beam_search_together(model, [source], options, special)[0]


@torch.inference_mode()
def beam_search_together(
    model: Transformer, sources: Sequence[Sequence[int]], options: BeamOptions, special: SpecialIds = SPECIAL_IDS
) -> list[list[Hypothesis]]:
    """``beam_search`` of several sources in one batch: a row for each beam, those of one source side by side.

    The model must be in evaluation mode.
    """
    lengths, memory, past = encode_sources(model, sources, special)
    searches = [Search(options, special.eos) for _ in sources]
    owners = list(range(len(sources)))  # the source of each row
    count = 2 * options.beam_size
    for step in range(options.max_new_tokens):
        alive = [search for search in searches if search.beams]
        read = [beam.tokens[-1] if beam.tokens else special.decoder_start for search in alive for beam in search.beams]
        tokens, cached = torch.tensor(read, device=lengths.device), torch.full_like(lengths, step)  # 2 x (R,)
        logits, past = model.step(tokens, cached, with_room(past, step), memory, lengths)  # (R, V)
        log_probs, ids = most_probable(allowed_log_probs(logits, special), count)
        first, origins = 0, []
        for search in alive:
            end = first + len(search.beams)
            ranked = best_continuations(search.beams, log_probs[first:end], ids[first:end], count)
            search.advance(ranked, last=step + 1 == options.max_new_tokens)
            origins += [first + beam.origin for beam in search.beams]
            first = end
        if not origins:
            break
        next_owners = [owners[row] for row in origins]
        rows = torch.tensor(origins, device=lengths.device)  # (R of the next step,)
        if origins != list(range(first)):
            past = take_rows(past, rows)
        if next_owners != owners:
            memory, lengths = take_rows(memory, rows), lengths[rows]
        owners = next_owners
    return [search.best() for search in searches]


def beam_search_all(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    options: BeamOptions,
    special: SpecialIds = SPECIAL_IDS,
    batch_rows: int = 256,
) -> list[list[Hypothesis]]:
    """``beam_search`` of any number of sources, in their order; those of near-equal length are searched together."""
    return in_groups(
        sources,
        max(1, batch_rows // options.beam_size),
        lambda groups: (beam_search_together(model, group, options, special) for group in groups),
    )
