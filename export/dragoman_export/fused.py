"""Attention as single ONNX nodes: the ``AttentionOps`` that the model uses while it is being exported.

Each method emits one ``com.microsoft`` node, so nothing has to be recognised and fused afterwards. Operators:
GroupQueryAttention and MultiHeadAttention of ONNX Runtime's contrib domain
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).

What the nodes assume, and the runner keeps: padding on the right (a mask is a length, so that left padding and holes
cannot even be expressed), every length at least 1 (``GenerationRequest`` refuses an empty source), and for a decoding
step a cache whose past and present share one buffer. Heads of sizes that the nodes do not take are padded: heads.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dragoman_export.heads import own_heads, padded_heads, scale

DOMAIN = "com.microsoft"


class FusedAttention:
    """Implements ``dragoman_training.attention.AttentionOps`` for tracing; computes nothing."""

    def __init__(self, target_capacity: Tensor | None = None, source_capacity: Tensor | None = None) -> None:
        """The capacities of the caches, (1,) int32, are graph inputs of a decoding step and needed for it alone."""
        self._target_capacity = target_capacity
        self._source_capacity = source_capacity

    def encoder(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        lengths_less_one = (lengths - 1).clamp(min=0)
        capacity = torch.ones(1, dtype=torch.int32) * q.shape[1]
        return _over_new(q, k, v, num_heads, lengths_less_one, capacity, causal=0)  # (B, S, D)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
        size = q.shape[1]  # of every row: what pads one on the right is seen by no position before it
        lengths_less_one = torch.ones(q.shape[0], dtype=torch.int32) * (size - 1)
        capacity = torch.ones(1, dtype=torch.int32) * size
        return _over_new(q, k, v, num_heads, lengths_less_one, capacity)  # (B, T, D)

    def cross(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        # GroupQueryAttention takes more than one new token with a cache only of a lone row.
        padded = padded_heads(q, num_heads)
        attributes = {"num_heads": num_heads, **scale(q.shape[-1], num_heads)}
        (out,) = _node("MultiHeadAttention", [padded, k, v, None, lengths], attributes, [padded])
        return own_heads(out, num_heads, q.shape[-1])  # (B, T, D)

    def step_causal(
        self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, past_k: Tensor, past_v: Tensor, cached: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self._target_capacity is not None
        new = [padded_heads(x, num_heads) for x in (q, k, v)]
        out, present_k, present_v = _node(
            "GroupQueryAttention",
            # The fifth input counts the tokens stored before this step (= all of them, less one).
            [*new, past_k, past_v, cached, self._target_capacity],
            _group_attributes(q, num_heads),
            [new[0], past_k, past_v],
        )
        return own_heads(out, num_heads, q.shape[-1]), present_k, present_v  # (R, 1, D), 2 x (R, H, C, Dh)

    def step_cross(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        assert self._source_capacity is not None
        padded = padded_heads(q, num_heads)
        nothing = padded[:, :0]  # (R, 0, D): no new keys; the source's are all in the past
        (out,) = _node(
            "GroupQueryAttention",
            [padded, nothing, nothing, k, v, lengths - 1, self._source_capacity],
            _group_attributes(q, num_heads),
            [padded],
        )
        return own_heads(out, num_heads, q.shape[-1])  # (R, 1, D)


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


def _over_new(
    q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths_less_one: Tensor, capacity: Tensor, **causal: int
) -> Tensor:
    """GroupQueryAttention without a cache."""
    new = [padded_heads(x, num_heads) for x in (q, k, v)]
    attributes = {**_group_attributes(q, num_heads), **causal}
    (out,) = _node("GroupQueryAttention", [*new, None, None, lengths_less_one, capacity], attributes, [new[0]])
    return own_heads(out, num_heads, q.shape[-1])


def _group_attributes(q: Tensor, num_heads: int) -> dict[str, int | float]:
    return {"num_heads": num_heads, "kv_num_heads": num_heads, **scale(q.shape[-1], num_heads)}


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
