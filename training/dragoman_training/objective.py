"""A model and its loss as one module: a batch in, a number to differentiate out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman_training.data import Batch
from dragoman_training.loss import projection_loss
from dragoman_training.model import Transformer
from dragoman_training.precision import autocast
from dragoman_training.tokenizer import SPECIAL_IDS


class Objective(nn.Module):
    """The summed label-smoothed loss of a batch, its products in ``precision``, the loss itself in float32.

    With ``compiled``, all of the model but its last layer goes through ``torch.compile``, for any batch shape. It is
    one module so that ``DistributedDataParallel`` can wrap it.
    """

    def __init__(self, model: Transformer, smoothing: float, precision: str, compiled: bool) -> None:
        super().__init__()
        self.model, self.smoothing, self.precision = model, smoothing, precision
        self.hidden = torch.compile(self.decoded, dynamic=True) if compiled else self.decoded

    def decoded(self, batch: Batch) -> Tensor:
        """The decoder's last hidden states (B, T, D)."""
        memory = self.model.encode(batch.source, batch.source_lengths)
        return self.model.decode_hidden(batch.target, memory, batch.source_lengths)

    def forward(self, batch: Batch) -> Tensor:
        with autocast(self.precision, batch.source.device):
            hidden = self.hidden(batch)
            return projection_loss(hidden, self.model.projection, batch.labels, SPECIAL_IDS.pad, self.smoothing)
