"""The last layer and the loss as one operation that never holds all logits.

With a vocabulary of thousands, logits are the largest tensor of a training step, and writing and reading them again
costs more than computing them. Here a few hundred rows at a time go from hidden state to logits to loss to gradient,
all within the cache; rows of padding are left out before the product.

Under autocast to fp16 its products stay in float32. The gradient is made here, before a loss scale can lift it: in fp16
the tails of its softmax would vanish, and sums over thousands of rows could overflow, which no scale mends.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK_ROWS = {"cpu": 256, "cuda": 4096}  # cpu: measured for vocabularies of 4,000 and 10,000; cuda: a few 100 MB


def projection_loss(hidden: Tensor, projection: nn.Linear, labels: Tensor, pad: int, smoothing: float) -> Tensor:
    """The label-smoothed cross-entropy (Szegedy et al. 2016) of ``projection(hidden)``, summed over real tokens.

    hidden: (B, T, D); labels: (B, T), ``pad`` where there is no token. Equals ``F.cross_entropy`` with
    ``ignore_index=pad`` and ``reduction="sum"`` to rounding; a scalar in float32 in every precision. No real token
    gives exactly 0 with zero gradients: divide by ``max(number, 1)``. Not differentiable twice.
    """
    flat = labels.reshape(-1)
    real = (flat != pad).nonzero()[:, 0]  # (N,)
    rows = hidden.reshape(len(flat), -1).index_select(0, real)  # (N, D)
    arguments = (rows, projection.weight, projection.bias, flat[real], smoothing, torch.is_grad_enabled())
    return cast(Tensor, ProjectionLoss.apply(*arguments))  # type: ignore[no-untyped-call]  # torch leaves it untyped


class ProjectionLoss(torch.autograd.Function):
    """Loss and gradients, both computed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        smoothing: float,
        differentiate: bool,
    ) -> Tensor:
        """hidden (N, D), weight (V, D), bias (V,), labels (N,) to the summed loss, a scalar."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        if dtype == torch.float16:  # see above
            dtype = torch.float32
        low_hidden, low_weight, low_bias = (x.to(dtype) for x in (hidden, weight, bias))  # themselves in float32
        uniform = smoothing / len(weight)
        total = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(low_hidden)
        weight_gradient, bias_gradient = torch.zeros_like(weight), torch.zeros_like(bias)
        with torch.autocast(device, enabled=False):
            for start in range(0, len(labels), CHUNK_ROWS[device]):
                chunk = slice(start, start + CHUNK_ROWS[device])
                rows, index = low_hidden[chunk], labels[chunk, None]
                z = torch.addmm(low_bias, rows, low_weight.T).float()  # (rows, V): logits, later their gradient
                largest = z.amax(1, keepdim=True)
                total -= (1 - smoothing) * z.gather(1, index).sum() + uniform * z.sum()
                z.sub_(largest).exp_()
                normalizer = z.sum(1, keepdim=True)
                total += (largest + normalizer.log()).sum()
                if not differentiate:
                    continue
                z.div_(normalizer).sub_(uniform)
                z.scatter_add_(1, index, torch.full_like(largest, smoothing - 1))
                bias_gradient += z.sum(0)
                low_z = z.to(dtype)
                torch.mm(low_z, low_weight, out=hidden_gradient[chunk])
                if dtype == weight.dtype:
                    weight_gradient.addmm_(low_z.T, rows)
                else:
                    weight_gradient += low_z.T @ rows
        if differentiate:
            ctx.hidden_dtype = hidden.dtype
            wider = torch.promote_types(hidden.dtype, dtype)  # hidden states in fp16: scaled before they are rounded
            ctx.save_for_backward(hidden_gradient.to(wider), weight_gradient, bias_gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        """The saved gradients times that of the loss."""
        of_hidden, of_weight, of_bias = (gradient * factor for gradient in ctx.saved_tensors)
        return of_hidden.to(ctx.hidden_dtype), of_weight, of_bias, None, None, None
