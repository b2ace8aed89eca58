"""Runs a bundle's graphs with ONNX Runtime on the CPU; elsewhere: ``device_runner.py``.

``OrtModel`` holds the sessions, once a process; every replica has an ``OrtRunner`` of its own over them, with its own
KV state and buffers. Inputs and outputs of a step are bound by address: a step copies its input tokens, nothing else.

Encoder graph: ``source`` (B, S) int64, ``source_lengths`` (B,) int32 -> per decoder layer ``cross_key_i``,
``cross_value_i`` (B, H, S, Dh). Decoder graph: ``tokens`` (R,) int64, ``cached`` and ``source_lengths`` (R,) int32,
``target_capacity`` and ``source_capacity`` (1,) int32, per layer ``past_key_i``, ``past_value_i`` (R, H, C, Dh),
``cross_key_i``, ``cross_value_i`` (R, H, L, Dh) -> ``logits`` (R, V), ``present_key_i``, ``present_value_i``, which are
bound to the same memory as the past. R rows are slots 0..R-1. Logits are fp32; caches and cross keys and values are
fp32, or all float16.

That of a shortlist takes the projection's columns, too: ``candidate_weights`` (D, K) uint8, ``candidate_scales`` (K,)
and, where the model has one, ``candidate_bias`` (K,) fp32; its ``logits`` are (R, K).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.bundle import Graph, GraphSet, ModelShape, Shortlist
from dragoman.engine.candidates import Candidates, read_arrays
from dragoman.engine.kv import KvStore
from dragoman.engine.projection import Columns, Projection
from dragoman.errors import BundleError
from dragoman.types import FloatArray, IntArray, TokenIds

# ONNX Runtime's wheels keep a database of their use in the home folder and upload it, unless told not to before they
# are loaded; a server speaks to nobody but its callers.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort  # after the line above, which it reads once

# ORT would fuse these by itself, but on its CPU provider the fused node is several times slower than the two.
DISABLED_OPTIMIZERS = ["SkipLayerNormFusion"]


class OrtModel:
    """The two sessions of a graph set. Sessions are thread-safe: replicas share them."""

    def __init__(
        self,
        shape: ModelShape,
        graphs: GraphSet,
        content: Callable[[str], bytes | Path],
        num_threads: int = 1,
        shortlist: Shortlist | None = None,
    ) -> None:
        """``content`` gives a declared file's bytes, or where they lie.

        With a ``shortlist``, its decoder takes the place of the set's.

        Raises BundleError when a file does not load or a signature is not the declared one.
        """
        self.shape = shape
        self.shortlist = None if shortlist is None else _read_shortlist(shortlist, shape, content(shortlist.table))
        decoder = graphs.decoder if shortlist is None else shortlist.decoder
        self.cache_type = _cache_type(decoder)
        self.encoder = open_graph(graphs.encoder, content, num_threads)
        self.decoder = open_graph(decoder, content, num_threads)


class OrtRunner:
    """The rows of one replica. Implements ``dragoman.types.Runner``; used by one thread at a time."""

    def __init__(self, model: OrtModel, num_slots: int, max_kv_cache_bytes: int) -> None:
        self._model = model
        self.kv = KvStore(model.shape, num_slots, max_kv_cache_bytes, model.cache_type)
        self._columns = None if model.shortlist is None else Columns(model.shortlist[1], num_slots)
        self._tokens: IntArray = np.zeros(num_slots, np.int64)
        self._logits: FloatArray = np.zeros((num_slots, model.shape.target_vocab_size), np.float32)
        self._capacities: dict[str, NDArray[np.int32]] = {}
        self._bindings: dict[int, Any] = {}  # by number of rows
        self._bound_generation = -1, -1  # of the KV state and of the columns

    @property
    def encoder(self) -> ort.InferenceSession:
        """The encoder graph's session, which any thread may run."""
        return self._model.encoder

    @property
    def num_slots(self) -> int:
        return self.kv.num_slots

    @property
    def kv_cache_bytes(self) -> int:
        return self.kv.num_bytes

    def reserve(self, num_source_tokens: int, max_new_tokens: int) -> None:
        self.kv.reserve(num_source_tokens, max_new_tokens)

    def admit(
        self, sources: Sequence[TokenIds], slots: Sequence[Sequence[int]], prefixes: Sequence[TokenIds] = ()
    ) -> None:
        lengths = np.array([len(source) for source in sources], np.int32)  # (B,)
        batch = np.zeros((len(sources), int(lengths.max())), np.int64)  # (B, S)
        for row, source in enumerate(sources):
            batch[row, : len(source)] = source
        outputs = self._model.encoder.run(None, {"source": batch, "source_lengths": lengths})
        keys, values = outputs[0::2], outputs[1::2]  # per layer (B, H, S, Dh)
        for row, own in enumerate(slots):
            for slot in own:
                self.kv.install(slot, [k[row] for k in keys], [v[row] for v in values], int(lengths[row]))
        if self._columns is not None and self._model.shortlist is not None:
            candidates, _ = self._model.shortlist
            for source, own, prefix in zip(sources, slots, prefixes or [()] * len(sources), strict=True):
                allowed = candidates.of(source, prefix)
                for slot in own:
                    self._columns.install(slot, allowed)

    def decode(self, tokens: IntArray) -> FloatArray:
        rows = len(tokens)
        self._tokens[:rows] = tokens
        if self._columns is not None:
            self._columns.keep(rows)
        self._model.decoder.run_with_iobinding(self._binding(rows))
        self.kv.cached[:rows] += 1
        if self._columns is not None:
            self._columns.spread(self._logits[:rows])
        return self._logits[:rows]

    def move(self, source_slot: int, target_slot: int) -> None:
        self.kv.move(source_slot, target_slot)
        if self._columns is not None:
            self._columns.move(source_slot, target_slot)

    def fork(self, source_slot: int, target_slot: int) -> None:
        self.kv.fork(source_slot, target_slot)

    def _binding(self, rows: int) -> Any:
        """All inputs and outputs of a step over so many rows, bound once and kept until an array is replaced."""
        kv, columns = self.kv, self._columns
        generation = kv.generation, 0 if columns is None else columns.generation
        if self._bound_generation != generation:
            self._bindings.clear()
            self._capacities = {
                "target_capacity": np.array([kv.target_capacity], np.int32),
                "source_capacity": np.array([kv.source_capacity], np.int32),
            }
            self._bound_generation = generation
        if rows not in self._bindings:
            binding = self._model.decoder.io_binding()
            per_row: dict[str, NDArray[Any]] = {
                "tokens": self._tokens,
                "cached": kv.cached,
                "source_lengths": kv.source_lengths,
            }
            for layer in range(self._model.shape.decoder_layers):
                per_row[f"past_key_{layer}"] = kv.self_keys[layer]
                per_row[f"past_value_{layer}"] = kv.self_values[layer]
                per_row[f"cross_key_{layer}"] = kv.cross_keys[layer]
                per_row[f"cross_value_{layer}"] = kv.cross_values[layer]
            common: dict[str, NDArray[Any]] = {**self._capacities}
            if columns is not None:
                common |= {"candidate_weights": columns.weights, "candidate_scales": columns.scales}
                if columns.bias is not None:
                    common["candidate_bias"] = columns.bias
            for name, array in [*per_row.items(), *common.items()]:
                shape = array.shape if name in common else (rows, *array.shape[1:])
                binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)
            outputs: dict[str, NDArray[Any]] = {"logits": self._logits if columns is None else columns.logits}
            for layer in range(self._model.shape.decoder_layers):
                outputs[f"present_key_{layer}"] = kv.self_keys[layer]
                outputs[f"present_value_{layer}"] = kv.self_values[layer]
            for name, array in outputs.items():
                binding.bind_output(name, "cpu", 0, array.dtype.type, (rows, *array.shape[1:]), array.ctypes.data)
            self._bindings[rows] = binding
        return self._bindings[rows]


def optimized_graph(path: Path) -> bytes:
    """A graph file as a session has it after ONNX Runtime's own optimisation: ONNX bytes, without the larger weights.

    The session is opened just as for running; what ONNX Runtime writes lies beside the file for a moment. Raises
    BundleError naming the file when it cannot be opened.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        optimized = Path(folder, "optimized.onnx")
        options = session_options(num_threads=1)
        options.optimized_model_filepath = str(optimized)
        prefix = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{prefix}_file_name", "weights")
        options.add_session_config_entry(f"{prefix}_min_size_in_bytes", "1024")
        _session(path.name, path, options)
        return optimized.read_bytes()


def session_options(num_threads: int) -> ort.SessionOptions:
    """How every session runs, whatever its provider."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # On CPUs without VNNI, the products of u8 and s8 saturate unless told to be exact; elsewhere it changes nothing.
    options.add_session_config_entry("session.x64quantprecision", "1")
    # The event loop shares the cores: a pool that spins between steps would steal its time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _session(file: str, content: bytes | Path, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(
            content,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=DISABLED_OPTIMIZERS,
        )
    except Exception as error:  # ONNX Runtime raises many unrelated types
        raise BundleError(f"{file}: ONNX Runtime cannot open it: {error}") from error


def open_session(path: Path, num_threads: int) -> ort.InferenceSession:
    """A session of a graph file that no manifest declares. Raises BundleError when it does not load."""
    return _session(path.name, path, session_options(num_threads))


def open_graph(graph: Graph, content: Callable[[str], bytes | Path], num_threads: int) -> ort.InferenceSession:
    """A session of a graph. ``content`` gives a declared file's bytes, or where they lie.

    Raises BundleError when it does not load or its signature is not the declared one.
    """
    file, options = content(graph.file), session_options(num_threads)
    if graph.weights is not None and isinstance(file, bytes):  # of a path, ONNX Runtime finds them beside it
        weights = content(graph.weights)  # held until the session is open: it copies what it needs
        assert isinstance(weights, bytes)
        options.add_external_initializers_from_files_in_memory([graph.weights], [weights], [len(weights)])
    session = _session(graph.file, file, options)
    check_signature(graph, session)
    return session


def check_signature(graph: Graph, session: ort.InferenceSession) -> None:
    """Raises BundleError where a session's inputs and outputs are not those that the manifest declares."""
    for kind, declared, actual in (
        ("input", graph.inputs, session.get_inputs()),
        ("output", graph.outputs, session.get_outputs()),
    ):
        expected = [(spec.name, spec.dtype, spec.shape) for spec in declared]
        found = list(_signature(actual))
        if expected != found:
            raise BundleError(f"{graph.file}: the manifest declares {kind}s {expected}, the graph has {found}")


def _read_shortlist(shortlist: Shortlist, shape: ModelShape, content: bytes | Path) -> tuple[Candidates, Projection]:
    """What a shortlist's file holds. Raises BundleError naming it."""
    has_bias = any(spec.name == "candidate_bias" for spec in shortlist.decoder.inputs)
    try:
        arrays = read_arrays(content if isinstance(content, bytes) else content.read_bytes())
        return Candidates.checked(arrays, shape), Projection.checked(arrays, shape, has_bias=has_bias)
    except BundleError as error:
        raise BundleError(f"{shortlist.table}: {error}") from error


def _cache_type(decoder: Graph) -> type[np.float32] | type[np.float16]:
    """The element type that a decoder declares for its caches: one for all of them."""
    declared = sorted({spec.dtype for spec in decoder.inputs if spec.name.startswith(("past_", "cross_"))})
    if declared == ["float16"]:
        return np.float16
    if declared == ["float"]:
        return np.float32
    raise BundleError(f"{decoder.file}: caches are declared as {declared}; all must be float, or all float16")


def _signature(arguments: Iterable[Any]) -> Iterable[tuple[str, str, tuple[int | str, ...]]]:
    for argument in arguments:
        yield argument.name, argument.type.removeprefix("tensor(").removesuffix(")"), tuple(argument.shape)
