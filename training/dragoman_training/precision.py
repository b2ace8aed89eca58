"""Number formats: in which one the products are computed, and the loss scale that fp16 needs.

Weights, gradients of weights, losses and the optimizer stay in float32 (Micikevicius et al. 2018).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST_SCALE = 2.0**24
GOOD_STEPS = 2000


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """A context in which products are computed in ``precision`` ("fp32": as always)."""
    return torch.autocast(device.type, FORMATS[precision], enabled=precision != "fp32")


@dataclass
class LossScale:
    """What a loss is multiplied by so that small gradients do not vanish in fp16.

    Follows ``torch.amp.GradScaler``: half the scale after a gradient that overflowed, twice the scale after 2,000 good
    steps in a row. The gradient that overflowed is left as it is: the training loop skips it.
    """

    value: float = 65536.0
    good_steps: int = 0

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide gradients by the scale, in place, and adapt it for the next step."""
        torch._foreach_mul_(gradients, 1 / self.value)
        if not torch.stack(torch._foreach_norm(gradients)).isfinite().all():
            self.value, self.good_steps = max(self.value / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == GOOD_STEPS:
            self.value, self.good_steps = min(self.value * 2, LARGEST_SCALE), 0
