"""The device that a runner keeps its state on, as far as the runner knows it: memory, sessions, and runs.

``cuda-dry`` is the CPU's memory and ONNX Runtime's CPU provider in the place of CUDA's; all else is the same, so that
what runs on a GPU is tested without one. Whatever a run brings back to the host is counted here, by reason.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dragoman.bundle import Graph
from dragoman.config import DeviceConfig
from dragoman.engine.provider import check_placement, preload_libraries, record_placement
from dragoman.engine.runner import check_signature, open_graph, session_options
from dragoman.errors import BundleError, ConfigError

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as in runner.py
import onnxruntime as ort  # after the line above, which it reads once

DRY: Final = "cuda-dry"

_OUT_OF_MEMORY = re.compile(
    r"out of memory|failed to allocate|bad allocation|bad_alloc|smaller than requested bytes", re.IGNORECASE
)
"""What CUDA, ONNX Runtime's arena and C++ say of it: there is no type for it."""

Content = Callable[[str], bytes | Path]
"""Gives a declared file's bytes, or where they lie."""

Value: TypeAlias = "ort.OrtValue"
"""What a run left on the device."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was what a run or an allocation lacked."""
    return isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None


@dataclass(frozen=True)
class Device:
    """A GPU, or the CPU in its place."""

    provider: str  # "cuda" or "cuda-dry"
    config: DeviceConfig = DeviceConfig()  # noqa: RUF009  # frozen

    @property
    def kind(self) -> str:
        """ONNX Runtime's word for where memory lies."""
        return "cpu" if self.provider == DRY else "cuda"

    @property
    def device_id(self) -> int:
        """ONNX Runtime's number of where memory lies."""
        return 0 if self.provider == DRY else self.config.device_id

    def open(
        self, graph: Graph, content: Content, *, mem_limit: int = 0, captured: bool = False
    ) -> ort.InferenceSession:
        """A session of a graph, which may take ``mem_limit`` bytes (0: what is free) beside what it is given.

        With ``captured``, its runs become CUDA graphs, where these are on.

        Raises BundleError when it does not load, its signature is not the declared one, or a node has no place on the
        device; ConfigError when CUDA does not load, or the device has no room.
        """
        if self.provider == DRY:
            return open_graph(graph, content, num_threads=1)
        preload_libraries()
        options = session_options(num_threads=1)
        record_placement(options)
        settings = {
            "device_id": str(self.device_id),
            "enable_cuda_graph": str(int(captured and self.config.cuda_graphs)),
            "arena_extend_strategy": "kSameAsRequested",  # doubling would take memory that others were promised
            "enable_skip_layer_norm_strict_mode": "1",  # in float16 alone, a norm's variance overflows
        }
        if mem_limit:
            settings["gpu_mem_limit"] = str(mem_limit)
        try:
            session = ort.InferenceSession(
                content(graph.file), options, providers=[("CUDAExecutionProvider", settings)], enable_fallback=0
            )
        except Exception as error:  # ONNX Runtime raises many unrelated types
            if is_out_of_memory(error):
                raise ConfigError(
                    f"the device has no room for the weights of {graph.file}: free its memory, or raise --gpu-mem-limit"
                ) from error
            raise BundleError(f"{graph.file}: ONNX Runtime cannot open it on CUDA: {error}") from error
        check_placement(session, graph.file)
        check_signature(graph, session)
        return session

    def capture_options(self, number: int) -> ort.RunOptions | None:
        """The run options of the CUDA graph of that number, captured at its first run; None where there are none."""
        if self.provider == DRY or not self.config.cuda_graphs:
            return None
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(number))
        return options


class Buffer:
    """An array in the device's memory, zeros at first, at one address as long as it lives. Its first axis is rows."""

    def __init__(self, device: Device, shape: Sequence[int], dtype: type[np.generic]) -> None:
        """Raises ConfigError, naming the bytes, where there is no room."""
        self.device = device
        self.shape = tuple(shape)
        self.dtype = dtype
        try:
            zeros: NDArray[Any] = np.zeros(self.shape, dtype)
            self._value = ort.OrtValue.ortvalue_from_numpy(zeros, device.kind, device.device_id)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            if not is_out_of_memory(error):
                raise
            size = np.dtype(dtype).itemsize * int(np.prod(self.shape))
            raise ConfigError(
                f"the device has no room for {size} bytes of keys, values and logits: lower --slots, or free its memory"
            ) from error
        self.row_bytes = np.dtype(dtype).itemsize * int(np.prod(self.shape[1:]))

    def write(self, array: NDArray[Any]) -> None:
        """Replace all that it holds, in place."""
        self._value.update_inplace(array)

    def read(self) -> NDArray[Any]:
        """A copy on the host of all that it holds: for tests and comparisons, never in a step."""
        return np.array(self._value.numpy())

    def address(self, row: int = 0) -> int:
        """Of a row."""
        return int(self._value.data_ptr()) + row * self.row_bytes


class Binding:
    """The inputs and outputs of a session's runs, bound by address; it keeps what they lie in alive."""

    def __init__(self, device: Device, session: ort.InferenceSession, copied: Counter[str]) -> None:
        """``copied`` counts the bytes that runs bring to the host."""
        self._device, self._session, self._copied = device, session, copied
        self._binding = session.io_binding()
        self._kept: list[Any] = []
        self._host_bytes = 0

    def read(self, name: str, buffer: Buffer, rows: int, start: int = 0) -> None:
        """Rows of a buffer as an input."""
        self._binding.bind_input(name, *self._place(buffer, rows, start))
        self._kept.append(buffer)

    def write(self, name: str, buffer: Buffer, rows: int, start: int = 0) -> None:
        """Rows of a buffer as an output."""
        self._binding.bind_output(name, *self._place(buffer, rows, start))
        self._kept.append(buffer)

    def read_value(self, name: str, value: Value) -> None:
        """What another run left on the device as an input."""
        self._binding.bind_ortvalue_input(name, value)

    def write_new(self, name: str) -> None:
        """An output for which each run allocates memory on the device."""
        self._binding.bind_output(name, self._device.kind, self._device.device_id)

    def read_host(self, name: str, array: NDArray[Any]) -> None:
        """An array of the host as an input; where the graph reads it on the device, it is copied now."""
        self._binding.bind_cpu_input(name, array)

    def read_host_in_place(self, name: str, array: NDArray[Any]) -> None:
        """An array of the host, of which each run reads what it then holds: for inputs that kernels read there."""
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._kept.append(array)

    def write_host(self, name: str, array: NDArray[Any]) -> None:
        """An array of the host as an output: each run fills it."""
        self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._kept.append(array)
        self._host_bytes += array.nbytes

    def run(self, reason: str, options: ort.RunOptions | None = None) -> None:
        """Run once; what it brought to the host is counted as ``reason``."""
        self._session.run_with_iobinding(self._binding, options)
        if self._host_bytes:
            self._copied[reason] += self._host_bytes

    def outputs(self) -> list[Value]:
        """Of the last run, on the device."""
        values: list[Value] = self._binding.get_outputs()
        return values

    def _place(self, buffer: Buffer, rows: int, start: int) -> tuple[Any, ...]:
        shape = rows, *buffer.shape[1:]
        return self._device.kind, self._device.device_id, buffer.dtype, shape, buffer.address(start)
