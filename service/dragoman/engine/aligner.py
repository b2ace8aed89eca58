"""The forced pass with ONNX Runtime.

Alignment graph: ``source`` (B, S) int64, ``source_lengths`` (B,) int32, ``target`` (B, T) int64, which is what the
decoder reads (its start token, then the answer's) -> ``weights`` (B, T, S), the cross-attention of one decoder layer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dragoman.bundle import Alignment
from dragoman.engine.runner import open_graph
from dragoman.types import FloatArray, TokenIds


class OrtForcedPass:
    """A ``dragoman.alignment.ForcedPass``. Any number of threads may share it."""

    def __init__(
        self, alignment: Alignment, decoder_start: int, content: Callable[[str], bytes], num_threads: int = 1
    ) -> None:
        """``content`` gives a declared file's bytes. Raises BundleError as ``OrtModel`` does."""
        self._session = open_graph(alignment.graph, content(alignment.graph.file), num_threads)
        self._decoder_start = decoder_start
        self._shift = alignment.shift

    def __call__(self, source: TokenIds, tokens: TokenIds) -> FloatArray:
        feeds = {
            "source": np.array([source], np.int64),
            "source_lengths": np.array([len(source)], np.int32),
            "target": np.array([[self._decoder_start, *tokens]], np.int64),
        }
        (weights,) = self._session.run(None, feeds)  # (1, T + 1, S)
        rows: FloatArray = weights[0, self._shift : self._shift + len(tokens)]
        return rows  # (T, S)
