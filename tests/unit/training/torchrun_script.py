"""What test_distributed.py starts in one process and in several: the same steps, written to a file by rank 0.

Run as ``python torchrun_script.py FILE``, by torchrun or alone.
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch

from dragoman_training.config import LoopConfig, ModelShape, OptimizerConfig
from dragoman_training.data import Pair
from dragoman_training.distributed import Group, join
from dragoman_training.model import Transformer
from dragoman_training.optim import make_optimizer
from dragoman_training.workers import Workers

STEPS = 20
OPTIMIZERS = {
    "sgd": OptimizerConfig(kind="sgd", learning_rate=0.05, momentum=0.9, weight_decay=0.0),
    "adamw": OptimizerConfig(kind="adamw", learning_rate=1e-2),
}


def make_model() -> Transformer:
    torch.manual_seed(7)
    shape = ModelShape(d_model=16, num_heads=2, ffn_dim=32, encoder_layers=2, decoder_layers=2, dropout=0.0)
    return Transformer(shape.with_vocabularies(16, 16))


def shares_of(step: int) -> list[list[Pair]]:
    """The shares of a step, of unequal size: usually four; one in the third step, three in the fourth."""
    rng = random.Random(step)

    def pair() -> Pair:
        tokens = [rng.randint(4, 15) for _ in range(rng.randint(1, 9))]
        return Pair([*tokens, 2], [*tokens[::-1], 2])

    return [[pair() for _ in range(rng.randint(1, 5))] for _ in range({2: 1, 3: 3}.get(step, 4))]


def run(group: Group, count: int) -> dict[str, Any]:
    """Losses, first gradients and last weights by optimizer, and the outcome of some flags."""
    result: dict[str, Any] = {}
    for name, config in OPTIMIZERS.items():
        model = make_model()
        optimizer = make_optimizer(model, config)
        losses, gradients = [], []
        with Workers(model, count, smoothing=0.1, group=group) as workers:
            workers.training(True)
            for step in range(STEPS):
                loss, tokens = workers.accumulate(shares_of(step)[group.rank :: group.world_size])
                losses.append(loss / tokens)
                if step == 0:
                    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                optimizer.step()
        weights = [p.detach() for p in model.parameters()]
        result[name] = {"losses": losses, "gradients": gradients, "weights": weights}
    stops = [group.any(group.rank == rank) for rank in range(3)]  # the third flag is set nowhere
    return {**result, "stops": stops}


def main(file: Path) -> None:
    torch.set_num_threads(1)
    group = join(LoopConfig(validate_every=1, workers=1, device="cpu"))
    result = run(group, 1)
    group.barrier()
    if group.is_main:
        torch.save(result, file)
    group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
