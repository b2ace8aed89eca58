"""The graph files of each target: those for the CPU all made of one tracing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx

from dragoman.bundle import Graph, GraphSet
from dragoman.engine.projection import Projection
from dragoman_export.counts import BLOCK_PRODUCTS, FLOAT_PRODUCTS, INTEGER_PRODUCTS, Products
from dragoman_export.cuda import check, fuse
from dragoman_export.graphs import DecoderGraph, EncoderGraph
from dragoman_export.half import half_copy
from dragoman_export.quantize import Range, to_int8, to_w8
from dragoman_export.shortlist_graph import with_columns
from dragoman_export.targets import FP16, FP32, INT8, W8, Target
from dragoman_export.trace import OPSET, TracedGraph, checked, trace
from dragoman_training.model import Transformer


class GraphWriter:
    """Writes checked graphs into a folder: they wait on the disk, as each is as large as its weights."""

    def __init__(self, model: Transformer, folder: Path) -> None:
        """Traces encoder and decoder, once. Raises ExportError."""
        self._folder = folder
        self._encoder, self._decoder = EncoderGraph(model), DecoderGraph(model)
        self._traced_encoder = trace(self._encoder, FP32.file("encoder", "onnx"))
        self._traced_decoder = trace(self._decoder, FP32.file("decoder", "onnx"))

    def write(self, target: Target, ranges: Mapping[str, Range] | None = None) -> GraphSet:
        """The graph set of a target, with nothing measured yet. ``ranges``: see ``quantize.to_int8``.

        Raises ExportError when a graph's nodes are not those that the model's shape requires.
        """
        if target == FP32:
            activations = "float"
            encoder, decoder = self._float()
        elif target == INT8:
            activations = "row" if ranges is None else "static"
            encoder, decoder = self._int8_encoder(ranges), self._int8_decoder(ranges)
        elif target == FP16:
            activations = "float"
            encoder, decoder = self._half()
        else:
            activations = "block"
            # A lone source has many tokens already: for it, too, the encoder of int8 is the faster one.
            encoder, decoder = self._int8_encoder(ranges), self._w8_decoder()
        return GraphSet(
            target.provider,
            target.precision,
            OPSET,
            activations=activations,
            batch_invariant=target.batch_invariant,
            encoder=encoder,
            decoder=decoder,
            golden=target.file("golden", "jsonl"),
            score_tolerance=target.score_tolerance,
            parity={},
            quality={},
        )

    def write_shortlist(self, ranges: Mapping[str, Range] | None) -> tuple[Graph, Projection]:
        """The decoder of int8 that takes the columns of its output projection as inputs, and these. Raises ExportError.

        ``ranges`` are those that INT8 was written with.
        """
        products = Products(INTEGER_PRODUCTS, by_row=ranges is None)
        model, projection = with_columns(to_int8(self._traced_decoder, ranges))
        traced = checked(INT8.file("shortlist", "onnx"), model, self._decoder.required_nodes(products))
        return self._written(traced), projection

    def _float(self) -> tuple[Graph, Graph]:
        products = Products(FLOAT_PRODUCTS)
        return (
            self._save(FP32, self._encoder, self._traced_encoder, products),
            self._save(FP32, self._decoder, self._traced_decoder, products),
        )

    def _half(self) -> tuple[Graph, Graph]:
        """Traced anew, from a rounded copy of the model: so that each value has its type from PyTorch."""
        model, products = half_copy(self._encoder.model), Products(FLOAT_PRODUCTS)
        encoder, decoder = EncoderGraph(model, FP16.provider), DecoderGraph(model, FP16.provider)
        return self._save_half(encoder, products), self._save_half(decoder, products)

    def _save_half(self, module: EncoderGraph | DecoderGraph, products: Products) -> Graph:
        file = FP16.file("encoder" if isinstance(module, EncoderGraph) else "decoder", "onnx")
        model = trace(module, file)
        fuse(model)
        graph = self._save(FP16, module, model, products)
        check(file, model)
        return graph

    def _int8_encoder(self, ranges: Mapping[str, Range] | None) -> Graph:
        products = Products(INTEGER_PRODUCTS, by_row=ranges is None)
        return self._save(INT8, self._encoder, to_int8(self._traced_encoder, ranges), products)

    def _int8_decoder(self, ranges: Mapping[str, Range] | None) -> Graph:
        products = Products(INTEGER_PRODUCTS, by_row=ranges is None)
        return self._save(INT8, self._decoder, to_int8(self._traced_decoder, ranges), products)

    def _w8_decoder(self) -> Graph:
        return self._save(W8, self._decoder, to_w8(self._traced_decoder), Products(BLOCK_PRODUCTS))

    def _save(
        self, target: Target, module: EncoderGraph | DecoderGraph, model: onnx.ModelProto, products: Products
    ) -> Graph:
        kind = "encoder" if isinstance(module, EncoderGraph) else "decoder"
        return self._written(checked(target.file(kind, "onnx"), model, module.required_nodes(products)))

    def _written(self, traced: TracedGraph) -> Graph:
        (self._folder / traced.declaration.file).write_bytes(traced.content)
        return traced.declaration
