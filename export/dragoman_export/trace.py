"""A graph module to ONNX, with its shape declared and its nodes counted.

The default domain stays at opset 23: ONNX Runtime has kernels for it on every provider, while later opsets make some
operators expand into many nodes without a word.
"""

from __future__ import annotations

import ast
import gc
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import torch

from dragoman.bundle import Graph, TensorSpec
from dragoman.engine.runner import optimized_graph
from dragoman_export.alignment_graph import AlignmentGraph
from dragoman_export.counts import check_caches, check_nodes, count_nodes
from dragoman_export.errors import ExportError
from dragoman_export.graphs import DecoderGraph, EncoderGraph, Signature
from dragoman_export.onnx_file import file_size, write_model
from dragoman_export.quantize import normalize
from dragoman_training.attention import TorchAttention

OPSET = 23
MAX_FILE_BYTES = (1 << 31) - 1  # of one protobuf message


def trace(module: EncoderGraph | DecoderGraph | AlignmentGraph, file: str) -> onnx.ModelProto:
    """The graph, in the model's own type, normalised.

    Raises ExportError naming ``file`` when its inputs or outputs are not those declared.
    """
    signature = module.signature()
    try:
        model = _export(module.eval(), signature)
    finally:
        module.model.use_attention(TorchAttention())  # tracing put the fused one in its place
    _name_products(model)
    _strip(model)
    normalize(model)
    for kind, values, declared in (
        ("input", model.graph.input, signature.inputs),
        ("output", model.graph.output, signature.outputs),
    ):
        _declare(file, kind, values, declared)
    return model


def checked(file: str, model: onnx.ModelProto, required: dict[str, int], folder: Path) -> Graph:
    """Write the graph to ``folder``, its nodes counted and checked as they are and as ONNX Runtime optimises them.

    Returns what the manifest will say of it. Raises ExportError naming the node, the graph, and both counts; or the
    size of a graph that is too large.
    """
    if (size := file_size(model)) > MAX_FILE_BYTES:
        raise ExportError(
            f"{file} would have {size} bytes; an ONNX file holds at most {MAX_FILE_BYTES}, weights included: this "
            "version exports no larger model"
        )
    exported = _checked_nodes(file, "as exported", model, required)
    # From here on the file is read, not bytes in memory: each copy of these is as large as the weights.
    path = folder / file
    write_model(model, path)
    onnx.checker.check_model(path)
    optimized = _checked_nodes(
        file, "as optimised by ONNX Runtime", onnx.load_from_string(optimized_graph(path)), required
    )
    return Graph(file, _specs(model.graph.input), _specs(model.graph.output), required, exported, optimized)


def _checked_nodes(file: str, stage: str, model: onnx.ModelProto, required: dict[str, int]) -> dict[str, int]:
    nodes = count_nodes(model)
    check_nodes(file, stage, nodes, required)
    check_caches(file, stage, model)
    return nodes


def _export(module: EncoderGraph | DecoderGraph | AlignmentGraph, signature: Signature) -> onnx.ModelProto:
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
    model = program.model_proto
    del program
    gc.collect()  # in the cycles of what torch made hang constants that are as large as the model
    return model


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


def _name_products(model: onnx.ModelProto) -> None:
    """Give each matrix product the name of the module that it belongs to: ``decoder.0.feed_forward.inner``."""
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Gemm"):
            properties = {entry.key: entry.value for entry in node.metadata_props}
            *_, module, _ = ast.literal_eval(properties["pkg.torch.onnx.name_scopes"])  # outermost first, then the call
            node.name = module.removeprefix("model.")


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
    names = {
        int(onnx.TensorProto.BOOL): "bool",
        int(onnx.TensorProto.FLOAT): "float",
        onnx.TensorProto.FLOAT16: "float16",
        onnx.TensorProto.UINT8: "uint8",
        onnx.TensorProto.INT32: "int32",
        onnx.TensorProto.INT64: "int64",
    }
    return tuple(
        TensorSpec(
            value.name,
            names[value.type.tensor_type.elem_type],
            tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim),
        )
        for value in values
    )
