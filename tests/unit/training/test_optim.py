"""Schedule and optimizer groups against worked examples."""

from collections.abc import Callable

import pytest
import torch

from dragoman_training.config import OptimizerConfig, ScheduleConfig
from dragoman_training.data import Pair
from dragoman_training.model import Transformer
from dragoman_training.optim import learning_rate, make_optimizer
from dragoman_training.workers import Workers


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


def test_the_cosine_rises_in_a_line_and_falls_to_zero() -> None:
    """Worked examples: the end of the warm-up, a third, half of and all the way down."""
    schedule = ScheduleConfig(steps=70, warmup_steps=10, kind="cosine")
    rates = {step: learning_rate(step, 2.0, schedule) for step in (1, 10, 30, 40, 70)}
    assert rates == pytest.approx({1: 0.2, 10: 2.0, 30: 1.5, 40: 1.0, 70: 0.0})


def test_a_cosine_may_be_all_warm_up() -> None:
    """With as many warm-up steps as steps, the rate only rises."""
    schedule = ScheduleConfig(steps=10, warmup_steps=10, kind="cosine")
    assert learning_rate(10, 2.0, schedule) == 2.0


def test_sgd_steps_of_a_worked_example() -> None:
    """Momentum sums up gradients; a matrix's decay is part of its gradient, a bias has none."""
    layer = torch.nn.Linear(1, 1)
    layer.weight.data.fill_(2.0)
    layer.bias.data.fill_(2.0)
    config = OptimizerConfig(kind="sgd", learning_rate=0.1, momentum=0.5, weight_decay=0.25)
    optimizer = make_optimizer(layer, config)
    for _ in range(2):
        layer.weight.grad, layer.bias.grad = torch.ones(1, 1), torch.ones(1)
        optimizer.step()
    assert layer.bias.item() == pytest.approx(2 - 0.1 - 0.15)
    weight = 2 - 0.1 * 1.5  # the gradient is 1 + 0.25 x 2
    weight -= 0.1 * (0.5 * 1.5 + 1 + 0.25 * weight)
    assert layer.weight.item() == pytest.approx(weight)


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_every_optimizer_lowers_the_loss(make_model: Callable[..., Transformer], kind: str) -> None:
    """On four pairs learned by heart."""
    model = make_model(dropout=0.0)
    optimizer = make_optimizer(model, OptimizerConfig(kind=kind, learning_rate=1e-2, momentum=0.9))
    pairs = [Pair([4, 5, 2], [4, 2]), Pair([5, 4, 2], [5, 2]), Pair([6, 2], [6, 7, 2]), Pair([7, 2], [8, 2])]
    losses = []
    with Workers(model, 1, smoothing=0.0) as workers:
        for _ in range(30):
            losses.append(workers.accumulate([pairs])[0])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert losses[-1] < losses[0] / 2
