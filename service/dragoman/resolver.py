"""From how a caller wants a text answered to what the engine is asked: names to ids, defaults and limits to numbers.

All that one model or engine cannot do is refused here, before any work; what no server could do has been refused by
``DecodingOptions`` itself.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from dragoman.bundle import Manifest
from dragoman.engine.repetition import repeats
from dragoman.errors import InvalidRequestError, ModelUnsupportedError, SourceTooLongError
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import (
    MAX_PRIORITY,
    DecodingOptions,
    GenerationRequest,
    SearchOptions,
    Steering,
    TokenIds,
    UnknownWords,
)


@dataclass(frozen=True, slots=True)
class Terms:
    """For whom a request is, and when. Raises InvalidRequestError."""

    deadline: float | None = None  # on time.monotonic's clock
    priority: int = 0  # the higher goes first
    caller: str = ""  # callers share the engine evenly

    def __post_init__(self) -> None:
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise InvalidRequestError(f"priority is {self.priority}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options as the engine understands them."""

    options: DecodingOptions
    prefix: TokenIds
    max_new_tokens: int
    search: SearchOptions
    steering: Steering | None


class Resolver:
    """One model's names and limits. Holds no state of any request."""

    def __init__(self, manifest: Manifest, source: SourceTokenizer, target: TargetTokenizer, num_slots: int) -> None:
        """``num_slots`` is how many rows one request may take."""
        self._limits = manifest.limits
        self._unknown_policy = manifest.unknown_policy
        self._eos = manifest.special_ids.eos
        self._never_generated = frozenset(manifest.special_ids.never_generated)
        self._source, self._target = source, target
        self._num_slots = num_slots
        # Beams and alternatives part at the first token: there must be as many to choose from, the end token left out.
        self._num_choices = manifest.model.target_vocab_size - len(self._never_generated) - 1

    def source(self, text: str, unknown_words: UnknownWords | None = None, language: str = "") -> TokenIds | None:
        """A segment as the model reads it; None for one of which the tokenizer keeps nothing.

        Raises InvalidRequestError and SourceTooLongError.
        """
        source = self._source.encode(text, unknown_words, language)
        own = self._source.own(source)
        if own.start == own.stop:
            return None
        if len(source) > self._limits.max_source_tokens:
            raise SourceTooLongError(
                f"source has {len(source)} tokens, end token included; this model accepts "
                f"{self._limits.max_source_tokens}: split the text"
            )
        return source

    def search(self, options: DecodingOptions) -> SearchOptions:
        """How tokens are chosen. For sampling without a seed, one is drawn. Raises InvalidRequestError."""
        for name in ("beam_size", "num_hypotheses"):
            if (value := getattr(options, name)) > self._num_slots:
                raise InvalidRequestError(
                    f"{name} is {value}; this server decodes {self._num_slots} rows together: ask for no more"
                )
        if options.temperature == 0:
            for name in ("beam_size", "num_hypotheses"):
                if 1 < (value := getattr(options, name)) > self._num_choices:
                    raise InvalidRequestError(
                        f"{name} is {value}; this model has {self._num_choices} tokens to choose from: ask for no more"
                    )
        # 53 bits: exact also for those who read numbers as doubles.
        seed = secrets.randbits(53) if options.seed is None and options.temperature > 0 else options.seed
        return SearchOptions(
            beam_size=options.beam_size,
            patience=options.patience,
            num_hypotheses=options.num_hypotheses,
            length_penalty=options.length_penalty,
            coverage_penalty=options.coverage_penalty,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=seed or 0,
            alternatives=options.return_alternatives,
        )

    def steering(self, options: DecodingOptions) -> Steering | None:
        """What may come; None for anything. Raises InvalidRequestError for tokens that there are not, or never come."""
        unknown = self._target.unknown_id
        silenced = options.unknown_words == UnknownWords.SUPPRESS and unknown not in self._never_generated
        steering = Steering(
            min_new_tokens=options.min_new_tokens,
            suppressed=(
                *self._target.ids(options.suppress_tokens, "suppress_tokens"),
                *((unknown,) if silenced else ()),
            ),
            suppressed_sequences=tuple(
                self._target.ids(names, f"suppress_sequences[{index}]")
                for index, names in enumerate(options.suppress_sequences)
            ),
            repetition_penalty=options.repetition_penalty,
            no_repeat_ngram_size=options.no_repeat_ngram_size,
            allowed=(unknown,) if options.unknown_words == UnknownWords.COPY else (),
        )
        self._check_suppressed(steering)
        return None if steering == Steering() else steering

    def _check_suppressed(self, steering: Steering) -> None:
        """What never comes anyway cannot be suppressed: a caller who names it means something else."""
        unknown = self._target.unknown_id
        if unknown in steering.suppressed and unknown in steering.allowed:
            raise InvalidRequestError(
                f"suppress_tokens names {self._target.tokens((unknown,))[0]!r} and unknown_words is copy, which puts "
                "source words in its place: choose one"
            )
        never = self._never_generated - set(steering.allowed)
        sequences = enumerate(steering.suppressed_sequences)
        places = [
            ("suppress_tokens", steering.suppressed),
            *((f"suppress_sequences[{i}]", ids) for i, ids in sequences),
        ]
        for name, ids in places:
            if unheard := [token for token in ids if token in never]:
                raise InvalidRequestError(
                    f"{name} names {self._target.tokens(unheard)[0]!r}, which no answer of this model ever has: leave "
                    "it out"
                )
        for index, ids in enumerate(steering.suppressed_sequences):
            if self._eos in ids[:-1]:
                raise InvalidRequestError(
                    f"suppress_sequences[{index}] has {self._target.tokens((self._eos,))[0]!r} before its end, behind "
                    "which nothing comes: leave it out"
                )

    def prefix(self, options: DecodingOptions) -> TokenIds:
        """The tokens of ``target_prefix``. Raises InvalidRequestError, also where no room is left behind it."""
        if not options.target_prefix:
            return ()
        prefix = self._target.encode(options.target_prefix, "target_prefix")
        if not prefix:
            raise InvalidRequestError(
                f"target_prefix is {options.target_prefix[:40]!r}, of which this model's target tokenizer keeps "
                "nothing: leave it unset"
            )
        if len(prefix) >= (most := self._limits.max_new_tokens):
            raise InvalidRequestError(
                f"target_prefix has {len(prefix)} tokens; this model's answers have up to {most}, the end token "
                "included: shorten it"
            )
        return prefix

    def _check_unknown_words(self, wanted: UnknownWords | None) -> None:
        """Raises ModelUnsupportedError for a policy that the source vocabulary cannot serve."""
        spells = self._unknown_policy == "byte_fallback"
        if wanted == UnknownWords.BYTE_FALLBACK and not spells:
            raise ModelUnsupportedError(
                "unknown_words is byte_fallback; this model's source vocabulary has no tokens for bytes: leave it "
                "unset, or train the model with byte_fallback"
            )
        if wanted in (UnknownWords.COPY, UnknownWords.SUPPRESS) and spells:
            raise ModelUnsupportedError(
                f"unknown_words is {wanted}; to this model no word is unknown, as it spells in bytes what its source "
                "vocabulary lacks: leave it unset"
            )

    def resolve(self, options: DecodingOptions) -> Resolved:
        """What all segments of a text have in common. Raises InvalidRequestError and ModelUnsupportedError."""
        self._check_unknown_words(options.unknown_words)
        prefix = self.prefix(options)
        most = self._limits.max_new_tokens - len(prefix)
        max_new_tokens = min(options.max_new_tokens or most, most)
        if options.min_new_tokens > max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens is {options.min_new_tokens}; this model has room for {max_new_tokens} tokens behind "
                "the prefix: ask for no more"
            )
        return Resolved(options, prefix, max_new_tokens, self.search(options), self.steering(options))

    def request(self, resolved: Resolved, source: TokenIds, terms: Terms) -> GenerationRequest:
        """What the engine is asked for one segment.

        Raises InvalidRequestError where the source's length allows less than is asked for.
        """
        options, max_new_tokens = resolved.options, resolved.max_new_tokens
        if options.max_length_ratio is not None:
            max_new_tokens = min(max_new_tokens, max(1, int(options.max_length_ratio * len(source))))
            if options.min_new_tokens > max_new_tokens:
                raise InvalidRequestError(
                    f"min_new_tokens is {options.min_new_tokens}; max_length_ratio {options.max_length_ratio} allows "
                    f"{max_new_tokens} for a source of {len(source)} tokens: change one of them"
                )
        return GenerationRequest(
            source=source,
            max_new_tokens=max_new_tokens,
            # Where stop strings cut them, several answers are ranked anew; so are those with a coverage penalty.
            return_scores=options.return_scores
            or (bool(options.stop) and max(options.num_hypotheses, options.beam_size) > 1)
            or options.coverage_penalty != 0,
            stop=options.stop,
            deadline=terms.deadline,
            prefix=resolved.prefix,
            search=resolved.search,
            steering=resolved.steering,
            num_top=options.num_top_tokens,
            # A source that repeats itself may ask for such an answer.
            stop_at_loops=options.detect_repetition and not repeats(source),
            priority=terms.priority,
            caller=terms.caller,
        )

    def scoring(self, source: TokenIds, target: str, terms: Terms) -> GenerationRequest:
        """The request that scores a given answer. Raises InvalidRequestError."""
        tokens = self._target.encode(target, "target")
        if len(tokens) >= (most := self._limits.max_new_tokens):
            raise InvalidRequestError(
                f"target has {len(tokens) + 1} tokens, end token included; this model's answers have up to {most}: "
                "split it"
            )
        return GenerationRequest(
            source=source,
            max_new_tokens=1,
            return_scores=True,
            deadline=terms.deadline,
            prefix=tokens,
            score_prefix=True,
            priority=terms.priority,
            caller=terms.caller,
        )
