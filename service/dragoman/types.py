"""The vocabulary: frozen values and protocols that cross the borders between edge, engine and runner.

No wire type, no tensor library beyond numpy's array type, no behaviour beyond validation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dragoman.errors import DragomanError, InvalidRequestError, UnsupportedError

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
TokenIds = tuple[int, ...]


class FinishReason(StrEnum):
    """Why a hypothesis ended."""

    STOP = "stop"
    LENGTH = "length"
    STOP_SEQUENCE = "stop_sequence"
    REPETITION = "repetition"
    CANCELLED = "cancelled"


MAX_NEW_TOKENS_EVER = 1_000_000
"""Above this a number is a mistake, whatever the model: refused instead of being capped."""


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """How one request wants to be decoded. ``None`` means the model's own default.

    Raises ``InvalidRequestError`` for a value that no server could honour, ``UnsupportedError`` for a sensible one
    that this engine does not implement: nothing is ignored in silence. This engine decodes greedily.
    """

    max_new_tokens: int | None = None  # decoding steps, 1 or more; more than the model's limit is capped to it
    beam_size: int = 1  # 1 is greedy search
    num_hypotheses: int = 1  # at most beam_size
    length_penalty: float = 1.0  # of beam search; has no effect on greedy search
    temperature: float = 0.0  # 0 is greedy search
    return_scores: bool = False  # log-probability of each token, and their sum

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            _check("max_new_tokens", self.max_new_tokens, 1, MAX_NEW_TOKENS_EVER)
        _check("beam_size", self.beam_size, 1, 1024)
        _check("num_hypotheses", self.num_hypotheses, 1, self.beam_size)
        _check("length_penalty", self.length_penalty, -10.0, 10.0)
        _check("temperature", self.temperature, 0.0, 100.0)
        if self.beam_size != 1:
            raise UnsupportedError(f"beam_size is {self.beam_size}; this server decodes greedily: use beam_size 1")
        if self.temperature != 0.0:
            raise UnsupportedError(f"temperature is {self.temperature}; this server does not sample: use temperature 0")


def _check(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:  # written so that NaN fails
        raise InvalidRequestError(f"{name} is {value}; it must be from {low} to {high}")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One source, tokenized, as the engine sees it."""

    source: TokenIds  # with the source template's start and end tokens; never empty
    max_new_tokens: int  # resolved against the model's limit, 1 or more
    return_scores: bool = False
    deadline: float | None = None  # on time.monotonic()'s clock

    def __post_init__(self) -> None:
        # Attention over nothing is NaN on one provider and finite on another: no row ever has length 0.
        if not self.source or self.max_new_tokens < 1:
            raise InvalidRequestError(
                f"source has {len(self.source)} tokens and max_new_tokens is {self.max_new_tokens}; "
                "both must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class HypothesisResult:
    """One finished answer. ``tokens`` are without the end token; ``token_scores``, if asked for, with it."""

    tokens: TokenIds
    finish_reason: FinishReason
    score: float | None = None
    token_scores: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Where one request's time went, in seconds."""

    queue_seconds: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    total_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The end of one request."""

    hypotheses: tuple[HypothesisResult, ...]
    num_source_tokens: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class GenerationUpdate:
    """What one or more steps added to one request: new tokens, and the result with the last of them."""

    tokens: TokenIds
    result: GenerationResult | None = None


class Runner(Protocol):
    """The engine's only seam to a model: rows of KV state that advance together. One thread at a time.

    Slots are row numbers. The active rows are always 0..R-1: the engine moves the last row into a freed one.
    """

    @property
    def num_slots(self) -> int:
        """How many rows there are."""

    @property
    def kv_cache_bytes(self) -> int:
        """Memory that the rows' state takes now."""

    def reserve(self, num_source_tokens: int, max_new_tokens: int) -> None:
        """Make room for a request of such lengths.

        Raises OverloadedError, with every row unharmed, when its KV memory would exceed the budget.
        """

    def admit(self, sources: Sequence[TokenIds], slots: Sequence[int]) -> None:
        """Encode the sources (room is reserved) and install each in its slot, ready for the first ``decode``."""

    def decode(self, tokens: IntArray) -> FloatArray:
        """One step: tokens (R,) appended to rows 0..R-1 give logits (R, V), valid and writable until the next call."""

    def move(self, source_slot: int, target_slot: int) -> None:
        """Copy a row's whole state over another row."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """One run of a graph."""

    phase: str  # "encode" or "decode"
    seconds: float
    num_rows: int
    num_tokens: int  # real ones
    num_padded_tokens: int  # real ones and padding


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The end of one request, good or bad; told once for each request that was submitted."""

    code: str  # "ok" or the error's code
    finish_reason: str | None  # of the best hypothesis, None for errors
    num_source_tokens: int
    num_generated_tokens: int
    timing: Timing
    time_to_first_token_seconds: float | None
    expired_in_queue: bool = False


class StatsListener(Protocol):
    """Told what happened; must be quick, thread-safe and must not raise."""

    def on_step(self, stats: StepStats) -> None:
        """An engine thread ran a graph."""

    def on_finished(self, stats: RequestStats) -> None:
        """A request ended. Called on the event loop, before its caller learns of the end."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine at this moment, for gauges and health."""

    num_waiting: int
    num_running: int
    slots_used: int
    slots_total: int
    kv_cache_bytes: int
    failure: DragomanError | None = None  # why the engine is dead
