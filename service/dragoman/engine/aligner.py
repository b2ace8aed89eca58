"""The forced pass with ONNX Runtime: the served encoder, then a graph of the decoder over a known answer.

Alignment graph: ``target`` (B, T) int64, which is what the decoder reads (its start token, then the answer's),
``source_lengths`` (B,) int32, and of the encoder graph's outputs ``cross_key_i``, ``cross_value_i`` (B, H, S, Dh) those
that it needs, fp32 -> ``weights`` (B, T, S), the cross-attention of one decoder layer, and ``coverage`` (B, T, S), the
mean of the last layer's heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dragoman.bundle import Alignment
from dragoman.engine.runner import open_graph
from dragoman.types import FloatArray, TokenIds


class Encoder(Protocol):
    """A session of an encoder graph, of any provider and precision."""

    def run(self, output_names: Sequence[str], feeds: Mapping[str, NDArray[Any]]) -> Sequence[NDArray[Any]]: ...


class OrtForcedPass:
    """A ``dragoman.alignment.ForcedPass``. Any number of threads may share it.

    A pass is a batch of its own, so that what it gives depends on no other request.
    """

    def __init__(
        self,
        alignment: Alignment,
        encoder: Encoder,
        decoder_start: int,
        content: Callable[[str], bytes | Path],
        num_threads: int = 1,
    ) -> None:
        """``content`` gives a declared file's bytes, or its path. Raises BundleError as ``OrtModel`` does."""
        self._encoder = encoder
        self._session = open_graph(alignment.graph, content, num_threads)
        self._cross = [spec.name for spec in alignment.graph.inputs if spec.name.startswith("cross_")]
        self._decoder_start = decoder_start
        self._shift = alignment.shift

    def __call__(self, source: TokenIds, tokens: TokenIds) -> FloatArray:
        rows = self._run("weights", source, tokens)
        return rows[self._shift : self._shift + len(tokens)]  # (T, S)

    def coverage(self, source: TokenIds, tokens: TokenIds) -> FloatArray:
        """The mean of the last layer's heads, a row for each token that the decoder reads: (T + 1, S)."""
        return self._run("coverage", source, tokens)

    def _run(self, output: str, source: TokenIds, tokens: TokenIds) -> FloatArray:
        lengths = np.array([len(source)], np.int32)
        cross = self._encoder.run(self._cross, {"source": np.array([source], np.int64), "source_lengths": lengths})
        feeds: dict[str, NDArray[Any]] = {
            "target": np.array([[self._decoder_start, *tokens]], np.int64),
            "source_lengths": lengths,
            # float16 where the encoder is of that type
            **{name: array.astype(np.float32, copy=False) for name, array in zip(self._cross, cross, strict=True)},
        }
        (rows,) = self._session.run([output], feeds)  # (1, T + 1, S)
        result: FloatArray = rows[0]
        return result
