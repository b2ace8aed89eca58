"""Dropout from random bytes: the arithmetic of ``nn.Dropout`` at a fraction of its cost on a CPU.

PyTorch draws one Bernoulli number an element, one after another, which took a fifth of a training step. Here eight
elements share one 64-bit draw, so the rate is a multiple of 1/256 (0.1 becomes 26/256 = 0.1016).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Zero a share ``rate`` of the elements and scale up the rest while training; nothing in evaluation mode.

    ``generator`` is where the bytes come from, by default PyTorch's own. Two threads must not share one.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.threshold = min(round(rate * 256), 255)
        self.enabled = True
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.threshold == 0 or not self.enabled:
            return x
        return x * self.factors(x.numel()).view(x.shape)

    def factors(self, size: int) -> Tensor:
        """``size`` numbers, each 0 or 1 / (1 - rate)."""
        draws = torch.empty((size + 7) // 8, dtype=torch.int64).random_(-(2**63), None, generator=self.generator)
        kept = draws.view(torch.uint8)[:size] >= self.threshold
        return kept.to(torch.float32).mul_(256 / (256 - self.threshold))
