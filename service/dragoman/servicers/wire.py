"""Messages to dataclasses and back, for the server and the client alike. No policy beyond "is this a valid message"."""

from __future__ import annotations

from typing import Final, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from dragoman.errors import DragomanError, InvalidRequestError
from dragoman.pipeline import TextHypothesis, TextResult, TextSegment, TextUpdate
from dragoman.types import DecodingOptions, FinishReason, Timing
from dragoman.v1 import generation_pb2 as pb

M = TypeVar("M", bound=Message)

MAX_REQUEST_ID_BYTES: Final = 128

_DEFAULT_OPTIONS: Final = DecodingOptions()
_OPTION_NAMES: Final = tuple(field.name for field in pb.DecodingOptions.DESCRIPTOR.fields)
_FINISH_REASON_NAMES: Final = {reason: f"FINISH_REASON_{reason.name}" for reason in FinishReason}
_FINISH_REASONS: Final = {pb.FinishReason.Value(name): reason for reason, name in _FINISH_REASON_NAMES.items()}


def parse(kind: type[M], data: bytes) -> M:
    """Bytes as a message. Raises InvalidRequestError: no such message, bad UTF-8, or fields that are not known here.

    It does not look into repeated messages: whoever handles one checks it with ``check_known``, so that their number
    can be checked first and a bad one fails alone.
    """
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.full_name
        raise InvalidRequestError(f"the request is no valid {name} message ({len(data)} bytes): {error}") from error
    check_known(message, kind.DESCRIPTOR.name)
    return message


def check_known(message: Message, place: str) -> None:
    """Raises InvalidRequestError for a field that is not known here, in this message or a single one inside it."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequestError(
            f"{place} has a field {unknown[0].field_number} that this server does not know: "
            "leave it out, or use a server whose version has it"
        )
    for field, value in message.ListFields():
        if isinstance(value, Message):
            check_known(value, f"{place}.{field.name}")


def options_from_wire(options: pb.DecodingOptions) -> DecodingOptions:
    """What is set, validated. Raises InvalidRequestError and UnsupportedError."""
    return DecodingOptions(**{name: getattr(options, name) for name in _OPTION_NAMES if options.HasField(name)})


def options_to_wire(options: DecodingOptions) -> pb.DecodingOptions:
    """What differs from the defaults; the rest stays unset."""
    values = {name: getattr(options, name) for name in _OPTION_NAMES}
    return pb.DecodingOptions(**{n: v for n, v in values.items() if v != getattr(_DEFAULT_OPTIONS, n)})


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError."""
    size = len(request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise InvalidRequestError(
            f"request_id has {size} bytes; at most {MAX_REQUEST_ID_BYTES} are allowed: shorten it"
        )


def update_to_wire(update: TextUpdate) -> pb.StreamGenerateResponse:
    """One event of a stream."""
    message = pb.StreamGenerateResponse(segment=update.segment, hypothesis=update.hypothesis, delta=update.delta)
    if update.result is not None:
        message.final = True
        message.result.CopyFrom(_hypothesis_to_wire(update.result))
    return message


def update_from_wire(message: pb.StreamGenerateResponse) -> TextUpdate:
    """The inverse of ``update_to_wire``."""
    result = _hypothesis_from_wire(message.result) if message.final else None
    return TextUpdate(message.segment, message.hypothesis, message.delta, result)


def result_to_wire(result: TextResult, *, model: str, version: str, request_id: str) -> pb.GenerateResponse:
    """The whole answer."""
    return pb.GenerateResponse(
        text=result.text,
        segments=[
            pb.Segment(
                source=pb.Span(start=segment.start, end=segment.end),
                hypotheses=[_hypothesis_to_wire(hypothesis) for hypothesis in segment.hypotheses],
            )
            for segment in result.segments
        ],
        usage=pb.Usage(source_tokens=result.num_source_tokens, generated_tokens=result.num_generated_tokens),
        timing=pb.Timing(
            queue=_duration(result.timing.queue_seconds),
            encode=_duration(result.timing.encode_seconds),
            decode=_duration(result.timing.decode_seconds),
            total=_duration(result.timing.total_seconds),
        ),
        model=model,
        version=version,
        request_id=request_id,
    )


def result_from_wire(message: pb.GenerateResponse) -> TextResult:
    """The inverse of ``result_to_wire``, without model, version and request id."""
    return TextResult(
        text=message.text,
        segments=tuple(
            TextSegment(s.source.start, s.source.end, tuple(_hypothesis_from_wire(h) for h in s.hypotheses))
            for s in message.segments
        ),
        num_source_tokens=message.usage.source_tokens,
        num_generated_tokens=message.usage.generated_tokens,
        timing=Timing(
            queue_seconds=_seconds(message.timing.queue),
            encode_seconds=_seconds(message.timing.encode),
            decode_seconds=_seconds(message.timing.decode),
            total_seconds=_seconds(message.timing.total),
        ),
    )


def _hypothesis_to_wire(hypothesis: TextHypothesis) -> pb.Hypothesis:
    message = pb.Hypothesis(
        text=hypothesis.text,
        tokens=hypothesis.tokens,
        finish_reason=_FINISH_REASON_NAMES[hypothesis.finish_reason],
    )
    if hypothesis.score is not None:
        message.scores.sum = hypothesis.score
        message.scores.tokens.extend(hypothesis.token_scores or ())
    return message


def _hypothesis_from_wire(message: pb.Hypothesis) -> TextHypothesis:
    scored = message.HasField("scores")
    if message.finish_reason not in _FINISH_REASONS:
        raise DragomanError(f"the server sent finish reason {message.finish_reason}, unknown here: upgrade this client")
    return TextHypothesis(
        text=message.text,
        tokens=tuple(message.tokens),
        finish_reason=_FINISH_REASONS[message.finish_reason],
        score=message.scores.sum if scored else None,
        token_scores=tuple(message.scores.tokens) if scored else None,
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
