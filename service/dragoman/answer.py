"""Answers as callers see them: text, tokens by name, numbers. The same for the server and its clients."""

from __future__ import annotations

from dataclasses import dataclass

from dragoman.alignment import AlignmentPoint, Span
from dragoman.types import FinishReason, Timing


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the most probable tokens at a position."""

    token: str
    log_probability: float


@dataclass(frozen=True, slots=True)
class TextHypothesis:
    """One answer to one segment."""

    text: str
    # With the prefix, without the end token; "<unk>" where the text has a copied word, a substitute's where it has a
    # protected span.
    tokens: tuple[str, ...]
    finish_reason: FinishReason
    # If scores were asked for: what answers are ranked by (of beam search, the sum of log-probabilities divided by
    # length ** length_penalty, with the coverage penalty; else the sum); the log-probability of each token behind the
    # prefix, and of the end token if the model produced it; and their sum.
    score: float | None = None
    token_scores: tuple[float, ...] | None = None
    log_probability: float | None = None
    alignment: tuple[AlignmentPoint, ...] = ()  # one for each token, if asked for
    top_tokens: tuple[tuple[TopToken, ...], ...] = ()  # for each score, if asked for
    unprotected: tuple[Span, ...] = ()  # of the spans to protect, in characters of the whole text, those not in it once


@dataclass(frozen=True, slots=True)
class TextSegment:
    """One segment of the text (characters ``start`` to ``end``) and its answers, best first.

    ``source_tokens`` are what the points of an alignment count, if one was asked for. ``continues``: the sentence goes
    on in the next segment, as it was too long for the model.
    """

    start: int
    end: int
    hypotheses: tuple[TextHypothesis, ...]
    source_tokens: tuple[str, ...] = ()
    continues: bool = False


@dataclass(frozen=True, slots=True)
class TextResult:
    """The whole answer to one text."""

    text: str
    segments: tuple[TextSegment, ...]
    num_source_tokens: int
    num_generated_tokens: int  # of all answers, without prefixes and end tokens
    timing: Timing
    seed: int | None = None  # what was drawn by chance was drawn with it


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """A piece of one segment's answer: ``delta`` is appended to what came before; ``result`` ends the hypothesis."""

    segment: int
    hypothesis: int
    delta: str
    result: TextHypothesis | None = None
    source: Span = (0, 0)  # where in the text the segment stands


@dataclass(frozen=True, slots=True)
class TextScore:
    """How probable a given answer is: the log-probability of each of its tokens, and of the end token behind them."""

    tokens: tuple[str, ...]
    token_scores: tuple[float, ...]
    log_probability: float  # their sum
    num_source_tokens: int
    timing: Timing
