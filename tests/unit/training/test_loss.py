"""The fused projection and loss against PyTorch's cross-entropy of all logits."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dragoman_training.loss import projection_loss

Gradients = list[Tensor]


def example(rows: int, length: int, width: int, vocabulary: int) -> tuple[Tensor, nn.Linear, Tensor]:
    """Hidden states (B, T, D), a projection, and labels of which about a third are padding."""
    generator = torch.Generator().manual_seed(rows * length)
    hidden = torch.randn(rows, length, width, generator=generator, requires_grad=True)
    projection = nn.Linear(width, vocabulary)
    projection.weight.data = torch.randn(vocabulary, width, generator=generator)
    projection.bias.data = torch.randn(vocabulary, generator=generator)
    labels = torch.randint(1, vocabulary, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.3] = 0
    return hidden, projection, labels


def gradients(total: Tensor, hidden: Tensor, projection: nn.Linear) -> Gradients:
    """Of hidden states, weight and bias, for the loss times 0.5."""
    return list(torch.autograd.grad(total * 0.5, [hidden, projection.weight, projection.bias]))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(3, 5, 8, 11), (7, 90, 4, 20)])  # the second fills more than two chunks
def test_value_and_gradients_are_those_of_cross_entropy(shape: tuple[int, int, int, int], smoothing: float) -> None:
    """Chunk by chunk or all logits at once: the same to rounding."""
    hidden, projection, labels = example(*shape)
    assert (labels == 0).any()
    expected = F.cross_entropy(
        projection(hidden).flatten(0, 1), labels.flatten(), ignore_index=0, label_smoothing=smoothing, reduction="sum"
    )
    total = projection_loss(hidden, projection, labels, 0, smoothing)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(gradients(total, hidden, projection), gradients(expected, hidden, projection), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_smoothed_loss_of_a_worked_example() -> None:
    """0.9 of the label's surprise plus 0.1 of the mean surprise; padding adds nothing."""
    projection = nn.Linear(2, 3, bias=True)
    projection.weight.data = torch.log(torch.tensor([[0.5, 0.9], [0.25, 0.05], [0.25, 0.05]]))
    projection.bias.data.zero_()
    total = projection_loss(torch.eye(2)[None], projection, torch.tensor([[1, 0]]), 0, 0.1)
    expected = 0.9 * math.log(4) + 0.1 * (math.log(2) + 2 * math.log(4)) / 3
    assert total.item() == pytest.approx(expected, rel=1e-6)


def test_a_batch_of_padding_has_exactly_no_loss_and_no_gradient() -> None:
    """Zero, not NaN, also with hidden states so large that their logits would overflow."""
    hidden, projection, labels = example(2, 3, 4, 5)
    hidden.data.fill_(3e38)
    total = projection_loss(hidden, projection, torch.zeros_like(labels), 0, 0.1)
    assert total.item() == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(total, hidden, projection))


def test_large_logits_neither_overflow_nor_lose_the_gradient() -> None:
    """A certain and right model has a loss of 0; a certain and wrong one the distance of the logits."""
    projection = nn.Linear(2, 2)
    projection.weight.data, projection.bias.data = torch.eye(2) * 1000, torch.zeros(2)
    hidden = torch.eye(2)[None].requires_grad_()
    assert projection_loss(hidden, projection, torch.tensor([[0, 1]]), 9, 0.0).item() == 0
    total = projection_loss(hidden, projection, torch.tensor([[1, 0]]), 9, 0.0)
    assert total.item() == 2000
    of_hidden, _, of_bias = gradients(total, hidden, projection)
    assert of_hidden.abs().tolist() == [[[500, 500], [500, 500]]]
    assert of_bias.tolist() == [0, 0]  # one row pulls up, the other down


def test_nothing_is_differentiated_where_gradients_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation gets the value alone, at the cost of one product."""
    hidden, projection, labels = example(3, 5, 8, 11)
    expected = projection_loss(hidden, projection, labels, 0, 0.1)
    monkeypatch.delattr(torch, "mm")
    with torch.inference_mode():
        assert torch.equal(projection_loss(hidden, projection, labels, 0, 0.1), expected)


def test_under_autocast_products_are_bf16_and_the_sum_is_float32() -> None:
    """Near the float32 result; gradients in the types of what they belong to."""
    hidden, projection, labels = example(7, 90, 16, 20)
    expected = projection_loss(hidden, projection, labels, 0, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        total = projection_loss(hidden, projection, labels, 0, 0.1)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(expected.item(), rel=0.01)
    assert total.item() != expected.item()
    pairs = zip(gradients(total, hidden, projection), gradients(expected, hidden, projection), strict=True)
    for low, full in pairs:
        assert low.dtype == torch.float32
        assert (low - full).norm() < 0.02 * full.norm()


def test_under_fp16_autocast_the_tails_of_the_softmax_stay_in_the_gradient() -> None:
    """Far below what fp16 can hold, until the loss scale lifts them: then all is as in float32."""
    hidden, projection, labels = example(2, 5, 4, 7)
    projection.weight.data.zero_()
    projection.bias.data = torch.tensor([-20.0, -21, -22, -23, -24, -25, 0])
    projection.weight.data[:6] = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    labels[labels != 0] = 6  # certain and right: what is left to learn are the tails, of about 1e-9
    scale = 65536.0
    expected = torch.autograd.grad(projection_loss(hidden, projection, labels, 0, 0.0) * scale, hidden)[0]
    assert 0 < (expected / scale).abs().max() < 6e-8
    low = hidden.detach().half().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        total = projection_loss(low, projection, labels, 0, 0.0)
    found = torch.autograd.grad(total * scale, low)[0]
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=1e-7)


def test_under_fp16_autocast_no_sum_over_rows_overflows() -> None:
    """A gradient of the weights past 65,504, the largest number of fp16, which no loss scale would make smaller."""
    projection = nn.Linear(2, 20)
    projection.weight.data.zero_()
    projection.bias.data.zero_()
    hidden, labels = torch.full((1, 256, 2), 300.0), torch.ones(1, 256, dtype=torch.long)
    with torch.autocast("cpu", torch.float16):
        total = projection_loss(hidden, projection, labels, 0, 0.0)
    of_weight = torch.autograd.grad(total, projection.weight)[0]
    assert of_weight[1].tolist() == pytest.approx([-0.95 * 300 * 256] * 2, rel=1e-4)
