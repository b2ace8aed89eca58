"""The gradient of a step, computed by several threads, processes, or one device.

On a CPU, two threads that each work through half the rows finish much sooner than two threads that share every small
matrix product (measured: 1.6 times the speed with this package's models). Each worker has a model of its own whose
weights are the same memory as the first one's, gradients of its own, and a source of random bytes of its own, so that
nothing depends on which thread is faster: the sum of the gradients is taken in a fixed order. Whoever trains with
dropout seeds these sources (``generators``) before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dragoman_training.data import Batch, Pair, make_batch
from dragoman_training.distributed import Group
from dragoman_training.dropout import Dropout
from dragoman_training.model import Transformer
from dragoman_training.objective import Objective
from dragoman_training.precision import LossScale
from dragoman_training.tokenizer import SPECIAL_IDS

Item = TypeVar("Item")
Result = TypeVar("Result")

# What a process without a share computes, so that the others do not wait for its gradients: zeros.
BLANK = [Pair([SPECIAL_IDS.eos], [SPECIAL_IDS.pad])]


class Workers:
    """A pool of ``count`` threads around one model, as one process of ``group``. Use it as a context manager.

    The model is already on the device where it is to work. On a GPU there is one worker whatever ``count`` says: shares
    are computed one after the other. A process of a larger group also has one worker.
    """

    def __init__(
        self,
        model: Transformer,
        count: int,
        smoothing: float,
        *,
        precision: str = "fp32",
        compiled: bool = False,
        group: Group | None = None,
    ) -> None:
        self.group = group or Group()
        self.device = next(model.parameters()).device
        if self.device.type != "cpu" or self.group.world_size > 1:
            count = 1
        self.models = [model, *(Transformer(model.config) for _ in range(count - 1))]
        self.generators = [torch.Generator(self.device) for _ in range(count)]
        self.dropouts: list[Dropout] = []
        for replica, generator in zip(self.models, self.generators, strict=True):
            for own, shared in zip(replica.parameters(), model.parameters(), strict=True):
                own.data = shared.data
            for module in replica.modules():
                if isinstance(module, Dropout):
                    module.generator = generator
                    self.dropouts.append(module)
        objectives = [Objective(replica, smoothing, precision, compiled) for replica in self.models]
        alone = self.group.world_size == 1
        self.objectives: list[nn.Module] = [*objectives] if alone else [*map(DistributedDataParallel, objectives)]
        self.loss_scale = LossScale() if precision == "fp16" else None
        self.pool = ThreadPoolExecutor(count)

    def __enter__(self) -> Workers:
        # One thread a product: the workers themselves fill the cores.
        self.threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self.threads_before)

    def map(self, work: Callable[[Transformer, Item], Result], items: Sequence[Item]) -> list[Result]:
        """``work(model, item)`` for each item of this process, item n by worker n modulo their number, in order."""
        return self.spread(lambda index, item: work(self.models[index], item), items)

    def spread(self, work: Callable[[int, Item], Result], items: Sequence[Item]) -> list[Result]:
        """Like ``map``, with the worker's number instead of its model."""
        count = len(self.models)
        if count == 1:  # a thread of its own would not know the current GPU
            return [work(0, item) for item in items]

        def share(index: int) -> list[Result]:
            torch.set_num_threads(1)  # a setting of each thread
            return [work(index, item) for item in items[index::count]]

        shares = [future.result() for future in [self.pool.submit(share, index) for index in range(count)]]
        return [shares[n % count][n // count] for n in range(len(items))]

    def accumulate(self, shares: Sequence[Sequence[Pair]]) -> tuple[float, int]:
        """Leave the gradient of the mean loss a token in the first model; return summed loss and number of tokens.

        Mean, sum and number are over all shares of all processes, however the pairs are cut into shares. ``shares`` are
        this process's, each padded by itself: a worker holds one at a time. None is fine.
        """
        mine = [share for share in shares if share]
        total = self.group.all_reduce_sum([sum(len(pair.target) for share in mine for pair in share)])[0]
        # DistributedDataParallel takes the mean over the processes where the sum is wanted.
        factor = self.group.world_size * (self.loss_scale.value if self.loss_scale else 1.0) / max(total, 1)
        if self.group.world_size > 1 and not mine:
            mine = [BLANK]
        for model in self.models:
            model.zero_grad()

        def backward(index: int, numbered: tuple[int, Sequence[Pair]]) -> float:
            number, share = numbered
            objective = self.objectives[index]
            with self.synchronizing(objective, last=number == len(mine) - 1):
                loss: Tensor = objective(on(self.device, make_batch(share)))
                (loss * factor).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return loss.item()

        losses = self.spread(backward, list(enumerate(mine)))
        first = gradients(self.models[0])
        for replica in self.models[1:]:
            if others := gradients(replica):  # none without a share
                torch._foreach_add_(first, others)
        if self.loss_scale and first:
            self.loss_scale.unscale(first)
        return self.group.all_reduce_sum([sum(losses)])[0], int(total)

    def synchronizing(self, objective: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Processes exchange gradients once a step, after their last shares."""
        if isinstance(objective, DistributedDataParallel) and not last:
            return objective.no_sync()
        return nullcontext()

    def dropout(self, enabled: bool) -> None:
        """Switch the dropout of training on or off."""
        for module in self.dropouts:
            module.enabled = enabled

    def training(self, mode: bool) -> None:
        """Switch all models between training and evaluation."""
        for model in self.models:
            model.train(mode)


def on(device: torch.device, batch: Batch) -> Batch:
    """The batch, its tensors on ``device``."""
    return Batch(**{name: tensor.to(device) for name, tensor in vars(batch).items()})


def gradients(model: Transformer) -> list[Tensor]:
    """The gradients of all parameters, in the model's order."""
    return [p.grad for p in model.parameters() if p.grad is not None]
