import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UnknownWords(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN_WORDS_UNSPECIFIED: _ClassVar[UnknownWords]
    UNKNOWN_WORDS_REFUSE: _ClassVar[UnknownWords]
    UNKNOWN_WORDS_BYTE_FALLBACK: _ClassVar[UnknownWords]
    UNKNOWN_WORDS_COPY: _ClassVar[UnknownWords]
    UNKNOWN_WORDS_SUPPRESS: _ClassVar[UnknownWords]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP_SEQUENCE: _ClassVar[FinishReason]
    FINISH_REASON_REPETITION: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class TokenizerSide(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKENIZER_SIDE_UNSPECIFIED: _ClassVar[TokenizerSide]
    TOKENIZER_SIDE_SOURCE: _ClassVar[TokenizerSide]
    TOKENIZER_SIDE_TARGET: _ClassVar[TokenizerSide]

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_READY: _ClassVar[ModelState]
    MODEL_STATE_DRAINING: _ClassVar[ModelState]
    MODEL_STATE_FAILED: _ClassVar[ModelState]
UNKNOWN_WORDS_UNSPECIFIED: UnknownWords
UNKNOWN_WORDS_REFUSE: UnknownWords
UNKNOWN_WORDS_BYTE_FALLBACK: UnknownWords
UNKNOWN_WORDS_COPY: UnknownWords
UNKNOWN_WORDS_SUPPRESS: UnknownWords
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP_SEQUENCE: FinishReason
FINISH_REASON_REPETITION: FinishReason
FINISH_REASON_CANCELLED: FinishReason
TOKENIZER_SIDE_UNSPECIFIED: TokenizerSide
TOKENIZER_SIDE_SOURCE: TokenizerSide
TOKENIZER_SIDE_TARGET: TokenizerSide
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_READY: ModelState
MODEL_STATE_DRAINING: ModelState
MODEL_STATE_FAILED: ModelState

class GenerateRequest(_message.Message):
    __slots__ = ("model", "version", "text", "target_language", "options", "request_id", "priority")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    text: str
    target_language: str
    options: DecodingOptions
    request_id: str
    priority: int
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., text: _Optional[str] = ..., target_language: _Optional[str] = ..., options: _Optional[_Union[DecodingOptions, _Mapping]] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class DecodingOptions(_message.Message):
    __slots__ = ("max_new_tokens", "beam_size", "num_hypotheses", "length_penalty", "temperature", "return_scores", "return_alignment", "min_new_tokens", "max_length_ratio", "patience", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "no_repeat_ngram_size", "target_prefix", "suppress_tokens", "suppress_sequences", "stop", "detect_repetition", "num_top_tokens", "return_alternatives", "coverage_penalty", "unknown_words", "split_sentences", "protect")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    RETURN_SCORES_FIELD_NUMBER: _ClassVar[int]
    RETURN_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_RATIO_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_PREFIX_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DETECT_REPETITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_WORDS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_SENTENCES_FIELD_NUMBER: _ClassVar[int]
    PROTECT_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    beam_size: int
    num_hypotheses: int
    length_penalty: float
    temperature: float
    return_scores: bool
    return_alignment: bool
    min_new_tokens: int
    max_length_ratio: float
    patience: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    no_repeat_ngram_size: int
    target_prefix: str
    suppress_tokens: _containers.RepeatedScalarFieldContainer[str]
    suppress_sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    stop: _containers.RepeatedScalarFieldContainer[str]
    detect_repetition: bool
    num_top_tokens: int
    return_alternatives: bool
    coverage_penalty: float
    unknown_words: UnknownWords
    split_sentences: bool
    protect: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, max_new_tokens: _Optional[int] = ..., beam_size: _Optional[int] = ..., num_hypotheses: _Optional[int] = ..., length_penalty: _Optional[float] = ..., temperature: _Optional[float] = ..., return_scores: _Optional[bool] = ..., return_alignment: _Optional[bool] = ..., min_new_tokens: _Optional[int] = ..., max_length_ratio: _Optional[float] = ..., patience: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., no_repeat_ngram_size: _Optional[int] = ..., target_prefix: _Optional[str] = ..., suppress_tokens: _Optional[_Iterable[str]] = ..., suppress_sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., stop: _Optional[_Iterable[str]] = ..., detect_repetition: _Optional[bool] = ..., num_top_tokens: _Optional[int] = ..., return_alternatives: _Optional[bool] = ..., coverage_penalty: _Optional[float] = ..., unknown_words: _Optional[_Union[UnknownWords, str]] = ..., split_sentences: _Optional[bool] = ..., protect: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("text", "segments", "usage", "timing", "model", "version", "request_id", "seed")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    text: str
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    usage: Usage
    timing: Timing
    model: str
    version: str
    request_id: str
    seed: int
    def __init__(self, text: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., request_id: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("source", "hypotheses", "source_tokens", "continues")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    source: Span
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    source_tokens: _containers.RepeatedScalarFieldContainer[str]
    continues: bool
    def __init__(self, source: _Optional[_Union[Span, _Mapping]] = ..., hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ..., source_tokens: _Optional[_Iterable[str]] = ..., continues: _Optional[bool] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("text", "tokens", "scores", "finish_reason", "alignment", "top_tokens", "unprotected")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNPROTECTED_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedScalarFieldContainer[str]
    scores: Scores
    finish_reason: FinishReason
    alignment: _containers.RepeatedCompositeFieldContainer[AlignmentPoint]
    top_tokens: _containers.RepeatedCompositeFieldContainer[TopTokens]
    unprotected: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[str]] = ..., scores: _Optional[_Union[Scores, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., alignment: _Optional[_Iterable[_Union[AlignmentPoint, _Mapping]]] = ..., top_tokens: _Optional[_Iterable[_Union[TopTokens, _Mapping]]] = ..., unprotected: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class TopTokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TopToken]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TopToken, _Mapping]]] = ...) -> None: ...

class TopToken(_message.Message):
    __slots__ = ("token", "log_probability")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    token: str
    log_probability: float
    def __init__(self, token: _Optional[str] = ..., log_probability: _Optional[float] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("sum", "tokens", "normalized")
    SUM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    sum: float
    tokens: _containers.RepeatedScalarFieldContainer[float]
    normalized: float
    def __init__(self, sum: _Optional[float] = ..., tokens: _Optional[_Iterable[float]] = ..., normalized: _Optional[float] = ...) -> None: ...

class AlignmentPoint(_message.Message):
    __slots__ = ("source_token", "target_token", "weight", "source")
    SOURCE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source_token: int
    target_token: int
    weight: float
    source: Span
    def __init__(self, source_token: _Optional[int] = ..., target_token: _Optional[int] = ..., weight: _Optional[float] = ..., source: _Optional[_Union[Span, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("source_tokens", "generated_tokens")
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source_tokens: int
    generated_tokens: int
    def __init__(self, source_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue", "encode", "decode", "total")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    encode: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    total: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., encode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StreamGenerateResponse(_message.Message):
    __slots__ = ("segment", "hypothesis", "delta", "final", "result", "response", "source")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESIS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    segment: int
    hypothesis: int
    delta: str
    final: bool
    result: Hypothesis
    response: GenerateResponse
    source: Span
    def __init__(self, segment: _Optional[int] = ..., hypothesis: _Optional[int] = ..., delta: _Optional[str] = ..., final: _Optional[bool] = ..., result: _Optional[_Union[Hypothesis, _Mapping]] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., source: _Optional[_Union[Span, _Mapping]] = ...) -> None: ...

class BatchGenerateRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ...) -> None: ...

class BatchGenerateResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BatchItem]
    def __init__(self, items: _Optional[_Iterable[_Union[BatchItem, _Mapping]]] = ...) -> None: ...

class BatchItem(_message.Message):
    __slots__ = ("response", "error")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    response: GenerateResponse
    error: _status_pb2.Status
    def __init__(self, response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "version", "text", "target", "request_id", "priority")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    text: str
    target: str
    request_id: str
    priority: int
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., text: _Optional[str] = ..., target: _Optional[str] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("tokens", "scores", "usage", "timing", "model", "version", "request_id")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    scores: Scores
    usage: Usage
    timing: Timing
    model: str
    version: str
    request_id: str
    def __init__(self, tokens: _Optional[_Iterable[str]] = ..., scores: _Optional[_Union[Scores, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model", "version", "created", "checksum", "precision", "provider", "limits", "unknown_policy", "shape", "quality", "source_tokenizer", "target_tokenizer", "batch_invariant", "alignment", "source_language", "target_language", "splits_sentences")
    class QualityEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_POLICY_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    SPLITS_SENTENCES_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    created: _timestamp_pb2.Timestamp
    checksum: str
    precision: str
    provider: str
    limits: ModelLimits
    unknown_policy: str
    shape: ModelShape
    quality: _containers.ScalarMap[str, str]
    source_tokenizer: TokenizerInfo
    target_tokenizer: TokenizerInfo
    batch_invariant: bool
    alignment: bool
    source_language: str
    target_language: str
    splits_sentences: bool
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., checksum: _Optional[str] = ..., precision: _Optional[str] = ..., provider: _Optional[str] = ..., limits: _Optional[_Union[ModelLimits, _Mapping]] = ..., unknown_policy: _Optional[str] = ..., shape: _Optional[_Union[ModelShape, _Mapping]] = ..., quality: _Optional[_Mapping[str, str]] = ..., source_tokenizer: _Optional[_Union[TokenizerInfo, _Mapping]] = ..., target_tokenizer: _Optional[_Union[TokenizerInfo, _Mapping]] = ..., batch_invariant: _Optional[bool] = ..., alignment: _Optional[bool] = ..., source_language: _Optional[str] = ..., target_language: _Optional[str] = ..., splits_sentences: _Optional[bool] = ...) -> None: ...

class TokenizerInfo(_message.Message):
    __slots__ = ("kind", "size", "normalization")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NORMALIZATION_FIELD_NUMBER: _ClassVar[int]
    kind: str
    size: int
    normalization: str
    def __init__(self, kind: _Optional[str] = ..., size: _Optional[int] = ..., normalization: _Optional[str] = ...) -> None: ...

class ModelLimits(_message.Message):
    __slots__ = ("max_source_tokens", "max_new_tokens", "max_text_bytes", "max_segments")
    MAX_SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    max_source_tokens: int
    max_new_tokens: int
    max_text_bytes: int
    max_segments: int
    def __init__(self, max_source_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., max_text_bytes: _Optional[int] = ..., max_segments: _Optional[int] = ...) -> None: ...

class ModelShape(_message.Message):
    __slots__ = ("d_model", "num_heads", "encoder_layers", "decoder_layers", "source_vocab_size", "target_vocab_size")
    D_MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DECODER_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    d_model: int
    num_heads: int
    encoder_layers: int
    decoder_layers: int
    source_vocab_size: int
    target_vocab_size: int
    def __init__(self, d_model: _Optional[int] = ..., num_heads: _Optional[int] = ..., encoder_layers: _Optional[int] = ..., decoder_layers: _Optional[int] = ..., source_vocab_size: _Optional[int] = ..., target_vocab_size: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "version", "text", "side", "target_language", "request_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    text: str
    side: TokenizerSide
    target_language: str
    request_id: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., text: _Optional[str] = ..., side: _Optional[_Union[TokenizerSide, str]] = ..., target_language: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("tokens", "model", "version", "request_id")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    model: str
    version: str
    request_id: str
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("token", "id", "span")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    token: str
    id: int
    span: Span
    def __init__(self, token: _Optional[str] = ..., id: _Optional[int] = ..., span: _Optional[_Union[Span, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("model", "version", "state", "reason", "is_default")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    state: ModelState
    reason: str
    is_default: bool
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., reason: _Optional[str] = ..., is_default: _Optional[bool] = ...) -> None: ...
