"""How one request's rows go on after each step: token by token, each row by itself. Beams: ``beam.py``.

No tensors: a search asks ``Offers`` for what a step's logits hold.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Final, Protocol

from dragoman.engine.choice import Offers, Ranked
from dragoman.engine.repetition import loops
from dragoman.engine.sampling import Sampler
from dragoman.errors import DragomanError, ImpossibleError, RowError
from dragoman.types import FinishReason, GenerationRequest, HypothesisResult

logger = logging.getLogger(__name__)

_INFINITY: Final = math.inf


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
    error: DragomanError | None = None

    def append(self, token: int) -> None:
        """Go on with a token, which the next step feeds."""
        self.tokens.append(token)
        self.next_input = token

    def fail(self, error: Exception) -> None:
        """End here, as this hypothesis cannot go on."""
        self.error, self.finish_reason = failure(error), FinishReason.CANCELLED

    def result(self, score: float | None) -> HypothesisResult:
        """The finished answer. Without a score, none was asked for."""
        assert self.finish_reason is not None
        scores = None if score is None else tuple(self.token_scores)
        top = tuple(tuple(zip(step.tokens, step.log_probs, strict=True)) for step in self.top)
        return HypothesisResult(tuple(self.tokens), self.finish_reason, score, scores, top, self.error)


@dataclass(slots=True)
class Progress:
    """What one step did to one request."""

    tokens: list[int]  # the next of those that its best answer is certain to have
    forks: Rows[tuple[Hypothesis, Hypothesis]] = ()  # copy the first row's prefix to the other
    released: Rows[Hypothesis] = ()  # rows that are done
    finished: bool = False


class Search(Protocol):
    """The rows of one request, and what becomes of them."""

    rows: list[Hypothesis]
    """Those that own slots."""

    def deciding(self) -> list[Hypothesis]:
        """The rows whose logits the next ``advance`` reads: none while a prefix is fed."""

    def advance(self, offers: Offers) -> Progress:
        """Take a step. Raises RowError or ImpossibleError when a row cannot go on: the request fails alone.

        Where the caller is going to cut the answers (``request.stop``), that row alone ends, with its error.
        """

    def stop(self) -> None:
        """End now: the text has what it was to end with."""

    def results(self) -> tuple[HypothesisResult, ...]:
        """The answers, best first, of a search that is finished."""

    def num_tokens(self) -> int:
        """How many tokens were produced so far, over all answers."""


def check_usable(value: float, num_tokens: int) -> None:
    """Raises ImpossibleError where nothing may come, and RowError unless the best logit is a finite number."""
    if -math.inf < value < math.inf:  # not so for NaN
        return
    if value == -math.inf:
        raise ImpossibleError(
            f"after {num_tokens} tokens, none is left that may come: loosen suppress_tokens, suppress_sequences, "
            "no_repeat_ngram_size or min_new_tokens"
        )
    raise RowError(f"the model gave no finite score after {num_tokens} tokens of this request")


def failure(error: Exception) -> DragomanError:
    """What the caller of a request is told that failed by an exception of its own."""
    if isinstance(error, DragomanError):
        return error
    logger.error("a request failed", exc_info=error)
    return RowError("decoding this request failed by an error of the server, which its log has")


class TokenSearch:
    """Each row on its own: the best token at each step, or one drawn by chance; ``num_hypotheses`` rows of it.

    With ``alternatives``, the rows part at the first token behind the prefix: the best one, the second best, and so on,
    each continued greedily.
    """

    def __init__(self, request: GenerationRequest, decoder_start: int, eos: int) -> None:
        self._request, self._eos = request, eos
        self._prefix = (*request.prefix, eos) if request.score_prefix else request.prefix
        self._num_forced = len(self._prefix)
        self._most = math.inf if request.score_prefix else self._num_forced + request.max_new_tokens
        self.rows = [Hypothesis(decoder_start) for _ in range(request.search.num_hypotheses)]
        self._all = list(self.rows)
        self._tells = len(self.rows) == 1  # of several, which is the best shows at the end
        self._scores = request.return_scores or len(self.rows) > 1
        self._parts = request.search.alternatives
        if request.search.temperature > 0:
            for number, row in enumerate(self.rows):
                row.sampler = Sampler(request.search, number)

    def deciding(self) -> list[Hypothesis]:
        if self._request.score_prefix or (self.rows and len(self.rows[0].tokens) >= self._num_forced):
            return self.rows
        return []

    def advance(self, offers: Offers) -> Progress:
        if self._parts and len(self.rows[0].tokens) >= self._num_forced:
            tokens = self._part(offers)
        else:
            tokens = []
            for row in self.rows:
                try:
                    token = self._step(row, offers)
                except Exception as error:  # whatever it was, it is this row's alone
                    if not self._request.stop:
                        raise
                    row.fail(error)
                else:
                    if token is not None:
                        tokens.append(token)
        if not self._tells:
            tokens = []
        released = [row for row in self.rows if row.finish_reason is not None]
        if not released:
            return Progress(tokens)
        self.rows = [row for row in self.rows if row.finish_reason is None]
        return Progress(tokens, released=released, finished=not self.rows)

    def _step(self, row: Hypothesis, offers: Offers) -> int | None:
        """The token that the row goes on with; None where it ended without one."""
        place = len(row.tokens)
        is_forced = place < self._num_forced
        if is_forced and not self._request.score_prefix:
            row.append(self._prefix[place])
            return self._prefix[place]
        slot = row.slot
        value = offers.value(slot)
        if not -_INFINITY < value < _INFINITY:  # so for NaN, too
            check_usable(value, place)
        if is_forced:
            token = self._prefix[place]
        else:
            token = offers.best(slot) if row.sampler is None else offers.draw(slot, row.sampler)
        if self._scores:
            row.token_scores.append(offers.log_prob(slot, token))
        return self._take(row, token, offers)

    def _take(self, row: Hypothesis, token: int, offers: Offers) -> int | None:
        request = self._request
        if request.num_top:
            row.top.append(offers.ranked(row.slot, request.num_top))
        if token == self._eos:
            row.finish_reason = FinishReason.STOP
            return None
        row.append(token)
        if len(row.tokens) >= self._most:
            row.finish_reason = FinishReason.LENGTH
        elif request.stop_at_loops and loops(row.tokens, self._num_forced):
            row.finish_reason = FinishReason.REPETITION
        return token

    def _part(self, offers: Offers) -> list[int]:
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
            self._take(row, token, offers)
        for row in self.rows[len(found.tokens) :]:  # fewer tokens may come than alternatives were asked for
            row.finish_reason = FinishReason.CANCELLED
            self._all.remove(row)
        return found.tokens

    def stop(self) -> None:
        for row in self.rows:
            row.finish_reason = FinishReason.STOP_SEQUENCE

    def results(self) -> tuple[HypothesisResult, ...]:
        # Alternatives keep the order of their first tokens; what was drawn is ranked by its probability.
        rows = self._all
        if len(rows) > 1 and not self._request.search.alternatives:
            rows = sorted(rows, key=lambda row: -sum(row.token_scores))
        return tuple(row.result(sum(row.token_scores) if self._request.return_scores else None) for row in rows)

    def num_tokens(self) -> int:
        return sum(max(0, len(row.tokens) - len(self._request.prefix)) for row in self._all)
