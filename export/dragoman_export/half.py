"""A model in float16, and whether all that it computes has a place there.

ONNX Runtime's CPU provider has few kernels for float16: it computes most of such a graph in fp32 and rounds the rest,
so that a comparison there need not meet an overflow that CUDA would. The range is found here, from PyTorch's
activations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dragoman_export.calibrate import calibrate
from dragoman_export.errors import ExportError
from dragoman_training.decode import Hypothesis
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import SpecialIds

LARGEST = 65504.0  # finite number of float16
HEADROOM = 2.0  # sources that were not tried may reach further


def half_copy(model: Transformer) -> Transformer:
    """The model with all parameters rounded to float16. Raises ExportError naming one that is beyond its range."""
    for name, parameter in model.named_parameters():
        if not (largest := float(parameter.detach().abs().max())) <= LARGEST:
            raise ExportError(f"{name} holds {largest:.6g}; float16 ends at {LARGEST:.0f}: export another precision")
    rounded = {id(p): nn.Parameter(p.detach().half(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, rounded)  # which has these in the place of the parameters, shared ones shared


def check_range(
    model: Transformer, sources: Sequence[Sequence[int]], answers: Sequence[Hypothesis], special: SpecialIds
) -> None:
    """Raises ExportError where an activation comes near the end of float16, naming the layer and both values.

    Seen are the inputs and outputs of all linear layers and norms, padding included, over at most 1,000 sources, evenly
    taken, and their greedy answers: embeddings, residual sums and activations are among them. Attention's own scores
    are not: its kernels keep them in fp32.
    """
    largest: dict[str, float] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def see(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            for value in (inputs[0], output):
                largest[name] = max(float(value.abs().nan_to_num(torch.inf).max()), largest.get(name, 0.0))

        return see

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.LayerNorm)
    ]
    try:
        calibrate(model, sources, answers, special)  # runs the model on them
    finally:
        for handle in handles:
            handle.remove()
    name, value = max(largest.items(), key=lambda item: item[1])
    if value > LARGEST / HEADROOM:
        raise ExportError(
            f"an activation at {name} reaches {value:.6g}; at most {LARGEST / HEADROOM:.0f} is allowed for fp16, which "
            f"overflows to infinities and NaN beyond {LARGEST:.0f}, where other sources may get: export another "
            "precision"
        )
