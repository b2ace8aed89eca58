"""``inference.GRPCInferenceService``: the Open Inference Protocol, with Triton's extensions, over the same pipelines.

What the protocol's messages mean here is written in proto/dragoman/oip/inference.proto.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import dragoman
from dragoman.answer import TextHypothesis, TextResult, TextUpdate
from dragoman.config import ServerConfig
from dragoman.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    ModelUnsupportedError,
    NotReadyError,
    RequestError,
)
from dragoman.model_status import ModelState
from dragoman.model_table import ModelTable
from dragoman.observer import RequestObserver, RunningRequest
from dragoman.oip import inference_pb2 as pb
from dragoman.served_model import ServedModel
from dragoman.servicers import tensors
from dragoman.servicers.generation import BATCH_WINDOW
from dragoman.servicers.growing import GrowingText
from dragoman.servicers.parameters import Parameters, read_parameters
from dragoman.servicers.room import Room
from dragoman.servicers.rpc import Call, Method
from dragoman.servicers.statistics import model_statistics
from dragoman.servicers.status import status_of
from dragoman.servicers.streamed import Replies, Reply
from dragoman.servicers.tensors import Texts
from dragoman.servicers.wire import check_request_id
from dragoman.types import FinishReason

if TYPE_CHECKING:
    from dragoman.model_loader import ModelLoader

SERVICE: Final = "inference.GRPCInferenceService"

_PLATFORM: Final = "dragoman"
_EXTENSIONS: Final = (
    "schedule_policy",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "statistics",
    "parameters",
)
"""Triton's names of what is here beyond the protocol."""

_STREAM_WINDOW: Final = 128
"""Requests of one stream that are in work, or wait for their caller to read them; more are not read."""

_STATUS_HEADER: Final = "triton_grpc_error"
_FINAL: Final = "triton_final_response"
_UNLOAD_DEPENDENTS: Final = "unload_dependents"

_WORST_FIRST: Final = (
    FinishReason.CANCELLED,
    FinishReason.REPETITION,
    FinishReason.LENGTH,
    FinishReason.STOP_SEQUENCE,
    FinishReason.STOP,
)

_STATES: Final = {
    ModelState.LOADING: "LOADING",
    ModelState.READY: "READY",
    ModelState.DRAINING: "UNLOADING",
    ModelState.FAILED: "UNAVAILABLE",
}

_DATA_TYPES: Final = {"BYTES": pb.TYPE_STRING, "FP64": pb.TYPE_FP64, "UINT32": pb.TYPE_UINT32}


class InferenceServicer:
    """The service's methods."""

    def __init__(
        self,
        table: ModelTable,
        config: ServerConfig,
        observer: RequestObserver,
        is_ready: Callable[[], bool],
        control: ModelLoader | None = None,
    ) -> None:
        """``is_ready`` tells whether requests should come here; without ``control`` no caller loads or unloads."""
        self._table = table
        self._control = control
        self._config = config
        self._observer = observer
        self._is_ready = is_ready

    def methods(self) -> tuple[Method, ...]:
        """The RPCs of the service."""
        return (
            Method(SERVICE, "ServerLive", pb.ServerLiveRequest, self._server_live, is_open=True),
            Method(SERVICE, "ServerReady", pb.ServerReadyRequest, self._server_ready, is_open=True),
            Method(SERVICE, "ModelReady", pb.ModelReadyRequest, self._model_ready),
            Method(SERVICE, "ServerMetadata", pb.ServerMetadataRequest, self._server_metadata),
            Method(SERVICE, "ModelMetadata", pb.ModelMetadataRequest, self._model_metadata),
            Method(SERVICE, "ModelInfer", pb.ModelInferRequest, self._infer, generates=True),
            Method(
                SERVICE,
                "ModelStreamInfer",
                pb.ModelInferRequest,
                self._stream,
                stream_request=True,
                stream_reply=True,
                generates=True,
            ),
            Method(SERVICE, "ModelConfig", pb.ModelConfigRequest, self._model_config),
            Method(SERVICE, "ModelStatistics", pb.ModelStatisticsRequest, self._model_statistics),
            Method(SERVICE, "RepositoryIndex", pb.RepositoryIndexRequest, self._repository_index),
            Method(SERVICE, "RepositoryModelLoad", pb.RepositoryModelLoadRequest, self._load),
            Method(SERVICE, "RepositoryModelUnload", pb.RepositoryModelUnloadRequest, self._unload),
        )

    async def _server_live(self, request: pb.ServerLiveRequest, call: Call) -> AsyncGenerator[pb.ServerLiveResponse]:
        yield pb.ServerLiveResponse(live=self._table.is_live)

    async def _server_ready(self, request: pb.ServerReadyRequest, call: Call) -> AsyncGenerator[pb.ServerReadyResponse]:
        yield pb.ServerReadyResponse(ready=self._is_ready())

    async def _model_ready(self, request: pb.ModelReadyRequest, call: Call) -> AsyncGenerator[pb.ModelReadyResponse]:
        ready = self._is_ready()
        try:
            self._table.find(request.name, request.version)
        except (ModelNotFoundError, NotReadyError):
            ready = False
        yield pb.ModelReadyResponse(ready=ready)

    async def _server_metadata(
        self, request: pb.ServerMetadataRequest, call: Call
    ) -> AsyncGenerator[pb.ServerMetadataResponse]:
        yield pb.ServerMetadataResponse(name="dragoman", version=dragoman.__version__, extensions=_EXTENSIONS)

    async def _model_metadata(
        self, request: pb.ModelMetadataRequest, call: Call
    ) -> AsyncGenerator[pb.ModelMetadataResponse]:
        model = self._table.find(request.name, request.version)
        yield pb.ModelMetadataResponse(
            name=model.name,
            versions=[other.version for other in self._table.models if other.name == model.name],
            platform=_PLATFORM,
            inputs=[pb.ModelMetadataResponse.TensorMetadata(name=tensors.INPUT, datatype="BYTES", shape=(-1, 1))],
            outputs=[
                pb.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=(-1, -1))
                for name, datatype in tensors.OUTPUTS.items()
            ],
            properties={
                "version": model.version,
                "precision": model.graphs.precision,
                "provider": model.graphs.provider,
                "checksum": model.bundle.manifest.checksum,
            },
        )

    async def _model_config(self, request: pb.ModelConfigRequest, call: Call) -> AsyncGenerator[pb.ModelConfigResponse]:
        model = self._table.find(request.name, request.version)
        yield pb.ModelConfigResponse(
            config=pb.ModelConfig(
                name=model.name,
                platform=_PLATFORM,
                backend=_PLATFORM,
                max_batch_size=self._config.max_batch_items,
                input=[pb.ModelInput(name=tensors.INPUT, data_type=pb.TYPE_STRING, dims=(1,))],
                output=[
                    pb.ModelOutput(name=name, data_type=_DATA_TYPES[datatype], dims=(-1,))
                    for name, datatype in tensors.OUTPUTS.items()
                ],
                dynamic_batching=pb.ModelDynamicBatching(),
                model_transaction_policy=pb.ModelTransactionPolicy(decoupled=False),
            )
        )

    async def _model_statistics(
        self, request: pb.ModelStatisticsRequest, call: Call
    ) -> AsyncGenerator[pb.ModelStatisticsResponse]:
        if request.name or request.version:
            found = [self._table.find(request.name, request.version)]
        else:
            found = list(self._table.models)
        newest: dict[str, str] = {}
        for model in found:
            newest.setdefault(model.name, model.version)
        registry = self._observer.metrics.registry
        yield pb.ModelStatisticsResponse(
            model_stats=[model_statistics(registry, name, version) for name, version in newest.items()]
        )

    async def _repository_index(
        self, request: pb.RepositoryIndexRequest, call: Call
    ) -> AsyncGenerator[pb.RepositoryIndexResponse]:
        _check_repository(request.repository_name)
        yield pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=status.name, version=status.version, state=_STATES[status.state], reason=status.reason
                )
                for status in self._table.statuses()
                if status.state is ModelState.READY or not request.ready
            ]
        )

    async def _load(
        self, request: pb.RepositoryModelLoadRequest, call: Call
    ) -> AsyncGenerator[pb.RepositoryModelLoadResponse]:
        _check_repository(request.repository_name)
        _check_repository_parameters(request.parameters, ())
        await self._allowed(request.model_name).load(request.model_name)
        yield pb.RepositoryModelLoadResponse()

    async def _unload(
        self, request: pb.RepositoryModelUnloadRequest, call: Call
    ) -> AsyncGenerator[pb.RepositoryModelUnloadResponse]:
        _check_repository(request.repository_name)
        _check_repository_parameters(request.parameters, (_UNLOAD_DEPENDENTS,))
        await self._allowed(request.model_name).unload(request.model_name)
        yield pb.RepositoryModelUnloadResponse()

    def _allowed(self, name: str) -> ModelLoader:
        """Raises ModelUnsupportedError where callers do not decide what is served, InvalidRequestError for no name."""
        if self._control is None:
            raise ModelUnsupportedError(
                "callers may not load and unload models of this server: start it with --allow-model-control"
            )
        if not name:
            raise InvalidRequestError("model_name is empty: name the model")
        return self._control

    async def _infer(self, request: pb.ModelInferRequest, call: Call) -> AsyncGenerator[pb.ModelInferResponse]:
        room = Room(self._config.max_message_bytes)

        def check_room(index: int, update: TextUpdate) -> None:
            if update.result is not None:
                room.take(len(update.result.text.encode()))

        with self._observed(request, call) as (model, running):
            inference = self._read(request, call)
            running.take(inference.texts)
            call.charge(max(0, len(inference.texts) - 1))
            results = running.results = await self._results(model, inference, check_room)
            response = _response(model, request.id)
            inference.write(response, inference.columns(results))
        yield response

    async def _stream(
        self, requests: AsyncGenerator[pb.ModelInferRequest], call: Call
    ) -> AsyncGenerator[pb.ModelStreamInferResponse]:
        replies = Replies()
        window = asyncio.Semaphore(_STREAM_WINDOW)
        reader = asyncio.create_task(self._read_stream(requests, call, replies, window))
        try:
            async for reply in replies.changed():
                for response in reply.take():
                    yield response
                if reply.ended:
                    window.release()
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def _read_stream(
        self,
        requests: AsyncGenerator[pb.ModelInferRequest],
        call: Call,
        replies: Replies,
        window: asyncio.Semaphore,
    ) -> None:
        """Work on the requests of a stream as they come. Those in work are answered, whatever ends the stream."""
        error: Exception | None = None
        async with asyncio.TaskGroup() as group, aclosing(requests):
            try:
                while (request := await _next(requests, call.draining)) is not None:
                    await window.acquire()
                    group.create_task(self._reply(request, call, replies.begin()))
            except Exception as broken:  # such as bytes that are no message
                error = broken
        replies.end(error)

    async def _reply(self, request: pb.ModelInferRequest, call: Call, reply: Reply) -> None:
        """Answer one request of a stream."""
        try:
            with self._observed(request, call) as (model, running):
                inference = self._read(request, call)
                running.take(inference.texts)
                call.charge(max(0, len(inference.texts) - 1))
                growing = [GrowingText(text) for text in inference.texts]

                def make(deltas: Sequence[str]) -> pb.ModelStreamInferResponse:
                    return _streamed(model, request.id, inference, {tensors.TEXT: deltas}, final=False)

                def grow(index: int, update: TextUpdate) -> None:
                    reply.grow(index * inference.num_answers, growing[index].push(update))

                if tensors.TEXT in inference.outputs:
                    reply.open(len(inference.texts) * inference.num_answers, make)
                results = running.results = await self._results(model, inference, grow)
                columns = inference.columns(results)
                if tensors.TEXT in columns:  # what was not sent of the best answers; the others come whole
                    rest = list(columns[tensors.TEXT])
                    rest[:: inference.num_answers] = [
                        text.close(result) for text, result in zip(growing, results, strict=True)
                    ]
                    columns[tensors.TEXT] = rest
                empty = inference.parameters.empty_final
                last = [_streamed(model, request.id, inference, columns, final=not empty)]
                if empty:
                    last.append(_streamed(model, request.id, inference, {}, final=True))
            reply.finish(*last)
        except Exception as error:
            if call.metadata.get(_STATUS_HEADER) == "true":
                reply.fail(error)
            else:
                failed = pb.ModelStreamInferResponse(error_message=status_of(error).message)
                failed.infer_response.id = request.id
                failed.infer_response.parameters[_FINAL].bool_param = True
                reply.finish(failed)

    def _read(self, request: pb.ModelInferRequest, call: Call) -> Inference:
        """What a request asks for. Raises InvalidRequestError."""
        check_request_id(request.id)
        outputs = tensors.read_outputs(request)
        texts = tensors.read_texts(request, self._config.max_batch_items)
        parameters = read_parameters(request, call, scored=tensors.SCORE in outputs)
        # Whoever wants something to survive unchanged is told what did not, also without asking.
        usual = (tensors.TEXT, tensors.UNPROTECTED) if parameters.options.protect else (tensors.TEXT,)
        return Inference(texts, outputs or usual, parameters)

    async def _results(
        self, model: ServedModel, inference: Inference, on_update: Callable[[int, TextUpdate], None]
    ) -> list[TextResult]:
        """The answers to all texts, which share the engine's batches. Raises the error of the first that fails."""
        parameters = inference.parameters
        window = asyncio.Semaphore(BATCH_WINDOW)

        async def answer(index: int, text: str) -> TextResult:
            async with window:
                await asyncio.sleep(0)  # other callers' turn: refusing a text can cost as much as answering one
                items = model.pipeline.stream(text, parameters.options, parameters.terms, parameters.target_language)
                async with aclosing(items):
                    async for item in items:
                        if isinstance(item, TextResult):
                            return item
                        on_update(index, item)
            raise AssertionError("a stream ends with its result")

        try:
            async with asyncio.TaskGroup() as group:  # a cancelled call cancels them all, and so does one that fails
                tasks = [group.create_task(answer(index, text)) for index, text in enumerate(inference.texts)]
        except ExceptionGroup as failures:
            index = next(i for i, task in enumerate(tasks) if not task.cancelled() and task.exception() is not None)
            raise _about(tasks[index].exception() or failures, index, len(tasks)) from None
        return [task.result() for task in tasks]

    @contextmanager
    def _observed(self, request: pb.ModelInferRequest, call: Call) -> Generator[tuple[ServedModel, RunningRequest]]:
        """The request's model, and who is to be told of its texts and results: each text ends as the request does."""
        with self._observer.request(call, request.id) as running, self._table.leases() as leases:
            model = running.model = leases.model(request.model_name, request.model_version)
            yield model, running


@dataclass(frozen=True, slots=True)
class Inference:
    """One request, read."""

    input: Texts
    outputs: tuple[str, ...]
    parameters: Parameters

    @property
    def texts(self) -> tuple[str, ...]:
        """What is to be answered."""
        return self.input.texts

    @property
    def num_answers(self) -> int:
        """To each text."""
        return self.parameters.options.num_hypotheses

    def columns(self, results: Sequence[TextResult]) -> dict[str, Sequence[object]]:
        """The outputs that are asked for, row by row."""
        answers = [_answers(text, result, self.num_answers) for text, result in zip(self.texts, results, strict=True)]
        columns: dict[str, Sequence[object]] = {
            tensors.TEXT: [answer.text for row in answers for answer in row],
            tensors.FINISH_REASON: [answer.finish_reason for row in answers for answer in row],
            tensors.SCORE: [answer.score for row in answers for answer in row],
            tensors.SOURCE_TOKENS: [result.num_source_tokens for result in results for _ in range(self.num_answers)],
            tensors.GENERATED_TOKENS: [
                result.num_generated_tokens for result in results for _ in range(self.num_answers)
            ],
            tensors.UNPROTECTED: [answer.unprotected for row in answers for answer in row],
        }
        return {name: columns[name] for name in self.outputs}

    def write(self, response: pb.ModelInferResponse, columns: Mapping[str, Sequence[object]]) -> None:
        """Put outputs into a response, in the form and shape of the request's input."""
        shape = self.input.shape if self.num_answers == 1 else (len(self.texts), self.num_answers)
        tensors.write_outputs(response, columns, shape, raw=self.input.raw)


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    finish_reason: str
    score: float
    unprotected: str  # as the output has it


_NO_ANSWER: Final = _Answer("", "", -math.inf, "[]")


def _answers(text: str, result: TextResult, num_answers: int) -> list[_Answer]:
    """So many answers to one text, best first."""
    best = [segment.hypotheses[0] for segment in result.segments]
    reason = min((hypothesis.finish_reason for hypothesis in best), key=_WORST_FIRST.index, default=FinishReason.STOP)
    score = sum(hypothesis.score or 0.0 for hypothesis in best)
    answers = [_Answer(result.text, reason, score, _unprotected(text, best))]
    if num_answers > 1 and result.segments:  # of which there is one, as the pipeline has made sure
        segment = result.segments[0]
        before, after = text[: segment.start], text[segment.end :]
        answers += [
            _Answer(before + h.text + after, h.finish_reason, h.score or 0.0, _unprotected(text, [h]))
            for h in segment.hypotheses[1:]
        ]
    return answers + [_NO_ANSWER] * (num_answers - len(answers))


def _unprotected(text: str, hypotheses: Sequence[TextHypothesis]) -> str:
    """What should have survived in an answer, and did not."""
    lost = [text[start:end] for hypothesis in hypotheses for start, end in hypothesis.unprotected]
    return json.dumps(lost, ensure_ascii=False)


def _response(model: ServedModel, request_id: str) -> pb.ModelInferResponse:
    return pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=request_id)


def _streamed(
    model: ServedModel, request_id: str, inference: Inference, columns: Mapping[str, Sequence[object]], *, final: bool
) -> pb.ModelStreamInferResponse:
    response = pb.ModelStreamInferResponse(infer_response=_response(model, request_id))
    response.infer_response.parameters[_FINAL].bool_param = final
    inference.write(response.infer_response, columns)
    return response


async def _next(requests: AsyncGenerator[pb.ModelInferRequest], draining: asyncio.Event) -> pb.ModelInferRequest | None:
    """The next request; None behind the last. Raises NotReadyError as soon as the server drains."""
    request = asyncio.ensure_future(anext(requests, None))
    drained = asyncio.create_task(draining.wait())
    try:
        await asyncio.wait((request, drained), return_when=asyncio.FIRST_COMPLETED)
        if draining.is_set():
            raise NotReadyError("the server is draining: retry elsewhere")
        return request.result()
    finally:
        drained.cancel()
        request.cancel()
        await asyncio.wait((request, drained))


def _about(error: BaseException, index: int, num_texts: int) -> BaseException:
    """The same error, saying which of several texts it is about."""
    if num_texts == 1 or not isinstance(error, RequestError):
        return error
    about = copy.copy(error)
    about.args = (f"{tensors.INPUT}[{index}]: {error}",)
    return about


def _check_repository(name: str) -> None:
    if name:
        raise InvalidRequestError(f"repository_name is {name[:100]!r}; there is one repository: leave it empty")


def _check_repository_parameters(parameters: Mapping[str, pb.ModelRepositoryParameter], known: Sequence[str]) -> None:
    for name in parameters:
        if name not in known:
            raise InvalidRequestError(f"{name[:100]!r} is no parameter here: leave it out")
