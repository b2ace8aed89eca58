"""How many nodes of each operator a graph has, and whether they are those that the model's shape requires.

Both are asked of the graph as exported and of what ONNX Runtime makes of it: either may leave attention unfused or
split a node, and such a graph runs, only slowly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import onnx

from dragoman.bundle import wrong_counts
from dragoman_export.errors import ExportError
from dragoman_training.config import ModelConfig

GROUP_ATTENTION = "GroupQueryAttention"
SELF_ATTENTION, CROSS_ATTENTION = f"{GROUP_ATTENTION}(self)", f"{GROUP_ATTENTION}(cross)"
ENCODER_ATTENTION = f"{GROUP_ATTENTION}(encoder)"
FLOAT_PRODUCTS, INTEGER_PRODUCTS, BLOCK_PRODUCTS = "MatMul+Gemm+FusedMatMul", "MatMulIntegerToFloat", "MatMulNBits"
NEVER = {
    "Softmax": 0,  # attention that was left unfused
    "Attention": 0,  # fused by the standard's operator, which reads the padding of a cache too
    "If+Loop+Scan": 0,
    "DynamicQuantizeMatMul+DynamicQuantizeLinear": 0,  # one scale for all rows: each would feel its neighbours
    "MatMulInteger+QLinearMatMul": 0,  # products that are slower than INTEGER_PRODUCTS
}
"""What no graph may hold."""

NEVER_ON_CPU = {
    **NEVER,
    "MultiHeadAttention": 0,  # in an encoder right, but slower
    "SkipLayerNormalization": 0,  # several times slower than the two nodes that it stands for
}
"""What no graph for the CPU may hold."""

NEVER_ON_CUDA = {
    **NEVER,
    "Gelu+FastGelu+Erf": 0,  # behind each bias: BiasGelu
}
"""What no graph for CUDA may hold."""


@dataclass(frozen=True)
class Products:
    """How a graph's products with weights are computed."""

    kind: str  # FLOAT_PRODUCTS, INTEGER_PRODUCTS or BLOCK_PRODUCTS
    by_row: bool = False  # of INTEGER_PRODUCTS: an activation's scale is found row by row

    def nodes(self, number: int, inputs: int) -> dict[str, int]:
        """``number`` of products, which read so many different ``inputs``. None may be of another kind."""
        counts = dict.fromkeys((FLOAT_PRODUCTS, INTEGER_PRODUCTS, BLOCK_PRODUCTS), 0)
        quantized = inputs if self.kind == INTEGER_PRODUCTS else 0
        row_scales = quantized if self.by_row else 0
        return {**counts, self.kind: number, "QuantizeLinear": quantized, "ReduceMax": row_scales}


def encoder_nodes(config: ModelConfig, products: Products, provider: str = "cpu") -> dict[str, int]:
    """What an encoder graph must hold: a layer's four projections and two of the feed-forward, and for each decoder
    layer the two of its cross-attention. A matrix product more would be attention that was left unfused."""
    layers = config.encoder_layers
    attention, other = ENCODER_ATTENTION, ""
    if provider == "cuda":
        attention, other = "MultiHeadAttention", f"+{ENCODER_ATTENTION}"
    return {
        attention: layers,
        f"{SELF_ATTENTION}+{CROSS_ATTENTION}+{GROUP_ATTENTION}{other}": 0,  # the third: with another cache than theirs
        **_between_products(config, provider, layers, norms=2 * layers),
        **products.nodes(6 * layers + 2 * config.decoder_layers, inputs=4 * layers + 1),
        **(NEVER_ON_CUDA if provider == "cuda" else NEVER_ON_CPU),
    }


def decoder_nodes(config: ModelConfig, products: Products, provider: str = "cpu") -> dict[str, int]:
    """What a decoder graph must hold: a layer's four projections of self-attention, two of cross-attention (the others
    are the encoder's) and two of the feed-forward, and the one to the vocabulary."""
    layers = config.decoder_layers
    return {
        SELF_ATTENTION: layers,
        CROSS_ATTENTION: layers,
        f"{ENCODER_ATTENTION}+{GROUP_ATTENTION}": 0,  # the last: with another cache than theirs
        **_between_products(config, provider, layers, norms=3 * layers),
        **products.nodes(8 * layers + 1, inputs=6 * layers + 1),
        **(NEVER_ON_CUDA | {"MultiHeadAttention": 0} if provider == "cuda" else NEVER_ON_CPU),
    }


def _between_products(config: ModelConfig, provider: str, layers: int, norms: int) -> dict[str, int]:
    """Norms, and on CUDA the activations that a bias is fused with. ``norms`` are those of the layers.

    On CUDA, SkipLayerNormalization takes in the sum before a norm. (A norm first in the stack has one, too: that of
    embeddings and positions; but where these have a norm of their own, there is none between the two.)
    """
    norms += config.norm_first + config.embedding_norm
    if provider == "cuda":
        alone = int(config.norm_first and config.embedding_norm)
        return {
            "SkipLayerNormalization": norms - alone,
            "LayerNormalization": alone,
            "BiasGelu": layers if config.activation == "gelu" else 0,
        }
    return {"LayerNormalization": norms}


def count_nodes(model: onnx.ModelProto) -> dict[str, int]:
    """How many nodes of each operator the graph holds, functions included, by name.

    GroupQueryAttention is counted by the cache that it reads: ``SELF_ATTENTION``, ``CROSS_ATTENTION``, or without one
    ``ENCODER_ATTENTION``.
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
    nodes = [node for node in model.graph.node if _kind(node) in (SELF_ATTENTION, CROSS_ATTENTION)]
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
    if node.op_type == GROUP_ATTENTION:
        if node.input[3].startswith("past_"):
            return SELF_ATTENTION
        if node.input[3].startswith("cross_"):
            return CROSS_ATTENTION
        if not node.input[3] and any(a.name == "causal" and a.i == 0 for a in node.attribute):
            return ENCODER_ATTENTION
    return str(node.op_type)
