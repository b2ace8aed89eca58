"""The larger constants of several graphs, each once, in one file beside them: ONNX's external data.

Encoder, decoder, alignment graph and the decoder of a shortlist have tables and weights in common, which would
otherwise be in each of their files.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import onnx
from onnx import TensorProto

from dragoman.bundle import Graph

MIN_BYTES = 1024  # of a constant: smaller ones stay in the graph, where ONNX needs some of them
ALIGNMENT = 64  # bytes, of a constant's place in the file


class SharedWeights:
    """A file of constants as it grows. The same graphs in the same order give the same file, byte for byte."""

    def __init__(self, folder: Path, file: str) -> None:
        """The file is made in ``folder``, where the graphs' files are."""
        self._folder, self._file = folder, file
        self._places: dict[bytes, int] = {}  # SHA-256 of a constant's bytes to where they begin

    def take(self, graph: Graph) -> Graph:
        """Move a graph's larger constants here; its file is rewritten. One without any stays as it is."""
        path = self._folder / graph.file
        model = onnx.load(path, load_external_data=False)
        large = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) >= MIN_BYTES]
        if not large:
            return graph
        with (self._folder / self._file).open("ab") as out:
            for tensor in large:
                content = tensor.raw_data
                digest = hashlib.sha256(content).digest()
                if digest not in self._places:
                    out.write(bytes(-out.tell() % ALIGNMENT))
                    self._places[digest] = out.tell()
                    out.write(content)
                self._refer(tensor, self._places[digest], len(content))
        path.write_bytes(model.SerializeToString(deterministic=True))
        return dataclasses.replace(graph, weights=self._file)

    def _refer(self, tensor: TensorProto, offset: int, length: int) -> None:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self._file), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
