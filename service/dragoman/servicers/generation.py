"""``dragoman.v1.GenerationService``: find the model, check the options, run the pipeline, count the outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, contextmanager
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.status_pb2 import Status

from dragoman.answer import TextUpdate
from dragoman.bundle import TokenizerEntry
from dragoman.config import ServerConfig
from dragoman.errors import (
    BundleError,
    ConfigError,
    DragomanError,
    InvalidRequestError,
    ModelNotFoundError,
    ReplyTooLargeError,
    UnsupportedError,
)
from dragoman.metrics import OTHER, ServerMetrics
from dragoman.resolver import Terms
from dragoman.served_model import ServedModel
from dragoman.servicers import wire
from dragoman.servicers.rpc import Call, Method
from dragoman.servicers.status import status_of
from dragoman.v1 import generation_pb2 as pb

SERVICE: Final = "dragoman.v1.GenerationService"

_BATCH_WINDOW: Final = 128
"""Items of one batch that are in work together: enough to fill an engine; of a line each, too few to fill its queue."""

_ITEM_BYTES: Final = 240
"""So much of a batch's reply is kept for each item: an error of a short message, and what any item has around it."""

_FRAME_BYTES: Final = 16
"""What protobuf puts around an item, at most."""


class ModelTable:
    """The served models by name and version. The first is the default; of one name, the first is the newest."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        """Raises ConfigError for no model or two alike."""
        if not models:
            raise ConfigError("there is no model to serve")
        names = [f"{model.name} version {model.version}" for model in models]
        if len(set(names)) != len(names):
            raise ConfigError(f"two models have the same name and version: {', '.join(names)}")
        self._models = tuple(models)
        self._names = ", ".join(names)

    def find(self, name: str, version: str) -> ServedModel:
        """The model for a request; empty means any. Raises ModelNotFoundError listing what there is."""
        for model in self._models:
            if name in ("", model.name) and version in ("", model.version):
                return model
        wanted = " ".join(f"{what} {value[:100]!r}" for what, value in (("model", name), ("version", version)) if value)
        raise ModelNotFoundError(f"no {wanted} is served; there is {self._names}")


class GenerationServicer:
    """The service's methods."""

    def __init__(self, models: Sequence[ServedModel], config: ServerConfig, metrics: ServerMetrics) -> None:
        """Raises ConfigError and BundleError for models that cannot be served together or described."""
        self._table = ModelTable(models)
        self._descriptions = {model: _describe(model, config) for model in models}
        self._config = config
        self._metrics = metrics

    def methods(self) -> tuple[Method, ...]:
        """The RPCs of the service."""
        return (
            Method(SERVICE, "Generate", pb.GenerateRequest, self._generate, generates=True),
            Method(SERVICE, "StreamGenerate", pb.GenerateRequest, self._stream, stream_reply=True, generates=True),
            Method(SERVICE, "BatchGenerate", pb.BatchGenerateRequest, self._batch, generates=True),
            Method(SERVICE, "Score", pb.ScoreRequest, self._score, generates=True),
            Method(SERVICE, "GetModel", pb.GetModelRequest, self._get_model),
        )

    async def _generate(self, request: pb.GenerateRequest, call: Call) -> AsyncGenerator[pb.GenerateResponse]:
        yield await self._answer_whole(request, call)

    async def _stream(self, request: pb.GenerateRequest, call: Call) -> AsyncGenerator[pb.StreamGenerateResponse]:
        async with aclosing(self._answer(request, call)) as items:
            async for item in items:
                if isinstance(item, TextUpdate):
                    yield wire.update_to_wire(item)
                else:
                    yield pb.StreamGenerateResponse(response=item)

    async def _batch(self, request: pb.BatchGenerateRequest, call: Call) -> AsyncGenerator[pb.BatchGenerateResponse]:
        num_items, limit = len(request.requests), self._config.max_batch_items
        if num_items > limit:
            self._metrics.request_finished(OTHER, call.method, InvalidRequestError.code, 0.0)
            raise InvalidRequestError(f"the batch has {num_items} items; this server accepts {limit}: split it")
        if num_items * _ITEM_BYTES > self._config.max_message_bytes:
            self._metrics.request_finished(OTHER, call.method, ReplyTooLargeError.code, 0.0)
            raise ReplyTooLargeError(
                f"the batch has {num_items} items, and the reply {num_items * _ITEM_BYTES} bytes or more if each "
                f"fails; this server's limit is {self._config.max_message_bytes}: split it"
            )
        window = asyncio.Semaphore(_BATCH_WINDOW)
        room = _Room(self._config.max_message_bytes - num_items * _ITEM_BYTES)
        async with asyncio.TaskGroup() as group:  # a cancelled call cancels them all
            tasks = [
                group.create_task(self._batch_item(item, f"requests[{index}]", call, window, room))
                for index, item in enumerate(request.requests)
            ]
        yield pb.BatchGenerateResponse(items=[task.result() for task in tasks])

    async def _batch_item(
        self, request: pb.GenerateRequest, place: str, call: Call, window: asyncio.Semaphore, room: _Room
    ) -> pb.BatchItem:
        try:
            await window.acquire()
        except asyncio.CancelledError:  # this item never came to ``_answer``, which counts the others
            self._metrics.request_finished(OTHER, call.method, call.interruption(), 0.0)
            raise
        try:
            await asyncio.sleep(0)  # other callers' turn: refusing an item can cost as much as answering one
            wire.check_known(request, place)
            return pb.BatchItem(response=await self._answer_whole(request, call, room))
        except Exception as error:  # of this item alone
            return pb.BatchItem(error=room.fitted(status_of(error)))
        finally:
            window.release()

    async def _score(self, request: pb.ScoreRequest, call: Call) -> AsyncGenerator[pb.ScoreResponse]:
        with self._counted(request, call) as model:
            terms = Terms(call.deadline, request.priority, call.caller)
            score = await model.pipeline.score(request.text, request.target, terms)
            response = wire.score_to_wire(score, model=model.name, version=model.version, request_id=request.request_id)
        yield response

    async def _get_model(self, request: pb.GetModelRequest, call: Call) -> AsyncGenerator[pb.GetModelResponse]:
        yield self._descriptions[self._table.find(request.model, request.version)]

    async def _answer_whole(
        self, request: pb.GenerateRequest, call: Call, room: _Room | None = None
    ) -> pb.GenerateResponse:
        response = None
        async with aclosing(self._answer(request, call, room)) as items:
            async for item in items:
                if not isinstance(item, TextUpdate):
                    response = item
        assert response is not None, "a pipeline's stream ends with its result"
        return response

    async def _answer(
        self, request: pb.GenerateRequest, call: Call, room: _Room | None = None
    ) -> AsyncGenerator[TextUpdate | pb.GenerateResponse]:
        """The one path of a text, however it came. The whole answer is the last item.

        ``room``: what is left of a reply that holds other answers too. An answer that turns out to be too large ends at
        once: no more work is done for it.
        """
        room = room or _Room(self._config.max_message_bytes)
        least = 0
        with self._counted(request, call) as model:
            room.check(0)
            if request.target_language:
                raise UnsupportedError(f"model {model.name} answers in one language: leave target_language empty")
            terms = Terms(call.deadline, request.priority, call.caller)
            options = wire.options_from_wire(request.options)
            async with aclosing(model.pipeline.stream(request.text, options, terms)) as items:
                async for item in items:
                    if isinstance(item, TextUpdate):
                        if item.result is not None:
                            least += wire.least_bytes(item.result)
                            room.check(least)
                        yield item
                    else:
                        response = wire.result_to_wire(
                            item, model=model.name, version=model.version, request_id=request.request_id
                        )
                        room.take(response.ByteSize())
                        yield response

    @contextmanager
    def _counted(self, request: pb.GenerateRequest | pb.ScoreRequest, call: Call) -> Generator[ServedModel]:
        """The request's model, to work with. Counts the outcome, once, whatever it is."""
        started = time.monotonic()
        model_label, code = OTHER, "internal"
        try:
            model = self._table.find(request.model, request.version)
            model_label = model.name
            wire.check_request_id(request.request_id)
            yield model
            code = "ok"
        except DragomanError as error:
            code = error.code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = call.interruption()
            raise
        finally:
            self._metrics.request_finished(model_label, call.method, code, time.monotonic() - started)


class _Room:
    """How many bytes the answers of one reply may still have."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    def check(self, num_bytes: int) -> None:
        """Raises ReplyTooLargeError where there is no room for an answer of so many bytes or more."""
        if (total := self._taken + num_bytes) >= self._limit:
            raise ReplyTooLargeError(
                f"the reply would have {total} bytes or more; this server's limit for the answers of one reply is "
                f"{self._limit}: ask for fewer lines, items, hypotheses or top tokens at once"
            )

    def take(self, num_bytes: int) -> None:
        """``check``, for an answer that is complete: its room is taken from then on."""
        self.check(num_bytes)
        self._taken += num_bytes

    def fitted(self, status: Status) -> Status:
        """An item's error, its message shortened, and marked so, where the reply has no room for all of it."""
        more = status.ByteSize() + _FRAME_BYTES - _ITEM_BYTES
        if more > 0 and self._taken + more < self._limit:
            self._taken += more
        elif more > 0:
            message = status.message.encode("utf-8")
            status.message = message[: max(0, len(message) - more - len("…".encode()))].decode("utf-8", "ignore") + "…"
        return status


def _describe(model: ServedModel, config: ServerConfig) -> pb.GetModelResponse:
    manifest = model.bundle.manifest
    created = Timestamp()
    try:
        created.FromJsonString(manifest.created)
    except ValueError as error:
        raise BundleError(f"manifest.created is {manifest.created!r}; it must be an RFC 3339 time: {error}") from error
    shape = manifest.model
    return pb.GetModelResponse(
        model=model.name,
        version=model.version,
        created=created,
        checksum=manifest.checksum,
        precision=model.graphs.precision,
        provider=model.graphs.provider,
        limits=pb.ModelLimits(
            max_source_tokens=manifest.limits.max_source_tokens,
            max_new_tokens=manifest.limits.max_new_tokens,
            max_text_bytes=config.max_text_bytes,
            max_segments=config.max_segments,
        ),
        unknown_policy=manifest.unknown_policy,
        shape=pb.ModelShape(
            d_model=shape.d_model,
            num_heads=shape.num_heads,
            encoder_layers=shape.encoder_layers,
            decoder_layers=shape.decoder_layers,
            source_vocab_size=shape.source_vocab_size,
            target_vocab_size=shape.target_vocab_size,
        ),
        quality={name: str(value) for name, value in _quality(model).items()},
        source_tokenizer=_describe_tokenizer(manifest.tokenizers.source),
        target_tokenizer=_describe_tokenizer(manifest.tokenizers.target),
        batch_invariant=model.graphs.batch_invariant,
        alignment=manifest.alignment is not None,
    )


def _quality(model: ServedModel) -> dict[str, float | str]:
    """The figures of what answers here, where they were measured; else those of the trained model. Never both."""
    measured = (model.graphs if model.shortlist is None else model.shortlist).quality
    return measured if measured and "status" not in measured else model.bundle.manifest.quality


def _describe_tokenizer(entry: TokenizerEntry) -> pb.TokenizerInfo:
    return pb.TokenizerInfo(kind=entry.kind, size=entry.size, normalization=entry.normalization)
