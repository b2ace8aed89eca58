"""The vocabulary: frozen values and protocols that cross the borders between edge, engine and runner.

No wire type, no tensor library beyond numpy's array type, no behaviour beyond validation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dragoman.errors import DragomanError, InvalidRequestError

if TYPE_CHECKING:
    from dragoman.engine.choice import Offers

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


class UnknownWords(StrEnum):
    """What becomes of the words of a text that the source vocabulary lacks: characters or pieces, as it has them."""

    REFUSE = "refuse"  # the text is refused
    BYTE_FALLBACK = "byte_fallback"  # they are spelled in bytes
    COPY = "copy"  # they are read as <unk>; an <unk> of the answer is replaced by the one that it comes from
    SUPPRESS = "suppress"  # they are read as <unk>, and an answer never has one


MAX_PRIORITY = 10
"""And at least its negative: each priority in use has a line of its own in the queue."""

MAX_NEW_TOKENS_EVER = 1_000_000
"""Above this a number is a mistake, whatever the model: refused instead of being capped."""

MAX_ROWS_EVER = 1024  # of one request
MAX_TOP_TOKENS = 32  # for each position
MAX_SUPPRESSED_TOKENS = 1024
MAX_SUPPRESSED_SEQUENCES = 256
MAX_SUPPRESSED_SEQUENCE_TOKENS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_PROTECT_PATTERNS = 16
MAX_PROTECT_CHARACTERS = 256
MIN_TEMPERATURE = 0.001  # below it the numbers of a draw overflow
MIN_REPETITION_PENALTY = 0.01  # far below it logits overflow


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """How one request wants to be decoded. ``None`` means the model's or the server's own choice.

    Tokens are counted behind the prefix, the end token included. Raises ``InvalidRequestError`` for a name that is no
    option's, a value of another type, one that no server could honour, and options that contradict each other or would
    have no effect together: nothing is ignored in silence. A bound that no answer reaches is kept by all of them.
    """

    max_new_tokens: int | None = None  # decoding steps, 1 or more; more than the model's limit is capped to it
    min_new_tokens: int = 0  # the end token does not come before
    max_length_ratio: float | None = None  # at most so many new tokens for each source token
    beam_size: int = 1  # 1 is greedy search, or with a temperature sampling
    patience: float = 1.0  # beam search waits for beam_size x patience finished hypotheses: not with length_penalty 0
    num_hypotheses: int = 1  # answers to return; at most beam_size, unless they are drawn or alternatives
    length_penalty: float = 1.0  # of beam search: exponent of the length that divides a sum of log-probabilities
    coverage_penalty: float = 0.0  # of beam search: weight of a penalty for source tokens that got little attention
    temperature: float = 0.0  # above 0, tokens are drawn by chance
    top_k: int = 0  # draw among so many of the most probable; 0: all
    top_p: float = 1.0  # ... among the fewest whose mass reaches this
    min_p: float = 0.0  # ... among those of at least this share of the best one's probability
    seed: int | None = None  # the same seed draws the same answer in any company; None: drawn, and told with the answer
    repetition_penalty: float = 1.0  # above 1, tokens that came before are less probable; 0.01 or more
    no_repeat_ngram_size: int = 0  # no sequence of so many tokens comes twice; 0: may
    target_prefix: str = ""  # what the answer begins with
    suppress_tokens: tuple[str, ...] = ()  # tokens, by name, that never come
    suppress_sequences: tuple[tuple[str, ...], ...] = ()  # sequences of tokens that never come
    stop: tuple[str, ...] = ()  # the answer ends before any of these texts
    detect_repetition: bool = True  # end an answer that goes round in circles
    return_scores: bool = False  # log-probability of each token, their sum, and what ranks the answers
    num_top_tokens: int = 0  # the most probable tokens to return for each position
    return_alternatives: bool = False  # the num_hypotheses best tokens behind the prefix, each continued greedily
    return_alignment: bool = False  # for each target token the source token that it comes from
    unknown_words: UnknownWords | None = None  # of the text; None: the model's policy, and an answer never has <unk>
    split_sentences: bool | None = None  # each a segment; None: the server's choice, or the model's
    protect: tuple[str, ...] = ()  # what must arrive unchanged: expressions of RE2, or names of protection.CLASSES

    def __new__(cls, *values: object, **options: object) -> Self:  # Python's own TypeError is no DragomanError
        for name in options:
            if name not in cls.__dataclass_fields__:
                alike = get_close_matches(name, cls.__dataclass_fields__, 1)
                hint = f"did you mean {alike[0]}?" if alike else f"there is {', '.join(cls.__dataclass_fields__)}"
                raise InvalidRequestError(f"{name[:100]} is no decoding option: {hint}")
        return object.__new__(cls)

    @property
    def num_awaited(self) -> int:
        """Beam search ends when so many hypotheses are finished, but where scores only fall."""
        return math.floor(self.beam_size * self.patience + 0.5)

    def __post_init__(self) -> None:
        for name, kind, protocol, words, optional in _TYPED_OPTIONS:
            value = getattr(self, name)
            if type(value) is not kind and not (value is None and optional):  # the quick way, for nearly all
                _check_type(name, value, protocol, words)
        if self.unknown_words is not None and self.unknown_words not in tuple(UnknownWords):
            raise InvalidRequestError(
                f"unknown_words is {self.unknown_words!r:.100}; it must be one of {', '.join(UnknownWords)}"
            )
        if self.max_new_tokens is not None:
            _check("max_new_tokens", self.max_new_tokens, 1, MAX_NEW_TOKENS_EVER)
        _check("min_new_tokens", self.min_new_tokens, 0, MAX_NEW_TOKENS_EVER)
        if self.max_length_ratio is not None:
            _check_above_0("max_length_ratio", self.max_length_ratio, 1000)
        _check("beam_size", self.beam_size, 1, MAX_ROWS_EVER)
        _check_above_0("patience", self.patience, 100)
        _check("num_hypotheses", self.num_hypotheses, 1, MAX_ROWS_EVER)
        _check("length_penalty", self.length_penalty, -10.0, 10.0)
        _check("coverage_penalty", self.coverage_penalty, -10.0, 10.0)
        if self.temperature != 0:
            _check("temperature", self.temperature, MIN_TEMPERATURE, 100.0, " (or 0 to draw nothing)")
        _check("top_k", self.top_k, 0, MAX_NEW_TOKENS_EVER)
        _check_above_0("top_p", self.top_p, 1)
        _check("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _check("seed", self.seed, 0, 2**64 - 1)
        _check("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _check("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, MAX_NEW_TOKENS_EVER)
        _check("num_top_tokens", self.num_top_tokens, 0, MAX_TOP_TOKENS)
        self._check_texts()
        self._check_contradictions()

    def _check_texts(self) -> None:
        for name in ("suppress_tokens", "suppress_sequences", "stop", "protect"):
            if not isinstance(value := getattr(self, name), tuple):
                raise InvalidRequestError(f"{name} is {value!r:.100}; it must be a tuple")
        for index, names in enumerate(self.suppress_sequences):
            if not isinstance(names, tuple):
                raise InvalidRequestError(f"suppress_sequences[{index}] is {names!r:.100}; it must be a tuple")
            _check_each_text(f"suppress_sequences[{index}]", names)
            _check_count(f"suppress_sequences[{index}]", "tokens", names, 1, MAX_SUPPRESSED_SEQUENCE_TOKENS)
        _check_each_text("suppress_tokens", self.suppress_tokens)
        _check_each_text("stop", self.stop)
        _check_count("suppress_tokens", "tokens", self.suppress_tokens, 0, MAX_SUPPRESSED_TOKENS)
        _check_count("suppress_sequences", "sequences", self.suppress_sequences, 0, MAX_SUPPRESSED_SEQUENCES)
        _check_count("stop", "texts", self.stop, 0, MAX_STOP_STRINGS)
        for index, text in enumerate(self.stop):
            _check_count(f"stop[{index}]", "characters", text, 1, MAX_STOP_CHARACTERS)
        _check_each_text("protect", self.protect)
        _check_count("protect", "patterns", self.protect, 0, MAX_PROTECT_PATTERNS)
        for index, text in enumerate(self.protect):
            _check_count(f"protect[{index}]", "characters", text, 1, MAX_PROTECT_CHARACTERS)

    def _check_contradictions(self) -> None:
        draws = self.temperature > 0
        if self.max_new_tokens is not None:
            _check("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens, ", which is max_new_tokens")
        if self.beam_size > 1 and draws:
            raise InvalidRequestError(
                f"beam_size is {self.beam_size} and temperature is {self.temperature}; beam search draws nothing: "
                "choose one"
            )
        if self.return_alternatives and (draws or self.beam_size > 1):
            raise InvalidRequestError(
                f"return_alternatives is set, beam_size is {self.beam_size} and temperature is {self.temperature}; "
                "alternatives are continued greedily: leave the others unset"
            )
        for name in ("target_prefix", "stop"):
            if self.protect and (value := getattr(self, name)):
                raise InvalidRequestError(
                    f"{name} is {value!r:.100} and protect is set; the model answers with substitutes, which are put "
                    "back when the answer is whole: choose one"
                )
        if self.beam_size == 1:
            for name, usual in (("patience", 1), ("length_penalty", 1), ("coverage_penalty", 0)):
                if (value := getattr(self, name)) != usual:
                    raise InvalidRequestError(f"{name} is {value} and beam_size is 1; {name} needs a beam search")
        if self.length_penalty == self.coverage_penalty == 0 and self.patience != 1:
            raise InvalidRequestError(
                f"patience is {self.patience} and length_penalty is 0; scores only fall then, and the search ends when "
                "none can overtake: leave patience unset"
            )
        if self.num_awaited < 1:
            raise InvalidRequestError(
                f"patience is {self.patience} and beam_size is {self.beam_size}; beam_size x patience must round to 1 "
                "or more"
            )
        if not draws and not self.return_alternatives:
            more = ": raise that, or set a temperature or return_alternatives"
            _check("num_hypotheses", self.num_hypotheses, 1, self.beam_size, f", which is beam_size{more}")
            _check("num_hypotheses", self.num_hypotheses, 1, self.num_awaited, ", which is beam_size x patience")
        if not draws:
            for name, unset in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("seed", None)):
                if (value := getattr(self, name)) != unset:
                    raise InvalidRequestError(
                        f"{name} is {value} and temperature is 0, which draws nothing; {name} needs one above 0"
                    )


_TYPES: Final[dict[str, tuple[type, type, str]]] = {
    "int": (int, Integral, "an integer"),
    "float": (float, Real, "a number"),
    "bool": (bool, bool, "True or False"),
    "str": (str, str, "a text"),
}
"""By annotation: the usual type, what else will do (numpy's numbers, say), and what to call it."""

_TYPED_OPTIONS: Final = tuple(
    (field.name, *_TYPES[kind], optional == "None")
    for field in fields(DecodingOptions)
    for kind, _, optional in [str(field.type).partition(" | ")]
    if kind in _TYPES
)


def _check_type(name: str, value: object, kind: type, words: str) -> None:
    # True is an integer to Python, and a mistake here.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidRequestError(f"{name} is {value!r:.100}; it must be {words}")


def _check_each_text(name: str, values: tuple[object, ...]) -> None:
    for index, value in enumerate(values):
        _check_type(f"{name}[{index}]", value, str, "a text")


def _check(name: str, value: float, low: float, high: float, why: str = "") -> None:
    if not low <= value <= high:  # written so that NaN fails
        raise InvalidRequestError(f"{name} is {value}; it must be from {low} to {high}{why}")


def _check_above_0(name: str, value: float, high: float) -> None:
    if not 0 < value <= high:  # written so that NaN fails
        raise InvalidRequestError(f"{name} is {value}; it must be above 0 and at most {high}")


def _check_count(name: str, what: str, value: Sequence[object], low: int, high: int) -> None:
    if not low <= len(value) <= high:
        raise InvalidRequestError(f"{name} has {len(value)} {what}; it must have from {low} to {high}")


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How tokens are chosen: the best at each step, by beam search, or by chance (``temperature`` above 0)."""

    beam_size: int = 1
    patience: float = 1.0  # beam search ends with beam_size x patience finished hypotheses (Kasai et al. 2022)
    num_hypotheses: int = 1  # to return; when drawn by chance, or as alternatives, each has a row of its own
    length_penalty: float = 1.0  # exponent of the length that divides a beam's score
    coverage_penalty: float = 0.0  # not 0: whoever asks adds a penalty to the scores, and so gets all that was finished
    temperature: float = 0.0
    top_k: int = 0  # draw among so many of the most probable; 0: all
    top_p: float = 1.0  # ... among the fewest whose mass reaches this
    min_p: float = 0.0  # ... among those of at least this share of the best one's probability
    seed: int = 0
    alternatives: bool = False  # the num_hypotheses best tokens behind the prefix, each continued greedily


@dataclass(frozen=True, slots=True)
class Steering:
    """What may come. All ids are the target side's; counts are of tokens behind the prefix."""

    min_new_tokens: int = 0  # the end token may not come before
    suppressed: TokenIds = ()
    suppressed_sequences: tuple[TokenIds, ...] = ()
    repetition_penalty: float = 1.0  # divides positive logits of what came before, multiplies negative ones
    no_repeat_ngram_size: int = 0  # no sequence of so many tokens comes twice; 0: may
    allowed: TokenIds = ()  # of the tokens that a model never produces, those that it may


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One source, tokenized, as the engine sees it. Equal requests are one caller's for the same answer."""

    source: TokenIds  # with the source template's start and end tokens; never empty
    max_new_tokens: int  # behind the prefix; resolved against the model's limit, 1 or more
    return_scores: bool = False
    deadline: float | None = field(default=None, compare=False)  # on time.monotonic()'s clock
    prefix: TokenIds = ()  # what every answer begins with; not scored
    search: SearchOptions = SearchOptions()
    steering: Steering | None = None
    num_top: int = 0  # the most probable tokens to return for each position
    stop_at_loops: bool = False  # end a hypothesis that repeats itself, with the finish reason ``repetition``
    score_prefix: bool = False  # the prefix is the whole answer: force and score it, the end token included
    # Where the caller is going to cut the answers. The engine does not look for these texts; but as what comes behind
    # them does not matter, a hypothesis that cannot go on ends alone, and the others go on.
    stop: tuple[str, ...] = ()
    priority: int = field(default=0, compare=False)  # the higher goes first
    caller: str = ""  # whom the request is for: callers share the slots evenly

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

    tokens: TokenIds  # with the prefix
    finish_reason: FinishReason
    score: float | None = None  # what the search ranks by: in beam search, the sum divided by length ** length_penalty
    token_scores: tuple[float, ...] | None = None  # of the tokens behind the prefix; their sum is the log-probability
    top: tuple[tuple[tuple[int, float], ...], ...] = ()  # for each of these, the most probable tokens, if asked for
    error: DragomanError | None = None  # why it could not go on, beside ``stop``; its finish reason means nothing then


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

    def admit(
        self, sources: Sequence[TokenIds], slots: Sequence[Sequence[int]], prefixes: Sequence[TokenIds] = ()
    ) -> None:
        """Encode the sources (room is reserved) and install each in its slots, ready for the first ``decode``.

        ``prefixes``, if given, are what each one's answers begin with, and other tokens that may come whatever the
        runner thinks. Raises OverloadedError, with the rows that run unharmed, where memory is lacking.
        """

    def decode(self, tokens: IntArray) -> FloatArray | Offers:
        """One step: tokens (R,) appended to rows 0..R-1 give logits (R, V), valid and writable until the next call.

        A runner whose logits lie elsewhere gives what they offer instead, valid as long.
        """

    def move(self, source_slot: int, target_slot: int) -> None:
        """Copy a row's whole state over another row."""

    def fork(self, source_slot: int, target_slot: int) -> None:
        """Copy a row's target prefix over another row of the same source."""


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
    shared: bool = False  # it took no rows of its own: an equal request was being decoded
    inter_token_seconds: float | None = None  # between a token and the next, on average; None for a single one


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
    num_callers_waiting: int = 0
    failure: DragomanError | None = None  # why the engine is dead
