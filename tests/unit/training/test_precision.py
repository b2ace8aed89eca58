"""Products in 16 bits, and the loss scale against PyTorch's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dragoman_training import precision
from dragoman_training.config import OptimizerConfig
from dragoman_training.data import Pair
from dragoman_training.loss import projection_loss
from dragoman_training.model import Transformer
from dragoman_training.optim import make_optimizer
from dragoman_training.precision import LossScale
from dragoman_training.workers import Workers

MakeModel = Callable[..., Transformer]
PAIRS = [Pair([4 + n % 7, 5, 2], [4 + n % 5, 2]) for n in range(12)]


def gradients_of(model: Transformer) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_the_scale_follows_that_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through good steps and overflows, the same scale and the same unscaled gradients."""
    monkeypatch.setattr(precision, "GOOD_STEPS", 3)
    theirs = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    ours = LossScale()
    for step, good in enumerate([True] * 4 + [False, True, True, False, False] + [True] * 7):
        gradient = torch.full((4,), float(step) if good else torch.inf)
        own = [gradient * ours.value]
        weight.grad = gradient * theirs.get_scale()
        ours.unscale(own)
        theirs.scale(torch.ones(()))
        theirs.unscale_(optimizer)
        assert torch.equal(own[0], weight.grad)
        theirs.step(optimizer)
        theirs.update()
        assert ours.value == theirs.get_scale()


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_gradients_in_16_bits_are_near_those_in_32(make_model: MakeModel, kind: str) -> None:
    """Gradients and weights themselves stay in float32, the scale is taken out again."""
    model = make_model(dropout=0.0)
    results = {}
    for name in ("fp32", kind):
        with Workers(model, 2, smoothing=0.1, precision=name) as workers:
            loss, _ = workers.accumulate([PAIRS[:5], PAIRS[5:]])
            results[name] = (loss, gradients_of(model))
    assert results[kind][0] == pytest.approx(results["fp32"][0], rel=0.02)
    assert results[kind][0] != results["fp32"][0]
    assert all(gradient.dtype == torch.float32 for gradient in results[kind][1])
    low, full = (torch.cat([g.flatten() for g in results[name][1]]) for name in (kind, "fp32"))
    assert (low - full).norm() < 0.05 * full.norm()


def test_bf16_trains(make_model: MakeModel) -> None:
    """The loss of a toy task falls, with every kind of dropout on."""
    rates = {"dropout": 0.05, "attention_dropout": 0.05, "activation_dropout": 0.05}
    model = make_model(encoder_layers=1, decoder_layers=1, **rates)
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2))
    losses = []
    with Workers(model, 2, smoothing=0.0, precision="bf16") as workers:
        workers.training(True)
        for _ in range(20):
            losses.append(workers.accumulate([PAIRS[:6], PAIRS[6:]])[0])
            optimizer.step()
    assert losses[-1] < losses[0] / 2


def test_an_overflow_shows_in_the_gradient_and_halves_the_scale(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training loop sees a gradient that is not finite; the next step has a smaller scale."""
    model = make_model()
    huge = "dragoman_training.objective.projection_loss"
    monkeypatch.setattr(huge, lambda *arguments: projection_loss(*arguments) * 1e36)
    with Workers(model, 1, smoothing=0.0, precision="fp16") as workers:
        workers.accumulate([PAIRS])
        assert not all(gradient.isfinite().all() for gradient in gradients_of(model))
        assert workers.loss_scale == LossScale(value=32768.0, good_steps=0)
