"""Muon (Jordan et al. 2024) for the matrices of a model, AdamW for the rest, as one optimizer.

Muon's update is the momentum of the gradient with all its singular values moved to about 1: directions that the
gradient shows rarely are learned as fast as the common ones. On this package's models a step costs a fifth more than
with AdamW and is worth far more than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor, nn

# The quintic x -> a x + b x^3 + c x^5, applied to the singular values, drives all of (0, 1] towards 1 in five rounds.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
UPDATE_SIZE = 0.2  # root mean square of an update at rate 1: about that of AdamW's


def orthogonalise(matrices: Tensor) -> Tensor:
    """Matrices (N, P, Q), P <= Q, with their singular values moved close to 1 (0.7 to 1.2), by Newton-Schulz rounds."""
    a, b, c = COEFFICIENTS
    x: Tensor = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT  # (N, P, P)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class MuonWithAdamW(torch.optim.AdamW):
    """The first group holds matrices for Muon, at ``matrix_rate`` times its rate; AdamW updates the other groups.

    Muon here: Nesterov momentum, scaled to the size of AdamW's updates, decoupled weight decay. ``share_work`` spreads
    the matrices over threads; which thread does what is fixed, so that the result is too.
    """

    def __init__(self, groups: list[dict[str, Any]], *, matrix_rate: float, momentum: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self.matrix_rate, self.momentum = matrix_rate, momentum
        self.executor: Executor | None = None
        self.num_shares = 1

    def share_work(self, executor: Executor, num_shares: int) -> None:
        """Update the matrices on so many threads of ``executor`` from now on."""
        self.executor, self.num_shares = executor, num_shares

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closures, and so no loss
        """Update all parameters that have a gradient; closures are not supported."""
        self.update_matrices()
        matrices = self.param_groups[0]["params"]
        gradients = [matrix.grad for matrix in matrices]
        for matrix in matrices:  # AdamW passes over parameters without gradient
            matrix.grad = None
        super().step()
        for matrix, gradient in zip(matrices, gradients, strict=True):
            matrix.grad = gradient

    def update_matrices(self) -> None:
        """One Muon step: matrices of one shape (or its transpose) are orthogonalised together."""
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for matrix in self.param_groups[0]["params"]:
            if matrix.grad is not None:
                by_shape.setdefault((min(matrix.shape), max(matrix.shape)), []).append(matrix)
        if self.executor is None:
            for matrices in by_shape.values():
                self.update_alike(matrices)
        else:
            shares = [matrices[n :: self.num_shares] for matrices in by_shape.values() for n in range(self.num_shares)]
            list(self.executor.map(self.update_alike, shares))

    @torch.no_grad()
    def update_alike(self, matrices: list[nn.Parameter]) -> None:
        """Update matrices of one shape, or its transpose; none is fine."""
        if not matrices:
            return
        group = self.param_groups[0]
        rate = group["lr"] * self.matrix_rate
        updates = orthogonalise(torch.stack([wide(self.direction(matrix)) for matrix in matrices]))
        for matrix, update in zip(matrices, updates, strict=True):
            tall = matrix.shape[0] > matrix.shape[1]
            matrix.mul_(1 - rate * group["weight_decay"])
            matrix.sub_(update.T if tall else update, alpha=rate * UPDATE_SIZE * math.sqrt(max(matrix.shape)))

    def direction(self, matrix: nn.Parameter) -> Tensor:
        """The matrix's gradient with Nesterov momentum, whose running sum this updates."""
        state = self.state[matrix]
        if not state:
            state["step"] = torch.zeros(())  # AdamW wants one for every parameter when a saved state is loaded
            state["momentum"] = torch.zeros_like(matrix)
        running: Tensor = state["momentum"]
        assert matrix.grad is not None
        running.mul_(self.momentum).add_(matrix.grad)
        return matrix.grad + self.momentum * running


def wide(matrix: Tensor) -> Tensor:
    """The matrix, transposed if it has more rows than columns."""
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
