"""Every RPC under messages that nobody would send: no crash, no INTERNAL, and the next caller is answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.config import ServerConfig
from dragoman.metrics import ServerMetrics
from dragoman.model_table import ModelTable
from dragoman.oip import inference_pb2
from dragoman.pipeline import TextLimits
from dragoman.server import Server
from dragoman.testing import scripted_model
from dragoman.v1 import generation_pb2 as pb

GENERATE = "/dragoman.v1.GenerationService/Generate"
OUR_FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
FEW = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def methods() -> dict[str, type[Message]]:
    """All RPCs that end by themselves, by path, and what they are asked with."""
    found: dict[str, type[Message]] = {
        "/grpc.health.v1.Health/Check": HealthCheckRequest,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ServerReflectionRequest,
    }
    for module in (pb, inference_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found[f"/{service.full_name}/{method.name}"] = GetMessageClass(method.input_type)
    return found


METHODS = methods()
TEXTS = st.one_of(
    st.text("abc\n \t", max_size=20),
    st.text(max_size=10),
    st.sampled_from(
        ["scripted", "1", "\x00", "\u202eabc", "\ufeffab", "a" * 300, "e\u0301", "𝄞", "text_input", "BYTES"]
    ),
)
NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from([0, 1, 2, 5, -1, 2**31 - 1, -(2**31)]),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from([0, 1, 2, 5, -1, 2**63 - 1, -(2**63)]),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 2, 3, 8, 9, 64, 1024, 2**32 - 1]),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2, 3, 2**64 - 1]),
    FieldDescriptor.CPPTYPE_DOUBLE: st.sampled_from(
        [0.0, -0.0, 0.5, 1.0, -1.0, 100.0, 1e308, float("nan"), float("inf")]
    ),
    FieldDescriptor.CPPTYPE_FLOAT: st.sampled_from([0.0, 0.5, -1.0, 1e38, float("nan"), float("-inf")]),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.sampled_from([0, 1, 2, 3, 99]),
}


def fill(draw: st.DrawFn, message: Message, depth: int) -> Message:
    """Set some of a message's fields to something of their type."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    chosen: list[Any] = draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)) if fields else []
    for field in chosen:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            fill_map(draw, getattr(message, field.name), field.message_type, depth)
        elif field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                if field.message_type is None:
                    getattr(message, field.name).append(draw(scalar(field)))
                elif depth:
                    fill(draw, getattr(message, field.name).add(), depth - 1)
        elif field.message_type is None:
            setattr(message, field.name, draw(scalar(field)))
        elif depth:
            fill(draw, getattr(message, field.name), depth - 1)
    return message


def fill_map(draw: st.DrawFn, entries: Any, entry: Descriptor, depth: int) -> None:
    value = entry.fields_by_name["value"]
    for _ in range(draw(st.integers(0, 2))):
        key = draw(TEXTS)
        if value.message_type is None:
            entries[key] = draw(scalar(value))
        elif depth:
            fill(draw, entries[key], depth - 1)


def scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
        return NUMBERS[field.cpp_type]
    return st.binary(max_size=12) if field.type == FieldDescriptor.TYPE_BYTES else TEXTS


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, bytes]:
    """An RPC and a message of the right type, its fields at random."""
    path = draw(st.sampled_from(sorted(METHODS)))
    return path, fill(draw, METHODS[path](), 3).SerializeToString()


@st.composite
def broken_calls(draw: st.DrawFn) -> tuple[str, bytes]:
    """An RPC and bytes: such a message with some of them changed, cut or repeated, or none at all."""
    path, data = draw(calls())
    how = draw(st.sampled_from(["noise", "cut", "change", "twice"]))
    if how == "noise" or not data:
        return path, draw(st.binary(max_size=40))
    place = draw(st.integers(0, len(data) - 1))
    if how == "cut":
        return path, data[:place]
    if how == "twice":
        return path, data + data[place:]
    return path, data[:place] + draw(st.binary(min_size=1, max_size=3)) + data[place + 1 :]


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    """To a server that runs on a thread of its own: hypothesis knows no event loops."""
    where: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        config = ServerConfig(host="127.0.0.1", port=0, metrics_port=0, drain_seconds=5.0)
        model = scripted_model(limits=TextLimits(config.max_text_bytes, config.max_segments))
        server = Server(ModelTable([model]), config, ServerMetrics())
        await server.start()
        stopping = asyncio.Event()
        where.set_result((server.port, asyncio.get_running_loop(), stopping))
        await stopping.wait()
        assert await server.drain()  # nothing is left behind
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    port, loop, stopping = where.result(60)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        yield channel
    loop.call_soon_threadsafe(stopping.set)
    thread.join(60)
    assert not thread.is_alive()


def check(channel: grpc.Channel, path: str, data: bytes) -> None:
    """It is answered or refused, with a reason; and the next request is answered right."""
    try:
        list(channel.stream_stream(path, None, None)(iter([data]), timeout=30))
    except grpc.RpcError as error:
        call: Any = error
        assert call.code() not in OUR_FAULTS, (path, data, call.details())
        status = Status.FromString(dict(call.trailing_metadata())["grpc-status-details-bin"])
        info = ErrorInfo()
        assert status.details[0].Unpack(info) and info.domain == "dragoman" and info.reason not in ("", "internal")
        assert 0 < len(call.details()) <= 1000
    reply = channel.unary_unary(GENERATE, None, None)(b"\x1a\x03abc", timeout=30)
    assert pb.GenerateResponse.FromString(reply).text == "abc"


@FEW
@given(call=calls())
def test_messages_of_the_right_type_are_answered_or_refused_with_a_reason(channel, call):
    """Whatever their fields hold."""
    check(channel, *call)


@FEW
@given(call=broken_calls())
def test_bytes_that_are_no_message_are_refused_with_a_reason(channel, call):
    """Whatever they are."""
    check(channel, *call)
