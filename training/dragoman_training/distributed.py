"""The processes that train one model together, and the device of each.

Started by ``torchrun``, every process computes the gradient of its own shares of a step; ``DistributedDataParallel``
(see workers.py) adds the gradients up. Started alone, a process is a group of one, in which nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from dragoman_training.config import LoopConfig, require
from dragoman_training.errors import TrainingError

CPU = torch.device("cpu")
# Long, since all wait while the main process validates; a process that has died is noticed at once by other means.
WAIT = timedelta(days=1)
WAIT_AFTER_A_FAILURE = timedelta(seconds=5)

Value = TypeVar("Value")


@dataclass(frozen=True)
class Group:
    """This process's place in the group. What a method sends, all processes must send at the same point."""

    device: torch.device = CPU
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            distributed.barrier()

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The sum over all processes of each value; ``TrainingError`` where one of them has gone."""
        if self.world_size == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64, device=self.device)
        try:
            distributed.all_reduce(summed)
        except RuntimeError as error:
            raise TrainingError(f"another process has ended, see what it said: {error}") from error
        result: list[float] = summed.tolist()
        return result

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set in any process."""
        return self.all_reduce_sum([float(flag)])[0] > 0

    def from_main(self, value: Value) -> Value:
        """The main process's ``value``, in all processes."""
        if self.world_size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def close(self, failed: bool = False) -> None:
        """Leave the group: all together, or, when this process has ``failed``, whether the others come or not.

        A group is not to be torn down while its threads let go of the last tensors that were sent: they would wait for
        the interpreter, and it for them. This barrier takes no such thread, and time enough for them to end. On a GPU,
        a process that failed leaves the group to its own end: tearing it down might wait for the others.
        """
        if self.world_size == 1:
            return
        if self.device.type == "cpu" and not failed:
            distributed.monitored_barrier()
        elif self.device.type == "cpu":
            with suppress(RuntimeError):  # the others have not failed, and do not come
                distributed.monitored_barrier(timeout=WAIT_AFTER_A_FAILURE)
        if self.device.type == "cpu" or not failed:
            distributed.destroy_process_group()


def join(loop: LoopConfig) -> Group:
    """The group that ``torchrun`` made (its environment tells), or a group of one, on the device of ``loop``.

    Raises ``ConfigError`` where this machine or this number of processes does not fit ``loop``.
    """
    rank, world_size, local_rank = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    cuda = loop.device == "cuda" or (loop.device == "auto" and torch.cuda.is_available())
    require(
        not cuda or torch.cuda.is_available(), "loop.device", "cuda", "PyTorch finds no GPU here: choose auto or cpu"
    )
    require(cuda or loop.precision != "fp16", "loop.precision", "fp16", "a CPU has bf16 at best: choose fp32 or bf16")
    remedy = f"each of the {world_size} processes of torchrun is one worker: set it to 1"
    require(world_size == 1 or loop.workers == 1, "loop.workers", loop.workers, remedy)
    device = torch.device("cuda", local_rank) if cuda else CPU
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        distributed.init_process_group("nccl" if cuda else "gloo", timeout=WAIT)
    return Group(device, rank, world_size)
