"""A graph module to ONNX, with its shape declared and its fused nodes counted.

The default domain stays at opset 23: ONNX Runtime has kernels for it on every provider, while later opsets make some
operators expand into many nodes without a word.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import onnx
import torch

from dragoman.bundle import Graph, TensorSpec
from dragoman_export.errors import ExportError
from dragoman_export.graphs import DecoderGraph, EncoderGraph, Signature
from dragoman_training.attention import TorchAttention

OPSET = 23
COUNTED = ("MultiHeadAttention", "GroupQueryAttention")
FORBIDDEN = ("Softmax", "If", "Loop", "Scan", "Attention")  # attention that was left unfused, control flow


@dataclass(frozen=True)
class TracedGraph:
    """One ONNX file in memory, and what the manifest will say of it."""

    content: bytes
    declaration: Graph


def trace(module: EncoderGraph | DecoderGraph, file: str) -> TracedGraph:
    """Raises ExportError when the graph's shape or its fused nodes are not what the model requires."""
    signature = module.signature()
    try:
        model = _export(module.eval(), signature)
    finally:
        module.model.use_attention(TorchAttention())  # tracing put the fused one in its place
    _strip(model)
    for kind, values, declared in (
        ("input", model.graph.input, signature.inputs),
        ("output", model.graph.output, signature.outputs),
    ):
        _declare(file, kind, values, declared)
    counts = count_nodes(model)
    check_counts(file, counts, module.expected_nodes())
    onnx.checker.check_model(model)
    return TracedGraph(
        content=model.SerializeToString(deterministic=True),
        declaration=Graph(
            file=file,
            inputs=_specs(model.graph.input),
            outputs=_specs(model.graph.output),
            fused_nodes={name: counts[name] for name in COUNTED if counts[name]},
        ),
    )


def count_nodes(model: onnx.ModelProto) -> Counter[str]:
    """How many nodes of each operator the graph holds, functions included."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    return Counter(node.op_type for node in nodes)


def check_counts(file: str, counts: Counter[str], expected: dict[str, int]) -> None:
    """Raises ExportError unless exactly the expected fused attention nodes are there, and no unfused one."""
    problems = [
        f"{counts[name]} {name} nodes instead of {expected.get(name, 0)}"
        for name in COUNTED
        if counts[name] != expected.get(name, 0)
    ]
    problems += [f"{counts[name]} {name} nodes instead of none" for name in FORBIDDEN if counts[name]]
    if problems:
        raise ExportError(f"{file} has {', '.join(problems)}: attention is not fused as the model requires")


def _export(module: EncoderGraph | DecoderGraph, signature: Signature) -> onnx.ModelProto:
    names = {axis for shape in signature.inputs.values() for axis in shape if isinstance(axis, str)}
    dimensions = {name: torch.export.Dim(name) for name in sorted(names)}
    dynamic = {
        name: {axis: dimensions[size] for axis, size in enumerate(shape) if isinstance(size, str)}
        for name, shape in signature.inputs.items()
    }
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            module,
            tuple(module.arguments(signature.examples)),
            dynamo=True,
            dynamic_shapes=tuple(module.arguments(dynamic)),
            input_names=list(signature.inputs),
            output_names=list(signature.outputs),
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter says about torch."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _strip(model: onnx.ModelProto) -> None:
    """Drop what tells of the exporting machine (stack traces with paths), so that equal weights give equal bytes."""
    graph = model.graph
    del graph.value_info[:]
    for items in ([model, graph], graph.node, graph.input, graph.output, graph.initializer):
        for item in items:
            item.ClearField("doc_string")
            item.ClearField("metadata_props")


def _declare(
    file: str, kind: str, values: Iterable[onnx.ValueInfoProto], declared: dict[str, tuple[int | str, ...]]
) -> None:
    """Check names and fixed sizes against the signature, and give dynamic axes their names."""
    found = [value.name for value in values]
    if found != list(declared):
        raise ExportError(f"{file} has {kind}s {found} instead of {list(declared)}")
    for value in values:
        dimensions = value.type.tensor_type.shape.dim
        expected = declared[value.name]
        for axis, (dimension, size) in enumerate(zip(dimensions, expected, strict=True)):
            static = dimension.HasField("dim_value")
            if static != isinstance(size, int) or (static and dimension.dim_value != size):
                got = dimension.dim_value if static else "dynamic"
                raise ExportError(f"{file}: axis {axis} of {kind} {value.name} is {got}; it must be {size}")
            if isinstance(size, str):
                dimension.dim_param = size


def _specs(values: Iterable[onnx.ValueInfoProto]) -> tuple[TensorSpec, ...]:
    names = {int(onnx.TensorProto.FLOAT): "float", onnx.TensorProto.INT32: "int32", onnx.TensorProto.INT64: "int64"}
    return tuple(
        TensorSpec(
            value.name,
            names[value.type.tensor_type.elem_type],
            tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim),
        )
        for value in values
    )
