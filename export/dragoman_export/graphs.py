"""Modules whose ``forward`` is a graph's signature; ``engine/runner.py`` documents the same names from its side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dragoman_export.counts import Products, decoder_nodes, encoder_nodes
from dragoman_export.fused import ATTENTION
from dragoman_export.heads import cached_head_dim
from dragoman_training.model import KeyValue, Transformer


@dataclass(frozen=True)
class Signature:
    """The declared shapes, a name for each dynamic axis, and example inputs to trace with.

    The sizes of the examples' dynamic axes are distinct primes, so that no two are taken for the same.
    """

    examples: dict[str, Tensor]
    inputs: dict[str, tuple[int | str, ...]]
    outputs: dict[str, tuple[int | str, ...]]


class EncoderGraph(nn.Module):
    """source (B, S) int64, source_lengths (B,) int32 -> cross_key_i, cross_value_i (B, H, S, Dh), layer by layer.

    Keys and values are of the model's own type, and Dh as ``cached_head_dim`` says.
    """

    def __init__(self, model: Transformer, provider: str = "cpu") -> None:
        super().__init__()
        self.model = model
        self.provider = provider

    def forward(self, source: Tensor, source_lengths: Tensor) -> list[Tensor]:
        self.model.use_attention(ATTENTION[self.provider]())
        memory = self.model.encode(source, source_lengths)  # (B, S, D)
        # (B, H, S, Dh) as its own memory, not as a view of (B, S, H, Dh)
        tensors = [tensor.contiguous() for pair in self.model.keys_values(memory) for tensor in pair]
        more = cached_head_dim(self.model.config) - self.model.config.head_dim
        return [F.pad(tensor, (0, more)) for tensor in tensors] if more else tensors

    def signature(self) -> Signature:
        config = self.model.config
        batch, length = 3, 5
        return Signature(
            examples={
                "source": torch.zeros(batch, length, dtype=torch.int64),
                "source_lengths": torch.full((batch,), length, dtype=torch.int32),
            },
            inputs={"source": ("B", "S"), "source_lengths": ("B",)},
            outputs=dict.fromkeys(
                _names("cross", config.decoder_layers), ("B", config.num_heads, "S", cached_head_dim(config))
            ),
        )

    def arguments(self, values: dict[str, Any]) -> list[Any]:
        """A value for each input name, as ``forward`` takes them."""
        return list(values.values())

    def required_nodes(self, products: Products) -> dict[str, int]:
        """How many of each node the model's shape requires."""
        return encoder_nodes(self.model.config, products, self.provider)


class DecoderGraph(nn.Module):
    """One token a row. Inputs and outputs as in ``signature``; past and present of a layer are bound to one buffer.

    Keys and values are of the model's own type, logits always float32.
    """

    def __init__(self, model: Transformer, provider: str = "cpu") -> None:
        super().__init__()
        self.model = model
        self.provider = provider

    def forward(
        self,
        tokens: Tensor,
        cached: Tensor,
        source_lengths: Tensor,
        target_capacity: Tensor,
        source_capacity: Tensor,
        past: list[Tensor],
        cross: list[Tensor],
    ) -> list[Tensor]:
        self.model.use_attention(ATTENTION[self.provider](target_capacity, source_capacity))
        logits, present = self.model.step(tokens, cached, _pairs(past), _pairs(cross), source_lengths)
        return [logits.float(), *(tensor for pair in present for tensor in pair)]

    def signature(self) -> Signature:
        config = self.model.config
        rows, target_capacity, source_capacity = 3, 7, 11
        heads, head_dim, layers = config.num_heads, cached_head_dim(config), config.decoder_layers
        past, cross = _names("past", layers), _names("cross", layers)
        dtype = self.model.projection.weight.dtype
        return Signature(
            examples={
                "tokens": torch.zeros(rows, dtype=torch.int64),
                "cached": torch.zeros(rows, dtype=torch.int32),
                "source_lengths": torch.ones(rows, dtype=torch.int32),
                "target_capacity": torch.tensor([target_capacity], dtype=torch.int32),
                "source_capacity": torch.tensor([source_capacity], dtype=torch.int32),
                **{name: torch.zeros(rows, heads, target_capacity, head_dim, dtype=dtype) for name in past},
                **{name: torch.zeros(rows, heads, source_capacity, head_dim, dtype=dtype) for name in cross},
            },
            inputs={
                **dict.fromkeys(("tokens", "cached", "source_lengths"), ("R",)),
                **dict.fromkeys(("target_capacity", "source_capacity"), (1,)),
                **dict.fromkeys(past, ("R", heads, "C", head_dim)),
                **dict.fromkeys(cross, ("R", heads, "L", head_dim)),
            },
            outputs={
                "logits": ("R", config.target_vocab_size),
                **dict.fromkeys(_names("present", layers), ("R", heads, "C", head_dim)),
            },
        )

    def arguments(self, values: dict[str, Any]) -> list[Any]:
        """A value for each input name, as ``forward`` takes them."""
        flat, tensors = list(values.values()), 2 * self.model.config.decoder_layers
        return [*flat[: -2 * tensors], flat[-2 * tensors : -tensors], flat[-tensors:]]

    def required_nodes(self, products: Products) -> dict[str, int]:
        """How many of each node the model's shape requires."""
        return decoder_nodes(self.model.config, products, self.provider)


def _names(kind: str, layers: int) -> list[str]:
    return [f"{kind}_{part}_{layer}" for layer in range(layers) for part in ("key", "value")]


def _pairs(tensors: list[Tensor]) -> list[KeyValue]:
    return [KeyValue(key, value) for key, value in zip(tensors[0::2], tensors[1::2], strict=True)]
