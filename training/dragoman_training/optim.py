"""Optimizer groups and learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from dragoman_training.config import OptimizerConfig, ScheduleConfig
from dragoman_training.muon import MuonWithAdamW


def learning_rate(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """The rate of a step counted from 1: linear warm-up to ``peak``, then the decay of ``schedule.kind``.

    ``inverse_sqrt``: peak * sqrt(warm-up / step) (Vaswani et al. 2017); over the last ``cooldown_steps`` the rate falls
    in a straight line from where it stood, to reach 0 after the last. ``cosine``: half a cosine (Loshchilov and Hutter
    2017), which reaches 0 at the last step.
    """
    if schedule.kind == "cosine":
        if step <= schedule.warmup_steps:
            return peak * step / schedule.warmup_steps
        progress = (step - schedule.warmup_steps) / (schedule.steps - schedule.warmup_steps)
        return peak * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    cooldown_start = schedule.steps - schedule.cooldown_steps
    base = min(step, cooldown_start) if schedule.cooldown_steps else step
    base = max(base, 1)
    rate = peak * min(base / schedule.warmup_steps, math.sqrt(schedule.warmup_steps / base))
    if step > cooldown_start:
        rate *= (schedule.steps + 1 - step) / (schedule.cooldown_steps + 1)
    return rate


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Two groups: matrices of linear layers, which decay, and biases, norms and embeddings, which do not.

    AdamW for both, or Muon for the matrices, or SGD with momentum for both (whose decay is part of the gradient).

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
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=True)
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.epsilon,
        "fused": True,
    }
    if config.kind == "muon":
        return MuonWithAdamW(groups, matrix_rate=config.matrix_rate, momentum=config.momentum, **options)
    return torch.optim.AdamW(groups, **options)
