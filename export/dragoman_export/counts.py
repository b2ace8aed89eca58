"""How many nodes of each operator a graph has, and whether they are those that the model's shape requires.

Both are asked of the graph as exported and of what ONNX Runtime makes of it: either may leave attention unfused or
split a node, and such a graph runs, only slowly.
"""

from __future__ import annotations

from collections import Counter

import onnx

from dragoman.bundle import wrong_counts
from dragoman_export.errors import ExportError

CACHED_ATTENTION = "GroupQueryAttention"
SELF_ATTENTION, CROSS_ATTENTION = f"{CACHED_ATTENTION}(self)", f"{CACHED_ATTENTION}(cross)"
MATRIX_PRODUCTS = "MatMul+Gemm+FusedMatMul"
NEVER = {
    "Softmax": 0,  # attention that was left unfused
    "Attention": 0,  # fused by the standard's operator, which reads the padding of a cache too
    "SkipLayerNormalization": 0,  # on the CPU several times slower than the two nodes that it stands for
    "If+Loop+Scan": 0,
}
"""What no graph for the CPU may hold."""


def encoder_nodes(encoder_layers: int, decoder_layers: int, final_norm: bool) -> dict[str, int]:
    """What an encoder graph must hold: a layer's four projections and two of the feed-forward, and for each decoder
    layer the two of its cross-attention. A matrix product more would be attention that was left unfused."""
    return {
        "MultiHeadAttention": encoder_layers,
        CACHED_ATTENTION: 0,
        "LayerNormalization": 2 * encoder_layers + final_norm,
        MATRIX_PRODUCTS: 6 * encoder_layers + 2 * decoder_layers,
        **NEVER,
    }


def decoder_nodes(decoder_layers: int, final_norm: bool) -> dict[str, int]:
    """What a decoder graph must hold: a layer's four projections of self-attention, two of cross-attention (the others
    are the encoder's) and two of the feed-forward, and the one to the vocabulary."""
    return {
        "MultiHeadAttention": 0,
        SELF_ATTENTION: decoder_layers,
        CROSS_ATTENTION: decoder_layers,
        CACHED_ATTENTION: 0,  # with another cache than these
        "LayerNormalization": 3 * decoder_layers + final_norm,
        MATRIX_PRODUCTS: 8 * decoder_layers + 1,
        **NEVER,
    }


def count_nodes(model: onnx.ModelProto) -> dict[str, int]:
    """How many nodes of each operator the graph holds, functions included, by name.

    Attention with a cache is counted by the cache: ``SELF_ATTENTION`` or ``CROSS_ATTENTION``.
    """
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    return dict(sorted(Counter(map(_kind, nodes)).items()))


def check_nodes(file: str, stage: str, nodes: dict[str, int], required: dict[str, int]) -> None:
    """Raises ExportError naming graph, node, found and required count of each difference."""
    if problems := wrong_counts(required, nodes):
        raise ExportError(f"{file} {stage} has {problems}: the model's shape requires those")


def check_caches(file: str, stage: str, model: onnx.ModelProto) -> None:
    """Raises ExportError unless each layer's attention reads and writes the caches that are named after it.

    Layer by layer, self-attention then cross-attention: each needs the one before, so that no order differs. For a
    graph whose counts were checked.
    """
    nodes = [node for node in model.graph.node if node.op_type == CACHED_ATTENTION]
    for index, node in enumerate(nodes):
        layer, is_cross = divmod(index, 2)
        read = f"cross_key_{layer}", f"cross_value_{layer}"
        written: tuple[str, ...] = ()
        if not is_cross:
            read = f"past_key_{layer}", f"past_value_{layer}"
            written = f"present_key_{layer}", f"present_value_{layer}"
        for what, names, right in (("reads", node.input[3:5], read), ("writes", node.output[1:3], written)):
            found, expected = list(filter(None, names)), list(right)
            if found != expected:
                raise ExportError(
                    f"{file} {stage}: {_kind(node)} of layer {layer} {what} {found} instead of {expected}: a cache is "
                    "bound to the wrong place"
                )


def _kind(node: onnx.NodeProto) -> str:
    if node.op_type == CACHED_ATTENTION:
        if node.input[3].startswith("past_"):
            return SELF_ATTENTION
        if node.input[3].startswith("cross_"):
            return CROSS_ATTENTION
    return str(node.op_type)
