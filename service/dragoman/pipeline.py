"""Text in, text out: the path of one request around the engine, the same for the server and in-process use.

validate -> split into segments -> tokenize -> engine -> detokenize piece by piece -> align, if asked -> join.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final

from dragoman import document
from dragoman.alignment import Aligner, AlignmentPoint, points
from dragoman.answer import TextHypothesis, TextResult, TextScore, TextSegment, TextUpdate, TopToken
from dragoman.bundle import Manifest
from dragoman.engine.engine import Engine, Stream
from dragoman.errors import DragomanError, InvalidRequestError, ModelUnsupportedError, SourceTooLongError
from dragoman.resolver import Resolved, Resolver, Terms
from dragoman.stops import AnswerReader
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer, lone_surrogate
from dragoman.types import (
    DecodingOptions,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    HypothesisResult,
    Timing,
    TokenIds,
)

_NO_TERMS: Final = Terms()


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What the edge accepts, checked before any tokenizing."""

    max_text_bytes: int
    max_segments: int


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
        self._limits = limits
        self._resolver = Resolver(manifest, source_tokenizer, target_tokenizer, engine.num_slots)

    def close(self) -> None:
        """Align nothing more; the engine is its owner's to close."""
        if self._aligner is not None:
            self._aligner.close()

    async def generate(self, text: str, options: DecodingOptions, terms: Terms = _NO_TERMS) -> TextResult:
        """``stream`` consumed to its end."""
        async for item in self.stream(text, options, terms):
            if isinstance(item, TextResult):
                return item
        raise AssertionError("a stream ends with its result")

    async def stream(
        self, text: str, options: DecodingOptions, terms: Terms = _NO_TERMS
    ) -> AsyncGenerator[TextUpdate | TextResult]:
        """The answer piece by piece, segments interleaved as they are decoded; the last item is the whole of it.

        Of several hypotheses, the first grows as it is decoded, as far as that is certain; the others come whole, with
        the end. Closing the iterator cancels the work. Raises DragomanError; when one segment fails the whole text
        does. A text without a segment gives its result at once, without a run; so does a segment of which the tokenizer
        keeps nothing, and comes back unchanged.
        """
        started = time.monotonic()
        resolved = self._resolve(options)
        segments = self._segments(text, resolved.options)
        with self._room_to_align(resolved.options, len(segments)):
            requests = self._requests(segments, resolved, terms)
            streams: dict[int, tuple[GenerationRequest, Stream]] = {}
            readers: list[asyncio.Task[None]] = []
            items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception] = asyncio.Queue()
            try:
                # All or none: a text of which a part was refused is refused.
                for index, request in enumerate(requests):
                    if request is not None:
                        streams[index] = request, self._engine.submit(request)
                    else:
                        _return_unchanged(index, segments[index].text, items, scored=options.return_scores)
                readers = [
                    asyncio.create_task(self._read(index, segments[index], request, stream, items, options))
                    for index, (request, stream) in streams.items()
                ]
                ends: dict[int, _SegmentEnd] = {}
                while len(ends) < len(segments):
                    item = await items.get()
                    if isinstance(item, Exception):
                        raise item
                    if isinstance(item, _SegmentEnd):
                        ends[item.segment] = item
                    else:
                        yield item
            finally:
                for _, stream in streams.values():
                    stream.cancel()
                for reader in readers:
                    reader.cancel()
        ordered = [ends[index] for index in range(len(segments))]
        yield _result(text, segments, ordered, resolved, time.monotonic() - started)

    async def score(self, text: str, target: str, terms: Terms = _NO_TERMS) -> TextScore:
        """How probable the model finds ``target`` as the answer to ``text``, each of one line.

        Blanks around either do not count. To a blank text no answer but a blank one can be given: its score is 0, and
        nothing is computed. Raises DragomanError.
        """
        started = time.monotonic()
        line, target = self._line(text, "text"), self._line(target, "target")
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

    def _resolve(self, options: DecodingOptions) -> Resolved:
        """What this model makes of the options. Raises InvalidRequestError and ModelUnsupportedError."""
        if options.return_alignment and self._aligner is None:
            raise ModelUnsupportedError(
                "return_alignment is set; this model was exported without an alignment graph: leave it unset, or "
                "export the model again with dragoman export --alignment"
            )
        return self._resolver.resolve(options)

    def _segments(self, text: str, options: DecodingOptions) -> list[document.Segment]:
        """Validate and split: what is too much is refused here, before it costs anything."""
        self._check_size(text, "text")
        limit = min(self._limits.max_segments, self._engine.max_waiting)
        segments = document.split(text, limit)
        if len(segments) > limit:
            raise SourceTooLongError(f"text has more than {limit} lines, which is what this server accepts: split it")
        if len(segments) > 1:
            if options.target_prefix:
                raise InvalidRequestError(
                    f"target_prefix is set and text has {len(segments)} lines; a prefix is for one: send each by itself"
                )
            if options.num_hypotheses > 1:
                raise InvalidRequestError(
                    f"num_hypotheses is {options.num_hypotheses} and text has {len(segments)} lines; there are several "
                    "answers to one line alone: send each by itself"
                )
        return segments

    def _room_to_align(self, options: DecodingOptions, num_segments: int) -> AbstractContextManager[None]:
        if self._aligner is None or not options.return_alignment:
            return nullcontext()
        return self._aligner.room(num_segments * options.num_hypotheses)

    def _requests(
        self, segments: Sequence[document.Segment], resolved: Resolved, terms: Terms
    ) -> list[GenerationRequest | None]:
        """Tokenize: all else that can be refused is refused here, before the engine hears of it.

        There is no request for a segment of which the tokenizer keeps nothing, such as one zero-width blank.
        """
        self._engine.check_room(len(segments), terms.caller)
        sources = [self._resolver.source(segment.text) for segment in segments]
        return [None if source is None else self._resolver.request(resolved, source, terms) for source in sources]

    def _line(self, text: str, name: str) -> str:
        """The one line of a text, without blanks around it; empty for a blank text."""
        self._check_size(text, name)
        segments = document.split(text, 1)
        if len(segments) > 1:
            raise InvalidRequestError(f"{name} has more than one line; a score is of one: send each by itself")
        return segments[0].text if segments else ""

    def _check_size(self, text: str, name: str) -> None:
        try:
            num_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise lone_surrogate(text, name) from error
        if num_bytes > self._limits.max_text_bytes:
            raise SourceTooLongError(
                f"{name} has {num_bytes} bytes; this server accepts {self._limits.max_text_bytes}: split it"
            )

    async def _read(
        self,
        index: int,
        segment: document.Segment,
        request: GenerationRequest,
        stream: Stream,
        items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception],
        options: DecodingOptions,
    ) -> None:
        """Detokenize one segment's stream into the shared queue."""
        try:
            sent, result = await self._follow(index, request, stream, items, options)
            # From here on, what was read so far does not matter: the answer is the same however it came.
            written = self._written(options, request, result.hypotheses)
            hypotheses = []
            for number, (hypothesis, tokens) in enumerate(written):
                if options.return_alignment:
                    hypothesis = replace(hypothesis, alignment=await self._align(segment, request, tokens))
                assert number > 0 or hypothesis.text.startswith(sent)
                delta = hypothesis.text[len(sent) :] if number == 0 else hypothesis.text
                items.put_nowait(TextUpdate(index, number, delta, hypothesis))
                hypotheses.append(hypothesis)
            own = request.source[self._source_tokenizer.own(request.source)]
            source_tokens = tuple(self._source_tokenizer.tokens(own)) if options.return_alignment else ()
            items.put_nowait(
                _SegmentEnd(index, tuple(hypotheses), result.num_source_tokens, result.timing, source_tokens)
            )
        except Exception as error:
            items.put_nowait(error)

    async def _follow(
        self,
        index: int,
        request: GenerationRequest,
        stream: Stream,
        items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception],
        options: DecodingOptions,
    ) -> tuple[str, GenerationResult]:
        """Pass on a stream's text as it comes. Returns what was passed on, and the result.

        An answer that had reached a stop text before it failed is a good one, however late the engine learned of it.
        """
        reader = AnswerReader(self._target_tokenizer, len(request.prefix), options.stop)
        stops_early = options.beam_size == 1 and options.num_hypotheses == 1
        sent = ""
        try:
            async for update in stream:
                if update.result is not None:
                    return sent, update.result
                delta = reader.push(update.tokens)
                sent += delta
                if delta:
                    items.put_nowait(TextUpdate(index, 0, delta))
                if reader.stopped and stops_early:
                    stream.stop()
        except DragomanError:
            result = stream.partial
            if not options.stop or result is None:
                raise
            ((answer, _),) = self._written(options, request, result.hypotheses)
            if answer.finish_reason is not FinishReason.STOP_SEQUENCE:
                raise
            return sent, result
        raise AssertionError("a stream ends with its result")

    def _written(
        self, options: DecodingOptions, request: GenerationRequest, found: tuple[HypothesisResult, ...]
    ) -> list[tuple[TextHypothesis, TokenIds]]:
        """The answers, best first, each with its tokens: cut at stop strings, and then ranked by what is left."""
        written = [self._write(options, request, one) for one in found]
        if options.stop and not options.return_alternatives:
            written.sort(key=lambda one: -(one[0].score or 0.0))
        if options.return_scores:
            return written
        return [
            (replace(answer, score=None, token_scores=None, log_probability=None), tokens) for answer, tokens in written
        ]

    def _write(
        self, options: DecodingOptions, request: GenerationRequest, found: HypothesisResult
    ) -> tuple[TextHypothesis, TokenIds]:
        reader = AnswerReader(self._target_tokenizer, len(request.prefix), options.stop)
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
        self, segment: document.Segment, request: GenerationRequest, tokens: TokenIds
    ) -> tuple[AlignmentPoint, ...]:
        """Where each token of a finished answer comes from."""
        if not tokens:
            return ()
        assert self._aligner is not None
        weights = await self._aligner.weights(request.source, tokens, request.deadline)
        spans = [
            (segment.start + start, segment.start + end) for start, end in self._source_tokenizer.spans(segment.text)
        ]
        return points(weights, self._source_tokenizer.own(request.source), spans)


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
            TextSegment(segment.start, segment.end, end.hypotheses, end.source_tokens)
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


def _return_unchanged(
    index: int, text: str, items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception], *, scored: bool
) -> None:
    """What ``TextPipeline._read`` does, for a segment that the model does not see."""
    hypothesis = TextHypothesis(text, (), FinishReason.STOP)
    if scored:
        hypothesis = replace(hypothesis, score=0.0, token_scores=(), log_probability=0.0)
    items.put_nowait(TextUpdate(index, 0, text, hypothesis))
    items.put_nowait(_SegmentEnd(index, (hypothesis,), 0, Timing()))
