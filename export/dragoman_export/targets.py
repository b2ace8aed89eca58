"""What can be exported: a graph set for one execution provider and precision, and how exact it has to be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dragoman_export.errors import ExportError


@dataclass(frozen=True)
class Tolerance:
    """How far graphs may be from PyTorch in fp32.

    ``logits`` bounds the difference of any logit. ``relative`` bounds, for the logits and for each layer's keys and
    values, the root mean square of the differences, as a share of that of the values. ``token_error_rate`` bounds the
    edits, a token, that turn the graphs' greedy answers into PyTorch's; with 0, nothing but ties may differ.
    """

    logits: float
    relative: float
    token_error_rate: float


@dataclass(frozen=True)
class Target:
    """A graph set that can be asked for.

    ``golden_gap`` is how far apart the two best logits of a golden answer must be at every step, and
    ``score_tolerance`` how far its score may be off, relative to 1 + its size: no machine's rounding shall decide.
    Where rounding moves a value to another of 256, that takes more. ``tolerance_on_generated`` takes the place of
    ``tolerance`` where sources are made up: few of a model's answers to them are decided.
    """

    provider: str
    precision: str
    batch_invariant: bool
    tolerance: Tolerance
    tolerance_on_generated: Tolerance
    golden_gap: float
    score_tolerance: float

    def file(self, kind: str, suffix: str) -> str:
        """The name of one of its files: ``decoder.cpu.int8.onnx``."""
        return f"{kind}.{self.provider}.{self.precision}.{suffix}"


_EXACT = Tolerance(logits=1e-3, relative=1e-4, token_error_rate=0.0)  # sums in another order
_HALF = Tolerance(logits=0.25, relative=0.01, token_error_rate=0.05)
"""Weights and activations of 11 bits cost about 0.1 % of a layer's values."""
_QUANTIZED = Tolerance(logits=float("inf"), relative=0.2, token_error_rate=0.05)
"""Eight bits cost 1 to 5 % of a layer's values; what saturates, or reads another's scale, costs more than half.

Of a trained model's tokens on its own dev set, they change less than one in a hundred.
"""
_QUANTIZED_ON_GENERATED = replace(_QUANTIZED, token_error_rate=0.5)

FP32 = Target(
    "cpu",
    "fp32",
    batch_invariant=True,
    tolerance=_EXACT,
    tolerance_on_generated=_EXACT,
    golden_gap=0.1,
    score_tolerance=1e-3,
)
INT8 = Target(
    "cpu",
    "int8",
    batch_invariant=True,
    tolerance=_QUANTIZED,
    tolerance_on_generated=_QUANTIZED_ON_GENERATED,
    golden_gap=0.3,
    score_tolerance=0.02,
)
W8 = Target(
    "cpu",
    "w8",
    batch_invariant=False,  # the kernel for one row sums otherwise than that for many
    tolerance=_QUANTIZED,
    tolerance_on_generated=_QUANTIZED_ON_GENERATED,
    golden_gap=0.3,
    score_tolerance=0.02,
)
FP16 = Target(
    "cuda",
    "fp16",
    batch_invariant=False,  # CUDA's products sum otherwise for another number of rows
    tolerance=_HALF,
    tolerance_on_generated=_HALF,
    golden_gap=0.3,
    score_tolerance=0.02,
)
TARGETS = {target.precision: target for target in (FP32, INT8, W8, FP16)}
"""By precision, which belongs to one provider."""


def parse_precisions(text: str) -> tuple[Target, ...]:
    """``fp32,int8`` to targets, in this order. Raises ExportError naming the choices."""
    names = text.split(",")
    if unknown := [name for name in names if name not in TARGETS]:
        raise ExportError(f"no precision {', '.join(map(repr, unknown))}: choose among {', '.join(TARGETS)}")
    if len(set(names)) != len(names):
        raise ExportError(f"{text!r} names a precision twice")
    return tuple(TARGETS[name] for name in names)
