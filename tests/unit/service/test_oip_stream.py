"""The servicer of the Open Inference Protocol without a socket: slow callers, model control, any request at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.config import ServerConfig
from dragoman.errors import InvalidRequestError, ModelUnsupportedError, RequestError
from dragoman.metrics import ServerMetrics
from dragoman.model_status import ModelState
from dragoman.model_table import ModelTable
from dragoman.observer import RequestObserver
from dragoman.oip import inference_pb2 as pb
from dragoman.served_model import ServedModel
from dragoman.servicers.inference import InferenceServicer
from dragoman.servicers.parameters import ALIASES
from dragoman.servicers.rpc import Call
from dragoman.servicers.streamed import Replies
from dragoman.servicers.tensors import OUTPUTS
from dragoman.testing import scripted_model


class Listener:
    """Of a table, that wants to know nothing."""

    def on_ready(self, model: ServedModel) -> None: ...

    def on_gone(self, model: ServedModel) -> None: ...

    def on_change(self) -> None: ...


class Control:
    """Stands in for a loader."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def load(self, name: str) -> None:
        self.asked.append(("load", name))

    async def unload(self, name: str) -> None:
        self.asked.append(("unload", name))


@contextmanager
def serving(control: Any = None) -> Iterator[tuple[asyncio.Runner, InferenceServicer, ModelTable]]:
    """A servicer over a model that answers words with themselves, in an event loop."""
    table = ModelTable([scripted_model()])
    servicer = InferenceServicer(table, ServerConfig(), RequestObserver(ServerMetrics()), lambda: True, control)

    async def start() -> None:
        table.start(Listener())

    with asyncio.Runner() as runner:
        runner.run(start())
        yield runner, servicer, table
        runner.run(table.close())


def behaviour(servicer: InferenceServicer, name: str) -> Any:
    """What answers calls of a method."""
    return next(method.behaviour for method in servicer.methods() if method.name == name)


async def answer(servicer: InferenceServicer, name: str, request: Any) -> list[Any]:
    """All replies of a call."""
    async with aclosing(behaviour(servicer, name)(request, Call(name))) as replies:
        return [reply async for reply in replies]


def text_request(text: str) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(id=text)
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    return message


def test_a_caller_that_does_not_read_is_not_read():
    """Requests wait with the caller once so many answers wait for it; all are answered when it reads."""
    taken = 0

    async def requests() -> AsyncGenerator[pb.ModelInferRequest]:
        nonlocal taken
        for _ in range(300):
            taken += 1
            yield text_request("ab")

    async def stream(servicer: InferenceServicer) -> tuple[int, int]:
        replies = behaviour(servicer, "ModelStreamInfer")(requests(), Call("ModelStreamInfer"))
        finals = 0
        async with aclosing(replies):
            async for reply in replies:
                if not finals:
                    for _ in range(5000):  # turns of the event loop, of which a request that is read takes a few
                        await asyncio.sleep(0)
                    before = taken
                finals += reply.infer_response.parameters["triton_final_response"].bool_param
        return before, finals

    with serving() as (runner, servicer, _):
        before, finals = runner.run(stream(servicer))
    assert before < 200
    assert (taken, finals) == (300, 300)


async def test_what_waits_for_a_slow_caller_is_one_response():
    """However often a reply grows before it is taken; its order among the others is that of its first growth."""

    def make(deltas: Any) -> pb.ModelStreamInferResponse:
        return pb.ModelStreamInferResponse(error_message="|".join(deltas))

    replies = Replies()
    first, second = replies.begin(), replies.begin()
    first.open(2, make)
    for delta in "abc":
        first.grow(0, delta)
    second.finish(pb.ModelStreamInferResponse(error_message="other"))
    first.grow(1, "d")
    replies.end()
    taken = [[response.error_message for response in reply.take()] async for reply in replies.changed()]
    assert taken == [["abc|d"], ["other"]]
    assert (first.ended, second.ended) == (False, True)


def test_models_are_loaded_and_unloaded_where_callers_may():
    """By name; the parameter that Triton's client sends along is taken, others are refused."""
    control = Control()
    load, unload = pb.RepositoryModelLoadRequest, pb.RepositoryModelUnloadRequest
    with serving(control) as (runner, servicer, _):
        dependents = {"unload_dependents": pb.ModelRepositoryParameter(bool_param=True)}
        runner.run(answer(servicer, "RepositoryModelLoad", load(model_name="a")))
        runner.run(answer(servicer, "RepositoryModelUnload", unload(model_name="b", parameters=dependents)))
        assert control.asked == [("load", "a"), ("unload", "b")]
        for name, message in (
            ("RepositoryModelLoad", load()),
            ("RepositoryModelLoad", load(model_name="a", repository_name="r")),
            ("RepositoryModelLoad", load(model_name="a", parameters={"config": pb.ModelRepositoryParameter()})),
        ):
            with pytest.raises(InvalidRequestError):
                runner.run(answer(servicer, name, message))
    assert len(control.asked) == 2
    with serving() as (runner, servicer, _), pytest.raises(ModelUnsupportedError, match="--allow-model-control"):
        runner.run(answer(servicer, "RepositoryModelUnload", unload(model_name="a")))


def test_the_index_shows_what_is_not_served_too():
    """What loads and what failed, and why; not to those who ask for what is ready."""
    with serving() as (runner, servicer, table):

        async def announce() -> None:
            table.announce("other", "2", ModelState.LOADING)
            table.announce("other", "1", ModelState.FAILED, "its golden set differs")

        runner.run(announce())
        (index,) = runner.run(answer(servicer, "RepositoryIndex", pb.RepositoryIndexRequest()))
        (ready,) = runner.run(answer(servicer, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True)))
        (loading,) = runner.run(answer(servicer, "ModelReady", pb.ModelReadyRequest(name="other", version="2")))
    assert [(model.name, model.version, model.state, model.reason) for model in index.models] == [
        ("other", "2", "LOADING", ""),
        ("other", "1", "UNAVAILABLE", "its golden set differs"),
        ("scripted", "1", "READY", ""),
    ]
    assert [model.name for model in ready.models] == ["scripted"]
    assert not loading.ready


BYTES = st.one_of(st.binary(max_size=8), st.text("ab c\n", max_size=6).map(str.encode))
PARAMETERS = st.one_of(
    st.builds(pb.InferParameter, bool_param=st.booleans()),
    st.builds(pb.InferParameter, int64_param=st.one_of(st.integers(-3, 30), st.integers(-(2**63), 2**63 - 1))),
    st.builds(pb.InferParameter, uint64_param=st.integers(0, 2**64 - 1)),
    st.builds(pb.InferParameter, double_param=st.floats()),
    st.builds(pb.InferParameter, string_param=st.one_of(st.text(max_size=8), st.sampled_from(['["a"]', "copy", "[["]))),
    st.just(pb.InferParameter()),
)
OPTIONS = "beam_size num_hypotheses temperature stop suppress_sequences unknown_words target_prefix length_penalty"
OTHERS = "min_new_tokens protect split_sentences target_language priority timeout triton_enable_empty_final_response é"
NAMES = st.sampled_from([*OPTIONS.split(), *OTHERS.split(), *ALIASES])
VALID = {
    "max_tokens": pb.InferParameter(int64_param=3),
    "num_beams": pb.InferParameter(int64_param=2),
    "stop": pb.InferParameter(string_param="b"),
    "priority": pb.InferParameter(uint64_param=1),
    "protect": pb.InferParameter(string_param='["b"]'),
    "triton_enable_empty_final_response": pb.InferParameter(bool_param=True),
}


@st.composite
def inputs(draw: Any) -> pb.ModelInferRequest.InferInputTensor:
    """One that is right, but for one thing perhaps."""
    elements = draw(st.lists(BYTES, max_size=3))
    right = {"name": "text_input", "datatype": "BYTES", "shape": [len(elements), 1]}
    wrong = [{}, {}, {"shape": [len(elements)]}, {"name": "x"}, {"datatype": "FP32"}, {"shape": [-1]}, {"shape": [9]}]
    contents = pb.InferTensorContents(bytes_contents=elements)
    return pb.ModelInferRequest.InferInputTensor(contents=contents, **{**right, **draw(st.sampled_from(wrong))})


REQUESTS = st.builds(
    pb.ModelInferRequest,
    id=st.text(max_size=3),
    model_name=st.sampled_from(["", "scripted", "", "scripted", "none"]),
    parameters=st.one_of(
        st.lists(st.sampled_from(sorted(VALID)), max_size=3).map(lambda names: {name: VALID[name] for name in names}),
        st.dictionaries(NAMES, PARAMETERS, max_size=2),
    ),
    inputs=st.one_of(inputs().map(lambda tensor: [tensor]), st.lists(inputs(), max_size=2)),
    outputs=st.lists(
        st.builds(pb.ModelInferRequest.InferRequestedOutputTensor, name=st.sampled_from([*OUTPUTS, *OUTPUTS, "no"])),
        max_size=2,
    ),
    raw_input_contents=st.one_of(st.just([]), st.just([]), st.lists(BYTES, max_size=1), st.just([b"\1\0\0\0a"])),
)


def test_any_request_is_answered_or_refused_by_name():
    """Unary or streamed, alike; never a fault of the server's."""
    answered = 0

    with serving() as (runner, servicer, _):

        @settings(derandomize=True, max_examples=150, database=None)
        @given(REQUESTS)
        def check(request):
            nonlocal answered

            async def requests() -> AsyncGenerator[pb.ModelInferRequest]:
                yield request

            *_, last = runner.run(answer(servicer, "ModelStreamInfer", requests()))
            try:
                (reply,) = runner.run(answer(servicer, "ModelInfer", request))
            except RequestError as error:
                assert last.error_message == str(error) or "timeout" in request.parameters
            else:
                answered += 1
                assert last.error_message == ""
                assert [output.name for output in reply.outputs]

        check()
    assert answered > 10
