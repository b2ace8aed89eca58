"""Loss, schedule and optimizer groups against worked examples."""

import math
from collections.abc import Callable

import pytest
import torch

from dragoman_training.config import OptimizerConfig, ScheduleConfig
from dragoman_training.model import Transformer
from dragoman_training.optim import learning_rate, make_optimizer, smoothed_loss


def test_no_real_token_gives_exactly_zero_and_no_nan() -> None:
    """A batch of padding has no loss and no gradient."""
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss, tokens = smoothed_loss(logits, torch.zeros(2, 3, dtype=torch.long), 0, 0.1)
    (loss / max(tokens, 1)).backward()
    assert (loss.item(), tokens) == (0.0, 0)
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_the_smoothed_loss_of_a_worked_example() -> None:
    """0.9 of the label's surprise plus 0.1 of the mean surprise; padding adds nothing."""
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]]))
    loss, tokens = smoothed_loss(logits, torch.tensor([[1, 0]]), 0, 0.1)
    expected = 0.9 * math.log(4) + 0.1 * (math.log(2) + 2 * math.log(4)) / 3
    assert tokens == 1
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_rate_rises_falls_and_cools_down_to_zero() -> None:
    """Worked examples around the corners: the end of the warm-up, the start of the cool-down, the last step."""
    schedule = ScheduleConfig(steps=140, warmup_steps=25, cooldown_steps=40)
    rates = {step: learning_rate(step, 2.0, schedule) for step in (1, 25, 100, 101, 140, 141)}
    assert rates[1] == pytest.approx(2 / 25)
    assert rates[25] == pytest.approx(2.0)
    assert rates[100] == pytest.approx(1.0)
    assert rates[101] == pytest.approx(40 / 41)
    assert rates[140] == pytest.approx(1 / 41)
    assert rates[141] == 0


def test_without_cool_down_the_rate_follows_the_square_root() -> None:
    """Four times the steps, half the rate."""
    schedule = ScheduleConfig(steps=1000, warmup_steps=10)
    assert learning_rate(1000, 1.0, schedule) == pytest.approx(0.1)


def test_only_matrices_of_linear_layers_decay(make_model: Callable[..., Transformer]) -> None:
    """Norms, biases and embeddings (with the projection tied to one) do not; each parameter is in one group."""
    model = make_model(tied_embeddings="target")
    decayed, kept = make_optimizer(model, OptimizerConfig(learning_rate=1.0, weight_decay=0.5)).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.5, 0.0)
    assert all(names[id(p)].endswith("weight") and p.ndim == 2 for p in decayed["params"])
    assert {"source_embedding.weight", "target_embedding.weight"} <= {names[id(p)] for p in kept["params"]}
    assert len(decayed["params"]) + len(kept["params"]) == len(names)
