"""Beam search over rows of the slot table. No tensors: ranks, totals, and which row's prefix is copied where.

The semantics are those of CTranslate2's ``translate_batch`` (version 4). Each step ranks the 2 x ``beam_size`` best
continuations of all beams, ties going to the better beam and then to the smaller id. Of the first ``beam_size``, those
that end are finished, and their places go to the next continuations that do not end; endings of lower rank are dropped.
In the last step, all of the first ``beam_size`` are finished. The search stops when ``beam_size`` x ``patience``
hypotheses are finished; without length penalty already when one that was ranked first is, and ``num_hypotheses`` are in
all. A beam that may choose nothing is dropped; when none is left and nothing was finished, the request fails.

With a coverage penalty, which is not known here, whoever asked ranks anew: the search never ends before ``beam_size`` x
``patience``, and hands over all that was finished. Beside ``stop`` texts, a beam that cannot go on may have had its end
long ago: it is handed over, too, with its error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from dragoman.engine.choice import Offers, Ranked
from dragoman.engine.repetition import loops
from dragoman.engine.search import Hypothesis, Progress, check_usable
from dragoman.errors import ImpossibleError
from dragoman.types import FinishReason, GenerationRequest, HypothesisResult


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam and one more token."""

    origin: int  # the place of the beam among the live ones
    token: int
    log_prob: float
    total: float


@dataclass(slots=True)
class Beam:
    """A live partial answer, and the row that holds its prefix."""

    row: Hypothesis
    total: float  # the sum of log-probabilities


_NOTHING: Final = Ranked([], [])


class BeamSearch:
    """One request's beams: ``beam_size`` rows, of which each live beam owns one."""

    def __init__(self, request: GenerationRequest, decoder_start: int, eos: int) -> None:
        self._request, self._eos = request, eos
        self.rows = [Hypothesis(decoder_start) for _ in range(request.search.beam_size)]
        # Until they part, all rows read the same: the first stands for all.
        self._beams = [Beam(self.rows[0], 0.0)]
        self._is_ranked_anew = bool(request.stop) or request.search.coverage_penalty != 0
        self._parted = False
        self._finished: list[tuple[float, Hypothesis]] = []  # with their scores
        self._failed: list[tuple[float, Hypothesis]] = []  # with their scores; kept beside stop texts alone
        self._first_finished = False
        self._num_steps = 0  # behind the prefix
        self._num_certain = 0  # tokens that all hypotheses have in common and that were told

    def deciding(self) -> list[Hypothesis]:
        if len(self.rows[0].tokens) < len(self._request.prefix) and not self._parted:
            return []
        return [beam.row for beam in self._beams]

    def advance(self, offers: Offers) -> Progress:
        place = len(self.rows[0].tokens)
        if not self._parted and place < len(self._request.prefix):
            for row in self.rows:
                row.append(self._request.prefix[place])
            progress = Progress([])
        else:
            self._num_steps += 1
            progress = self._advance(offers)
        self._tell(progress)
        return progress

    def _advance(self, offers: Offers) -> Progress:
        size = self._request.search.beam_size
        offered = [self._offered(beam, offers) for beam in self._beams]
        best = sorted(
            (-(beam.total + log_prob), origin, token, log_prob)
            for origin, (beam, ranked) in enumerate(zip(self._beams, offered, strict=True))
            for token, log_prob in zip(ranked.tokens[: 2 * size], ranked.log_probs, strict=False)
        )[: 2 * size]
        ranked = [Continuation(origin, token, log_prob, -cost) for cost, origin, token, log_prob in best]
        last = self._num_steps == self._request.max_new_tokens
        spare = iter([c for c in ranked[size:] if c.token != self._eos])
        going: list[Continuation] = []
        for rank, continuation in enumerate(ranked[:size]):
            if reason := self._end(continuation, last=last):
                self._finish(continuation, reason, offered)
                self._first_finished = self._first_finished or rank == 0
                going += [c for c in [next(spare, None)] if c is not None]
            else:
                going.append(continuation)
        if last or self._enough():
            going = []
        if not going and not self._finished and not self._failed:  # several beams, and none may choose anything
            check_usable(-math.inf, len(self._beams[0].row.tokens))
        forks = self._go_on(going, offered)
        if going:
            return Progress([], forks)
        self._finished.sort(key=lambda finished: -finished[0])
        released, self.rows = self.rows, []
        return Progress([], forks, released, finished=True)

    def _offered(self, beam: Beam, offers: Offers) -> Ranked:
        """What a beam may go on with: nothing, where all is forbidden to it, or it cannot go on."""
        row = beam.row
        try:
            value = offers.value(row.slot)
            if value == -math.inf and (len(self._beams) > 1 or self._finished) and not self._request.stop:
                return _NOTHING
            check_usable(value, len(row.tokens))
            # The search looks at the first 2 x beam_size; more are for an answer that tells more.
            return offers.ranked(row.slot, max(2 * self._request.search.beam_size, self._request.num_top))
        except Exception as error:  # whatever it was, it is this beam's alone
            if not self._request.stop:
                raise
            self._set_aside(beam, error)
            return _NOTHING

    def _set_aside(self, beam: Beam, error: Exception) -> None:
        """A beam that cannot go on, if it is one of the best of these. Those without numbers are told in any case."""
        row = Hypothesis(0, [*beam.row.tokens], [*beam.row.token_scores], beam.row.top)
        row.fail(error)
        self._failed.append((self._score(beam.total, len(row.token_scores)), row))
        self._failed.sort(key=lambda failed: (isinstance(failed[1].error, ImpossibleError), -failed[0]))
        del self._failed[self._request.search.beam_size :]

    def _end(self, continuation: Continuation, *, last: bool) -> FinishReason | None:
        """Why a continuation ends here, if it does."""
        if continuation.token == self._eos:
            return FinishReason.STOP
        if last:
            return FinishReason.LENGTH
        if self._request.stop_at_loops:
            tokens = [*self._beams[continuation.origin].row.tokens, continuation.token]
            return FinishReason.REPETITION if loops(tokens, len(self._request.prefix)) else None
        return None

    def _enough(self) -> bool:
        search = self._request.search
        if search.length_penalty == search.coverage_penalty == 0:  # scores only fall
            return self._first_finished and len(self._finished) >= search.num_hypotheses
        return len(self._finished) >= max(1, math.floor(search.beam_size * search.patience + 0.5))

    def _finish(self, continuation: Continuation, reason: FinishReason, offered: list[Ranked]) -> None:
        row = self._continued(continuation, offered)
        if continuation.token != self._eos:
            row.tokens.append(continuation.token)
        row.finish_reason = reason
        self._finished.append((self._score(continuation.total, len(row.token_scores)), row))

    def _score(self, total: float, length: int) -> float:
        score: float = total / max(1, length) ** self._request.search.length_penalty
        return score

    def _continued(self, continuation: Continuation, offered: list[Ranked]) -> Hypothesis:
        """The origin's tokens, and one score more: a copy that owns no slot."""
        origin = self._beams[continuation.origin].row
        top = origin.top
        if count := self._request.num_top:
            first = offered[continuation.origin]
            top = [*top, Ranked(first.tokens[:count], first.log_probs[:count])]
        return Hypothesis(continuation.token, [*origin.tokens], [*origin.token_scores, continuation.log_prob], top)

    def _go_on(self, going: list[Continuation], offered: list[Ranked]) -> list[tuple[Hypothesis, Hypothesis]]:
        """Give each continuation a row: its origin's, or where another has it, one that none comes from.

        Returns the rows to copy, and what to.
        """
        continued = [self._continued(continuation, offered) for continuation in going]
        origins = [self._beams[continuation.origin].row for continuation in going]
        wanted = {id(row) for row in origins}
        free = [row for row in self.rows if id(row) not in wanted]
        beams, used, forks = [], set[int](), []
        for continuation, new, origin in zip(going, continued, origins, strict=True):
            row = origin
            if id(origin) in used:
                row = free.pop(0)
                if self._parted:
                    forks.append((origin, row))
            used.add(id(row))
            beams.append((row, new, continuation))
        for row, new, continuation in beams:
            row.tokens, row.token_scores, row.top = new.tokens, new.token_scores, new.top
            row.append(continuation.token)
        self._beams = [Beam(row, continuation.total) for row, _, continuation in beams]
        self._parted = True
        return forks

    def _tell(self, progress: Progress) -> None:
        """The tokens that every answer will have: those that all live and finished hypotheses begin with."""
        answers = [row.tokens for _, row in self._finished + self._failed]
        if progress.finished and not self._is_ranked_anew:
            answers = answers[:1]
        elif not progress.finished:
            answers += [beam.row.tokens for beam in self._beams]
        first, place = answers[0], self._num_certain
        shortest = min(map(len, answers))
        while place < shortest and all(tokens[place] == first[place] for tokens in answers):
            place += 1
        progress.tokens = first[self._num_certain : place]
        self._num_certain = place

    def stop(self) -> None:
        raise AssertionError("a beam search ends by itself; its texts are cut at the end")

    def results(self) -> tuple[HypothesisResult, ...]:
        scored = self._request.return_scores
        count = None if self._request.search.coverage_penalty else self._request.search.num_hypotheses
        return tuple(row.result(score if scored else None) for score, row in self._finished[:count] + self._failed)

    def num_tokens(self) -> int:
        rows = [row for _, row in self._finished[: self._request.search.num_hypotheses]]
        return sum(len(row.tokens) - len(self._request.prefix) for row in rows)
