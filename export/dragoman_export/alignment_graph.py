"""The alignment graph: the decoder up to the last layer's cross-attention, over a known target at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dragoman_export.counts import (
    CROSS_ATTENTION,
    ENCODER_ATTENTION,
    FLOAT_PRODUCTS,
    GROUP_ATTENTION,
    NEVER_ON_CPU,
    SELF_ATTENTION,
    Products,
)
from dragoman_export.fused import FusedAttention
from dragoman_export.graphs import Signature
from dragoman_export.heads import cached_head_dim
from dragoman_training.attention import length_mask, split_heads
from dragoman_training.model import KeyValue, Transformer


class AlignmentGraph(nn.Module):
    """target (B, T) int64, source_lengths (B,) int32, cross_key_i, cross_value_i -> weights, coverage (B, T, S).

    ``target`` is what the decoder reads: its start token, then the answer. Keys and values (B, H, S, Dh) are the
    encoder graph's outputs, layer by layer, all but the last values. ``weights`` are those of one head of one decoder
    layer, or without a head the mean of all; ``coverage`` is the mean of the last layer's heads.
    """

    def __init__(self, model: Transformer, layer: int, head: int | None) -> None:
        super().__init__()
        self.model = model
        self.layer = layer
        self.head = head

    def forward(self, target: Tensor, source_lengths: Tensor, cross: list[Tensor]) -> tuple[Tensor, Tensor]:
        model, heads, head_dim = self.model, self.model.config.num_heads, self.model.config.head_dim
        keys, values = cross[0::2], cross[1::2]
        watched = WatchedAttention()
        model.use_attention(watched)
        *below, last = list(model.decoder_layers())
        x = model.embed_target(target, torch.arange(target.shape[1]))  # (B, T, D)
        for layer, key, value in zip(below, keys[:-1], values, strict=True):
            x = layer(x, KeyValue(key, value), source_lengths)
        x = last.self_residual.after(x, last.self_attention.causal(last.self_residual.before(x)))
        queries = [*watched.queries, last.cross_attention.query(last.cross_residual.before(x))]  # each (B, T, D)
        attention = {
            layer: attention_weights(split_heads(queries[layer], heads), _own(keys[layer], head_dim), source_lengths)
            for layer in sorted({self.layer, len(below)})
        }  # each (B, H, T, S)
        chosen = slice(None) if self.head is None else slice(self.head, self.head + 1)
        return attention[self.layer][:, chosen].mean(dim=1), attention[len(below)].mean(dim=1)

    def signature(self) -> Signature:
        config = self.model.config
        batch, source_length, target_length = 3, 5, 7
        parts = [(part, layer) for layer in range(config.decoder_layers) for part in ("key", "value")]
        cross = [f"cross_{part}_{layer}" for part, layer in parts[:-1]]
        return Signature(
            examples={
                "target": torch.zeros(batch, target_length, dtype=torch.int64),
                "source_lengths": torch.full((batch,), source_length, dtype=torch.int32),
                **{
                    name: torch.zeros(batch, config.num_heads, source_length, cached_head_dim(config)) for name in cross
                },
            },
            inputs={
                "target": ("B", "T"),
                "source_lengths": ("B",),
                **dict.fromkeys(cross, ("B", config.num_heads, "S", cached_head_dim(config))),
            },
            outputs=dict.fromkeys(("weights", "coverage"), ("B", "T", "S")),
        )

    def arguments(self, values: dict[str, Any]) -> list[Any]:
        """A value for each input name, as ``forward`` takes them."""
        target, source_lengths, *cross = values.values()
        return [target, source_lengths, cross]

    def required_nodes(self, products: Products) -> dict[str, int]:
        """How many of each node the model's shape requires: a Softmax for each layer whose attention is a result.

        A layer below the last has four projections of self-attention, two of cross-attention (the others are the
        encoder graph's) and two of the feed-forward; the last has four, and queries, whose product with the keys stays
        one of floats, as does that of the chosen layer.
        """
        config = self.model.config
        below = config.decoder_layers - 1
        seen = len({self.layer, below})
        linear = products.nodes(8 * below + 5, inputs=6 * below + 3)
        return {
            **NEVER_ON_CPU,
            GROUP_ATTENTION: below + 1,  # causal, over the target
            "MultiHeadAttention": below,  # over the source
            f"{SELF_ATTENTION}+{CROSS_ATTENTION}+{ENCODER_ATTENTION}": 0,
            "Softmax": seen,
            "LayerNormalization": 3 * below + (2 if config.norm_first else 1) + config.embedding_norm,
            **linear,
            FLOAT_PRODUCTS: linear[FLOAT_PRODUCTS] + seen,
        }


class WatchedAttention(FusedAttention):
    """Keeps the queries of each cross-attention, in the order of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[Tensor] = []  # each (B, T, D)

    def cross(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        self.queries.append(q)
        return super().cross(q, k, v, num_heads, lengths)


def _own(key: Tensor, head_dim: int) -> Tensor:
    """A cached key without what pads its heads: (B, H, S, Dh)."""
    return key if key.shape[-1] == head_dim else key[..., :head_dim]


def attention_weights(query: Tensor, key: Tensor, lengths: Tensor) -> Tensor:
    """What each target position makes of each source position, in shares of 1; padding has none.

    query: (B, H, T, Dh); key: (B, H, S, Dh); lengths: (B,). Returns (B, H, T, S).
    """
    scores = (query @ key.transpose(2, 3)) * query.shape[-1] ** -0.5
    mask = length_mask(lengths, key.shape[2])  # (B, 1, 1, S)
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
