"""Muon against the singular value decomposition."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from dragoman_training.muon import UPDATE_SIZE, MuonWithAdamW, orthogonalise


def test_singular_values_move_close_to_one() -> None:
    """The directions of the decomposition stay, the values become 0.65 to 1.25, for any scale and several at once."""
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(3, 8, 16, generator=generator) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    values = torch.diagonal(u.mT @ orthogonalise(matrices) @ vh.mT, dim1=1, dim2=2)
    assert values.min() > 0.65
    assert values.max() < 1.25
    off_diagonal = u.mT @ orthogonalise(matrices) @ vh.mT - torch.diag_embed(values)
    assert off_diagonal.abs().max() < 0.02


@pytest.mark.parametrize("shape", [(6, 6), (4, 8), (8, 4)])
def test_the_first_step_is_the_orthogonalised_gradient(shape: tuple[int, int]) -> None:
    """Decayed weights minus rate x size x orthogonal matrix, whichever side is longer."""
    generator = torch.Generator().manual_seed(2)
    weight, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
    matrix, bias = nn.Parameter(weight.clone()), nn.Parameter(torch.zeros(3))
    groups = [{"params": [matrix], "weight_decay": 0.5}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = MuonWithAdamW(groups, matrix_rate=2.0, momentum=0.9, lr=0.1, fused=True)
    matrix.grad, bias.grad = gradient.clone(), torch.ones(3)
    optimizer.step()
    transposed = gradient.T if shape[0] > shape[1] else gradient
    update = orthogonalise(transposed[None])[0]
    expected = weight * (1 - 0.2 * 0.5) - 0.2 * UPDATE_SIZE * max(shape) ** 0.5 * (
        update.T if shape[0] > shape[1] else update
    )
    torch.testing.assert_close(matrix.detach(), expected)
    torch.testing.assert_close(bias.detach(), torch.full((3,), -0.1))  # AdamW's first step is the rate
    assert torch.equal(matrix.grad, gradient)


@pytest.mark.parametrize("shares", [1, 2, 7])
def test_the_work_may_be_shared_among_threads(shares: int) -> None:
    """Two steps over matrices of several shapes give the weights of one thread, also with more shares than work."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(6, 6), (4, 8), (8, 4), (6, 6), (4, 8)]
    starts, *gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
    results = []
    with ThreadPoolExecutor(2) as pool:
        for executor in (None, pool):
            matrices = [nn.Parameter(start.clone()) for start in starts]
            optimizer = MuonWithAdamW([{"params": matrices}], matrix_rate=1.0, momentum=0.9, lr=0.1)
            if executor is not None:
                optimizer.share_work(executor, shares)
            for step in gradients:
                for matrix, gradient in zip(matrices, step, strict=True):
                    matrix.grad = gradient.clone()
                optimizer.step()
            results.append(matrices)
    for alone, shared in zip(*results, strict=True):
        torch.testing.assert_close(shared, alone, rtol=0, atol=1e-6)


def test_the_state_goes_through_a_state_dict() -> None:
    """Momentum is saved with the rest: a restored optimizer takes the same second step."""
    results = []
    for restore in (False, True):
        matrix, bias = nn.Parameter(torch.eye(3)), nn.Parameter(torch.zeros(2))

        def make(matrix: nn.Parameter = matrix, bias: nn.Parameter = bias) -> MuonWithAdamW:
            return MuonWithAdamW([{"params": [matrix]}, {"params": [bias]}], matrix_rate=1.0, momentum=0.9, lr=0.1)

        optimizer = make()
        for step in range(2):
            matrix.grad, bias.grad = torch.arange(9.0).view(3, 3) * (step + 1) - 2, torch.ones(2)
            if restore and step == 1:
                state = optimizer.state_dict()
                optimizer = make()
                optimizer.load_state_dict(state)
            optimizer.step()
        results.append(matrix.detach().clone())
    assert torch.equal(*results)
