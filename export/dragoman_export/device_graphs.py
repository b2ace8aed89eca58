"""Graphs without weights that a device runner needs beside the model's: copies between rows, and what follows logits.

They ship in the bundle, for the service has nothing to make graphs with. What they compute is exact, and no choice is
left to a kernel: the CUDA provider promises no order of equal values, neither of ArgMax nor of TopK.

``copy``: the rows ``index`` (N,) of each layer's keys and values (M, H, T, Dh), each with ``padding`` (8,) behind its
tokens -> (N, H, P, Dh). What is written may be the memory that is read: the rows are gathered first.
``best``: ``logits`` (R, V), ``forbidden`` (V,) and ``numbers`` (V,), which are 0, 1, 2, ... -> the ``best`` token of
each row and its ``value``, infinite where a logit is NaN. Of equal ones, the smallest number.
``ranked``: the same and ``count`` (1,) -> ``keys`` (R, K) of the largest, falling, and ``log_total`` (R,), which is
log(sum(exp(logits - largest))). A key is 2^21 times the logit in steps of 2^-24, plus 2^21 - 1 - the token's number:
whole numbers, of which no two are equal. Logits of float16 are multiples of such a step; beyond 2^17 they are cut off.
``row``: ``logits`` (R, V) -> the same as ``values``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from dragoman.bundle import DeviceGraphs
from dragoman_export.errors import ExportError
from dragoman_export.heads import cached_head_dim
from dragoman_export.targets import Target
from dragoman_export.trace import OPSET, checked
from dragoman_training.config import ModelConfig

KERNELS = frozenset(
    {"Gather", "Identity", "Pad"}  # of any type
    | {"Clip", "Equal", "IsNaN", "ReduceMax", "ReduceMin", "Squeeze", "Where"}  # in float32
    | {"Exp", "Log", "ReduceSum"}  # in float64
    | {"Add", "Cast", "Mul", "Sub", "TopK"}  # in these and int64
)
"""Operators with a kernel of the CUDA provider for these types; the source is that of ``cuda.KERNELS``."""

STEPS = 1 << 24  # of a key's logit, in one; see ``dragoman/engine/device_tails.py``, which reads keys
TOKENS = 1 << 21  # more than any vocabulary has
LARGEST = 1 << 17  # (2 ** 17) * STEPS * TOKENS is below 2 ** 63


def write_device_graphs(config: ModelConfig, target: Target, folder: Path) -> DeviceGraphs:
    """Write the graphs of a model, and declare them. Raises ExportError as ``checked`` does."""
    size = config.target_vocab_size
    models = {"copy": _copy(config), "best": _best(size), "ranked": _ranked(size), "row": _row(size)}
    written = {}
    for kind, model in models.items():
        file = target.file(kind, "onnx")
        if strange := sorted({node.op_type for node in model.graph.node} - KERNELS):
            raise ExportError(f"{file} has {', '.join(strange)}, of which ONNX Runtime has no CUDA kernel")
        arrays = 2 * config.decoder_layers if kind == "copy" else 0
        written[kind] = checked(file, model, {"Gather": arrays, "Pad": arrays}, folder)
    return DeviceGraphs(**written)


def _copy(config: ModelConfig) -> onnx.ModelProto:
    names = [f"{part}_{layer}" for layer in range(config.decoder_layers) for part in ("key", "value")]
    heads, head_dim = config.num_heads, cached_head_dim(config)
    nodes = []
    for name in names:
        nodes.append(helper.make_node("Gather", [name, "index"], [f"gathered_{name}"], axis=0))
        nodes.append(helper.make_node("Pad", [f"gathered_{name}", "padding"], [f"copied_{name}"]))

    def arrays(prefix: str, rows: str, tokens: str) -> list[tuple[str, int, list[int | str]]]:
        return [(prefix + name, TensorProto.FLOAT16, [rows, heads, tokens, head_dim]) for name in names]

    scalars: Values = [("index", TensorProto.INT64, ["N"]), ("padding", TensorProto.INT64, [8])]
    return _model(nodes, [*scalars, *arrays("", "M", "T")], arrays("copied_", "N", "P"), {})


def _best(size: int) -> onnx.ModelProto:
    return _model(
        [
            *_usable(),
            helper.make_node("Equal", ["usable", "largest"], ["is_best"]),
            helper.make_node("Where", ["is_best", "numbers", "infinite"], ["best_numbers"]),  # (R, V)
            helper.make_node("ReduceMin", ["best_numbers", "axis"], ["best"], keepdims=0),
            helper.make_node("Squeeze", ["largest", "axis"], ["value"]),
        ],
        [*_logits(size), ("numbers", TensorProto.FLOAT, [size])],
        [("best", TensorProto.FLOAT, ["R"]), ("value", TensorProto.FLOAT, ["R"])],
        {"axis": np.array([1])},
    )


def _ranked(size: int) -> onnx.ModelProto:
    return _model(
        [
            *_usable(),
            helper.make_node("Sub", ["usable", "largest"], ["below_largest"]),
            # In double precision: rounded to single at the end, the sum is the same whatever its order.
            helper.make_node("Cast", ["below_largest"], ["exponents"], to=TensorProto.DOUBLE),
            helper.make_node("Exp", ["exponents"], ["weights"]),
            helper.make_node("ReduceSum", ["weights", "axis"], ["total"], keepdims=1),
            helper.make_node("Log", ["total"], ["log_totals"]),  # (R, 1)
            helper.make_node("Squeeze", ["log_totals", "axis"], ["double_log_total"]),
            helper.make_node("Cast", ["double_log_total"], ["log_total"], to=TensorProto.FLOAT),
            helper.make_node("Clip", ["usable", "low", "high"], ["finite"]),
            helper.make_node("Mul", ["finite", "steps"], ["scaled"]),
            helper.make_node("Cast", ["scaled"], ["whole"], to=TensorProto.INT64),
            helper.make_node("Mul", ["whole", "tokens"], ["shifted"]),
            helper.make_node("Cast", ["numbers"], ["token_numbers"], to=TensorProto.INT64),
            helper.make_node("Sub", ["last", "token_numbers"], ["order"]),
            helper.make_node("Add", ["shifted", "order"], ["all_keys"]),  # (R, V)
            helper.make_node("TopK", ["all_keys", "count"], ["keys", "places"], axis=1),
        ],
        [*_logits(size), ("numbers", TensorProto.FLOAT, [size]), ("count", TensorProto.INT64, [1])],
        [("keys", TensorProto.INT64, ["R", "K"]), ("log_total", TensorProto.FLOAT, ["R"])],
        {
            "axis": np.array([1]),
            "low": np.float32(-LARGEST),
            "high": np.float32(LARGEST),
            "steps": np.float32(STEPS),
            "tokens": np.int64(TOKENS),
            "last": np.int64(TOKENS - 1),
        },
    )


def _row(size: int) -> onnx.ModelProto:
    return _model(
        [helper.make_node("Identity", ["logits"], ["values"])],
        [("logits", TensorProto.FLOAT, ["R", size])],
        [("values", TensorProto.FLOAT, ["R", size])],
        {},
    )


def _usable() -> list[NodeProto]:
    """``usable`` (R, V): -inf where forbidden, +inf where NaN; and its ``largest`` (R, 1)."""
    return [
        helper.make_node("Where", ["forbidden", "minus_infinite", "logits"], ["allowed"]),
        helper.make_node("IsNaN", ["allowed"], ["is_nan"]),
        helper.make_node("Where", ["is_nan", "infinite", "allowed"], ["usable"]),
        helper.make_node("ReduceMax", ["usable", "axis"], ["largest"], keepdims=1),
    ]


Values = Sequence[tuple[str, int, list[int | str]]]
"""Names, types and shapes."""


def _logits(size: int) -> Values:
    return [("logits", TensorProto.FLOAT, ["R", size]), ("forbidden", TensorProto.BOOL, [size])]


def _model(
    nodes: list[NodeProto], inputs: Values, outputs: Values, constants: dict[str, np.ndarray | np.generic]
) -> onnx.ModelProto:
    constants = {**constants, "infinite": np.float32(np.inf), "minus_infinite": np.float32(-np.inf)}
    read = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "device",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items() if name in read],
    )
    # The least that knows this opset: readers of today need no later one.
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
