"""ONNX files written piece by piece are read as what was written."""

import numpy as np
import pytest

pytest.importorskip("onnx", reason="the runtime alone has no tools of the export")

import onnx
from onnx import TensorProto, helper, numpy_helper

from dragoman_export.onnx_file import file_size, write_model


def model(tensors):
    """With something in every kind of field: numbers, texts, lists, messages, functions."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", 4]) for name in "xy")
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], name="layer", alpha=0.5, transB=1)]
    graph = helper.make_graph(nodes, "graph", [x], [y], tensors, doc_string="a graph")
    domains = [helper.make_opsetid("", 23), helper.make_opsetid("local", 1)]
    twice = helper.make_function("local", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], domains)
    made = helper.make_model(graph, opset_imports=domains, ir_version=10, functions=[twice], producer_name="test")
    helper.set_model_props(made, {"key": "value"})
    return made


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [numpy_helper.from_array(np.zeros((0, 4), np.float32), "w")],
        [numpy_helper.from_array(np.arange(16, dtype=np.float32).reshape(4, 4), "w")],
        [helper.make_tensor("w", TensorProto.FLOAT, [4, 4], np.arange(16.0))],  # not as bytes
        [
            numpy_helper.from_array(np.random.default_rng(0).integers(0, 255, size, np.uint8), f"w{size}")
            for size in (1, 127, 128, 16_383, 16_384, 300_000)  # where lengths take another byte
        ],
    ],
    ids=["none", "empty", "raw", "numbers", "many"],
)
def test_what_is_read_is_what_was_written(tmp_path, tensors):
    """Field by field; the size is foretold."""
    given = model(tensors)
    write_model(given, tmp_path / "model.onnx")
    assert onnx.load(tmp_path / "model.onnx") == given
    assert (tmp_path / "model.onnx").stat().st_size == file_size(given) == given.ByteSize()
