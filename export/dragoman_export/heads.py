"""Attention heads as wide as ONNX Runtime's kernels want them.

GroupQueryAttention takes head sizes that are multiples of 8 alone. Others are padded with zeros inside of the graph:
zeros of queries and keys add nothing to a score, and those of values are cut off the result. What would change is the
score's scale, which follows from a head's size and is stated instead. Caches hold padded heads.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dragoman_training.config import ModelShape

MULTIPLE = 8


def cached_head_dim(config: ModelShape) -> int:
    """The width of a head in the caches: the model's, rounded up."""
    return -(-config.head_dim // MULTIPLE) * MULTIPLE


def padding(width: int, num_heads: int) -> int:
    """How many zeros each head of heads side by side needs."""
    return -(width // num_heads) % MULTIPLE


def padded_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, T, H * Dh) with zeros behind each head."""
    if not (more := padding(x.shape[-1], num_heads)):
        return x
    return F.pad(_apart(x, num_heads), (0, more)).flatten(-2)


def own_heads(x: Tensor, num_heads: int, width: int) -> Tensor:
    """(B, T, H * Dp) without the zeros: (B, T, ``width``)."""
    if not padding(width, num_heads):
        return x
    return _apart(x, num_heads)[..., : width // num_heads].flatten(-2)


def scale(width: int, num_heads: int) -> dict[str, float]:
    """The attribute that states a score's scale; none where it follows from the heads' size."""
    return {"scale": (width // num_heads) ** -0.5} if padding(width, num_heads) else {}


def _apart(x: Tensor, num_heads: int) -> Tensor:
    """(B, T, H * Dh) to (B, T, H, Dh)."""
    return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)
