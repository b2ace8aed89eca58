"""How one request's rows go on after each step: token by token, each row by itself. Beams: ``beam.py``.

No tensors: a search asks ``Offers`` for what a step's logits hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from dragoman.engine.choice import Offers, Ranked
from dragoman.engine.repetition import loops
from dragoman.engine.sampling import Sampler
from dragoman.errors import ImpossibleError, RowError
from dragoman.types import FinishReason, GenerationRequest, HypothesisResult


@dataclass(slots=True, eq=False)
class Hypothesis:
    """One partial answer: a row of the decoding step. ``slot`` is -1 while it owns none."""

    next_input: int  # the token that the next step feeds
    tokens: list[int] = field(default_factory=list)  # with the prefix, without the end token
    token_scores: list[float] = field(default_factory=list)  # of those behind the prefix, with the end token's
    top: list[Ranked] = field(default_factory=list)  # for each of these, if asked for
    slot: int = -1
    finish_reason: FinishReason | None = None
    sampler: Sampler | None = None

    def append(self, token: int) -> None:
        """Go on with a token, which the next step feeds."""
        self.tokens.append(token)
        self.next_input = token

    def result(self, score: float | None) -> HypothesisResult:
        """The finished answer. Without a score, none was asked for."""
        assert self.finish_reason is not None
        scores = None if score is None else tuple(self.token_scores)
        top = tuple(tuple(zip(step.tokens, step.log_probs, strict=True)) for step in self.top)
        return HypothesisResult(tuple(self.tokens), self.finish_reason, score, scores, top)


@dataclass(slots=True)
class Progress:
    """What one step did to one request."""

    tokens: list[int] = field(default_factory=list)  # the next of those that its best answer is certain to have
    forks: list[tuple[Hypothesis, Hypothesis]] = field(default_factory=list)  # copy the first row's prefix to the other
    released: list[Hypothesis] = field(default_factory=list)  # rows that are done
    finished: bool = False


class Search(Protocol):
    """The rows of one request, and what becomes of them."""

    rows: list[Hypothesis]
    """Those that own slots."""

    def deciding(self) -> list[Hypothesis]:
        """The rows whose logits the next ``advance`` reads: none while a prefix is fed."""

    def advance(self, offers: Offers) -> Progress:
        """Take a step. Raises RowError or ImpossibleError when a row cannot go on: the request fails alone."""

    def stop(self, reason: FinishReason = FinishReason.STOP_SEQUENCE) -> None:
        """End now; by default because the text has what it was to end with."""

    def results(self) -> tuple[HypothesisResult, ...]:
        """The answers, best first, of a search that is finished."""

    def num_tokens(self) -> int:
        """How many tokens were produced so far, over all answers."""


def check_usable(value: float, num_tokens: int) -> None:
    """Raises ImpossibleError where nothing may come, and RowError unless the best logit is a finite number."""
    if value == -math.inf:
        raise ImpossibleError(
            f"after {num_tokens} tokens, none is left that may come: loosen suppress_tokens, suppress_sequences, "
            "no_repeat_ngram_size or min_new_tokens"
        )
    if not abs(value) < float("inf"):  # written so that NaN fails
        raise RowError(f"the model gave no finite score after {num_tokens} tokens of this request")


class TokenSearch:
    """Each row on its own: the best token at each step, or one drawn by chance; ``num_hypotheses`` rows of it.

    With ``alternatives``, the rows part at the first token behind the prefix: the best one, the second best, and so on,
    each continued greedily.
    """

    def __init__(self, request: GenerationRequest, decoder_start: int, eos: int) -> None:
        self._request, self._eos = request, eos
        self._prefix = (*request.prefix, eos) if request.score_prefix else request.prefix
        self.rows = [Hypothesis(decoder_start) for _ in range(request.search.num_hypotheses)]
        self._all = list(self.rows)
        self._tells = len(self.rows) == 1  # of several, which is the best shows at the end
        self._scores = request.return_scores or len(self.rows) > 1
        self._parts = request.search.alternatives
        if request.search.temperature > 0:
            for number, row in enumerate(self.rows):
                row.sampler = Sampler(request.search, number)

    def deciding(self) -> list[Hypothesis]:
        if self._request.score_prefix or (self.rows and len(self.rows[0].tokens) >= len(self._prefix)):
            return self.rows
        return []

    def advance(self, offers: Offers) -> Progress:
        progress = Progress()
        if self._parts and len(self.rows[0].tokens) >= len(self._prefix):
            self._part(offers, progress)
        else:
            for row in self.rows:
                self._step(row, offers, progress)
        if progress.released:
            self.rows = [row for row in self.rows if row.finish_reason is None]
        progress.finished = not self.rows
        return progress

    def _step(self, row: Hypothesis, offers: Offers, progress: Progress) -> None:
        place = len(row.tokens)
        if place < len(self._prefix):
            token = self._prefix[place]
            if not self._request.score_prefix:
                row.append(token)
                if self._tells:
                    progress.tokens.append(token)
                return
        check_usable(offers.value(row.slot), place)
        if not place < len(self._prefix):
            token = offers.best(row.slot) if row.sampler is None else offers.draw(row.slot, row.sampler)
        if self._scores:
            row.token_scores.append(offers.log_prob(row.slot, token))
        self._take(row, token, offers, progress)

    def _take(self, row: Hypothesis, token: int, offers: Offers, progress: Progress) -> None:
        request = self._request
        if request.num_top:
            row.top.append(offers.ranked(row.slot, request.num_top))
        if token == self._eos:
            row.finish_reason = FinishReason.STOP
        else:
            row.append(token)
            if self._tells:
                progress.tokens.append(token)
            if not request.score_prefix and len(row.tokens) - len(self._prefix) >= request.max_new_tokens:
                row.finish_reason = FinishReason.LENGTH
            elif request.stop_at_loops and loops(row.tokens, len(self._prefix)):
                row.finish_reason = FinishReason.REPETITION
        if row.finish_reason is not None:
            progress.released.append(row)

    def _part(self, offers: Offers, progress: Progress) -> None:
        """The first step of alternatives. All rows have read the same, so that nothing need be copied."""
        self._parts = False
        first = self.rows[0]
        check_usable(offers.value(first.slot), len(first.tokens))
        # To end is no alternative: probabilities are over the others.
        found = offers.ranked(first.slot, len(self.rows), without=self._eos)
        if not found.tokens:
            check_usable(-math.inf, len(first.tokens))
        for row, token, score in zip(self.rows, found.tokens, found.log_probs, strict=False):
            if self._scores:
                row.token_scores.append(score)
            self._take(row, token, offers, progress)
        for row in self.rows[len(found.tokens) :]:  # fewer tokens may come than alternatives were asked for
            row.finish_reason = FinishReason.CANCELLED
            progress.released.append(row)
            self._all.remove(row)

    def stop(self, reason: FinishReason = FinishReason.STOP_SEQUENCE) -> None:
        for row in self.rows:
            row.finish_reason = reason

    def results(self) -> tuple[HypothesisResult, ...]:
        # Alternatives keep the order of their first tokens; what was drawn is ranked by its probability.
        rows = self._all
        if len(rows) > 1 and not self._request.search.alternatives:
            rows = sorted(rows, key=lambda row: -sum(row.token_scores))
        return tuple(row.result(sum(row.token_scores) if self._request.return_scores else None) for row in rows)

    def num_tokens(self) -> int:
        return sum(max(0, len(row.tokens) - len(self._request.prefix)) for row in self._all)
