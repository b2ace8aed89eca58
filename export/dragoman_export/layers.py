"""What each linear layer reads, in the graphs and in PyTorch: where a graph goes wrong has a name.

A graph's outputs tell that it computes something else, not in which layer. Of each graph there is a copy, for the
comparison alone, that has the inputs of all its linear layers as further outputs, named after the layers. These are all
that a layer makes: normed sums, attention's results, activations. What the last layers make of theirs are the graph's
own outputs, which ``verify.py`` compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper
from torch import Tensor, nn

from dragoman.bundle import GraphSet
from dragoman.engine.runner import open_session
from dragoman.types import FloatArray
from dragoman_export.errors import ExportError
from dragoman_export.onnx_file import write_model
from dragoman_export.quantize import linears
from dragoman_export.verify import Differences, Source
from dragoman_training.model import Transformer

MAX_STEPS = 16  # of each target: a layer that is wrong is so at once

Array = NDArray[Any]


def watched(file: str) -> str:
    """The name of a graph file's copy."""
    return f"watched.{file}"


def layer_inputs(model: onnx.ModelProto) -> dict[str, str]:
    """The tensors that a graph's linear layers read, by the layer; of layers that read the same, the first."""
    first: dict[str, str] = {}
    for linear in linears(model):
        first.setdefault(linear.input, linear.name)
    return {name: tensor for tensor, name in first.items()}


def write_watched(file: str, model: onnx.ModelProto, inputs: Mapping[str, str], folder: Path) -> None:
    """Write the copy of a graph to ``folder``. ``inputs`` are those of ``layer_inputs``."""
    graph = model.graph
    num_nodes, num_outputs = len(graph.node), len(graph.output)
    graph.node.extend(helper.make_node("Identity", [tensor], [name]) for name, tensor in inputs.items())
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in inputs)
    write_model(model, folder / watched(file))
    del graph.node[num_nodes:], graph.output[num_outputs:]  # a copy in memory would be as large as the weights


def compare_layers(
    model: Transformer,
    graphs: GraphSet,
    folder: Path,
    sources: Sequence[Source],
    targets: Sequence[Source],
    start: int,
    tolerance: float,
) -> float:
    """The largest difference of what a layer reads from PyTorch's, as a share of its size, each over all positions.

    Of ragged rows side by side, and of the first steps of each target. Raises ExportError beyond ``tolerance``, NaN
    included, naming the first such layer of the encoder, or else of the decoder.
    """
    targets = [target[: MAX_STEPS - 1] for target in targets]
    differences = Differences()
    for source, target, row in zip(sources, targets, _of_graphs(graphs, folder, sources, targets, start), strict=True):
        expected = _of_pytorch(model, source, target, start)
        for name, values in row.items():
            differences.add_values(name, values, expected[name])
    relative = differences.relative()
    right = "The graph is wrong before its first layer"
    for name, difference in relative.items():
        if not difference <= tolerance:
            raise ExportError(
                f"{graphs.precision}: what {name} reads differs from PyTorch's by {difference:.3g} of its size; at "
                f"most {tolerance} is allowed. {right}, or values spread too far there for this precision"
            )
        right = f"What {name} reads is right: the graph goes wrong behind it"
    return max(relative.values())


def _of_graphs(
    graphs: GraphSet, folder: Path, sources: Sequence[Source], targets: Sequence[Source], start: int
) -> list[dict[str, FloatArray]]:
    """What the layers read, row by row, in the graphs' order: (S, K) of those over the source, (T, K) of the others."""
    rows: list[dict[str, FloatArray]] = [{} for _ in sources]
    lengths = np.array([len(source) for source in sources], np.int32)  # (B,)
    batch = np.zeros((len(sources), int(lengths.max())), np.int64)  # (B, S)
    for row, source in enumerate(sources):
        batch[row, : len(source)] = source
    encoder = _Session(folder / watched(graphs.encoder.file))
    outputs = encoder.run({"source": batch, "source_lengths": lengths})
    cross = {spec.name: outputs.pop(spec.name) for spec in graphs.encoder.outputs}  # (B, H, S, Dh)
    for name, values in outputs.items():  # (B, S, K)
        for row, length in enumerate(lengths):
            rows[row][name] = values[row, :length]
    del encoder  # two sessions would hold the weights twice
    decoder = _Session(folder / watched(graphs.decoder.file))
    steps = list(_steps(decoder, graphs, cross, lengths, targets, start))
    for row, target in enumerate(targets):
        for name in steps[0]:
            rows[row][name] = np.stack([step[name][row] for step in steps[: 1 + len(target)]])
    return rows


def _steps(
    decoder: _Session,
    graphs: GraphSet,
    cross: dict[str, Array],
    lengths: Array,
    targets: Sequence[Source],
    start: int,
) -> Iterator[dict[str, Array]]:
    """What the decoder's layers read at each step of the longest target: (B, K). Rows that have ended read on."""
    num_steps = 1 + max(map(len, targets))
    rows, heads, source_capacity, head_dim = next(iter(cross.values())).shape
    empty = np.zeros((rows, heads, num_steps, head_dim), next(iter(cross.values())).dtype)  # (B, H, C, Dh)
    past = {spec.name: empty for spec in graphs.decoder.inputs if spec.name.startswith("past_")}
    tokens = np.zeros((rows, num_steps), np.int64)  # (B, T)
    for row, target in enumerate(targets):
        tokens[row, : 1 + len(target)] = (start, *target)
    capacities = {
        "target_capacity": np.array([num_steps], np.int32),
        "source_capacity": np.array([source_capacity], np.int32),
    }
    for step in range(num_steps):
        cached = np.full(rows, step, np.int32)
        fed: dict[str, Array] = {"tokens": tokens[:, step], "cached": cached, "source_lengths": lengths}
        outputs = decoder.run({**fed, **capacities, **past, **cross})
        declared = {spec.name: outputs.pop(spec.name) for spec in graphs.decoder.outputs}
        past = {name: declared[name.replace("past_", "present_")] for name in past}
        yield {name: values.reshape(rows, -1) for name, values in outputs.items()}


class _Session:
    """A watched graph, opened, its outputs by name."""

    def __init__(self, path: Path) -> None:
        self._session = open_session(path, torch.get_num_threads())
        self._names = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self._names, self._session.run(None, dict(inputs)), strict=True))


@torch.inference_mode()
def _of_pytorch(model: Transformer, source: Source, target: Source, start: int) -> dict[str, FloatArray]:
    """The same of one lone source by PyTorch, for all linear layers."""
    read: dict[str, FloatArray] = {}

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def see(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            read[name] = inputs[0][0].numpy()

        return module.register_forward_pre_hook(see)

    handles = [watch(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    try:
        lengths = torch.tensor([len(source)], dtype=torch.int32)
        model(torch.tensor([source]), lengths, torch.tensor([[start, *target]]))
    finally:
        for handle in handles:
            handle.remove()
    return read
