"""How much attention each source token got: the coverage penalty of Wu et al. 2016, section 7, as CTranslate2 has it.

It is the sum over the source positions of log(min(attention it got in all steps, 1)), and at most 0. Attention is the
last decoder layer's cross-attention, the mean of its heads (there: of the model's alignment heads), ``</s>`` of the
source and the steps of a prefix included. It takes no part in the search: it changes the scores of what is finished.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dragoman_training.attention import split_heads
from dragoman_training.model import Transformer


def attention_weights(model: Transformer, source: Sequence[int], read: Sequence[int]) -> Tensor:
    """The last decoder layer's cross-attention while it reads ``read`` (T tokens), the mean of its heads: (T, S).

    The last decoder layer is repeated here as far as its attention's queries: the model does not hand out weights.
    """
    heads, device = model.config.num_heads, next(model.parameters()).device
    lengths = torch.tensor([len(source)], dtype=torch.int32, device=device)
    memory = model.encode(torch.tensor([list(source)], device=device), lengths)  # (1, S, D)
    positions = torch.arange(len(read), device=device)
    x = model.embed_target(torch.tensor([list(read)], device=device), positions)  # (1, T, D)
    *below, last = model.decoder_layers()
    for layer in below:
        x = layer(x, layer.cross_attention.keys_values(memory), lengths)
    x = last.self_residual.after(x, last.self_attention.causal(last.self_residual.before(x)))
    query = split_heads(last.cross_attention.query(last.cross_residual.before(x)), heads)  # (1, H, T, Dh)
    key = last.cross_attention.keys_values(memory).key  # (1, H, S, Dh)
    scores = query @ key.transpose(2, 3) * model.config.head_dim**-0.5  # (1, H, T, S)
    return torch.softmax(scores, dim=-1).mean(dim=1)[0]


def coverage_penalty(weights: Tensor) -> float:
    """The penalty, not yet weighted, of attention weights (T, S). What got none at all is left out, as it is there."""
    coverage = weights.sum(dim=0)  # (S,)
    return float(coverage[coverage > 0].clamp(max=1.0).log().sum())
