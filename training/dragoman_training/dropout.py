"""Dropout from random bytes: the arithmetic of ``nn.Dropout`` at a fraction of its cost on a CPU.

PyTorch draws one Bernoulli number an element, one after another, which took a fifth of a training step. Here eight
elements share one 64-bit draw, so the rate is a multiple of 1/256 (0.1 becomes 26/256 = 0.1016).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Zero a share ``rate`` of the elements and scale up the rest while training; nothing in evaluation mode.

    ``generator`` is where the bytes come from, by default PyTorch's own. It must be of the input's device, and two
    threads must not share one.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.threshold = min(round(rate * 256), 255)
        self.enabled = True
        self.generator: torch.Generator | None = None

    @property
    def active(self) -> bool:
        """Whether ``forward`` changes anything at present."""
        return self.training and self.enabled and self.threshold > 0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors(x) if self.active else x

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the compiler knows no generators
    def factors(self, x: Tensor) -> Tensor:
        """Numbers of ``x``'s shape, type and device, each 0 or 1 / (1 - rate)."""
        draws = torch.empty((x.numel() + 7) // 8, dtype=torch.int64, device=x.device)
        draws.random_(-(2**63), None, generator=self.generator)
        # Compared as floats, in place: comparing bytes and converting the answers takes three times as long.
        kept = draws.view(torch.uint8)[: x.numel()].to(x.dtype).ge_(self.threshold)
        return kept.mul_(256 / (256 - self.threshold)).view(x.shape)
