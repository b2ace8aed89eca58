"""Attention as single ONNX nodes: the ``AttentionOps`` that the model uses while it is being exported.

Each method emits one ``com.microsoft`` node, so nothing has to be recognised and fused afterwards. Operators:
MultiHeadAttention and GroupQueryAttention of ONNX Runtime's contrib domain
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).

What the nodes assume, and the runner keeps: padding on the right (a mask is a length, so that left padding and holes
cannot even be expressed), every length at least 1 (``GenerationRequest`` refuses an empty source), and for a decoding
step a cache whose past and present share one buffer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

DOMAIN = "com.microsoft"
MASKED = -1e9  # what a padded key's score becomes; far below any real one, finite so that no row can become NaN


class FusedAttention:
    """Implements ``dragoman_training.attention.AttentionOps`` for tracing; computes nothing."""

    def __init__(self, target_capacity: Tensor | None = None, source_capacity: Tensor | None = None) -> None:
        """The capacities of the caches, (1,) int32, are graph inputs of a decoding step and needed for it alone."""
        self._target_capacity = target_capacity
        self._source_capacity = source_capacity

    def encoder(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        (out,) = _node(
            "MultiHeadAttention",
            [q, k, v, None, lengths],
            {"num_heads": num_heads, "mask_filter_value": MASKED},
            [q],
        )
        return out  # (B, S, D)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
        raise NotImplementedError("the exported decoder takes one token a step; it has no teacher forcing")

    def cross(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        raise NotImplementedError("the exported decoder takes one token a step; it has no teacher forcing")

    def step_causal(
        self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, past_k: Tensor, past_v: Tensor, cached: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self._target_capacity is not None
        out, present_k, present_v = _node(
            "GroupQueryAttention",
            # The fifth input counts the tokens stored before this step (= all of them, less one).
            [q, k, v, past_k, past_v, cached, self._target_capacity],
            {"num_heads": num_heads, "kv_num_heads": num_heads},
            [q, past_k, past_v],
        )
        return out, present_k, present_v  # (R, 1, D), 2 x (R, H, C, Dh)

    def step_cross(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        assert self._source_capacity is not None
        nothing = q[:, :0]  # (R, 0, D): no new keys; the source's are all in the past
        (out,) = _node(
            "GroupQueryAttention",
            [q, nothing, nothing, k, v, lengths - 1, self._source_capacity],
            {"num_heads": num_heads, "kv_num_heads": num_heads},
            [q],
        )
        return out  # (R, 1, D)


def _node(
    name: str, inputs: list[Tensor | None], attributes: Mapping[str, int | float], like: list[Tensor]
) -> tuple[Tensor, ...]:
    """One contrib node whose outputs have the types and shapes of ``like``."""
    return tuple(
        torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{name}",
            inputs,
            dict(attributes),
            dtypes=[x.dtype for x in like],
            shapes=[x.shape for x in like],
            version=1,
        )
    )
