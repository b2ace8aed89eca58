"""The graph files of each target: those for the CPU all made of one tracing of the encoder and one of the decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from dragoman.bundle import Graph, GraphSet
from dragoman.engine.projection import Projection
from dragoman_export.counts import BLOCK_PRODUCTS, FLOAT_PRODUCTS, INTEGER_PRODUCTS, Products
from dragoman_export.cuda import check, fuse
from dragoman_export.device_graphs import write_device_graphs
from dragoman_export.graphs import DecoderGraph, EncoderGraph
from dragoman_export.half import half_copy
from dragoman_export.layers import layer_inputs, write_watched
from dragoman_export.quantize import Range, to_int8, to_w8
from dragoman_export.shortlist_graph import with_columns
from dragoman_export.targets import FP16, FP32, INT8, W8, Target
from dragoman_export.trace import OPSET, checked, trace
from dragoman_export.weights import SharedWeights
from dragoman_training.model import Transformer

WEIGHTS = "weights.8bit.bin"


@dataclass(frozen=True)
class WrittenGraphs:
    """What lies in the folder: a graph set a target, nothing measured yet, and the shortlist's decoder where asked.

    ``weights`` have the constants of the graphs in 8 bits, and room for more.
    """

    sets: dict[Target, GraphSet]
    weights: SharedWeights
    shortlist: tuple[Graph, Projection] | None


def write_graphs(
    model: Transformer,
    targets: Sequence[Target],
    ranges: Mapping[str, Range] | None,
    folder: Path,
    *,
    shortlist: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> WrittenGraphs:
    """Trace, convert and check the graphs of the targets, in a folder: they wait on the disk.

    Of each graph there is a watched copy beside it: see ``layers.py``. What is traced is as large as its weights, so
    that the encoder's is let go before the decoder is traced. ``ranges`` are those of int8 activations: see
    ``quantize.to_int8``. ``tell`` hears what is being done. With ``shortlist``, the decoder of int8 is written a second
    time with the columns of its output projection as inputs, and these are returned.

    Raises ExportError when a graph's nodes are not those that the model's shape requires.
    """
    weights = SharedWeights(folder, WEIGHTS)
    encoder = _Part("encoder", EncoderGraph, model, ranges, folder, weights, tell)
    # A lone source has many tokens already: for it, too, the encoder of int8 is faster than one of w8.
    encoders = {target: encoder.write(INT8 if target == W8 else target) for target in targets}
    del encoder
    decoder = _Part("decoder", DecoderGraph, model, ranges, folder, weights, tell)
    sets = {target: _graph_set(target, encoders[target], decoder.write(target), ranges) for target in targets}
    if FP16 in sets:
        device = write_device_graphs(model.config, FP16, folder)
        sets[FP16] = dataclasses.replace(sets[FP16], device=device)
    return WrittenGraphs(sets, weights, decoder.write_shortlist() if shortlist else None)


def _graph_set(target: Target, encoder: Graph, decoder: Graph, ranges: Mapping[str, Range] | None) -> GraphSet:
    activations = {W8: "block", INT8: "row" if ranges is None else "static"}
    return GraphSet(
        target.provider,
        target.precision,
        OPSET,
        activations=activations.get(target, "float"),
        batch_invariant=target.batch_invariant,
        encoder=encoder,
        decoder=decoder,
        golden=target.file("golden", "jsonl"),
        score_tolerance=target.score_tolerance,
        parity={},
        quality={},
    )


class _Part:
    """Writes the graphs of the encoder, or those of the decoder."""

    def __init__(
        self,
        name: str,
        kind: type[EncoderGraph] | type[DecoderGraph],
        model: Transformer,
        ranges: Mapping[str, Range] | None,
        folder: Path,
        weights: SharedWeights,
        tell: Callable[[str], None],
    ) -> None:
        self._name, self._kind, self._model = name, kind, model
        self._ranges, self._folder, self._weights, self._tell = ranges, folder, weights, tell
        self._traced: onnx.ModelProto | None = None  # for the CPU, when it is first needed
        self._written: dict[Target, Graph] = {}

    def write(self, target: Target) -> Graph:
        """The graph of a target, once."""
        if target not in self._written:
            self._written[target] = self._half() if target == FP16 else self._for_cpu(target)
        return self._written[target]

    def write_shortlist(self) -> tuple[Graph, Projection]:
        """Of the decoder: that of int8 which takes the columns of its output projection as inputs, and these."""
        file = INT8.file("shortlist", "onnx")
        self._tell(f"writing {file}")
        model, projection = with_columns(to_int8(self._trace(), self._ranges))
        required = self._kind(self._model).required_nodes(self._products(INT8))
        return self._weights.take(checked(file, model, required, self._folder)), projection

    def _for_cpu(self, target: Target) -> Graph:
        traced = self._trace()
        if target == FP32:
            model = traced
        elif target == INT8:
            model = to_int8(traced, self._ranges)
        else:
            model = to_w8(traced)
        return self._save(target, self._kind(self._model), model, layer_inputs(traced))

    def _half(self) -> Graph:
        """Traced anew, from a rounded copy of the model: so that each value has its type from PyTorch."""
        module, file = self._kind(half_copy(self._model), FP16.provider), FP16.file(self._name, "onnx")
        self._tell(f"tracing {file}")
        model = trace(module, file)
        inputs = layer_inputs(model)
        fuse(model)
        graph = self._save(FP16, module, model, inputs)
        check(file, model)
        return graph

    def _trace(self) -> onnx.ModelProto:
        if self._traced is None:
            file = FP32.file(self._name, "onnx")
            self._tell(f"tracing {file}")
            self._traced = trace(self._kind(self._model), file)
        return self._traced

    def _products(self, target: Target) -> Products:
        if target == INT8:
            return Products(INTEGER_PRODUCTS, by_row=self._ranges is None)
        return Products(BLOCK_PRODUCTS if target == W8 else FLOAT_PRODUCTS)

    def _save(
        self, target: Target, module: EncoderGraph | DecoderGraph, model: onnx.ModelProto, inputs: Mapping[str, str]
    ) -> Graph:
        file = target.file(self._name, "onnx")
        self._tell(f"writing {file}")
        graph = checked(file, model, module.required_nodes(self._products(target)), self._folder)
        write_watched(file, model, inputs, self._folder)
        return self._weights.take(graph) if target in (INT8, W8) else graph
