"""The four attentions of an encoder-decoder transformer, behind one interface.

Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1): softmax(Q K^T / sqrt(Dh)) V. The model decides *what*
attends to what; an ``AttentionOps`` decides *how*. Training and the reference decoder use ``TorchAttention`` below; the
export swaps in operations that become single fused ONNX nodes, so that one model definition serves both.

Heads are split here and nowhere else: queries, keys and values arrive as (B, T, H * Dh).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dragoman_training.dropout import Dropout


class AttentionOps(Protocol):
    """How attention is computed. ``lengths`` are true lengths, padding is on the right, every length is at least 1."""

    def encoder(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        """Every position of a row attends to the row's first ``lengths`` positions.

        q, k, v: (B, S, D); lengths: (B,) int32. Returns (B, S, D); padded positions hold finite numbers of no meaning.
        """

    def causal(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
        """Position t attends to positions 0..t (teacher forcing). q, k, v: (B, T, D). Returns (B, T, D)."""

    def cross(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        """Every target position attends to the row's source. q: (B, T, D); k, v: (B, H, S, Dh). Returns (B, T, D)."""

    def step_causal(
        self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, past_k: Tensor, past_v: Tensor, cached: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One new token a row: store its key and value at position ``cached`` and attend to positions 0..cached.

        q, k, v: (R, 1, D); past_k, past_v: (R, H, C, Dh); cached: (R,) int32, the tokens stored before this step.
        Returns the output (R, 1, D) and the updated caches.
        """

    def step_cross(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        """One new token a row attends to its source. q: (R, 1, D); k, v: (R, H, L, Dh). Returns (R, 1, D)."""


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, T, H * Dh) to (B, H, T, Dh)."""
    batch, length, width = x.shape
    return x.view(batch, length, num_heads, width // num_heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, Dh) to (B, T, H * Dh)."""
    batch, num_heads, length, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch, length, num_heads * head_dim)


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """True where a key may be seen: (B, 1, 1, size)."""
    return (torch.arange(size, device=lengths.device)[None, :] < lengths[:, None])[:, None, None, :]


def dropped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: Dropout) -> Tensor:
    """Attention with dropout on its weights. q: (B, H, T, Dh); k, v: (B, H, S, Dh); mask: to (B, H, T, S)."""
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5  # (B, H, T, S)
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    dropped: Tensor = dropout(weights)
    return dropped.to(v.dtype) @ v  # (B, H, T, Dh)


class TorchAttention:
    """The reference: PyTorch's ``scaled_dot_product_attention`` with boolean masks.

    While ``dropout`` is active, the attention weights are computed step by step instead: PyTorch's own function draws
    from a generator that all threads share.
    """

    def __init__(self, dropout: Dropout | None = None) -> None:
        self.dropout = dropout

    def encoder(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        return self.cross(q, split_heads(k, num_heads), split_heads(v, num_heads), num_heads, lengths)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
        q, k, v = (split_heads(x, num_heads) for x in (q, k, v))  # 3 x (B, H, T, Dh)
        if self.dropout is not None and self.dropout.active:
            earlier = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()  # (T, T)
            return merge_heads(dropped_attention(q, k, v, earlier, self.dropout))
        return merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def cross(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        q = split_heads(q, num_heads)  # (B, H, T, Dh)
        mask = length_mask(lengths, k.shape[2])  # (B, 1, 1, S)
        if self.dropout is not None and self.dropout.active:
            return merge_heads(dropped_attention(q, k, v, mask, self.dropout))
        return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    def step_causal(
        self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, past_k: Tensor, past_v: Tensor, cached: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.arange(q.shape[0], device=q.device)
        past_k[rows, :, cached.long()] = split_heads(k, num_heads)[:, :, 0]
        past_v[rows, :, cached.long()] = split_heads(v, num_heads)[:, :, 0]
        return self.cross(q, past_k, past_v, num_heads, cached + 1), past_k, past_v

    def step_cross(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        return self.cross(q, k, v, num_heads, lengths)
