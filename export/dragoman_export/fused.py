"""Attention as single ONNX nodes: the ``AttentionOps`` that the model uses while it is being exported.

Each method emits one ``com.microsoft`` node, so nothing has to be recognised and fused afterwards. Operators:
GroupQueryAttention and MultiHeadAttention of ONNX Runtime's contrib domain
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


class FusedAttention:
    """Implements ``dragoman_training.attention.AttentionOps`` for tracing; computes nothing."""

    def __init__(self, target_capacity: Tensor | None = None, source_capacity: Tensor | None = None) -> None:
        """The capacities of the caches, (1,) int32, are graph inputs of a decoding step and needed for it alone."""
        self._target_capacity = target_capacity
        self._source_capacity = source_capacity

    def encoder(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        (out,) = _node(
            "GroupQueryAttention",
            [q, k, v, None, None, (lengths - 1).clamp(min=0), torch.ones(1, dtype=torch.int32) * q.shape[1]],
            {"num_heads": num_heads, "kv_num_heads": num_heads, "causal": 0},
            [q],
        )
        return out  # (B, S, D)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
        size = q.shape[1]  # of every row: what pads one on the right is seen by no position before it
        (out,) = _node(
            "GroupQueryAttention",
            [
                q,
                k,
                v,
                None,
                None,
                torch.ones(q.shape[0], dtype=torch.int32) * (size - 1),
                torch.ones(1, dtype=torch.int32) * size,
            ],
            {"num_heads": num_heads, "kv_num_heads": num_heads},
            [q],
        )
        return out  # (B, T, D)

    def cross(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        # GroupQueryAttention takes more than one new token with a cache only of a lone row.
        (out,) = _node("MultiHeadAttention", [q, k, v, None, lengths], {"num_heads": num_heads}, [q])
        return out  # (B, T, D)

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


class CudaAttention(FusedAttention):
    """The same for the CUDA provider, where the encoder's attention is MultiHeadAttention.

    There, GroupQueryAttention without a causal mask is not safe for rows of unlike lengths: of its kernels for a first
    prompt, those of Flash and of memory-efficient attention are told the padded length as every row's, and a shorter
    row would attend to its padding. The lengths are a key mask here. What a masked score becomes is the operator's own
    default, -10,000: float16 holds it.
    """

    def encoder(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        (out,) = _node("MultiHeadAttention", [q, k, v, None, lengths], {"num_heads": num_heads}, [q])
        return out  # (B, S, D)


ATTENTION: Mapping[str, type[FusedAttention]] = {"cpu": FusedAttention, "cuda": CudaAttention}
"""By execution provider."""


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
