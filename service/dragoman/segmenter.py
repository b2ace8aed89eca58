"""A text to what the model reads of it: lines, sentences where they are split, substitutes for what is protected.

All that can be refused of a text is refused here, before the engine hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dragoman import document
from dragoman.alignment import Span
from dragoman.bundle import PROTECTION_KINDS, Manifest
from dragoman.document import Segment
from dragoman.errors import InvalidRequestError, ModelUnsupportedError, SourceTooLongError
from dragoman.protection import MAX_SPANS, Protector, Reading, vocabulary_of
from dragoman.resolver import Resolver
from dragoman.sentences import SentenceSplitter, pieces
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer, lone_surrogate
from dragoman.types import DecodingOptions, TokenIds, UnknownWords


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to read a segment, tokenized."""

    reading: Reading
    source: TokenIds


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment and the ways to read it, each to be tried where the ones before it lost what is protected.

    There is none for a segment that comes back unchanged: of which the tokenizer keeps nothing, such as one zero-width
    blank, or which is protected as a whole.
    """

    segment: Segment
    attempts: tuple[Attempt, ...]


class Segmenter:
    """One model's way with texts. Holds no state of any request."""

    def __init__(
        self,
        manifest: Manifest,
        source_tokenizer: SourceTokenizer,
        target_tokenizer: TargetTokenizer,
        resolver: Resolver,
        max_text_bytes: int,
        max_segments: int,
        split_sentences: bool | None,
    ) -> None:
        """``split_sentences``: unless a request says otherwise; None: as the model has it.

        A model that does not name its source's language never does.
        """
        texts = manifest.texts
        self._splitter = None if texts is None else SentenceSplitter(texts.source_language)
        self.splits_sentences = texts is not None and (
            texts.split_sentences if split_sentences is None else split_sentences
        )
        kinds = PROTECTION_KINDS if texts is None else texts.protect_with
        usable = tuple(kind for kind in kinds if _is_usable(kind, source_tokenizer, target_tokenizer))
        self._kinds = usable or ("itself",)  # what has no substitute is read as it is, and told of where it is lost
        self._max_source_tokens = manifest.limits.max_source_tokens
        self._source_tokenizer = source_tokenizer
        self._resolver = resolver
        self._max_text_bytes, self._max_segments = max_text_bytes, max_segments

    async def pieces(self, text: str, options: DecodingOptions, most: int, language: str = "") -> list[Piece]:
        """A text's segments, at most ``most`` of them and as many as the edge accepts.

        ``language`` is what to answer in, by a model that has several. Raises InvalidRequestError, SourceTooLongError
        and ModelUnsupportedError.
        """
        self._check_size(text, "text")
        splitter = self._splitter_for(options)
        limit = min(self._max_segments, most)
        lines = document.split(text, limit)
        protected: list[list[Span]] = [[] for _ in lines]
        if options.protect:
            protector = Protector(options.protect)
            # Beside the event loop: it may take a while, which others need not wait for.
            protected = await asyncio.to_thread(lambda: [protector.find(line.text) for line in lines])
        segments: list[tuple[Segment, list[Span], str]] = []
        for line, spans in zip(lines, protected, strict=True):
            own_language = language or self._source_tokenizer.typed_language(line.text)
            parts = [(0, len(line.text))] if splitter is None else splitter.split(line.text, spans)
            segments += [(*_part(line, part, spans), own_language) for part in parts]
            _check_number(len(segments), limit)
        found: list[Piece] = []
        for segment, spans, own_language in segments:
            found += self._fitting(segment, spans, options, own_language, may_cut=splitter is not None)
            _check_number(len(found), limit)
        if len(found) > 1:
            _check_single(len(found), "lines" if splitter is None else "sentences", options)
        return found

    def line(self, text: str, name: str) -> str:
        """The one line of a text, without blanks around it; empty for a blank text. Raises what ``pieces`` does."""
        self._check_size(text, name)
        segments = document.split(text, 1)
        if len(segments) > 1:
            raise InvalidRequestError(f"{name} has more than one line, where one is wanted: send each by itself")
        return segments[0].text if segments else ""

    def _splitter_for(self, options: DecodingOptions) -> SentenceSplitter | None:
        if options.split_sentences and self._splitter is None:
            raise ModelUnsupportedError(
                "split_sentences is set; this model does not name its source's language, which has the rules: leave it "
                "unset, or export the model again with dragoman export --source-language"
            )
        splits = self.splits_sentences if options.split_sentences is None else options.split_sentences
        return self._splitter if splits else None

    def _fitting(
        self, segment: Segment, spans: list[Span], options: DecodingOptions, language: str, *, may_cut: bool
    ) -> list[Piece]:
        """The segment; cut, where it is too long for the model and may be cut."""
        try:
            return [Piece(segment, tuple(self._attempts(segment.text, spans, options.unknown_words, language)))]
        except SourceTooLongError:
            if not may_cut:
                raise
            reading = next(self._readings(segment.text, spans))
            tokens = [reading.place(span) for span in self._source_tokenizer.spans(reading.text)]
            template = len(self._source_tokenizer.encode("", None, language))
            parts = pieces(segment.text, tokens, self._max_source_tokens - template, spans)
            if len(parts) == 1:
                raise
        cut = [_part(segment, part, spans) for part in parts]
        cut = [(replace(own, continues=own.end < segment.end or segment.continues), within) for own, within in cut]
        return [p for own, within in cut for p in self._fitting(own, within, options, language, may_cut=True)]

    def _attempts(
        self, text: str, spans: list[Span], unknown_words: UnknownWords | None, language: str
    ) -> list[Attempt]:
        if len(spans) > MAX_SPANS:
            raise InvalidRequestError(
                f"protect matches {len(spans)} spans of one segment, of which at most {MAX_SPANS} can be protected: "
                "give narrower patterns, or split the text"
            )
        if spans == [(0, len(text))]:
            return []
        attempts: list[Attempt] = []
        problems: list[InvalidRequestError | SourceTooLongError] = []
        for reading in self._readings(text, spans):
            try:
                source = self._resolver.source(reading.text, unknown_words, language)
            except (InvalidRequestError, SourceTooLongError) as error:
                problems.append(error)
            else:
                if source is not None:
                    attempts.append(Attempt(reading, source))
        if problems and not attempts:
            raise problems[0]
        return attempts

    def _readings(self, text: str, spans: list[Span]) -> Iterator[Reading]:
        """The ways to read a segment; one, where nothing of it is protected."""
        seen = set[str]()
        for kind in self._kinds if spans else ("itself",):
            reading = Reading.of(text, spans, kind)
            if reading.text not in seen:
                seen.add(reading.text)
                yield reading

    def _check_size(self, text: str, name: str) -> None:
        try:
            num_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise lone_surrogate(text, name) from error
        if num_bytes > self._max_text_bytes:
            raise SourceTooLongError(
                f"{name} has {num_bytes} bytes; this server accepts {self._max_text_bytes}: split it"
            )


def _check_number(number: int, limit: int) -> None:
    if number > limit:
        raise SourceTooLongError(
            f"text has more than {limit} lines, or sentences where these are split, which is what this server accepts: "
            "split it"
        )


def _check_single(number: int, what: str, options: DecodingOptions) -> None:
    """Raises InvalidRequestError for what is for one segment alone."""
    if options.target_prefix:
        raise InvalidRequestError(
            f"target_prefix is set and text has {number} {what}; a prefix is for one: send each by itself"
        )
    if options.num_hypotheses > 1:
        raise InvalidRequestError(
            f"num_hypotheses is {options.num_hypotheses} and text has {number} {what}; there are several answers to "
            "one alone: send each by itself"
        )


def _part(segment: Segment, part: Span, spans: Sequence[Span]) -> tuple[Segment, list[Span]]:
    """A part of a segment, and those of the spans that are in it; both parts and spans are in characters of theirs."""
    start, end = part
    own = Segment(segment.start + start, segment.start + end, segment.text[start:end])
    return own, [(first - start, last - start) for first, last in spans if start <= first and last <= end]


def _is_usable(kind: str, source: SourceTokenizer, target: TargetTokenizer) -> bool:
    """Whether both vocabularies can write the substitutes, other than in bytes."""
    text = vocabulary_of(kind)
    if not text:
        return True
    try:
        source.encode(text, UnknownWords.REFUSE)
        return target.decode(target.encode(text, kind)) == text
    except InvalidRequestError:
        return False
