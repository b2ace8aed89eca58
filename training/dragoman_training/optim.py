"""Loss, optimizer groups and learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dragoman_training.config import OptimizerConfig, ScheduleConfig
from dragoman_training.muon import MuonWithAdamW


def smoothed_loss(logits: Tensor, labels: Tensor, pad: int, smoothing: float) -> tuple[Tensor, int]:
    """The label-smoothed cross-entropy (Szegedy et al. 2016), summed over real tokens, and their number.

    logits: (B, T, V); labels: (B, T), ``pad`` where there is no token. No real token gives exactly (0, 0), with zero
    gradients: divide by ``max(number, 1)``.
    """
    flat = labels.reshape(-1)
    total = F.cross_entropy(
        logits.reshape(len(flat), -1), flat, ignore_index=pad, label_smoothing=smoothing, reduction="sum"
    )
    return total, int((flat != pad).sum())


def learning_rate(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """The rate of a step counted from 1: linear warm-up to ``peak``, then peak * sqrt(warm-up / step).

    Over the last ``cooldown_steps`` the rate falls in a straight line from where it stood, to reach 0 after the last.
    """
    cooldown_start = schedule.steps - schedule.cooldown_steps
    base = min(step, cooldown_start) if schedule.cooldown_steps else step
    base = max(base, 1)
    rate = peak * min(base / schedule.warmup_steps, math.sqrt(schedule.warmup_steps / base))
    if step > cooldown_start:
        rate *= (schedule.steps + 1 - step) / (schedule.cooldown_steps + 1)
    return rate


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Two groups: matrices of linear layers, which decay, and biases, norms and embeddings, which do not.

    AdamW for both, or Muon for the matrices.

    An embedding tied to a projection counts as an embedding. The order of parameters, and with it the saved state,
    follows the model's definition.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        matrix = parameter.ndim > 1 and id(parameter) not in embeddings
        (decayed if matrix else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.epsilon,
        "fused": True,
    }
    if config.kind == "muon":
        return MuonWithAdamW(groups, matrix_rate=config.matrix_rate, momentum=config.momentum, **options)
    return torch.optim.AdamW(groups, **options)
