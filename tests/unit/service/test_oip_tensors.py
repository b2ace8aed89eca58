"""Texts out of the tensors of the Open Inference Protocol, and answers into them."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from dragoman.errors import InvalidRequestError
from dragoman.oip import inference_pb2 as pb
from dragoman.servicers import tensors


def request(elements: list[bytes] | None = None, raw: list[bytes] | None = None, **tensor: Any) -> pb.ModelInferRequest:
    """A request with the one input, whose fields are given."""
    elements = elements or []
    fields = {"name": "text_input", "datatype": "BYTES", "shape": [len(elements)], **tensor}
    message = pb.ModelInferRequest(raw_input_contents=raw or [])
    message.inputs.add(**fields).contents.bytes_contents.extend(elements)
    return message


def laid_out(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


@pytest.mark.parametrize("shape", [[3], [3, 1]])
def test_texts_come_typed_or_raw_in_rows_or_in_a_column(shape):
    """The same texts, empty ones and other scripts included, whichever way they are sent."""
    elements = [b"a b\nc", b"", "Straße 犬".encode()]
    typed = tensors.read_texts(request(elements, shape=shape), 3)
    raw = tensors.read_texts(request(raw=[laid_out(*elements)], shape=shape), 3)
    assert typed.texts == raw.texts == ("a b\nc", "", "Straße 犬")
    assert typed.shape == raw.shape == tuple(shape)
    assert (typed.raw, raw.raw) == (False, True)


def test_a_request_may_have_no_text():
    """A batch of nothing is one, typed or raw."""
    assert tensors.read_texts(request([]), 3).texts == ()
    assert tensors.read_texts(request(raw=[b""], shape=[0, 1]), 3).texts == ()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.ModelInferRequest(), "the request has 0 inputs"),
        (request([b"a"], name="prompt"), "'prompt'; this model has the input text_input alone"),
        (request([b"a"], datatype="FP32"), "datatype 'FP32'; it must be 'BYTES'"),
        (request([b"a"], shape=[]), r"shape \[\]; it must be"),
        (request([b"a"], shape=[-1]), r"shape \[-1\]; it must be"),
        (request([b"a", b"b"], shape=[1, 2]), r"shape \[1, 2\]; it must be"),
        (request([b"a"], shape=[1, 1, 1]), r"shape \[1, 1, 1\]; it must be"),
        (request([b"a"] * 4), "has 4 texts; this server accepts 3 at once"),
        (request([b"a"], shape=[2]), r"has 1 elements; its shape \[2\] means 2"),
        (request([b"a"], raw=[laid_out(b"a")]), "contents, and raw_input_contents has it too"),
        (request(raw=[laid_out(b"a")] * 2, shape=[1]), "raw_input_contents has 2 tensors and inputs has 1"),
        (request(raw=[laid_out(b"a", b"b")], shape=[1]), r"has 2 elements; its shape \[1\] means 1"),
        (request(raw=[laid_out(b"a") + b"\1\0"], shape=[2]), "ends within element 1: behind byte 5 there must be 4"),
        (request(raw=[b"\5\0\0\0abc"], shape=[1]), "ends within element 0: behind byte 0 there must be the 5"),
        (request([b"a", b"ab\xff"]), r"text_input\[1\] is no UTF-8 at byte 2"),
        (request([b"a"], parameters={"shared_memory_region": pb.InferParameter(string_param="r")}), "'shared_memory_"),
        (request([b"a"], contents=pb.InferTensorContents(fp32_contents=[1.0])), "has fp32_contents"),
    ],
)
def test_what_is_no_batch_of_texts_is_refused_by_name(message, words):
    """The message names the value and what there should be."""
    with pytest.raises(InvalidRequestError, match=words):
        tensors.read_texts(message, 3)


def test_two_inputs_are_refused():
    """Even where both are the right one."""
    message = request([b"a"])
    message.inputs.append(message.inputs[0])
    with pytest.raises(InvalidRequestError, match="2 inputs"):
        tensors.read_texts(message, 3)


def test_a_huge_size_of_an_element_costs_nothing():
    """It is compared with what is there, not allocated."""
    with pytest.raises(InvalidRequestError, match="the 4294967295 of this element"):
        tensors.read_texts(request(raw=[b"\xff\xff\xff\xff"], shape=[1]), 3)


def outputs(*names: str, **parameters: pb.InferParameter) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name, parameters=parameters) for name in names]
    )


def test_outputs_are_those_asked_for():
    """In the order in which they are asked for."""
    assert tensors.read_outputs(outputs()) == ()
    assert tensors.read_outputs(outputs("score", "text_output")) == ("score", "text_output")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (outputs("text_output", "logits"), r"outputs\[1\] is 'logits'; there is text_output, finish_reason"),
        (outputs("score", "score"), "ask for it once"),
        (outputs("score", classification=pb.InferParameter(int64_param=1)), "output score has a parameter 'classific"),
    ],
)
def test_outputs_that_there_are_not_are_refused(message, words):
    """Names, repetitions and parameters."""
    with pytest.raises(InvalidRequestError, match=words):
        tensors.read_outputs(message)


@pytest.mark.parametrize("raw", [False, True])
def test_answers_are_written_in_the_form_of_the_request(raw):
    """Typed contents, or bytes laid out as the protocol has them; never both."""
    response = pb.ModelInferResponse()
    columns: dict[str, list[object]] = {"text_output": ["ab", ""], "score": [-1.5, 0.0], "source_tokens": [3, 1]}
    tensors.write_outputs(response, columns, (2, 1), raw=raw)
    assert [(o.name, o.datatype, list(o.shape)) for o in response.outputs] == [
        ("text_output", "BYTES", [2, 1]),
        ("score", "FP64", [2, 1]),
        ("source_tokens", "UINT32", [2, 1]),
    ]
    if raw:
        assert not any(output.HasField("contents") for output in response.outputs)
        assert list(response.raw_output_contents) == [
            b"\2\0\0\0ab\0\0\0\0",
            struct.pack("<dd", -1.5, 0.0),
            struct.pack("<II", 3, 1),
        ]
    else:
        assert not response.raw_output_contents
        text, score, source = (output.contents for output in response.outputs)
        assert (list(text.bytes_contents), list(score.fp64_contents), list(source.uint_contents)) == (
            [b"ab", b""],
            [-1.5, 0.0],
            [3, 1],
        )
