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
from dragoman.coverage import coverage_penalty
from dragoman.engine.engine import Engine, Stream
from dragoman.errors import (
    DragomanError,
    ImpossibleError,
    InvalidRequestError,
    ModelUnsupportedError,
    SourceTooLongError,
)
from dragoman.explanation import Side, TokenAttention
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
    UnknownWords,
)
from dragoman.vocabulary import UNK_ID

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

    async def attend(self, text: str, answer: str | None = None) -> TokenAttention:
        """Where the model looks in ``text`` for each token of ``answer``, or of its own one; each of one line.

        Raises DragomanError: for a model that cannot align, and where there is nothing to look at.
        """
        if self._aligner is None:
            raise ModelUnsupportedError(
                "this model was exported without an alignment graph, which tells where it looks: export it again with "
                "dragoman export --alignment"
            )
        line = self._line(text, "text")
        source = self._resolver.source(line) if line else None
        if source is None:
            raise InvalidRequestError("text is blank: give one with something to look at")
        if answer is None:
            result = await self.generate(line, DecodingOptions())
            tokens = self._target_tokenizer.ids(result.segments[0].hypotheses[0].tokens, "answer")
        else:
            tokens = self._resolver.scoring(source, self._line(answer, "answer"), _NO_TERMS).prefix
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
        num_passes = 0
        if options.return_alignment or options.unknown_words == UnknownWords.COPY:
            num_passes += options.num_hypotheses
        if options.coverage_penalty != 0:
            num_passes += options.num_awaited
        if self._aligner is None or not num_passes:
            return nullcontext()
        return self._aligner.room(num_segments * num_passes)

    def _requests(
        self, segments: Sequence[document.Segment], resolved: Resolved, terms: Terms
    ) -> list[GenerationRequest | None]:
        """Tokenize: all else that can be refused is refused here, before the engine hears of it.

        There is no request for a segment of which the tokenizer keeps nothing, such as one zero-width blank.
        """
        self._engine.check_room(len(segments), terms.caller, terms.priority)
        sources = [self._resolver.source(segment.text, resolved.options.unknown_words) for segment in segments]
        return [None if source is None else self._resolver.request(resolved, source, terms) for source in sources]

    def _line(self, text: str, name: str) -> str:
        """The one line of a text, without blanks around it; empty for a blank text."""
        self._check_size(text, name)
        segments = document.split(text, 1)
        if len(segments) > 1:
            raise InvalidRequestError(f"{name} has more than one line, where one is wanted: send each by itself")
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
            sent, result = await self._follow(index, segment, request, stream, items, options)
            # From here on, what was read so far does not matter: the answer is the same however it came.
            written = await self._written(segment, options, request, result.hypotheses)
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
        segment: document.Segment,
        request: GenerationRequest,
        stream: Stream,
        items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception],
        options: DecodingOptions,
    ) -> tuple[str, GenerationResult]:
        """Pass on a stream's text as it comes, up to the first word that is to be copied: which, the end tells.

        Returns what was passed on, and the result.
        """
        copied = None if options.unknown_words == UnknownWords.COPY else ()
        reader = AnswerReader(self._target_tokenizer, len(request.prefix), options.stop, copied)
        stops_early = options.beam_size == 1 and options.num_hypotheses == 1
        sent = ""
        async for update in stream:
            if update.result is not None:
                return sent, update.result
            delta = reader.push(update.tokens)
            sent += delta
            if delta:
                items.put_nowait(TextUpdate(index, 0, delta))
            if reader.stopped and stops_early:
                stream.stop()
        raise AssertionError("a stream ends with its result")

    async def _written(
        self,
        segment: document.Segment,
        options: DecodingOptions,
        request: GenerationRequest,
        found: tuple[HypothesisResult, ...],
    ) -> list[tuple[TextHypothesis, TokenIds]]:
        """The answers, best first, each with its tokens: cut at stop strings, and then ranked by what is left.

        An answer that had reached a stop text before it failed is a good one. A beam that had not, and may choose
        nothing, is dropped, as ever; whatever else failed fails the request.
        """
        written: list[tuple[TextHypothesis, TokenIds]] = []
        errors: list[DragomanError] = []
        for one in found:
            copied = await self._copied(segment, options, request, one.tokens)
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

    async def _copied(
        self, segment: document.Segment, options: DecodingOptions, request: GenerationRequest, tokens: TokenIds
    ) -> list[str]:
        """What each ``<unk>`` of an answer stands for, as it was typed.

        Of the unknown words of the source, that which the model looked at most; where there is none, of all its tokens.
        """
        if options.unknown_words != UnknownWords.COPY or UNK_ID not in tokens:
            return []
        assert self._aligner is not None
        weights = await self._aligner.weights(request.source, tokens, request.deadline)  # (T, S)
        own = self._source_tokenizer.own(request.source)
        spans = self._source_tokenizer.spans(segment.text)
        places = [place for place, token in enumerate(request.source[own]) if token == UNK_ID]
        # A token that is but a blank has nothing to copy.
        places = places or [place for place, (start, end) in enumerate(spans) if start < end]
        best = weights[:, own][:, places].argmax(axis=1).tolist()
        copied = [spans[places[i]] for i, token in zip(best, tokens, strict=True) if token == UNK_ID]
        return [segment.text[start:end] for start, end in copied]

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
