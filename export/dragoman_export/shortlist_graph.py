"""The decoder graph of a shortlist: that of int8, with the output projection's columns as inputs.

What a column holds is copied here as it stands in the int8 graph, so that a candidate's logit is the same, bit for bit;
only the zero point differs: see ``dragoman/engine/projection.py``.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from dragoman.engine.projection import Projection
from dragoman_export.errors import ExportError

PRODUCT = "MatMulIntegerToFloat"


def with_columns(decoder: onnx.ModelProto) -> tuple[onnx.ModelProto, Projection]:
    """A decoder graph of int8 without its output projection's weights, and those.

    Inputs are added, with K tokens: ``candidate_weights`` (D, K) uint8, ``candidate_scales`` (K,) and, where there is a
    bias, ``candidate_bias`` (K,) float32; ``logits`` become (R, K). Raises ExportError where the last product is not
    that of the vocabulary.
    """
    model = onnx.ModelProto()
    model.CopyFrom(decoder)
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes = {node.output[0]: node for node in graph.node}
    readers = {name: node for node in graph.node for name in node.input}
    product = [node for node in graph.node if node.op_type == PRODUCT][-1]
    logits = next(value for value in graph.output if value.name == "logits").type.tensor_type.shape.dim[1]
    weights = _matrix(product.input[1], nodes, constants)  # (D, V)
    scales = numpy_helper.to_array(constants[product.input[3]])
    if weights.shape[1] != logits.dim_value:
        raise ExportError(
            f"the decoder's last product has {weights.shape[1]} columns, its logits {logits.dim_value}: it is not the "
            "output projection, and no shortlist can be made of it"
        )
    bias_reader, place = _bias(product, readers, constants)
    bias = None if bias_reader is None else numpy_helper.to_array(constants[bias_reader.input[place]])

    width = weights.shape[0]
    x, _, scale, _, zero, *_ = product.input
    inputs = [x, "candidate_weights", scale, "candidate_scales", zero, "candidate_zero"]
    if bias_reader is product:
        inputs.append("candidate_bias")
    elif bias_reader is not None:
        bias_reader.input[place] = "candidate_bias"
    del product.input[:]
    product.input.extend(inputs)
    graph.input.append(helper.make_tensor_value_info("candidate_weights", TensorProto.UINT8, [width, "K"]))
    graph.input.append(helper.make_tensor_value_info("candidate_scales", TensorProto.FLOAT, ["K"]))
    if bias is not None:
        graph.input.append(helper.make_tensor_value_info("candidate_bias", TensorProto.FLOAT, ["K"]))
    graph.initializer.append(numpy_helper.from_array(np.array(128, np.uint8), "candidate_zero"))
    logits.Clear()
    logits.dim_param = "K"
    _drop_unused(graph)
    integers = np.ascontiguousarray(weights.T).view(np.uint8) ^ np.uint8(128)  # -128..127 -> 0..255
    return model, Projection(integers, np.ascontiguousarray(scales), bias)


def _matrix(name: str, nodes: dict[str, NodeProto], constants: dict[str, TensorProto]) -> np.ndarray:
    """A weight (D, V), even where it is a table's transpose."""
    if name in nodes:
        return numpy_helper.to_array(constants[nodes[name].input[0]]).T
    return numpy_helper.to_array(constants[name])


def _bias(
    product: NodeProto, readers: dict[str, NodeProto], constants: dict[str, TensorProto]
) -> tuple[NodeProto | None, int]:
    """The node that adds the bias, and which of its inputs that is: the product itself, or with row scales the sum."""
    if len(product.input) > 6 and product.input[6]:
        return product, 6
    reader = readers.get(product.output[0])
    while reader is not None and reader.op_type == "Mul":
        reader = readers.get(reader.output[0])
    if reader is not None and reader.op_type == "Add" and reader.input[1] in constants:
        return reader, 1
    return None, 0


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Leave out constants, and transposes of them, that nothing reads any more."""
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    kept = [node for node in graph.node if node.op_type != "Transpose" or node.output[0] in read]
    del graph.node[:]
    graph.node.extend(kept)
    read = {name for node in graph.node for name in node.input}
    constants = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(constants)
