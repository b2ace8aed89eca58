"""What range of values each linear layer's input takes, over sources and the model's own answers to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dragoman_export.quantize import Range
from dragoman_training.attention import length_mask
from dragoman_training.data import pad
from dragoman_training.decode import Hypothesis
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import SpecialIds

MAX_SOURCES = 1000  # evenly taken from those given
BATCH = 16


@torch.inference_mode()
def calibrate(
    model: Transformer, sources: Sequence[Sequence[int]], answers: Sequence[Hypothesis], special: SpecialIds
) -> dict[str, Range]:
    """The range of each linear layer's input, by the layer's name. Padding does not count.

    ``answers`` are what greedy decoding made of the sources: fed at once, as here, they give the activations that the
    decode loop had. Deterministic: the same sources, the same ranges.
    """
    stride = -(-len(sources) // MAX_SOURCES)
    chosen = sorted(range(0, len(sources), stride), key=lambda i: len(sources[i]))
    ranges: dict[str, Range] = {}
    masks: dict[str, Tensor] = {}  # (B, S) and (B, T): where a position is real

    def see(name: str, x: Tensor) -> None:
        values = x[masks[_side(name)]]  # (positions, K)
        seen = Range(float(values.min()), float(values.max()))
        ranges[name] = ranges.get(name, seen) | seen

    with _watched(model, see):
        for begin in range(0, len(chosen), BATCH):
            batch = chosen[begin : begin + BATCH]
            source = pad([sources[i] for i in batch], special.pad)  # (B, S)
            target = pad([[special.decoder_start, *answers[i].tokens] for i in batch], special.pad)  # (B, T)
            lengths = torch.tensor([len(sources[i]) for i in batch], dtype=torch.int32)
            masks["source"] = length_mask(lengths, source.shape[1])[:, 0, 0]
            steps = torch.tensor([1 + len(answers[i].tokens) for i in batch])
            masks["target"] = length_mask(steps, target.shape[1])[:, 0, 0]
            model(source, lengths, target)
    return ranges


def _side(name: str) -> str:
    """Whose positions a layer's input has: the keys and values of cross-attention are made of the source."""
    from_memory = name.endswith(("cross_attention.key", "cross_attention.value"))
    return "source" if name.startswith("encoder.") or from_memory else "target"


@contextmanager
def _watched(model: Transformer, see: Callable[[str, Tensor], None]) -> Iterator[None]:
    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_pre_hook(lambda _, inputs: see(name, inputs[0]))

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    handles = [watch(name, module) for name, module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
