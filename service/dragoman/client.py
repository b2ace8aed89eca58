"""The typed client: text in, dataclasses out, errors as ``dragoman.errors``. ``AsyncClient``, and ``Client``.

Both speak as their ``ClientCredentials`` say: by default in the clear, without a token. A target is ``HOST:PORT``, or
``IP:PORT,IP:PORT,...``; of several servers, each gets every n-th call: see ``addresses.py``. A call that was refused
for the moment is made again as the ``RetryPolicy`` says (see ``retries.py``): a stream only before its first message, a
text of a batch not at all. A call without ``timeout`` (seconds, for all attempts together) waits as long as the server
does. Proxies that the environment names are not used: a target is dialled directly. An argument of a wrong type is an
InvalidRequestError, before anything is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self

import grpc
from google.protobuf.message import Message

from dragoman.addresses import channel_target
from dragoman.answer import TextResult, TextScore, TextUpdate
from dragoman.client_credentials import PLAIN, ClientCredentials, open_async_channel, open_channel
from dragoman.errors import ConfigError, DragomanError, InvalidRequestError
from dragoman.model_status import ModelStatus
from dragoman.retries import Attempts, RetryPolicy
from dragoman.servicers import wire
from dragoman.servicers.status import error_of, error_of_rpc
from dragoman.tokenization import TextToken, TokenizerSide
from dragoman.types import MAX_PRIORITY, DecodingOptions
from dragoman.v1 import generation_pb2 as pb
from dragoman.v1.generation_pb2_grpc import GenerationServiceStub

_OPTIONS: Final = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    # A dead server is found within 40 s of silence. No pings without calls: servers may resent them.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
_GREEDY: Final = DecodingOptions()
_RETRIES: Final = RetryPolicy()

MAX_TIMEOUT_SECONDS: Final = 1_000_000_000
"""Thirty years. From some 7 times this on, gRPC's clock overflows, and takes the deadline for one that has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedResult(TextResult):
    """An answer, and who gave it."""

    model: str
    version: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedScore(TextScore):
    """A score, and who gave it."""

    model: str
    version: str
    request_id: str


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """How one side's text becomes tokens."""

    kind: str
    size: int
    normalization: str  # the rule by which text is changed first; "identity" for none


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a served model is and accepts."""

    model: str
    version: str
    created: datetime
    checksum: str
    precision: str
    provider: str
    max_source_tokens: int
    max_new_tokens: int
    max_text_bytes: int
    max_segments: int
    unknown_policy: str
    quality: dict[str, str]
    source_tokenizer: TokenizerInfo
    target_tokenizer: TokenizerInfo
    batch_invariant: bool
    alignment: bool  # whether return_alignment may be asked for
    source_language: str  # of ISO 639, as the next; empty where the model does not say
    target_language: str
    splits_sentences: bool  # unless a request says otherwise


@contextmanager
def _dial(target: str, credentials: ClientCredentials) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    if not isinstance(target, str):
        raise ConfigError(f"target is {target!r:.100}; it must be a text, HOST:PORT")
    dialled, options = channel_target(target)
    if dialled != target and credentials.encrypted and not credentials.server_name:
        raise ConfigError(f"target {target!r} has several addresses: set server_name to the name in their certificates")
    try:
        yield dialled, [*_OPTIONS, *options]
    except UnicodeError as error:
        raise ConfigError(f"target {target!r} is no HOST:PORT: {error}") from error


class AsyncClient:
    """Calls one server from one event loop. Any number of calls may run together. Every method raises DragomanError."""

    def __init__(
        self,
        target: str,
        *,
        model: str = "",
        version: str = "",
        credentials: ClientCredentials = PLAIN,
        retries: RetryPolicy = _RETRIES,
    ) -> None:
        """Nothing is dialled before the first call. No model: the server's default.

        Raises ConfigError for a target that is none, and for files of ``credentials`` that cannot be used.
        """
        self._model, self._version = model, version
        self._metadata, self._retries = credentials.metadata, retries
        with _dial(target, credentials) as (dialled, options):
            self._channel = open_async_channel(dialled, credentials, options)
        self._stub: Any = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated code

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and hang up."""
        await self._channel.close(None)

    async def generate(
        self,
        text: str,
        options: DecodingOptions = _GREEDY,
        *,
        target_language: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout: float | None = None,
    ) -> ServedResult:
        """The answer to one text, by a model of several languages in the one named.

        Cancelling the task cancels the work on the server.
        """
        request = _request(text, options, target_language, request_id, priority, self._model, self._version)
        return _result(await self._call(self._stub.Generate, request, timeout))

    async def stream(
        self,
        text: str,
        options: DecodingOptions = _GREEDY,
        *,
        target_language: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[TextUpdate | ServedResult]:
        """The answer piece by piece; the whole of it last. Closing the generator cancels the work on the server."""
        request = _request(text, options, target_language, request_id, priority, self._model, self._version)
        attempts = Attempts(self._retries, _seconds(timeout))
        begun = False
        while True:
            call = self._stub.StreamGenerate(request, timeout=attempts.remaining(), metadata=self._metadata)
            try:
                with _dragoman_errors():
                    async for message in call:
                        begun = True
                        yield _item(message)
                return
            except DragomanError as error:
                if begun:
                    raise
                delay = attempts.delay_after(error)
            finally:
                call.cancel()
            await asyncio.sleep(delay)

    async def batch(
        self,
        texts: Sequence[str],
        options: DecodingOptions = _GREEDY,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[ServedResult | DragomanError]:
        """The answers to many texts, in order; a text that failed alone has its error in its place."""
        request = _batch_request(texts, options, priority, self._model, self._version)
        return _batch_results(await self._call(self._stub.BatchGenerate, request, timeout))

    async def score(
        self, text: str, target: str, *, request_id: str = "", priority: int = 0, timeout: float | None = None
    ) -> ServedScore:
        """How probable the model finds ``target`` as the answer to ``text``, each of one line."""
        request = _score_request(text, target, request_id, priority, self._model, self._version)
        return _score(await self._call(self._stub.Score, request, timeout))

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """What the model is."""
        request = _model_request(self._model, self._version)
        return _model_info(await self._call(self._stub.GetModel, request, timeout))

    async def models(self, *, timeout: float | None = None) -> list[ModelStatus]:
        """All versions of all models of the server, by name, the newest first; those too that load or failed to."""
        request = pb.ListModelsRequest()
        return _models(await self._call(self._stub.ListModels, request, timeout))

    async def tokenize(
        self,
        text: str,
        side: TokenizerSide = TokenizerSide.SOURCE,
        *,
        target_language: str = "",
        timeout: float | None = None,
    ) -> list[TextToken]:
        """The tokens that the model makes of a text of one line; of a source, those of the template among them."""
        request = _tokenize_request(text, side, target_language, self._model, self._version)
        return _tokens(await self._call(self._stub.Tokenize, request, timeout))

    async def _call(self, method: Any, request: Message, timeout: float | None) -> Any:
        attempts = Attempts(self._retries, _seconds(timeout))
        while True:
            try:
                with _dragoman_errors():
                    return await method(request, timeout=attempts.remaining(), metadata=self._metadata)
            except DragomanError as error:
                delay = attempts.delay_after(error)
            await asyncio.sleep(delay)


class Client:
    """``AsyncClient`` for code without an event loop. Any number of threads may share it."""

    def __init__(
        self,
        target: str,
        *,
        model: str = "",
        version: str = "",
        credentials: ClientCredentials = PLAIN,
        retries: RetryPolicy = _RETRIES,
    ) -> None:
        """Nothing is dialled before the first call. No model: the server's default.

        Raises ConfigError for a target that is none, and for files of ``credentials`` that cannot be used.
        """
        self._model, self._version = model, version
        self._metadata, self._retries = credentials.metadata, retries
        with _dial(target, credentials) as (dialled, options):
            self._channel = open_channel(dialled, credentials, options)
        self._stub: Any = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs and hang up."""
        self._channel.close()

    def generate(
        self,
        text: str,
        options: DecodingOptions = _GREEDY,
        *,
        target_language: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout: float | None = None,
    ) -> ServedResult:
        """As ``AsyncClient.generate``."""
        request = _request(text, options, target_language, request_id, priority, self._model, self._version)
        return _result(self._call(self._stub.Generate, request, timeout))

    def stream(
        self,
        text: str,
        options: DecodingOptions = _GREEDY,
        *,
        target_language: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout: float | None = None,
    ) -> Iterator[TextUpdate | ServedResult]:
        """As ``AsyncClient.stream``."""
        request = _request(text, options, target_language, request_id, priority, self._model, self._version)
        attempts = Attempts(self._retries, _seconds(timeout))
        begun = False
        while True:
            call = self._stub.StreamGenerate(request, timeout=attempts.remaining(), metadata=self._metadata)
            try:
                with _dragoman_errors():
                    for message in call:
                        begun = True
                        yield _item(message)
                return
            except DragomanError as error:
                if begun:
                    raise
                delay = attempts.delay_after(error)
            finally:
                call.cancel()
            time.sleep(delay)

    def batch(
        self,
        texts: Sequence[str],
        options: DecodingOptions = _GREEDY,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[ServedResult | DragomanError]:
        """As ``AsyncClient.batch``."""
        request = _batch_request(texts, options, priority, self._model, self._version)
        return _batch_results(self._call(self._stub.BatchGenerate, request, timeout))

    def score(
        self, text: str, target: str, *, request_id: str = "", priority: int = 0, timeout: float | None = None
    ) -> ServedScore:
        """As ``AsyncClient.score``."""
        request = _score_request(text, target, request_id, priority, self._model, self._version)
        return _score(self._call(self._stub.Score, request, timeout))

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """As ``AsyncClient.model_info``."""
        request = _model_request(self._model, self._version)
        return _model_info(self._call(self._stub.GetModel, request, timeout))

    def models(self, *, timeout: float | None = None) -> list[ModelStatus]:
        """As ``AsyncClient.models``."""
        request = pb.ListModelsRequest()
        return _models(self._call(self._stub.ListModels, request, timeout))

    def tokenize(
        self,
        text: str,
        side: TokenizerSide = TokenizerSide.SOURCE,
        *,
        target_language: str = "",
        timeout: float | None = None,
    ) -> list[TextToken]:
        """As ``AsyncClient.tokenize``."""
        request = _tokenize_request(text, side, target_language, self._model, self._version)
        return _tokens(self._call(self._stub.Tokenize, request, timeout))

    def _call(self, method: Any, request: Message, timeout: float | None) -> Any:
        attempts = Attempts(self._retries, _seconds(timeout))
        while True:
            try:
                with _dragoman_errors():
                    return method(request, timeout=attempts.remaining(), metadata=self._metadata)
            except DragomanError as error:
                delay = attempts.delay_after(error)
            time.sleep(delay)


@contextmanager
def _dragoman_errors() -> Generator[None]:
    try:
        yield
    except grpc.RpcError as error:
        call: Any = error  # a failed call is its own error, with code, details and trailing metadata
        raise error_of_rpc(call.code(), call.details() or "", call.trailing_metadata() or ()) from error


@contextmanager
def _packing() -> Generator[None]:
    """Whatever protobuf cannot hold."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from error


def _check_texts(**values: object) -> None:
    """Raises InvalidRequestError for what is no text."""
    for name, value in values.items():
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} is {value!r:.100}; it must be a text")


def _check_priority(priority: object) -> None:
    """Raises InvalidRequestError for what is no whole number, and for one that the message has no place for."""
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority is {priority!r:.100}; it must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        )


def _seconds(timeout: object) -> float | None:
    """A call's timeout. Raises InvalidRequestError."""
    if timeout is None:
        return None
    if (
        isinstance(timeout, int | float)
        and not isinstance(timeout, bool)
        and abs(timeout) <= MAX_TIMEOUT_SECONDS  # not so for NaN
    ):
        return timeout
    raise InvalidRequestError(
        f"timeout is {timeout!r:.100}; it must be a number of seconds, at most {MAX_TIMEOUT_SECONDS}, or None"
    )


def _request(
    text: str,
    options: DecodingOptions,
    target_language: str,
    request_id: str,
    priority: int,
    model: str,
    version: str,
) -> pb.GenerateRequest:
    _check_texts(text=text, target_language=target_language, request_id=request_id, model=model, version=version)
    _check_priority(priority)
    if not isinstance(options, DecodingOptions):
        raise InvalidRequestError(f"options is {options!r:.100}; it must be a dragoman.types.DecodingOptions")
    with _packing():
        return pb.GenerateRequest(
            model=model,
            version=version,
            text=text,
            target_language=target_language,
            options=wire.options_to_wire(options),
            request_id=request_id,
            priority=priority,
        )


def _batch_request(
    texts: Sequence[str], options: DecodingOptions, priority: int, model: str, version: str
) -> pb.BatchGenerateRequest:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise InvalidRequestError(f"texts is {texts!r:.100}; it must be a list of texts")
    _check_texts(**{f"texts[{index}]": text for index, text in enumerate(texts)})
    requests = [_request(text, options, "", "", priority, model, version) for text in texts]
    return pb.BatchGenerateRequest(requests=requests)


def _score_request(text: str, target: str, request_id: str, priority: int, model: str, version: str) -> pb.ScoreRequest:
    _check_texts(text=text, target=target, request_id=request_id, model=model, version=version)
    _check_priority(priority)
    with _packing():
        return pb.ScoreRequest(
            model=model, version=version, text=text, target=target, request_id=request_id, priority=priority
        )


def _model_request(model: str, version: str) -> pb.GetModelRequest:
    _check_texts(model=model, version=version)
    return pb.GetModelRequest(model=model, version=version)


def _tokenize_request(text: str, side: object, target_language: str, model: str, version: str) -> pb.TokenizeRequest:
    _check_texts(model=model, version=version, text=text, target_language=target_language)
    if not isinstance(side, TokenizerSide):
        raise InvalidRequestError(f"side is {side!r:.100}; it must be a TokenizerSide")
    with _packing():
        return pb.TokenizeRequest(
            model=model, version=version, text=text, side=wire.side_to_wire(side), target_language=target_language
        )


def _models(message: pb.ListModelsResponse) -> list[ModelStatus]:
    return [wire.status_from_wire(status) for status in message.models]


def _tokens(message: pb.TokenizeResponse) -> list[TextToken]:
    return [wire.token_from_wire(token) for token in message.tokens]


def _result(message: pb.GenerateResponse) -> ServedResult:
    result = wire.result_from_wire(message)
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    return ServedResult(**values, model=message.model, version=message.version, request_id=message.request_id)


def _score(message: pb.ScoreResponse) -> ServedScore:
    score = wire.score_from_wire(message)
    values = {field.name: getattr(score, field.name) for field in fields(score)}
    return ServedScore(**values, model=message.model, version=message.version, request_id=message.request_id)


def _item(message: pb.StreamGenerateResponse) -> TextUpdate | ServedResult:
    return _result(message.response) if message.HasField("response") else wire.update_from_wire(message)


def _batch_results(message: pb.BatchGenerateResponse) -> list[ServedResult | DragomanError]:
    return [_result(item.response) if item.HasField("response") else error_of(item.error) for item in message.items]


def _model_info(message: pb.GetModelResponse) -> ModelInfo:
    return ModelInfo(
        model=message.model,
        version=message.version,
        created=message.created.ToDatetime(UTC),
        checksum=message.checksum,
        precision=message.precision,
        provider=message.provider,
        max_source_tokens=message.limits.max_source_tokens,
        max_new_tokens=message.limits.max_new_tokens,
        max_text_bytes=message.limits.max_text_bytes,
        max_segments=message.limits.max_segments,
        unknown_policy=message.unknown_policy,
        quality=dict(message.quality),
        source_tokenizer=_tokenizer_info(message.source_tokenizer),
        target_tokenizer=_tokenizer_info(message.target_tokenizer),
        batch_invariant=message.batch_invariant,
        alignment=message.alignment,
        source_language=message.source_language,
        target_language=message.target_language,
        splits_sentences=message.splits_sentences,
    )


def _tokenizer_info(message: pb.TokenizerInfo) -> TokenizerInfo:
    return TokenizerInfo(message.kind, message.size, message.normalization)
