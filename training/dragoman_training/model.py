"""The encoder-decoder transformer (Vaswani et al. 2017), top to bottom in one file.

It has no length limit: sinusoidal positions are computed, not looked up in a table, unless ``num_positions`` asks for
one, whose length is the limit then. It knows neither tokenizers nor search; ``decode.py`` searches, ``data.py`` makes
batches. Shapes: B rows, S source and T target positions, D width, H heads of size Dh, V vocabulary, R rows of a
decoding step, C cache capacity, L source capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dragoman_training.attention import AttentionOps, TorchAttention, split_heads
from dragoman_training.config import ModelConfig
from dragoman_training.dropout import Dropout

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class KeyValue(NamedTuple):
    """Keys and values of one attention, heads apart: each (B, H, S, Dh)."""

    key: Tensor
    value: Tensor


def sinusoidal_positions(positions: Tensor, width: int, base: float = 10000.0) -> Tensor:
    """Sine and cosine of the given positions at geometrically spaced wavelengths (Vaswani et al. 2017, section 3.5).

    positions: any shape of integers; returns the same shape plus (width,). The wavelengths go from 2 pi to 2 pi x
    ``base`` tokens. The first half of the channels holds the sines, the second the cosines (the order is a permutation
    of the paper's, which learned weights cannot tell apart).
    """
    half = width // 2
    rate = torch.exp(torch.arange(half, device=positions.device) * (-math.log(base) / max(half - 1, 1)))
    angle = positions.to(torch.float32)[..., None] * rate
    return torch.cat([torch.sin(angle), torch.cos(angle)], dim=-1)


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """A norm of the model's width."""
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)


class Attention(nn.Module):
    """Query, key, value and output projections around one attention. The arithmetic between them is ``self.ops``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key = nn.Linear(config.d_model, config.d_model)
        self.value = nn.Linear(config.d_model, config.d_model)
        self.output = nn.Linear(config.d_model, config.d_model)
        self.dropout = Dropout(config.attention_dropout)
        self.ops: AttentionOps = TorchAttention(self.dropout)

    def encoder(self, x: Tensor, lengths: Tensor) -> Tensor:
        out = self.ops.encoder(self.query(x), self.key(x), self.value(x), self.num_heads, lengths)
        return cast(Tensor, self.output(out))  # (B, S, D)

    def causal(self, x: Tensor) -> Tensor:
        out = self.ops.causal(self.query(x), self.key(x), self.value(x), self.num_heads)
        return cast(Tensor, self.output(out))  # (B, T, D)

    def keys_values(self, memory: Tensor) -> KeyValue:
        """Project an encoder output once for the whole decoding: (B, S, D) to 2 x (B, H, S, Dh)."""
        return KeyValue(*(split_heads(p(memory), self.num_heads) for p in (self.key, self.value)))

    def cross(self, x: Tensor, memory: KeyValue, lengths: Tensor) -> Tensor:
        out = self.ops.cross(self.query(x), memory.key, memory.value, self.num_heads, lengths)
        return cast(Tensor, self.output(out))  # (B, T, D)

    def step_causal(self, x: Tensor, past: KeyValue, cached: Tensor) -> tuple[Tensor, KeyValue]:
        out, key, value = self.ops.step_causal(
            self.query(x), self.key(x), self.value(x), self.num_heads, past.key, past.value, cached
        )
        return self.output(out), KeyValue(key, value)  # (R, 1, D), 2 x (R, H, C, Dh)

    def step_cross(self, x: Tensor, memory: KeyValue, lengths: Tensor) -> Tensor:
        out = self.ops.step_cross(self.query(x), memory.key, memory.value, self.num_heads, lengths)
        return cast(Tensor, self.output(out))  # (R, 1, D)


class FeedForward(nn.Module):
    """Two linear layers with an activation (and its dropout) between: (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.ffn_dim)
        self.outer = nn.Linear(config.ffn_dim, config.d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.outer(self.dropout(self.activation(self.inner(x)))))


class Residual(nn.Module):
    """Where the norm stands: before the sublayer (``norm_first``) or after the sum. Both halves keep (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = layer_norm(config)
        self.norm_first = config.norm_first
        self.dropout = Dropout(config.dropout)

    def before(self, x: Tensor) -> Tensor:
        """What the sublayer reads."""
        return cast(Tensor, self.norm(x)) if self.norm_first else x

    def after(self, x: Tensor, sublayer: Tensor) -> Tensor:
        """The sum of input and sublayer output."""
        total = x + self.dropout(sublayer)
        return total if self.norm_first else cast(Tensor, self.norm(total))


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention = Attention(config)
        self.self_residual = Residual(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.self_residual.after(x, self.self_attention.encoder(self.self_residual.before(x), lengths))
        return self.feed_forward_residual.after(x, self.feed_forward(self.feed_forward_residual.before(x)))


class DecoderLayer(nn.Module):
    """Masked self-attention, cross-attention, then feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention = Attention(config)
        self.self_residual = Residual(config)
        self.cross_attention = Attention(config)
        self.cross_residual = Residual(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x: Tensor, memory: KeyValue, lengths: Tensor) -> Tensor:
        """All target positions at once (teacher forcing). x: (B, T, D)."""
        x = self.self_residual.after(x, self.self_attention.causal(self.self_residual.before(x)))
        x = self.cross_residual.after(x, self.cross_attention.cross(self.cross_residual.before(x), memory, lengths))
        return self.feed_forward_residual.after(x, self.feed_forward(self.feed_forward_residual.before(x)))

    def step(
        self, x: Tensor, past: KeyValue, cached: Tensor, memory: KeyValue, lengths: Tensor
    ) -> tuple[Tensor, KeyValue]:
        """One target position a row, keys and values of the earlier ones cached. x: (R, 1, D)."""
        attended, present = self.self_attention.step_causal(self.self_residual.before(x), past, cached)
        x = self.self_residual.after(x, attended)
        attended = self.cross_attention.step_cross(self.cross_residual.before(x), memory, lengths)
        x = self.cross_residual.after(x, attended)
        return self.feed_forward_residual.after(x, self.feed_forward(self.feed_forward_residual.before(x))), present


class Transformer(nn.Module):
    """Encoder, decoder, embeddings and output projection.

    ``encode`` then ``decode`` gives the logits of a known target (training, scoring); ``encode``, ``keys_values`` and
    one ``step`` a token give the same logits with cached keys and values (generation).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        d_model = config.d_model
        self.source_embedding = nn.Embedding(config.source_vocab_size, d_model)
        if config.tied_embeddings == "all":
            self.target_embedding = self.source_embedding
        else:
            self.target_embedding = nn.Embedding(config.target_vocab_size, d_model)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        # With the norm first, the residual stream itself is never normalised: one norm closes each stack.
        self.encoder_norm = layer_norm(config) if config.norm_first else nn.Identity()
        self.decoder_norm = layer_norm(config) if config.norm_first else nn.Identity()
        self.source_norm = layer_norm(config) if config.embedding_norm else nn.Identity()
        self.target_norm = layer_norm(config) if config.embedding_norm else nn.Identity()
        self.source_positions, self.target_positions = (
            nn.Embedding(config.num_positions, d_model) if config.num_positions else None for _ in range(2)
        )
        self.projection = nn.Linear(d_model, config.target_vocab_size)
        if config.tied_embeddings != "none":
            self.projection.weight = self.target_embedding.weight
        self.dropout = Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier for the projections; embeddings so that, scaled by sqrt(D), they start with unit variance."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        tables = [table for table in (self.source_positions, self.target_positions) if table is not None]
        for embedding in (self.source_embedding, self.target_embedding, *tables):  # last: tied to the projection
            nn.init.normal_(embedding.weight, std=self.config.d_model**-0.5)

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        """The decoder's layers, typed."""
        return cast(Iterator[DecoderLayer], iter(self.decoder))

    def use_attention(self, ops: AttentionOps) -> None:
        """Compute every attention of this model with ``ops`` from now on (the export's seam)."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.ops = ops

    def embed_source(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What the encoder reads: tokens (B, S) at positions (S,), which count from 0, to (B, S, D)."""
        x = self._placed(self.source_embedding(tokens), self.source_positions, positions)
        return cast(Tensor, self.dropout(self.source_norm(x)))

    def embed_target(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What the decoder reads: tokens (B, T) at positions (B, T) or (T,), which count from 0, to (B, T, D)."""
        x = self._placed(self.target_embedding(tokens), self.target_positions, positions)
        return cast(Tensor, self.dropout(self.target_norm(x)))

    def _placed(self, embedded: Tensor, table: nn.Embedding | None, positions: Tensor) -> Tensor:
        """Embeddings (B, T, D), scaled, plus the vectors of their positions."""
        config = self.config
        if config.scaled_embeddings:
            embedded = embedded * math.sqrt(config.d_model)
        if table is not None:  # padding may lie behind the last position: what it gets means nothing
            return embedded + cast(Tensor, table(positions.clamp(max=config.num_positions - 1)))
        if config.first_position:
            positions = positions + config.first_position
        return embedded + sinusoidal_positions(positions, config.d_model, config.position_base).to(embedded.dtype)

    def encode(self, source: Tensor, lengths: Tensor) -> Tensor:
        """source (B, S), right-padded, and true lengths (B,) to the encoder output (B, S, D)."""
        x = self.embed_source(source, torch.arange(source.shape[1], device=source.device))
        for layer in self.encoder:
            x = layer(x, lengths)
        return cast(Tensor, self.encoder_norm(x))

    def keys_values(self, memory: Tensor) -> list[KeyValue]:
        """The cross-attention keys and values of each decoder layer: each 2 x (B, H, S, Dh)."""
        return [layer.cross_attention.keys_values(memory) for layer in self.decoder_layers()]

    def decode_hidden(self, target: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        """The decoder's last hidden states for a known target (B, T): (B, T, D)."""
        x = self.embed_target(target, torch.arange(target.shape[1], device=target.device))
        for layer, keys_values in zip(self.decoder_layers(), self.keys_values(memory), strict=True):
            x = layer(x, keys_values, lengths)
        return cast(Tensor, self.decoder_norm(x))

    def decode(self, target: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        """Logits after each token of a known target (B, T): (B, T, V)."""
        return cast(Tensor, self.projection(self.decode_hidden(target, memory, lengths)))

    def step(
        self, tokens: Tensor, cached: Tensor, past: list[KeyValue], memory: list[KeyValue], lengths: Tensor
    ) -> tuple[Tensor, list[KeyValue]]:
        """Logits after one more token a row.

        tokens: (R,); cached: (R,) int32, target tokens already in ``past``; past: 2 x (R, H, C, Dh) a layer, with
        C > cached;
        memory: 2 x (R, H, L, Dh) a layer; lengths: (R,) int32 source lengths. Returns (R, V) and the updated caches.
        """
        x = self.embed_target(tokens[:, None], cached[:, None])  # (R, 1, D)
        present = []
        for layer, layer_past, layer_memory in zip(self.decoder_layers(), past, memory, strict=True):
            x, layer_present = layer.step(x, layer_past, cached, layer_memory, lengths)
            present.append(layer_present)
        return self.projection(self.decoder_norm(x)[:, 0]), present

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Teacher-forced logits: source (B, S), lengths (B,), decoder input (B, T) to (B, T, V)."""
        return self.decode(target, self.encode(source, lengths), lengths)
