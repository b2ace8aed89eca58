"""ONNX files, written piece by piece.

Protobuf in Python takes four to five times a message's size to serialise it, and of a model that is more than all the
rest of an export. But a message is its fields one after another, in any order, and one of bytes or of a message is its
number, its length and its content (https://protobuf.dev/programming-guides/encoding/): what is large can be written by
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import onnx
from google.protobuf.message import Message

_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_WITH_LENGTH = 2  # the wire type

M = TypeVar("M", bound=Message)


def write_model(model: onnx.ModelProto, path: Path) -> None:
    """Write a model, weights included. The same model gives the same bytes. Raises OSError."""
    with path.open("wb") as file:
        file.writelines(_pieces(model))


def file_size(model: onnx.ModelProto) -> int:
    """How many bytes ``write_model`` would write."""
    return sum(map(len, _pieces(model)))


def _pieces(model: onnx.ModelProto) -> Iterator[bytes]:
    """The file's bytes in order, none longer than the largest tensor."""
    tensors = model.graph.initializer
    yield _bytes(_without(model, "graph"))
    graph = _bytes(_without(model.graph, "initializer"))
    yield _head(_GRAPH, len(graph) + sum(len(piece) for tensor in tensors for piece in _tensor(tensor)))
    yield graph
    for tensor in tensors:
        yield from _tensor(tensor)


def _tensor(tensor: onnx.TensorProto) -> Iterator[bytes]:
    """A field ``initializer``."""
    small, raw = _bytes(_without(tensor, "raw_data")), tensor.raw_data
    values = _head(_RAW_DATA, len(raw)) if tensor.HasField("raw_data") else b""
    yield _head(_INITIALIZER, len(small) + len(values) + len(raw)) + small + values
    yield raw


def _bytes(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _head(number: int, length: int) -> bytes:
    """What stands before the content of a field."""
    return _varint(number << 3 | _WITH_LENGTH) + _varint(length)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last byte have the eighth bit set."""
    digits = []
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def _without(message: M, name: str) -> M:
    """A copy of a message that lacks a field, made without copying that."""
    rest = type(message)()
    for field, value in message.ListFields():
        if field.name == name:
            continue
        if hasattr(value, "extend"):
            getattr(rest, field.name).extend(value)
        elif isinstance(value, Message):
            getattr(rest, field.name).CopyFrom(value)
        else:
            setattr(rest, field.name, value)
    return rest
