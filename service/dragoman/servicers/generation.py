"""``dragoman.v1.GenerationService``: find the model, check the options, run the pipeline, count the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from dragoman.answer import TextUpdate
from dragoman.bundle import TokenizerEntry
from dragoman.config import ServerConfig
from dragoman.errors import InvalidRequestError, ReplyTooLargeError
from dragoman.model_table import Leases, ModelTable
from dragoman.observer import RequestObserver, RunningRequest
from dragoman.resolver import Terms
from dragoman.served_model import ServedModel
from dragoman.servicers import wire
from dragoman.servicers.room import ITEM_BYTES, Room
from dragoman.servicers.rpc import Call, Method
from dragoman.servicers.status import status_of
from dragoman.v1 import generation_pb2 as pb

SERVICE: Final = "dragoman.v1.GenerationService"

BATCH_WINDOW: Final = 128
"""Items of one batch that are in work together: enough to fill an engine; of a line each, too few to fill its queue."""


class GenerationServicer:
    """The service's methods."""

    def __init__(self, table: ModelTable, config: ServerConfig, observer: RequestObserver) -> None:
        self._table = table
        self._config = config
        self._observer = observer

    def methods(self) -> tuple[Method, ...]:
        """The RPCs of the service."""
        return (
            Method(SERVICE, "Generate", pb.GenerateRequest, self._generate, generates=True),
            Method(SERVICE, "StreamGenerate", pb.GenerateRequest, self._stream, stream_reply=True, generates=True),
            Method(SERVICE, "BatchGenerate", pb.BatchGenerateRequest, self._batch, generates=True),
            Method(SERVICE, "Score", pb.ScoreRequest, self._score, generates=True),
            Method(SERVICE, "Tokenize", pb.TokenizeRequest, self._tokenize),
            Method(SERVICE, "ListModels", pb.ListModelsRequest, self._list_models),
            Method(SERVICE, "GetModel", pb.GetModelRequest, self._get_model),
        )

    async def _generate(self, request: pb.GenerateRequest, call: Call) -> AsyncGenerator[pb.GenerateResponse]:
        with self._table.leases() as leases:
            yield await self._answer_whole(request, call, leases)

    async def _stream(self, request: pb.GenerateRequest, call: Call) -> AsyncGenerator[pb.StreamGenerateResponse]:
        with self._table.leases() as leases:
            async with aclosing(self._answer(request, call, leases)) as items:
                async for item in items:
                    if isinstance(item, TextUpdate):
                        yield wire.update_to_wire(item)
                    else:
                        yield pb.StreamGenerateResponse(response=item)

    async def _batch(self, request: pb.BatchGenerateRequest, call: Call) -> AsyncGenerator[pb.BatchGenerateResponse]:
        num_items, limit = len(request.requests), self._config.max_batch_items
        if num_items > limit:
            self._observer.refused(call, InvalidRequestError.code)
            raise InvalidRequestError(f"the batch has {num_items} items; this server accepts {limit}: split it")
        if num_items * ITEM_BYTES > self._config.max_message_bytes:
            self._observer.refused(call, ReplyTooLargeError.code)
            raise ReplyTooLargeError(
                f"the batch has {num_items} items, and the reply {num_items * ITEM_BYTES} bytes or more if each "
                f"fails; this server's limit is {self._config.max_message_bytes}: split it"
            )
        call.charge(max(0, num_items - 1))
        window = asyncio.Semaphore(BATCH_WINDOW)
        room = Room(self._config.max_message_bytes - num_items * ITEM_BYTES)
        with self._table.leases() as leases:  # items of one model are answered by one version of it
            async with asyncio.TaskGroup() as group:  # a cancelled call cancels them all
                tasks = [
                    group.create_task(self._batch_item(item, f"requests[{index}]", call, leases, window, room))
                    for index, item in enumerate(request.requests)
                ]
        yield pb.BatchGenerateResponse(items=[task.result() for task in tasks])

    async def _batch_item(
        self,
        request: pb.GenerateRequest,
        place: str,
        call: Call,
        leases: Leases,
        window: asyncio.Semaphore,
        room: Room,
    ) -> pb.BatchItem:
        try:
            await window.acquire()
        except asyncio.CancelledError:  # this item never came to ``_answer``, which counts the others
            self._observer.refused(call, call.interruption())
            raise
        try:
            await asyncio.sleep(0)  # other callers' turn: refusing an item can cost as much as answering one
            wire.check_known(request, place)
            return pb.BatchItem(response=await self._answer_whole(request, call, leases, room))
        except Exception as error:  # of this item alone
            return pb.BatchItem(error=room.fitted(status_of(error)))
        finally:
            window.release()

    async def _score(self, request: pb.ScoreRequest, call: Call) -> AsyncGenerator[pb.ScoreResponse]:
        with self._table.leases() as leases, self._observed(request, call, leases) as (model, running):
            terms = Terms(call.deadline, request.priority, call.caller)
            score = await model.pipeline.score(request.text, request.target, terms)
            running.results = (score,)
            response = wire.score_to_wire(score, model=model.name, version=model.version, request_id=request.request_id)
        yield response

    async def _get_model(self, request: pb.GetModelRequest, call: Call) -> AsyncGenerator[pb.GetModelResponse]:
        yield _describe(self._table.find(request.model, request.version), self._config)

    async def _list_models(self, request: pb.ListModelsRequest, call: Call) -> AsyncGenerator[pb.ListModelsResponse]:
        yield pb.ListModelsResponse(models=[wire.status_to_wire(status) for status in self._table.statuses()])

    async def _tokenize(self, request: pb.TokenizeRequest, call: Call) -> AsyncGenerator[pb.TokenizeResponse]:
        wire.check_request_id(request.request_id)
        model = self._table.find(request.model, request.version)
        side = wire.side_from_wire(request.side)
        tokens = model.pipeline.tokenize(request.text, side, request.target_language)
        yield pb.TokenizeResponse(
            tokens=[wire.token_to_wire(token) for token in tokens],
            model=model.name,
            version=model.version,
            request_id=request.request_id,
        )

    async def _answer_whole(
        self, request: pb.GenerateRequest, call: Call, leases: Leases, room: Room | None = None
    ) -> pb.GenerateResponse:
        response = None
        async with aclosing(self._answer(request, call, leases, room)) as items:
            async for item in items:
                if not isinstance(item, TextUpdate):
                    response = item
        assert response is not None, "a pipeline's stream ends with its result"
        return response

    async def _answer(
        self, request: pb.GenerateRequest, call: Call, leases: Leases, room: Room | None = None
    ) -> AsyncGenerator[TextUpdate | pb.GenerateResponse]:
        """The one path of a text, however it came. The whole answer is the last item.

        ``room``: what is left of a reply that holds other answers too. An answer that turns out to be too large ends at
        once: no more work is done for it.
        """
        room = room or Room(self._config.max_message_bytes)
        least = 0
        with self._observed(request, call, leases) as (model, running):
            room.check(0)
            terms = Terms(call.deadline, request.priority, call.caller)
            options = wire.options_from_wire(request.options)
            async with aclosing(model.pipeline.stream(request.text, options, terms, request.target_language)) as items:
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
                        running.results = (item,)
                        yield response

    @contextmanager
    def _observed(
        self, request: pb.GenerateRequest | pb.ScoreRequest, call: Call, leases: Leases
    ) -> Generator[tuple[ServedModel, RunningRequest]]:
        """The request's model, to work with, and who is to be told of its results. It counts once, however it ends."""
        with self._observer.request(call, request.request_id, request.text) as running:
            model = running.model = leases.model(request.model, request.version)
            wire.check_request_id(request.request_id)
            yield model, running


def _describe(model: ServedModel, config: ServerConfig) -> pb.GetModelResponse:
    manifest = model.bundle.manifest
    created = Timestamp()
    created.FromDatetime(model.created)
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
        source_language="" if manifest.texts is None else manifest.texts.source_language,
        target_language="" if manifest.texts is None else manifest.texts.target_language or "",
        splits_sentences=model.pipeline.splits_sentences,
    )


def _quality(model: ServedModel) -> dict[str, float | str]:
    """The figures of what answers here, where they were measured; else those of the trained model. Never both."""
    measured = (model.graphs if model.shortlist is None else model.shortlist).quality
    return measured if measured and "status" not in measured else model.bundle.manifest.quality


def _describe_tokenizer(entry: TokenizerEntry) -> pb.TokenizerInfo:
    return pb.TokenizerInfo(kind=entry.kind, size=entry.size, normalization=entry.normalization)
