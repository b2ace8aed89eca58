"""Dropout from random bytes."""

import pytest
import torch

from dragoman_training.dropout import Dropout


def test_a_share_is_zeroed_and_the_rest_scaled_up() -> None:
    """The rate is rounded to 1/256, the values are 0 or x / (1 - rate), and the mean stays."""
    dropout = Dropout(0.1)
    dropout.generator = torch.Generator().manual_seed(1)
    out = dropout(torch.ones(100_003))
    assert out.unique().tolist() == pytest.approx([0.0, 256 / 230])
    assert (out == 0).float().mean().item() == pytest.approx(26 / 256, abs=0.005)
    assert out.mean().item() == pytest.approx(1.0, abs=0.005)


def test_the_generator_alone_decides() -> None:
    """Equal generators give equal masks, whatever PyTorch's own random numbers do."""
    masks = []
    for _ in range(2):
        torch.rand(5)
        dropout = Dropout(0.5)
        dropout.generator = torch.Generator().manual_seed(2)
        masks.append(dropout(torch.ones(3, 7)))
    assert torch.equal(*masks)


@pytest.mark.parametrize(("rate", "training"), [(0.0, True), (0.5, False)])
def test_evaluation_and_rate_zero_change_nothing(rate: float, training: bool) -> None:
    """The input comes back itself."""
    x = torch.randn(4)
    assert Dropout(rate).train(training)(x) is x


def test_gradients_pass_where_values_pass() -> None:
    """The gradient carries the same factors."""
    x = torch.ones(1000, requires_grad=True)
    out = Dropout(0.3)(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elements_of_16_bits_keep_their_type(dtype: torch.dtype) -> None:
    """The same elements are dropped as in float32."""
    masks = []
    for kind in (torch.float32, dtype):
        dropout = Dropout(0.3)
        dropout.generator = torch.Generator().manual_seed(2)
        out = dropout(torch.ones(999, dtype=kind))
        assert out.dtype == kind
        masks.append(out != 0)
    assert torch.equal(*masks)
