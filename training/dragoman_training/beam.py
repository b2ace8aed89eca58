"""Reference beam search in plain PyTorch. What it shares with greedy search, and the semantics: ``decode.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dragoman_training.coverage import attention_weights, coverage_penalty
from dragoman_training.decode import (
    Hypothesis,
    each_prefix,
    encode_sources,
    in_groups,
    nothing_left,
    take_rows,
    with_room,
)
from dragoman_training.model import Transformer
from dragoman_training.steering import NO_STEERING, Steering, Written, allowed_log_probs, check_limits
from dragoman_training.tokenizer import SPECIAL_IDS, SpecialIds


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """How to search. Raises ValueError for values without a meaning and for those that contradict each other."""

    beam_size: int
    max_new_tokens: int
    num_hypotheses: int = 1  # at most beam_size, and at most as many as patience waits for
    length_penalty: float = 1.0
    patience: float = 1.0  # so many times beam_size hypotheses are waited for (Kasai et al. 2022)
    coverage_penalty: float = 0.0  # weight of the penalty for source tokens that got little attention (``coverage.py``)
    steering: Steering = NO_STEERING

    def __post_init__(self) -> None:
        check_limits(self.max_new_tokens, self.steering)
        for name in ("length_penalty", "patience", "coverage_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}: it must be a finite number")
        if not 1 <= self.num_hypotheses <= self.beam_size:
            raise ValueError(f"num_hypotheses is {self.num_hypotheses}: it must be 1 to beam_size ({self.beam_size})")
        if self.num_hypotheses > self.enough:
            raise ValueError(
                f"num_hypotheses is {self.num_hypotheses}: it must be at most beam_size x patience"
                f" ({self.beam_size} x {self.patience})"
            )

    @property
    def enough(self) -> int:
        """The search stops when so many hypotheses are finished: beam_size x patience, halves rounded up."""
        return math.floor(self.beam_size * self.patience + 0.5)

    @property
    def may_end_early(self) -> bool:
        """Whether scores are plain sums, which only fall: the search may then end with its first rank."""
        return self.length_penalty == 0 and self.coverage_penalty == 0


@dataclass(frozen=True)
class Candidate:
    """A continuation of one beam by one token."""

    total: float
    origin: int  # the beam it continues
    tokens: list[int]  # with the prefix
    log_probs: list[float]  # of what comes behind the prefix


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
    score = candidate.total / len(candidate.log_probs) ** length_penalty
    if candidate.tokens[-1] == eos:
        return Hypothesis(candidate.tokens[:-1], candidate.log_probs, score, "stop")
    return Hypothesis(candidate.tokens, candidate.log_probs, score, "length")


class Search:
    """The beam search of one source: which beams live, what is finished. It knows no tensors.

    While the prefix lasts, one beam is fed with it. Behind it, each step ranks the 2 x ``beam_size`` best
    continuations. Of the first ``beam_size``, those that end with ``</s>`` are finished, and their places go to the
    next continuations that do not end; endings of lower rank are dropped. In the last step, all of the first
    ``beam_size`` are finished. The search stops when ``beam_size`` x ``patience`` hypotheses are finished; without
    length and coverage penalty instead when one that was ranked first, and ``num_hypotheses`` in all, are.
    """

    def __init__(self, options: BeamOptions, eos: int, prefix: Sequence[int] = ()) -> None:
        self.options, self.eos, self.prefix = options, eos, prefix
        self.beams = [Candidate(0.0, 0, [], [])]
        self.finished: list[Hypothesis] = []
        self.first_finished = False

    def written(self) -> list[Written]:
        """What each beam holds."""
        return [Written(beam.tokens, len(self.prefix)) for beam in self.beams]

    def advance(self, ranked: Sequence[Candidate]) -> None:
        """Take the ranked continuations of one step; no beam is left when the search has stopped."""
        options, fed = self.options, self.beams[0].tokens
        if len(fed) < len(self.prefix):
            self.beams = [Candidate(0.0, 0, [*fed, self.prefix[len(fed)]], [])]
            return
        last = len(fed) + 1 == len(self.prefix) + options.max_new_tokens
        spare = iter([c for c in ranked[options.beam_size :] if c.tokens[-1] != self.eos])
        self.beams = []
        for rank, candidate in enumerate(ranked[: options.beam_size]):
            if last or candidate.tokens[-1] == self.eos:
                self.finished.append(finish(candidate, options.length_penalty, self.eos))
                self.first_finished = self.first_finished or rank == 0
                self.beams.extend(c for c in [next(spare, None)] if c is not None)
            else:
                self.beams.append(candidate)
        enough = len(self.finished) >= options.enough
        if options.may_end_early:
            enough = self.first_finished and len(self.finished) >= options.num_hypotheses
        if last or enough:
            self.beams = []

    def best(self) -> list[Hypothesis]:
        """The best ``num_hypotheses`` finished, best first; fewer where no more can be."""
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        return self.finished[: self.options.num_hypotheses]


def beam_search(
    model: Transformer,
    source: Sequence[int],
    options: BeamOptions,
    special: SpecialIds = SPECIAL_IDS,
    *,
    prefix: Sequence[int] = (),
) -> list[Hypothesis]:
    """The best ``num_hypotheses`` that a beam finds for one source closed by ``</s>``, best first. See ``Search``."""
    return beam_search_together(model, [source], options, special, prefixes=[prefix])[0]


@torch.inference_mode()
def beam_search_together(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    options: BeamOptions,
    special: SpecialIds = SPECIAL_IDS,
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """``beam_search`` of several sources in one batch: a row for each beam, those of one source side by side.

    ``prefixes``, one a source, are what the hypotheses begin with. The model must be in evaluation mode. Raises
    ``DecodingError`` where the steering lets a source have no hypothesis at all.
    """
    lengths, memory, past = encode_sources(model, sources, special)
    searches = [Search(options, special.eos, prefix) for prefix in each_prefix(sources, prefixes)]
    owners = list(range(len(sources)))  # the source of each row
    count, step = 2 * options.beam_size, 0
    while owners:
        alive = [search for search in searches if search.beams]
        written = [so_far for search in alive for so_far in search.written()]
        read = [so_far.tokens[-1] if so_far.tokens else special.decoder_start for so_far in written]
        tokens, cached = torch.tensor(read, device=lengths.device), torch.full_like(lengths, step)  # 2 x (R,)
        logits, past = model.step(tokens, cached, with_room(past, step), memory, lengths)  # (R, V)
        log_probs, ids = most_probable(allowed_log_probs(logits, special, options.steering, written), count)
        first, origins = 0, []
        for search in alive:
            end = first + len(search.beams)
            search.advance(best_continuations(search.beams, log_probs[first:end], ids[first:end], count))
            origins += [first + beam.origin for beam in search.beams]
            first = end
        next_owners = [owners[row] for row in origins]
        rows = torch.tensor(origins, dtype=torch.int64, device=lengths.device)  # (R of the next step,)
        if origins != list(range(first)):
            past = take_rows(past, rows)
        if next_owners != owners:
            memory, lengths = take_rows(memory, rows), lengths[rows]
        owners = next_owners
        step += 1
    for index, (source, search) in enumerate(zip(sources, searches, strict=True)):
        if not search.finished:
            raise nothing_left(index, step - 1)
        if options.coverage_penalty != 0:
            search.finished = [covered(model, source, found, options, special) for found in search.finished]
    return [search.best() for search in searches]


def covered(
    model: Transformer, source: Sequence[int], found: Hypothesis, options: BeamOptions, special: SpecialIds
) -> Hypothesis:
    """The hypothesis with the coverage penalty in its score."""
    read = [special.decoder_start, *found.tokens]
    if found.finish_reason == "length":  # its last token was written, but not read
        read.pop()
    penalty = coverage_penalty(attention_weights(model, source, read))
    return replace(found, score=found.score + options.coverage_penalty * penalty)


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
