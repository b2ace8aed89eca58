"""Tensors of the Open Inference Protocol: texts out of a request's input, answers into a response's outputs.

Both forms of a tensor are known: typed contents, and raw bytes laid out row by row. A response has the request's form.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dragoman.errors import InvalidRequestError
from dragoman.oip import inference_pb2 as pb
from dragoman.servicers.wire import check_known

INPUT: Final = "text_input"
TEXT: Final = "text_output"
FINISH_REASON: Final = "finish_reason"
SCORE: Final = "score"
SOURCE_TOKENS: Final = "source_tokens"
GENERATED_TOKENS: Final = "generated_tokens"
UNPROTECTED: Final = "unprotected"

OUTPUTS: Final[Mapping[str, str]] = {
    TEXT: "BYTES",
    FINISH_REASON: "BYTES",
    SCORE: "FP64",
    SOURCE_TOKENS: "UINT32",
    GENERATED_TOKENS: "UINT32",
    UNPROTECTED: "BYTES",
}
"""Their datatypes."""

_CONTENTS: Final = {"BYTES": "bytes_contents", "FP64": "fp64_contents", "UINT32": "uint_contents"}
_FORMATS: Final = {"FP64": "d", "UINT32": "I"}
_SIZE: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Texts:
    """What the one input has. ``shape`` is [N] or [N, 1]."""

    texts: tuple[str, ...]
    shape: tuple[int, ...]
    raw: bool


def read_texts(request: pb.ModelInferRequest, max_texts: int) -> Texts:
    """The texts of a request. Raises InvalidRequestError: nothing is read between the lines."""
    for index, tensor in enumerate(request.inputs):
        check_known(tensor, f"inputs[{index}]")
        if tensor.name != INPUT:
            raise InvalidRequestError(
                f"inputs[{index}] is {tensor.name[:100]!r}; this model has the input {INPUT} alone: leave it out"
            )
    if len(request.inputs) != 1:
        raise InvalidRequestError(f"the request has {len(request.inputs)} inputs; there must be one, {INPUT}")
    tensor = request.inputs[0]
    if tensor.datatype != "BYTES":
        raise InvalidRequestError(f"{INPUT} has datatype {tensor.datatype[:100]!r}; it must be 'BYTES'")
    for name in tensor.parameters:
        raise InvalidRequestError(
            f"{INPUT} has a parameter {name[:100]!r}; no parameter of a tensor is known here: leave it out, and send "
            "the texts themselves"
        )
    shape = tuple(tensor.shape)
    if len(shape) not in (1, 2) or shape[0] < 0 or shape[1:] not in ((), (1,)):
        raise InvalidRequestError(f"{INPUT} has shape {list(shape)[:10]}; it must be [N] or [N, 1]")
    if shape[0] > max_texts:
        raise InvalidRequestError(f"{INPUT} has {shape[0]} texts; this server accepts {max_texts} at once: split them")
    raw = len(request.raw_input_contents) > 0
    elements = _raw_elements(request, shape[0]) if raw else _typed_elements(tensor)
    if len(elements) != shape[0]:
        raise InvalidRequestError(f"{INPUT} has {len(elements)} elements; its shape {list(shape)} means {shape[0]}")
    return Texts(tuple(_text(element, index) for index, element in enumerate(elements)), shape, raw)


def read_outputs(request: pb.ModelInferRequest) -> tuple[str, ...]:
    """The names of the outputs that are asked for, if any are. Raises InvalidRequestError."""
    names: list[str] = []
    for index, output in enumerate(request.outputs):
        check_known(output, f"outputs[{index}]")
        name = output.name
        if name not in OUTPUTS:
            raise InvalidRequestError(f"outputs[{index}] is {name[:100]!r}; there is {', '.join(OUTPUTS)}")
        if name in names:
            raise InvalidRequestError(f"outputs[{index}] is {name}, as one before it: ask for it once")
        for parameter in output.parameters:
            raise InvalidRequestError(
                f"output {name} has a parameter {parameter[:100]!r}; no parameter of a tensor is known here: leave it "
                "out"
            )
        names.append(name)
    return tuple(names)


def write_outputs(
    response: pb.ModelInferResponse, columns: Mapping[str, Sequence[object]], shape: Sequence[int], *, raw: bool
) -> None:
    """Add outputs by name, each with its elements row by row."""
    for name, elements in columns.items():
        datatype = OUTPUTS[name]
        output = response.outputs.add(name=name, datatype=datatype, shape=shape)
        values = [str(value).encode() for value in elements] if datatype == "BYTES" else list(elements)
        if raw:
            response.raw_output_contents.append(_raw(datatype, values))
        else:
            getattr(output.contents, _CONTENTS[datatype]).extend(values)


def _raw(datatype: str, values: Sequence[object]) -> bytes:
    if datatype != "BYTES":
        return struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)
    return b"".join(part for value in values if isinstance(value, bytes) for part in (_SIZE.pack(len(value)), value))


def _raw_elements(request: pb.ModelInferRequest, most: int) -> list[bytes]:
    if len(request.raw_input_contents) != 1:
        raise InvalidRequestError(
            f"raw_input_contents has {len(request.raw_input_contents)} tensors and inputs has 1: they must be as many"
        )
    if request.inputs[0].contents.ByteSize() > 0:
        raise InvalidRequestError(f"{INPUT} has contents, and raw_input_contents has it too: leave one of them out")
    data = request.raw_input_contents[0]
    elements: list[bytes] = []
    position = 0
    while position < len(data) and len(elements) <= most:
        start = position + _SIZE.size
        size = _SIZE.unpack_from(data, position)[0] if start <= len(data) else None
        if size is None or start + size > len(data):
            wanted = f"{_SIZE.size} for a size" if size is None else f"the {size} of this element"
            raise InvalidRequestError(
                f"raw_input_contents[0] ends within element {len(elements)}: behind byte {position} there must be "
                f"{wanted}"
            )
        position = start + size
        elements.append(data[start:position])
    return elements


def _typed_elements(tensor: pb.ModelInferRequest.InferInputTensor) -> Sequence[bytes]:
    for field, _ in tensor.contents.ListFields():
        if field.name != "bytes_contents":
            raise InvalidRequestError(f"{INPUT} has {field.name}; its datatype BYTES belongs into bytes_contents")
    return tensor.contents.bytes_contents


def _text(element: bytes, index: int) -> str:
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{INPUT}[{index}] is no UTF-8 at byte {error.start}: send text in UTF-8") from error
