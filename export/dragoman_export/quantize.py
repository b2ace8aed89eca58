"""fp32 graphs to 8 bits: every product with a weight, and the embedding tables.

Weights are signed, with one scale a column (an output channel), found from the weights alone; nothing is trained.
Activations are unsigned with a zero point. Their scale is *static*, from the range that calibration has seen, or one a
*row*, found from the row itself at run time. Both are blind to a row's neighbours, and sums of integers do not depend
on their order: the product of a row is the same, bit for bit, in any batch. (A scale over the whole activation tensor,
as DynamicQuantizeMatMul has, would tie a row's answer to who shares its batch.)

*w8* is for a lone request: weights of 8 bits in blocks, activations quantised inside of MatMulNBits. It is not batch
invariant: its kernel for one row sums otherwise than that for many.

Operators: QuantizeLinear of ONNX; MatMulIntegerToFloat and MatMulNBits of ONNX Runtime's contrib domain
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from dragoman.types import FloatArray
from dragoman_export.errors import ExportError
from dragoman_export.fused import DOMAIN

LEVELS = 127  # of a signed weight, and of a row's activations, to either side of zero
BLOCK = 32  # MatMulNBits: so many inputs of a column share a scale
LINEAR_GEMM = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1}  # how the exporter writes a linear layer
SMALLEST_SCALE = np.float32(1e-30)  # of a row of zeros: something to divide by


@dataclass(frozen=True)
class Range:
    """The least and the largest value that an activation took."""

    low: float
    high: float

    def __or__(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))

    def scale_and_zero(self) -> tuple[np.float32, np.uint8]:
        """A step, and the integer that stands for 0: 0..255 cover the range, and 0 exactly."""
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        scale = np.float32((high - low) / 255 or 1.0)
        return scale, np.uint8(np.clip(np.rint(-low / scale), 0, 255))


@dataclass(frozen=True)
class Linear:
    """A linear layer in a graph: a product of the activation ``input`` (…, K), and the sum with a bias."""

    name: str  # in the model: "decoder.0.feed_forward.inner"
    input: str
    product: str  # the output of the product's node
    output: str  # that of the sum's; without a bias, the product
    weight: str  # (K, N)
    bias: str  # (N,); empty where there is none: the exporter leaves zeros out


def to_int8(model: onnx.ModelProto, ranges: Mapping[str, Range] | None) -> onnx.ModelProto:
    """All products and tables of a graph in 8 bits, as a new graph.

    ``ranges`` are those of each linear layer's input, by the layer's name; None: a scale for each row at run time.
    Raises ExportError for a layer without a range.
    """
    if ranges is None:
        return _rewritten(model, _by_row)
    by_input: dict[str, Range] = {}  # layers that read one activation share its quantised form, and so the range
    for linear in linears(model):
        if linear.name not in ranges:
            raise ExportError(f"the calibration saw no input of {linear.name}: it cannot be quantised")
        by_input[linear.input] = by_input.get(linear.input, ranges[linear.name]) | ranges[linear.name]
    return _rewritten(model, lambda graph, linear: _static(graph, linear, by_input[linear.input]))


def to_w8(model: onnx.ModelProto) -> onnx.ModelProto:
    """All products of a graph by MatMulNBits, and its tables in 8 bits, as a new graph.

    Raises ExportError for a layer whose input width is no multiple of BLOCK.
    """
    return _rewritten(model, _blockwise)


def quantized_columns(weight: FloatArray) -> tuple[NDArray[np.int8], FloatArray]:
    """A matrix (K, N) as signed integers and one scale a column, (N,): column n is about integers * scale[n]."""
    scale = np.abs(weight).max(axis=0) / np.float32(LEVELS)
    scale[scale == 0] = 1  # a column of zeros stays one
    return np.rint(weight / scale).astype(np.int8), scale.astype(np.float32)


def linears(model: onnx.ModelProto) -> Iterator[Linear]:
    """The linear layers of a graph, in order: each product with a weight, and the sum with the bias behind it."""
    constants = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    weights = {*constants, *_transposes(model)}
    sums = {
        node.input[0]: node for node in model.graph.node if node.op_type == "Add" and constants.get(node.input[1]) == 1
    }
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            x, weight, product = node.input[0], node.input[1], node.output[0]
            if product in sums:
                yield Linear(node.name, x, product, sums[product].output[0], weight, sums[product].input[1])
            else:
                yield Linear(node.name, x, product, product, weight, "")


class _Graph:
    """The new graph as it grows: nodes in order, and constants by name."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._given = {tensor.name: tensor for tensor in model.graph.initializer}
        self._tables = _transposes(model)  # of the products with a table's transpose
        self.nodes: dict[str, NodeProto] = {}  # by first output
        self.constants: dict[str, TensorProto] = {}

    def values(self, name: str) -> FloatArray:
        """A given constant."""
        array: FloatArray = numpy_helper.to_array(self._given[name])
        return array

    def matrix(self, weight: str) -> FloatArray:
        """A weight (K, N), even where it is a table's transpose."""
        return self.values(self._tables[weight]).T if weight in self._tables else self.values(weight)

    def keep(self, node: NodeProto) -> None:
        """A node as it was, with its constants."""
        self.nodes[node.output[0]] = node
        for name in node.input:
            if name in self._given and name not in self.nodes:
                self.constants[name] = self._given[name]

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """A node with one output; one that is there already is not made again."""
        if output not in self.nodes:
            domain = "" if onnx.defs.has(kind) else DOMAIN
            self.nodes[output] = helper.make_node(kind, inputs, [output], domain=domain, **attributes)
        return output

    def constant(self, name: str, value: NDArray[np.generic] | np.generic) -> str:
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def given(self, name: str) -> str:
        """A constant of the old graph, taken over; the empty name stays empty."""
        if name:
            self.constants[name] = self._given[name]
        return name

    def integers(self, weight: str) -> tuple[str, str]:
        """A weight (K, N) as int8, and its scales (N,). Of a table's transpose, the table's own."""
        if weight in self._tables:
            integers, scales = self.table(self._tables[weight])
            return self.node("Transpose", [integers], f"{weight}.integers", perm=[1, 0]), scales
        values, sizes = quantized_columns(self.values(weight))
        return self.constant(f"{weight}.integers", values), self.constant(f"{weight}.scales", sizes)

    def table(self, name: str) -> tuple[str, str]:
        """A table (V, D) as int8, and its scales (V,), one a token."""
        if f"{name}.integers" not in self.constants:
            values, scales = quantized_columns(self.values(name).T)
            self.constant(f"{name}.integers", np.ascontiguousarray(values.T))
            self.constant(f"{name}.scales", scales)
        return f"{name}.integers", f"{name}.scales"

    def embedding(self, name: str) -> None:
        """``name`` as a table of floats made of the one in int8, which ONNX Runtime does once, when it opens the graph:

        the file holds bytes, and a step reads a row of floats by one node.
        """
        integers, scales = self.table(name)
        floats = self.node("Cast", [integers], f"{name}.floats", to=int(TensorProto.FLOAT))
        columns = self.node("Unsqueeze", [scales, self.constant("axis_1", np.array([1]))], f"{name}.columns")
        self.node("Mul", [floats, columns], name)


def _rewritten(model: onnx.ModelProto, layer: Callable[[_Graph, Linear], None]) -> onnx.ModelProto:
    """A copy of a graph in which ``layer`` has written each linear layer, and each table is of int8.

    Raises ExportError naming a matrix that is left in fp32.
    """
    graph, found = _Graph(model), list(linears(model))
    products, sums = {linear.product for linear in found}, {linear.output: linear for linear in found}
    tables, transposes = _tables(model), _transposes(model)
    for node in model.graph.node:
        output = node.output[0]
        if output in sums:
            layer(graph, sums[output])
            continue
        if output in products or output in transposes:
            continue
        if node.op_type == "Gather" and node.input[0] in tables:
            graph.embedding(node.input[0])
        graph.keep(node)
    matrices = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2}
    if left := sorted(matrices.intersection(graph.constants)):
        raise ExportError(f"{', '.join(left)} would stay in fp32: they are read by neither a product nor a Gather")
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:], result.graph.initializer[:]
    result.graph.node.extend(graph.nodes.values())
    result.graph.initializer.extend(graph.constants.values())
    return result


def _tables(model: onnx.ModelProto) -> set[str]:
    """The constants (V, D) of which a Gather takes rows."""
    matrices = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2}
    return {node.input[0] for node in model.graph.node if node.op_type == "Gather"} & matrices


def _transposes(model: onnx.ModelProto) -> dict[str, str]:
    """The transposed tables: outputs of Transpose nodes over one, with its name."""
    tables = _tables(model)
    nodes = (node for node in model.graph.node if node.op_type == "Transpose" and node.input[0] in tables)
    return {node.output[0]: node.input[0] for node in nodes}


def _static(graph: _Graph, linear: Linear, seen: Range) -> None:
    x, (scale, zero) = linear.input, seen.scale_and_zero()
    grid = [graph.constant(f"{x}.scale", scale), graph.constant(f"{x}.zero", zero)]
    quantized = graph.node("QuantizeLinear", [x, *grid], f"{x}.quantized")
    integers, scales = graph.integers(linear.weight)
    inputs = [quantized, integers, grid[0], scales, grid[1], "", graph.given(linear.bias)]
    graph.node("MatMulIntegerToFloat", inputs, linear.output)


def _by_row(graph: _Graph, linear: Linear) -> None:
    x = linear.input
    magnitude = graph.node("Abs", [x], f"{x}.magnitude")
    largest = graph.node("ReduceMax", [magnitude, graph.constant("last_axis", np.array([-1]))], f"{x}.largest")
    size = graph.node("Max", [largest, graph.constant("smallest_scale", SMALLEST_SCALE)], f"{x}.size")  # (…, 1)
    unit = graph.node("Div", [x, size], f"{x}.unit")  # -1..1
    grid = [graph.constant("row.scale", np.float32(1 / LEVELS)), graph.constant("row.zero", np.uint8(128))]
    quantized = graph.node("QuantizeLinear", [unit, *grid], f"{x}.quantized")
    integers, scales = graph.integers(linear.weight)
    inputs = [quantized, integers, grid[0], scales, grid[1]]
    product = graph.node("MatMulIntegerToFloat", inputs, f"{linear.product}.unit")
    if linear.bias:
        sized = graph.node("Mul", [product, size], f"{linear.product}.sized")
        graph.node("Add", [sized, graph.given(linear.bias)], linear.output)
    else:
        graph.node("Mul", [product, size], linear.output)


def _blockwise(graph: _Graph, linear: Linear) -> None:
    weight = np.ascontiguousarray(graph.matrix(linear.weight).T)  # (N, K)
    rows, width = weight.shape
    if width % BLOCK:
        raise ExportError(f"{linear.name} has an input width of {width}; w8 needs a multiple of {BLOCK}")
    blocks = weight.reshape(rows, width // BLOCK, BLOCK)
    scales = np.abs(blocks).max(axis=2) / np.float32(LEVELS)  # (N, K / BLOCK)
    scales[scales == 0] = 1
    integers = (np.rint(blocks / scales[:, :, None]) + 128).astype(np.uint8)
    inputs = [
        linear.input,
        graph.constant(f"{linear.weight}.blocks", integers),
        graph.constant(f"{linear.weight}.block_scales", scales.astype(np.float32)),
        "",  # zero points: 128
        "",  # order of the blocks: as they are
        graph.given(linear.bias),
    ]
    # Accuracy level 4: activations in 8 bits. Without it, the kernel is many times slower.
    graph.node("MatMulNBits", inputs, linear.output, K=width, N=rows, bits=8, block_size=BLOCK, accuracy_level=4)


def normalize(model: onnx.ModelProto) -> None:
    """One form for every linear layer, in place: a product with a weight (K, N), then the sum with the bias.

    The exporter writes a Gemm where the input is a matrix, and where embeddings are tied it stores the table twice, the
    second time transposed. Here the graph says that the one is the other's transpose; ONNX Runtime transposes, and
    joins product and sum, when it opens the graph.
    """
    graph, tables = model.graph, _tables(model)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[NodeProto] = []
    for node in graph.node:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type != "Gemm" or node.input[1] not in constants or attributes != LINEAR_GEMM:
            nodes.append(node)
            continue
        (x, weight, *bias), (output,) = node.input, node.output
        transposed = f"{weight}.transposed"
        if weight in tables:
            nodes.append(helper.make_node("Transpose", [weight], [transposed], perm=[1, 0]))
        else:
            values = np.ascontiguousarray(numpy_helper.to_array(constants[weight]).T)
            graph.initializer.remove(constants[weight])
            graph.initializer.append(numpy_helper.from_array(values, transposed))
        product = f"{output}.product" if bias else output
        nodes.append(helper.make_node("MatMul", [x, transposed], [product], name=node.name))
        if bias:
            nodes.append(helper.make_node("Add", [product, *bias], [output]))
    del graph.node[:]
    graph.node.extend(nodes)
