"""Text in, text out: the path of one request around the engine, the same for the server and in-process use.

validate, split into segments and tokenize (``segmenter.py``) -> engine -> detokenize piece by piece -> align, if asked
-> put back what was protected -> join.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final

from dragoman import document
from dragoman.alignment import Aligner, AlignmentPoint, Span, points
from dragoman.answer import TextHypothesis, TextResult, TextScore, TextSegment, TextUpdate, TopToken
from dragoman.bundle import Manifest
from dragoman.coverage import coverage_penalty
from dragoman.engine.engine import Engine, Stream
from dragoman.errors import (
    DragomanError,
    ImpossibleError,
    InvalidRequestError,
    ModelUnsupportedError,
)
from dragoman.explanation import Side, TokenAttention
from dragoman.protection import Reading
from dragoman.resolver import Resolved, Resolver, Terms
from dragoman.segmenter import Piece, Segmenter
from dragoman.stops import AnswerReader
from dragoman.tokenization import TextToken, TokenizerSide, source_tokens, target_tokens
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import (
    DecodingOptions,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    HypothesisResult,
    Timing,
    TokenIds,
    UnknownWords,
)

_NO_TERMS: Final = Terms()


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What the edge accepts, checked before any tokenizing, and what it does where a request does not say."""

    max_text_bytes: int
    max_segments: int
    split_sentences: bool | None = None  # of models that name their source's language; None: as the model has it


class TextPipeline:
    """One model's tokenizers and limits around its engine. Holds no state of any request."""

    def __init__(
        self,
        manifest: Manifest,
        source_tokenizer: SourceTokenizer,
        target_tokenizer: TargetTokenizer,
        engine: Engine,
        limits: TextLimits,
        aligner: Aligner | None = None,
    ) -> None:
        """``aligner``: None for a model that cannot align."""
        self._aligner = aligner
        self._source_tokenizer = source_tokenizer
        self._target_tokenizer = target_tokenizer
        self._engine = engine
        self._resolver = Resolver(manifest, source_tokenizer, target_tokenizer, engine.num_slots)
        self._segmenter = Segmenter(
            manifest,
            source_tokenizer,
            target_tokenizer,
            self._resolver,
            limits.max_text_bytes,
            limits.max_segments,
            limits.split_sentences,
        )

    def close(self) -> None:
        """Align nothing more; the engine is its owner's to close."""
        if self._aligner is not None:
            self._aligner.close()

    @property
    def splits_sentences(self) -> bool:
        """Whether each sentence is a segment, unless a request says otherwise."""
        return self._segmenter.splits_sentences

    @property
    def languages(self) -> tuple[str, ...]:
        """What may be asked for as ``language``; none, of a model that answers in one."""
        return self._source_tokenizer.languages

    async def generate(
        self, text: str, options: DecodingOptions, terms: Terms = _NO_TERMS, language: str = ""
    ) -> TextResult:
        """``stream`` consumed to its end."""
        async for item in self.stream(text, options, terms, language):
            if isinstance(item, TextResult):
                return item
        raise AssertionError("a stream ends with its result")

    async def stream(
        self, text: str, options: DecodingOptions, terms: Terms = _NO_TERMS, language: str = ""
    ) -> AsyncGenerator[TextUpdate | TextResult]:
        """The answer piece by piece, segments interleaved as they are decoded; the last item is the whole of it.

        Of several hypotheses, the first grows as it is decoded, as far as that is certain; the others come whole, with
        the end. Closing the iterator cancels the work. Raises DragomanError; when one segment fails the whole text
        does. A text without a segment gives its result at once, without a run; so does a segment of which the tokenizer
        keeps nothing, and comes back unchanged. ``language`` is what to answer in, by a model that has several.
        """
        started = time.monotonic()
        self._check_language(language)
        resolved = self._resolve(options)
        pieces = await self._segmenter.pieces(text, resolved.options, self._engine.max_waiting, language)
        with self._room_to_align(resolved.options, len(pieces)):
            self._engine.check_room(len(pieces), terms.caller, terms.priority)
            works = [self._work(index, piece, resolved, terms) for index, piece in enumerate(pieces)]
            streams: dict[int, Stream] = {}
            readers: list[asyncio.Task[None]] = []
            items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception] = asyncio.Queue()
            try:
                # All or none: a text of which a part was refused is refused.
                for work in works:
                    if work.attempts:
                        streams[work.index] = self._engine.submit(work.attempts[0].request)
                    else:
                        _return_unchanged(work, items, scored=options.return_scores)
                readers = [
                    asyncio.create_task(self._read(works[index], stream, items, options))
                    for index, stream in streams.items()
                ]
                ends: dict[int, _SegmentEnd] = {}
                while len(ends) < len(works):
                    item = await items.get()
                    if isinstance(item, Exception):
                        raise item
                    if isinstance(item, _SegmentEnd):
                        ends[item.segment] = item
                    else:
                        yield item
            finally:
                for stream in streams.values():
                    stream.cancel()
                for reader in readers:
                    reader.cancel()
        ordered = [ends[index] for index in range(len(works))]
        yield _result(text, [work.segment for work in works], ordered, resolved, time.monotonic() - started)

    async def score(self, text: str, target: str, terms: Terms = _NO_TERMS) -> TextScore:
        """How probable the model finds ``target`` as the answer to ``text``, each of one line.

        Blanks around either do not count. To a blank text no answer but a blank one can be given: its score is 0, and
        nothing is computed. Raises DragomanError.
        """
        started = time.monotonic()
        line, target = self._segmenter.line(text, "text"), self._segmenter.line(target, "target")
        source = self._resolver.source(line) if line else None
        if source is None:
            if target:
                raise InvalidRequestError("text is blank and target is not: the answer to a blank text is itself")
            return TextScore((), (), 0.0, 0, Timing())
        request = self._resolver.scoring(source, target, terms)
        stream = self._engine.submit(request)
        try:
            async for update in stream:
                if (result := update.result) is not None:
                    scores = result.hypotheses[0].token_scores
                    assert scores is not None
                    return TextScore(
                        tokens=tuple(self._target_tokenizer.tokens(request.prefix)),
                        token_scores=scores,
                        log_probability=sum(scores),
                        num_source_tokens=result.num_source_tokens,
                        timing=replace(result.timing, total_seconds=time.monotonic() - started),
                    )
        finally:
            stream.cancel()
        raise AssertionError("a stream ends with its result")

    def tokenize(self, text: str, side: TokenizerSide, language: str = "") -> list[TextToken]:
        """The tokens of a text of one line, without the blanks around it; ``language`` is for the source's side alone.

        However many there are: a text that is too long for the model is not refused. Raises InvalidRequestError and
        SourceTooLongError, for what the edge does not accept or the vocabulary lacks, and ModelUnsupportedError.
        """
        line = self._segmenter.line(text, "text")
        if side is TokenizerSide.TARGET:
            if language:
                raise InvalidRequestError(
                    f"target_language is {language[:40]!r}, and answers are not marked with it: leave it empty"
                )
            tokens = target_tokens(self._target_tokenizer, line)
        else:
            self._check_language(language)
            tokens = source_tokens(self._source_tokenizer, line, language)
        start = text.find(line)  # nothing but blanks before it
        return [
            replace(token, span=None if token.span is None else (start + token.span[0], start + token.span[1]))
            for token in tokens
        ]

    async def attend(self, text: str, answer: str | None = None) -> TokenAttention:
        """Where the model looks in ``text`` for each token of ``answer``, or of its own one; each of one line.

        Raises DragomanError: for a model that cannot align, and where there is nothing to look at.
        """
        if self._aligner is None:
            raise ModelUnsupportedError(
                "this model was exported without an alignment graph, which tells where it looks: export it again with "
                "dragoman export --alignment"
            )
        line = self._segmenter.line(text, "text")
        source = self._resolver.source(line) if line else None
        if source is None:
            raise InvalidRequestError("text is blank: give one with something to look at")
        if answer is None:
            result = await self.generate(line, DecodingOptions(split_sentences=False))
            tokens = self._target_tokenizer.ids(result.segments[0].hypotheses[0].tokens, "answer")
        else:
            tokens = self._resolver.scoring(source, self._segmenter.line(answer, "answer"), _NO_TERMS).prefix
        if not tokens:
            raise InvalidRequestError("the answer is empty: there is nothing to look for")
        own = self._source_tokenizer.own(source)
        names = self._source_tokenizer.tokens(source)
        spans = self._source_tokenizer.spans(line)
        return TokenAttention(
            source=Side(line, tuple(names[own]), tuple(spans), self._source_tokenizer.marks_words),
            target=Side(
                self._target_tokenizer.decode(tokens),
                tuple(self._target_tokenizer.tokens(tokens)),
                tuple(self._target_tokenizer.spans(tokens)),
                self._target_tokenizer.vocabulary.marks_words,
            ),
            before=tuple(names[: own.start]),
            after=tuple(names[own.stop :]),
            weights=await self._aligner.weights(source, tokens, None),
        )

    def _check_language(self, language: str) -> None:
        if language and not self.languages:
            raise ModelUnsupportedError(
                f"target_language is {language[:40]!r}; this model answers in one language: leave it empty"
            )

    def _resolve(self, options: DecodingOptions) -> Resolved:
        """What this model makes of the options. Raises InvalidRequestError and ModelUnsupportedError."""
        if options.return_alignment and self._aligner is None:
            raise ModelUnsupportedError(
                "return_alignment is set; this model was exported without an alignment graph: leave it unset, or "
                "export the model again with dragoman export --alignment"
            )
        if options.unknown_words == UnknownWords.COPY and self._aligner is None:
            raise ModelUnsupportedError(
                "unknown_words is copy; this model was exported without an alignment graph, which tells what to copy: "
                "leave it unset, or export the model again with dragoman export --alignment"
            )
        if options.coverage_penalty != 0 and (self._aligner is None or not self._aligner.tells_coverage):
            raise ModelUnsupportedError(
                f"coverage_penalty is {options.coverage_penalty}; this model was exported without an alignment graph, "
                "which tells how much attention source tokens got: leave it unset, or export the model again with "
                "dragoman export --alignment"
            )
        return self._resolver.resolve(options)

    def _room_to_align(self, options: DecodingOptions, num_segments: int) -> AbstractContextManager[None]:
        num_passes = 0
        if options.return_alignment or options.unknown_words == UnknownWords.COPY:
            num_passes += options.num_hypotheses
        if options.coverage_penalty != 0:
            num_passes += options.num_awaited
        if self._aligner is None or not num_passes:
            return nullcontext()
        return self._aligner.room(num_segments * num_passes)

    def _work(self, index: int, piece: Piece, resolved: Resolved, terms: Terms) -> _Work:
        attempts = [
            _Attempt(one.reading, self._resolver.request(resolved, one.source, terms)) for one in piece.attempts
        ]
        return _Work(index, piece.segment, tuple(attempts))

    async def _read(
        self,
        work: _Work,
        stream: Stream,
        items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception],
        options: DecodingOptions,
    ) -> None:
        """Detokenize one segment's stream into the shared queue; what lost a protected span is asked for again."""
        try:
            sent, end = await self._answered(work, work.attempts[0], stream, items, options)
            for attempt in work.attempts[1:]:
                if not end.hypotheses[0].unprotected:
                    break
                end = await self._better(end, work, attempt, items, options)
            for number, hypothesis in enumerate(end.hypotheses):
                assert number > 0 or hypothesis.text.startswith(sent)
                delta = hypothesis.text[len(sent) :] if number == 0 else hypothesis.text
                items.put_nowait(TextUpdate(work.index, number, delta, hypothesis, work.source))
            items.put_nowait(end)
        except Exception as error:
            items.put_nowait(error)

    async def _better(
        self,
        end: _SegmentEnd,
        work: _Work,
        attempt: _Attempt,
        items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception],
        options: DecodingOptions,
    ) -> _SegmentEnd:
        """What another attempt comes to, or what there is where that has lost less. The time is that of both.

        Raises OverloadedError where the queue has no room for it: what is there already would be an answer that depends
        on who else asks.
        """
        stream = self._engine.submit(attempt.request)
        try:
            _, other = await self._answered(work, attempt, stream, items, options)
        finally:
            stream.cancel()
        best = min(other, end, key=lambda one: len(one.hypotheses[0].unprotected))
        return replace(best, timing=_sum(end.timing, other.timing))

    async def _answered(
        self,
        work: _Work,
        attempt: _Attempt,
        stream: Stream,
        items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception],
        options: DecodingOptions,
    ) -> tuple[str, _SegmentEnd]:
        """What was passed on of a stream, and what it came to."""
        sent, result = await self._follow(work, attempt, stream, items, options)
        # From here on, what was read so far does not matter: the answer is the same however it came.
        request = attempt.request
        hypotheses = []
        for hypothesis, tokens in await self._written(attempt, options, result.hypotheses):
            if options.return_alignment:
                hypothesis = replace(hypothesis, alignment=await self._align(work.segment, attempt, tokens))
            if attempt.reading.spans:
                text, lost = attempt.reading.restored(hypothesis.text)
                start = work.segment.start
                lost = tuple((start + first, start + last) for first, last in lost)
                hypothesis = replace(hypothesis, text=text, unprotected=lost)
            hypotheses.append(hypothesis)
        own = request.source[self._source_tokenizer.own(request.source)]
        source_tokens = tuple(self._source_tokenizer.tokens(own)) if options.return_alignment else ()
        return sent, _SegmentEnd(work.index, tuple(hypotheses), result.num_source_tokens, result.timing, source_tokens)

    async def _follow(
        self,
        work: _Work,
        attempt: _Attempt,
        stream: Stream,
        items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception],
        options: DecodingOptions,
    ) -> tuple[str, GenerationResult]:
        """Pass on a stream's text as it comes, up to the first word that is to be copied: which, the end tells.

        Nothing is passed on of a segment with protected spans, which may be answered once more. Returns what was passed
        on, and the result.
        """
        copied = None if options.unknown_words == UnknownWords.COPY else ()
        reader = AnswerReader(self._target_tokenizer, len(attempt.request.prefix), options.stop, copied)
        stops_early = options.beam_size == 1 and options.num_hypotheses == 1
        sent = ""
        async for update in stream:
            if update.result is not None:
                return sent, update.result
            delta = "" if attempt.reading.spans else reader.push(update.tokens)
            sent += delta
            if delta:
                items.put_nowait(TextUpdate(work.index, 0, delta, source=work.source))
            if reader.stopped and stops_early:
                stream.stop()
        raise AssertionError("a stream ends with its result")

    async def _written(
        self, attempt: _Attempt, options: DecodingOptions, found: tuple[HypothesisResult, ...]
    ) -> list[tuple[TextHypothesis, TokenIds]]:
        """The answers, best first, each with its tokens: cut at stop strings, and then ranked by what is left.

        An answer that had reached a stop text before it failed is a good one. A beam that had not, and may choose
        nothing, is dropped, as ever; whatever else failed fails the request.
        """
        request = attempt.request
        written: list[tuple[TextHypothesis, TokenIds]] = []
        errors: list[DragomanError] = []
        for one in found:
            copied = await self._copied(attempt, options, one.tokens)
            answer, tokens = self._write(options, request, one, copied)
            if one.error is not None and answer.finish_reason is not FinishReason.STOP_SEQUENCE:
                errors.append(one.error)
                continue
            if options.coverage_penalty != 0:
                answer = await self._covered(options, request, answer, tokens)
            written.append((answer, tokens))
        may_drop = options.beam_size > 1 and len(written) > 0
        if failures := [error for error in errors if not (may_drop and isinstance(error, ImpossibleError))]:
            raise failures[0]
        if (options.stop and not options.return_alternatives) or options.coverage_penalty != 0:
            written.sort(key=lambda one: -(one[0].score or 0.0))
        del written[options.num_hypotheses :]
        if options.return_scores:
            return written
        return [
            (replace(answer, score=None, token_scores=None, log_probability=None), tokens) for answer, tokens in written
        ]

    async def _covered(
        self, options: DecodingOptions, request: GenerationRequest, answer: TextHypothesis, tokens: TokenIds
    ) -> TextHypothesis:
        """The answer with the coverage penalty in its score: of the steps that produced what it has."""
        assert self._aligner is not None and answer.score is not None
        weights = await self._aligner.coverage(request.source, tokens, request.deadline)  # (T + 1, S)
        num_steps = len(tokens) + (answer.finish_reason is FinishReason.STOP)
        penalty = options.coverage_penalty * coverage_penalty(weights[:num_steps])
        return replace(answer, score=answer.score + penalty)

    async def _copied(self, attempt: _Attempt, options: DecodingOptions, tokens: TokenIds) -> list[str]:
        """What each ``<unk>`` of an answer stands for, as it was typed.

        Of the unknown words of the source, that which the model looked at most; where there is none, of all its tokens.
        """
        unknown = self._target_tokenizer.unknown_id
        if options.unknown_words != UnknownWords.COPY or unknown not in tokens:
            return []
        assert self._aligner is not None
        request, text = attempt.request, attempt.reading.text
        weights = await self._aligner.weights(request.source, tokens, request.deadline)  # (T, S)
        own = self._source_tokenizer.own(request.source)
        spans = self._source_tokenizer.spans(text)
        unread = self._source_tokenizer.unknown_id
        places = [place for place, token in enumerate(request.source[own]) if token == unread]
        # A token that is but a blank has nothing to copy.
        places = places or [place for place, (start, end) in enumerate(spans) if start < end]
        best = weights[:, own][:, places].argmax(axis=1).tolist()
        copied = [spans[places[i]] for i, token in zip(best, tokens, strict=True) if token == unknown]
        return [text[start:end] for start, end in copied]

    def _write(
        self, options: DecodingOptions, request: GenerationRequest, found: HypothesisResult, copied: list[str]
    ) -> tuple[TextHypothesis, TokenIds]:
        reader = AnswerReader(self._target_tokenizer, len(request.prefix), options.stop, copied)
        text = reader.push(found.tokens) + reader.close()
        tokens = found.tokens[: reader.num_tokens]
        score, scores, top = found.score, found.token_scores, found.top
        if reader.stopped:
            num_new = len(tokens) - len(request.prefix)
            top = top[:num_new]
            if scores is not None:
                scores = scores[:num_new]
                penalty = options.length_penalty if options.beam_size > 1 else 0.0
                score = sum(scores, 0.0) / max(1, num_new) ** penalty
        names = self._target_tokenizer.vocabulary.tokens
        hypothesis = TextHypothesis(
            text=text,
            tokens=tuple(self._target_tokenizer.tokens(tokens)),
            finish_reason=FinishReason.STOP_SEQUENCE if reader.stopped else found.finish_reason,
            score=score,
            token_scores=scores,
            log_probability=None if scores is None else sum(scores, 0.0),
            top_tokens=tuple(tuple(TopToken(names[token], value) for token, value in step) for step in top),
        )
        return hypothesis, tokens

    async def _align(
        self, segment: document.Segment, attempt: _Attempt, tokens: TokenIds
    ) -> tuple[AlignmentPoint, ...]:
        """Where each token of a finished answer comes from."""
        if not tokens:
            return ()
        assert self._aligner is not None
        request, reading = attempt.request, attempt.reading
        weights = await self._aligner.weights(request.source, tokens, request.deadline)
        places = [reading.place(span) for span in self._source_tokenizer.spans(reading.text)]
        spans = [(segment.start + start, segment.start + end) for start, end in places]
        return points(weights, self._source_tokenizer.own(request.source), spans)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One way to ask for a segment's answer."""

    reading: Reading
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class _Work:
    """A segment, by its number, and the ways to ask for its answer; none, where it comes back unchanged."""

    index: int
    segment: document.Segment
    attempts: tuple[_Attempt, ...]

    @property
    def source(self) -> Span:
        return self.segment.start, self.segment.end


@dataclass(frozen=True, slots=True)
class _SegmentEnd:
    segment: int
    hypotheses: tuple[TextHypothesis, ...]
    num_source_tokens: int
    timing: Timing
    source_tokens: tuple[str, ...] = ()


def _result(
    text: str, segments: list[document.Segment], ends: list[_SegmentEnd], resolved: Resolved, total_seconds: float
) -> TextResult:
    timings = [end.timing for end in ends]
    num_prefix = len(resolved.prefix)
    return TextResult(
        text=document.join(text, segments, [end.hypotheses[0].text for end in ends]),
        segments=tuple(
            TextSegment(segment.start, segment.end, end.hypotheses, end.source_tokens, segment.continues)
            for segment, end in zip(segments, ends, strict=True)
        ),
        num_source_tokens=sum(end.num_source_tokens for end in ends),
        num_generated_tokens=sum(max(0, len(h.tokens) - num_prefix) for end in ends for h in end.hypotheses),
        timing=Timing(
            queue_seconds=max((t.queue_seconds for t in timings), default=0.0),
            encode_seconds=max((t.encode_seconds for t in timings), default=0.0),
            decode_seconds=max((t.decode_seconds for t in timings), default=0.0),
            total_seconds=total_seconds,
        ),
        seed=resolved.search.seed if resolved.search.temperature > 0 else None,
    )


def _sum(one: Timing, other: Timing) -> Timing:
    return Timing(
        queue_seconds=one.queue_seconds + other.queue_seconds,
        encode_seconds=one.encode_seconds + other.encode_seconds,
        decode_seconds=one.decode_seconds + other.decode_seconds,
        total_seconds=one.total_seconds + other.total_seconds,
    )


def _return_unchanged(work: _Work, items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception], *, scored: bool) -> None:
    """What ``TextPipeline._read`` does, for a segment that the model does not see."""
    hypothesis = TextHypothesis(work.segment.text, (), FinishReason.STOP)
    if scored:
        hypothesis = replace(hypothesis, score=0.0, token_scores=(), log_probability=0.0)
    items.put_nowait(TextUpdate(work.index, 0, work.segment.text, hypothesis, work.source))
    items.put_nowait(_SegmentEnd(work.index, (hypothesis,), 0, Timing()))
