"""Text in, text out: the path of one request around the engine, the same for the server and in-process use.

validate -> split into segments -> tokenize -> engine -> detokenize piece by piece -> join.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from dragoman import document
from dragoman.bundle import Manifest
from dragoman.engine.engine import Engine, Stream
from dragoman.errors import SourceTooLongError
from dragoman.tokenizer import IncrementalDetokenizer, SourceTokenizer, TargetTokenizer, lone_surrogate
from dragoman.types import DecodingOptions, FinishReason, GenerationRequest, GenerationResult, HypothesisResult, Timing


@dataclass(frozen=True, slots=True)
class TextHypothesis:
    """One answer to one segment."""

    text: str
    tokens: tuple[str, ...]
    finish_reason: FinishReason
    score: float | None  # sum of log-probabilities, if asked for
    token_scores: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class TextSegment:
    """One segment of the text (characters ``start`` to ``end``) and its answers, best first."""

    start: int
    end: int
    hypotheses: tuple[TextHypothesis, ...]


@dataclass(frozen=True, slots=True)
class TextResult:
    """The whole answer to one text."""

    text: str
    segments: tuple[TextSegment, ...]
    num_source_tokens: int
    num_generated_tokens: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """A piece of one segment's answer: ``delta`` is appended to what came before; ``result`` ends the hypothesis."""

    segment: int
    hypothesis: int
    delta: str
    result: TextHypothesis | None = None


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
    ) -> None:
        self._model_limits = manifest.limits
        self._source_tokenizer = source_tokenizer
        self._target_tokenizer = target_tokenizer
        self._engine = engine
        self._limits = limits

    async def generate(self, text: str, options: DecodingOptions, deadline: float | None = None) -> TextResult:
        """``stream`` consumed to its end."""
        async for item in self.stream(text, options, deadline):
            if isinstance(item, TextResult):
                return item
        raise AssertionError("a stream ends with its result")

    async def stream(
        self, text: str, options: DecodingOptions, deadline: float | None = None
    ) -> AsyncGenerator[TextUpdate | TextResult]:
        """The answer piece by piece, segments interleaved as they are decoded; the last item is the whole of it.

        deadline: on ``time.monotonic``'s clock. Closing the iterator cancels the work. Raises DragomanError; when one
        segment fails the whole text does. A text without a segment gives its result at once, without a run; so does a
        segment of which the tokenizer keeps nothing, and comes back unchanged.
        """
        started = time.monotonic()
        segments, requests = self._requests(text, options, deadline)
        streams: dict[int, Stream] = {}
        readers: list[asyncio.Task[None]] = []
        items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception] = asyncio.Queue()
        try:
            # All or none: a text of which a part was refused is refused.
            for index, request in enumerate(requests):
                if request is not None:
                    streams[index] = self._engine.submit(request)
                else:
                    _return_unchanged(index, segments[index].text, items, scored=options.return_scores)
            readers = [
                asyncio.create_task(self._read(index, stream, items, scored=options.return_scores))
                for index, stream in streams.items()
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
            for stream in streams.values():
                stream.cancel()
            for reader in readers:
                reader.cancel()
        yield self._result(text, segments, [ends[i] for i in range(len(segments))], time.monotonic() - started)

    def _requests(
        self, text: str, options: DecodingOptions, deadline: float | None
    ) -> tuple[list[document.Segment], list[GenerationRequest | None]]:
        """Validate, split and tokenize: all that can be refused is refused here, before the engine hears of it.

        There is no request for a segment of which the tokenizer keeps nothing, such as one zero-width blank.
        """
        num_bytes = _utf8_length(text)
        if num_bytes > self._limits.max_text_bytes:
            raise SourceTooLongError(
                f"text has {num_bytes} bytes; this server accepts {self._limits.max_text_bytes}: split it"
            )
        limit = min(self._limits.max_segments, self._engine.max_waiting)
        segments = document.split(text, limit)
        if len(segments) > limit:
            raise SourceTooLongError(f"text has more than {limit} lines, which is what this server accepts: split it")
        self._engine.check_room(len(segments))
        most = self._model_limits.max_new_tokens
        max_new_tokens = min(options.max_new_tokens or most, most)
        requests: list[GenerationRequest | None] = []
        for segment in segments:
            source = self._source_tokenizer.encode(segment.text)
            if source == self._source_tokenizer.empty:
                requests.append(None)
                continue
            if len(source) > self._model_limits.max_source_tokens:
                raise SourceTooLongError(
                    f"source has {len(source)} tokens, end token included; this model accepts "
                    f"{self._model_limits.max_source_tokens}: split the text"
                )
            requests.append(GenerationRequest(source, max_new_tokens, options.return_scores, deadline))
        return segments, requests

    async def _read(
        self, index: int, stream: Stream, items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception], *, scored: bool
    ) -> None:
        """Detokenize one segment's stream into the shared queue."""
        detokenizer = IncrementalDetokenizer(self._target_tokenizer)
        text = ""
        try:
            async for update in stream:
                delta = detokenizer.push(update.tokens)
                if update.result is None:
                    text += delta
                    if delta:
                        items.put_nowait(TextUpdate(index, 0, delta))
                    continue
                delta += detokenizer.close()
                best = update.result.hypotheses[0]
                hypothesis = TextHypothesis(
                    text=text + delta,
                    tokens=tuple(self._target_tokenizer.tokens(best.tokens)),
                    finish_reason=best.finish_reason,
                    score=best.score if scored else None,
                    token_scores=best.token_scores if scored else None,
                )
                items.put_nowait(TextUpdate(index, 0, delta, hypothesis))
                items.put_nowait(_SegmentEnd(index, hypothesis, update.result))
        except Exception as error:
            items.put_nowait(error)

    def _result(
        self, text: str, segments: list[document.Segment], ends: list[_SegmentEnd], total_seconds: float
    ) -> TextResult:
        timings = [end.result.timing for end in ends]
        return TextResult(
            text=document.join(text, segments, [end.hypothesis.text for end in ends]),
            segments=tuple(
                TextSegment(segment.start, segment.end, (end.hypothesis,))
                for segment, end in zip(segments, ends, strict=True)
            ),
            num_source_tokens=sum(end.result.num_source_tokens for end in ends),
            num_generated_tokens=sum(len(h.tokens) for end in ends for h in end.result.hypotheses),
            timing=Timing(
                queue_seconds=max((t.queue_seconds for t in timings), default=0.0),
                encode_seconds=max((t.encode_seconds for t in timings), default=0.0),
                decode_seconds=max((t.decode_seconds for t in timings), default=0.0),
                total_seconds=total_seconds,
            ),
        )


@dataclass(frozen=True, slots=True)
class _SegmentEnd:
    segment: int
    hypothesis: TextHypothesis
    result: GenerationResult


def _return_unchanged(
    index: int, text: str, items: asyncio.Queue[TextUpdate | _SegmentEnd | Exception], *, scored: bool
) -> None:
    """What ``TextPipeline._read`` does, for a segment that the model does not see."""
    score, token_scores = (0.0, ()) if scored else (None, None)
    hypothesis = TextHypothesis(text, (), FinishReason.STOP, score, token_scores)
    result = GenerationResult((HypothesisResult((), FinishReason.STOP),), num_source_tokens=0, timing=Timing())
    items.put_nowait(TextUpdate(index, 0, text, hypothesis))
    items.put_nowait(_SegmentEnd(index, hypothesis, result))


def _utf8_length(text: str) -> int:
    """Raises InvalidRequestError for a lone surrogate, which no UTF-8 text holds."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise lone_surrogate(text) from error
