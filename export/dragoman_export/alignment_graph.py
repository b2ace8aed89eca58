"""The alignment graph: encoder, and decoder up to the cross-attention of one layer, over a known target at once."""

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
)
from dragoman_export.fused import FusedAttention
from dragoman_export.graphs import Signature
from dragoman_training.attention import length_mask, split_heads
from dragoman_training.model import Transformer


class AlignmentGraph(nn.Module):
    """source (B, S) int64, source_lengths (B,) int32, target (B, T) int64 -> weights (B, T, S).

    ``target`` is what the decoder reads: its start token, then the answer. The weights are those of one head of one
    decoder layer, or without a head the mean of all; the layers above have no part in the graph.
    """

    def __init__(self, model: Transformer, layer: int, head: int | None) -> None:
        super().__init__()
        self.model = model
        self.layer = layer
        self.head = head

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        model, heads = self.model, self.model.config.num_heads
        model.use_attention(FusedAttention())
        memory = model.encode(source, source_lengths)  # (B, S, D)
        *below, last = list(model.decoder_layers())[: self.layer + 1]
        x = model.embed(model.target_embedding, target, torch.arange(target.shape[1]))  # (B, T, D)
        for layer in below:
            x = layer(x, layer.cross_attention.keys_values(memory), source_lengths)
        x = last.self_residual.after(x, last.self_attention.causal(last.self_residual.before(x)))
        query = split_heads(last.cross_attention.query(last.cross_residual.before(x)), heads)  # (B, H, T, Dh)
        key = split_heads(last.cross_attention.key(memory), heads)  # (B, H, S, Dh)
        if self.head is not None:
            chosen = slice(self.head, self.head + 1)
            query, key = query[:, chosen], key[:, chosen]
        return attention_weights(query, key, source_lengths).mean(dim=1)

    def signature(self) -> Signature:
        batch, source_length, target_length = 3, 5, 7
        return Signature(
            examples={
                "source": torch.zeros(batch, source_length, dtype=torch.int64),
                "source_lengths": torch.full((batch,), source_length, dtype=torch.int32),
                "target": torch.zeros(batch, target_length, dtype=torch.int64),
            },
            inputs={"source": ("B", "S"), "source_lengths": ("B",), "target": ("B", "T")},
            outputs={"weights": ("B", "T", "S")},
        )

    def arguments(self, values: dict[str, Any]) -> list[Any]:
        """A value for each input name, as ``forward`` takes them."""
        return list(values.values())

    def required_nodes(self) -> dict[str, int]:
        """How many of each node the model's shape requires: one Softmax, whose result is the graph's.

        A layer below the last has four projections of self-attention, four of cross-attention and two of the
        feed-forward; the last has four, and queries and keys, whose product is one more.
        """
        config = self.model.config
        encoder, below = config.encoder_layers, self.layer
        return {
            **NEVER_ON_CPU,
            ENCODER_ATTENTION: encoder,
            GROUP_ATTENTION: below + 1,  # causal, over the target
            "MultiHeadAttention": below,  # over the source
            f"{SELF_ATTENTION}+{CROSS_ATTENTION}": 0,
            "Softmax": 1,
            "LayerNormalization": 2 * encoder + 3 * below + (3 if config.norm_first else 1),
            FLOAT_PRODUCTS: 6 * encoder + 10 * below + 7,
        }


def attention_weights(query: Tensor, key: Tensor, lengths: Tensor) -> Tensor:
    """What each target position makes of each source position, in shares of 1; padding has none.

    query: (B, H, T, Dh); key: (B, H, S, Dh); lengths: (B,). Returns (B, H, T, S).
    """
    scores = (query @ key.transpose(2, 3)) * query.shape[-1] ** -0.5
    mask = length_mask(lengths, key.shape[2])  # (B, 1, 1, S)
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
