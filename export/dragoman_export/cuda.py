"""Graphs in float16 for the CUDA provider: nodes fused for it, and what keeps them off the CPU and out of fp32.

A sum and the norm behind it become one SkipLayerNormalization, which takes in the bias of the linear layer before, too,
and gives the sum where something else reads it (the residual stream of a norm that comes first). A bias and an exact
Gelu behind it become one BiasGelu. Nothing is approximated. Attention is fused before: ``fused.CudaAttention``.

Operators: ONNX Runtime's contrib domain
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx
from onnx import NodeProto, TensorProto, helper

from dragoman_export.errors import ExportError
from dragoman_export.fused import DOMAIN

KERNELS = frozenset(
    {"BiasGelu", "GroupQueryAttention", "MultiHeadAttention", "SkipLayerNormalization"}  # in float16
    | {
        "Add",
        "Gather",
        "LayerNormalization",
        "MatMul",
        "Mul",
        "Pad",
        "Relu",
        "Reshape",
        "Sigmoid",
        "Slice",
        "Transpose",
    }  # in float16
    | {"Clip", "Min", "Range", "Shape", "Squeeze", "Sub"}  # in integers; Range reads and Shape writes on the host
    | {"Cast", "Concat", "Cos", "Sin", "Unsqueeze"}  # in float32, for the positions
)
"""Operators with a kernel of the CUDA provider for the types that these graphs give them. One without would run on the
CPU amid copies, and no CUDA graph could be captured. Source: "Operators implemented by CUDAExecutionProvider" in
https://github.com/microsoft/onnxruntime/blob/main/docs/OperatorKernels.md."""

WAVES = frozenset({"Unsqueeze", "Mul", "Sin", "Cos", "Concat", "Cast"})
"""What may compute in fp32: the sines and cosines of the positions, whose angles float16 could not tell apart."""


def fuse(model: onnx.ModelProto) -> None:
    """Fuse the nodes of a normalised graph (see ``quantize.normalize``), in place.

    What does not fit is left as it is, for the counts to find.
    """
    graph = _Graph(model)
    fused: dict[str, NodeProto] = {}  # by the output of the Add in whose place it stands
    dropped: set[str] = set()  # first outputs
    for node in model.graph.node:
        if node.op_type == "LayerNormalization" and graph.maker(node.input[0], "Add"):
            total = node.input[0]
            fused[total], bias_sum = _skip_layer_norm(graph, graph.makers[total], node)
            dropped |= {node.output[0], *bias_sum}
        elif node.op_type == "Gelu" and _is_exact(node) and graph.is_bias_sum(node.input[0]):
            total = node.input[0]
            fused[total] = helper.make_node(
                "BiasGelu", list(graph.makers[total].input), [node.output[0]], domain=DOMAIN
            )
            dropped.add(node.output[0])
    nodes = [fused.get(n.output[0], n) for n in model.graph.node if n.output[0] not in dropped]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def check(file: str, model: onnx.ModelProto) -> None:
    """Raises ExportError naming operators that CUDA has no kernel for, and whatever is in fp32 but the positions.

    Of the outputs, ``logits`` is in fp32 by intent.
    """
    if strange := sorted({node.op_type for node in model.graph.node} - KERNELS):
        raise ExportError(f"{file} has {', '.join(strange)}, of which ONNX Runtime has no CUDA kernel for float16")
    floats = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    rates = floats.intersection(_wave_rates(model))
    if left := sorted(floats - rates):
        raise ExportError(f"{file} holds {', '.join(left)} in fp32: all constants but {sorted(rates)} must be float16")
    for node in model.graph.node:
        if floats.isdisjoint(node.input) and not _casts_to_float(node):
            continue
        if node.op_type not in WAVES:
            raise ExportError(f"{file} computes {node.op_type} {node.output[0]} in fp32; it must be float16")
        if node.op_type != "Cast" or _casts_to_float(node):
            floats.update(node.output)
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name != "logits":
            raise ExportError(f"{file} has {value.name} in fp32; it must be float16")


class _Graph:
    """Who makes a value, and how many nodes read it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.makers = {output: node for node in model.graph.node for output in node.output if output}
        self.constants = {tensor.name for tensor in model.graph.initializer}
        self.readers = Counter(name for node in model.graph.node for name in node.input)
        self.readers.update(value.name for value in model.graph.output)

    def maker(self, name: str, kind: str) -> NodeProto | None:
        """The node that makes a value, if it is of this kind."""
        node = self.makers.get(name)
        return node if node is not None and node.op_type == kind else None

    def is_bias_sum(self, name: str) -> bool:
        """Whether a value is a product with its bias added, for one reader alone."""
        node = self.maker(name, "Add")
        if node is None or self.readers[name] > 1:
            return False
        return self.maker(node.input[0], "MatMul") is not None and node.input[1] in self.constants


def _skip_layer_norm(graph: _Graph, add: NodeProto, norm: NodeProto) -> tuple[NodeProto, list[str]]:
    """The fused node of a sum and its norm, and the sum with a bias that is in it, too.

    The operator's second input may lack the batch axis, and so may the second term of a sum of embeddings and
    positions; of the residual's sum, the second term is the sublayer's output.
    """
    (first, second), (total,) = add.input, add.output
    terms, bias_sum = [first, second], []
    if graph.is_bias_sum(second):
        product, bias = graph.makers[second].input
        terms, bias_sum = [product, first], [second]
    inputs = [*terms, norm.input[1], norm.input[2], *([bias] if bias_sum else [])]
    outputs = [norm.output[0], *(["", "", total] if graph.readers[total] > 1 else [])]
    (epsilon,) = [attribute.f for attribute in norm.attribute if attribute.name == "epsilon"]
    return helper.make_node("SkipLayerNormalization", inputs, outputs, domain=DOMAIN, epsilon=epsilon), bias_sum


def _is_exact(gelu: NodeProto) -> bool:
    return all(attribute.s == b"none" for attribute in gelu.attribute if attribute.name == "approximate")


def _wave_rates(model: onnx.ModelProto) -> Iterator[str]:
    """What positions are multiplied with to be angles."""
    angles = {node.input[0] for node in model.graph.node if node.op_type in ("Sin", "Cos")}
    return (
        name for node in model.graph.node if node.op_type == "Mul" and node.output[0] in angles for name in node.input
    )


def _casts_to_float(node: NodeProto) -> bool:
    return node.op_type == "Cast" and any(a.name == "to" and a.i == TensorProto.FLOAT for a in node.attribute)
