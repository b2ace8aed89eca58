"""Messages to dataclasses and back, for the server and the client alike. No policy beyond "is this a valid message"."""

from __future__ import annotations

from typing import Final, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from dragoman.alignment import AlignmentPoint, Span
from dragoman.answer import TextHypothesis, TextResult, TextScore, TextSegment, TextUpdate, TopToken
from dragoman.errors import DragomanError, InvalidRequestError
from dragoman.model_status import ModelState, ModelStatus
from dragoman.tokenization import TextToken, TokenizerSide
from dragoman.types import DecodingOptions, FinishReason, Timing, UnknownWords
from dragoman.v1 import generation_pb2 as pb

M = TypeVar("M", bound=Message)

MAX_REQUEST_ID_BYTES: Final = 128

_DEFAULT_OPTIONS: Final = DecodingOptions()
_SINGLE_OPTIONS: Final = tuple(
    field.name
    for field in pb.DecodingOptions.DESCRIPTOR.fields
    if not field.is_repeated and field.name != "unknown_words"
)
_FINISH_REASON_NAMES: Final = {reason: f"FINISH_REASON_{reason.name}" for reason in FinishReason}
_UNKNOWN_WORDS_NAMES: Final = {policy: f"UNKNOWN_WORDS_{policy.name}" for policy in UnknownWords}
_UNKNOWN_WORDS: Final = {pb.UnknownWords.Value(name): policy for policy, name in _UNKNOWN_WORDS_NAMES.items()}
_SIDES: Final = {
    pb.TOKENIZER_SIDE_UNSPECIFIED: TokenizerSide.SOURCE,
    pb.TOKENIZER_SIDE_SOURCE: TokenizerSide.SOURCE,
    pb.TOKENIZER_SIDE_TARGET: TokenizerSide.TARGET,
}
_STATE_NAMES: Final = {state: f"MODEL_STATE_{state.name}" for state in ModelState}
_STATES: Final = {pb.ModelState.Value(name): state for state, name in _STATE_NAMES.items()}
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
    """What is set, validated. Raises InvalidRequestError."""
    for index, sequence in enumerate(options.suppress_sequences):
        check_known(sequence, f"suppress_sequences[{index}]")
    return DecodingOptions(
        **{name: getattr(options, name) for name in _SINGLE_OPTIONS if options.HasField(name)},
        suppress_tokens=tuple(options.suppress_tokens),
        suppress_sequences=tuple(tuple(sequence.tokens) for sequence in options.suppress_sequences),
        stop=tuple(options.stop),
        protect=tuple(options.protect),
        unknown_words=_unknown_words_from_wire(options.unknown_words),
    )


def _unknown_words_from_wire(value: int) -> UnknownWords | None:
    if value == pb.UNKNOWN_WORDS_UNSPECIFIED:
        return None
    if value not in _UNKNOWN_WORDS:
        raise InvalidRequestError(f"unknown_words is {value}; it must be one of {', '.join(pb.UnknownWords.keys())}")
    return _UNKNOWN_WORDS[value]


def options_to_wire(options: DecodingOptions) -> pb.DecodingOptions:
    """What differs from the defaults; the rest stays unset."""
    values = {name: getattr(options, name) for name in _SINGLE_OPTIONS}
    return pb.DecodingOptions(
        **{name: value for name, value in values.items() if value != getattr(_DEFAULT_OPTIONS, name)},
        suppress_tokens=options.suppress_tokens,
        suppress_sequences=[pb.TokenSequence(tokens=names) for names in options.suppress_sequences],
        stop=options.stop,
        protect=options.protect,
        unknown_words=None if options.unknown_words is None else _UNKNOWN_WORDS_NAMES[options.unknown_words],
    )


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError."""
    size = len(request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise InvalidRequestError(
            f"request_id has {size} bytes; at most {MAX_REQUEST_ID_BYTES} are allowed: shorten it"
        )


def update_to_wire(update: TextUpdate) -> pb.StreamGenerateResponse:
    """One event of a stream."""
    message = pb.StreamGenerateResponse(
        segment=update.segment, hypothesis=update.hypothesis, delta=update.delta, source=_span_to_wire(update.source)
    )
    if update.result is not None:
        message.final = True
        message.result.CopyFrom(_hypothesis_to_wire(update.result))
    return message


def update_from_wire(message: pb.StreamGenerateResponse) -> TextUpdate:
    """The inverse of ``update_to_wire``."""
    result = _hypothesis_from_wire(message.result) if message.final else None
    return TextUpdate(message.segment, message.hypothesis, message.delta, result, _span_from_wire(message.source))


def least_bytes(hypothesis: TextHypothesis) -> int:
    """A number of bytes that the hypothesis has at least in a message; quicker than to make one."""
    num_scores = 0 if hypothesis.token_scores is None else len(hypothesis.token_scores)
    num_top = sum(top.log_probability != 0 for place in hypothesis.top_tokens for top in place)
    # Of a token tag and length; of a score 8 bytes; of a top token tag, length, and tag and score, if it is not 0.
    return len(hypothesis.text) + 2 * len(hypothesis.tokens) + 8 * num_scores + 11 * num_top


def result_to_wire(result: TextResult, *, model: str, version: str, request_id: str) -> pb.GenerateResponse:
    """The whole answer."""
    return pb.GenerateResponse(
        text=result.text,
        segments=[
            pb.Segment(
                source=pb.Span(start=segment.start, end=segment.end),
                hypotheses=[_hypothesis_to_wire(hypothesis) for hypothesis in segment.hypotheses],
                source_tokens=segment.source_tokens,
                continues=segment.continues,
            )
            for segment in result.segments
        ],
        usage=pb.Usage(source_tokens=result.num_source_tokens, generated_tokens=result.num_generated_tokens),
        timing=_timing_to_wire(result.timing),
        model=model,
        version=version,
        request_id=request_id,
        seed=result.seed,
    )


def result_from_wire(message: pb.GenerateResponse) -> TextResult:
    """The inverse of ``result_to_wire``, without model, version and request id."""
    return TextResult(
        text=message.text,
        segments=tuple(
            TextSegment(
                s.source.start,
                s.source.end,
                tuple(_hypothesis_from_wire(h) for h in s.hypotheses),
                tuple(s.source_tokens),
                s.continues,
            )
            for s in message.segments
        ),
        num_source_tokens=message.usage.source_tokens,
        num_generated_tokens=message.usage.generated_tokens,
        timing=_timing_from_wire(message.timing),
        seed=message.seed if message.HasField("seed") else None,
    )


def score_to_wire(score: TextScore, *, model: str, version: str, request_id: str) -> pb.ScoreResponse:
    """How probable an answer is."""
    return pb.ScoreResponse(
        tokens=score.tokens,
        scores=pb.Scores(sum=score.log_probability, tokens=score.token_scores, normalized=score.log_probability),
        usage=pb.Usage(source_tokens=score.num_source_tokens),
        timing=_timing_to_wire(score.timing),
        model=model,
        version=version,
        request_id=request_id,
    )


def score_from_wire(message: pb.ScoreResponse) -> TextScore:
    """The inverse of ``score_to_wire``, without model, version and request id."""
    return TextScore(
        tokens=tuple(message.tokens),
        token_scores=tuple(message.scores.tokens),
        log_probability=message.scores.sum,
        num_source_tokens=message.usage.source_tokens,
        timing=_timing_from_wire(message.timing),
    )


def side_from_wire(side: pb.TokenizerSide) -> TokenizerSide:
    """Whose tokens are asked for. Raises InvalidRequestError for a number that means nothing."""
    if side not in _SIDES:
        raise InvalidRequestError(f"side is {side}, which means nothing: leave it out, or name a side")
    return _SIDES[side]


def side_to_wire(side: TokenizerSide) -> str:
    """The inverse of ``side_from_wire``."""
    return f"TOKENIZER_SIDE_{side.name}"


def token_to_wire(token: TextToken) -> pb.Token:
    """One token of a text."""
    return pb.Token(token=token.token, id=token.id, span=None if token.span is None else _span_to_wire(token.span))


def token_from_wire(message: pb.Token) -> TextToken:
    """The inverse of ``token_to_wire``."""
    return TextToken(message.token, message.id, _span_from_wire(message.span) if message.HasField("span") else None)


def status_to_wire(status: ModelStatus) -> pb.ModelStatus:
    """One version of a model."""
    return pb.ModelStatus(
        model=status.name,
        version=status.version,
        state=_STATE_NAMES[status.state],
        reason=status.reason,
        is_default=status.is_default,
    )


def status_from_wire(message: pb.ModelStatus) -> ModelStatus:
    """The inverse of ``status_to_wire``."""
    if message.state not in _STATES:
        raise DragomanError(f"the server sent the state {message.state}, unknown here: upgrade this client")
    return ModelStatus(message.model, message.version, _STATES[message.state], message.reason, message.is_default)


def _hypothesis_to_wire(hypothesis: TextHypothesis) -> pb.Hypothesis:
    message = pb.Hypothesis(
        text=hypothesis.text,
        tokens=hypothesis.tokens,
        finish_reason=_FINISH_REASON_NAMES[hypothesis.finish_reason],
        alignment=[
            pb.AlignmentPoint(
                source_token=point.source_token,
                target_token=point.target_token,
                weight=point.weight,
                source=pb.Span(start=point.source_span[0], end=point.source_span[1]),
            )
            for point in hypothesis.alignment
        ],
        top_tokens=[
            pb.TopTokens(tokens=[pb.TopToken(token=top.token, log_probability=top.log_probability) for top in place])
            for place in hypothesis.top_tokens
        ],
        unprotected=[_span_to_wire(span) for span in hypothesis.unprotected],
    )
    if hypothesis.token_scores is not None:
        message.scores.tokens.extend(hypothesis.token_scores)
        message.scores.sum = hypothesis.log_probability or 0.0
        message.scores.normalized = hypothesis.score or 0.0
    return message


def _hypothesis_from_wire(message: pb.Hypothesis) -> TextHypothesis:
    scored = message.HasField("scores")
    if message.finish_reason not in _FINISH_REASONS:
        raise DragomanError(f"the server sent finish reason {message.finish_reason}, unknown here: upgrade this client")
    return TextHypothesis(
        text=message.text,
        tokens=tuple(message.tokens),
        finish_reason=_FINISH_REASONS[message.finish_reason],
        score=message.scores.normalized if scored else None,
        token_scores=tuple(message.scores.tokens) if scored else None,
        log_probability=message.scores.sum if scored else None,
        alignment=tuple(
            AlignmentPoint(p.source_token, p.target_token, p.weight, (p.source.start, p.source.end))
            for p in message.alignment
        ),
        top_tokens=tuple(
            tuple(TopToken(top.token, top.log_probability) for top in place.tokens) for place in message.top_tokens
        ),
        unprotected=tuple(_span_from_wire(span) for span in message.unprotected),
    )


def _span_to_wire(span: Span) -> pb.Span:
    return pb.Span(start=span[0], end=span[1])


def _span_from_wire(message: pb.Span) -> Span:
    return message.start, message.end


def _timing_to_wire(timing: Timing) -> pb.Timing:
    return pb.Timing(
        queue=_duration(timing.queue_seconds),
        encode=_duration(timing.encode_seconds),
        decode=_duration(timing.decode_seconds),
        total=_duration(timing.total_seconds),
    )


def _timing_from_wire(message: pb.Timing) -> Timing:
    return Timing(
        queue_seconds=_seconds(message.queue),
        encode_seconds=_seconds(message.encode),
        decode_seconds=_seconds(message.decode),
        total_seconds=_seconds(message.total),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
