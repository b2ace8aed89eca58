"""Graphs run on CUDA, or not at all: what ONNX Runtime would move to the CPU without a word is refused here.

Where the CUDA provider does not load, ONNX Runtime opens the session on the CPU and logs an error; where it has no
kernel for a node, it runs that node on the CPU amid copies. Either way a server would be slow and say nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from functools import cache
from pathlib import Path
from typing import Final

from dragoman import cuda
from dragoman.errors import BundleError, ConfigError

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as in runner.py
import onnxruntime as ort  # after the line above, which it reads once

CUDA: Final = "CUDAExecutionProvider"

HOST_OPERATORS: Final = frozenset({"Concat", "Gather", "Shape", "Slice", "Squeeze", "Unsqueeze"})
"""What may run on the CPU: ONNX Runtime keeps shapes there, a few integers each, because their readers are there.

These move numbers and compute none. Of the graphs of the export, onnxruntime-gpu 1.31 places a Squeeze and a Concat of
the encoder there, and all else on CUDA.
"""


def available_providers() -> tuple[str, ...]:
    """What the installed ONNX Runtime has; whether they load is another question."""
    return tuple(ort.get_available_providers())


def runtime_version() -> str:
    """ONNX Runtime's own."""
    return str(ort.__version__)


def cuda_version() -> str:
    """What ONNX Runtime was built for, like "13.0"; empty where it was not, or does not tell."""
    return str(getattr(ort, "cuda_version", None) or "")


def check_available(device_id: int) -> cuda.Device:
    """Load CUDA's libraries, from Python packages where they are installed so, and look whether graphs can run there.

    Raises ConfigError naming what is missing, and what to do about it.
    """
    if CUDA not in (providers := available_providers()):
        raise ConfigError(
            f"graphs were asked to run on CUDA, and onnxruntime {runtime_version()} is installed, which is for "
            f"{', '.join(providers)} alone: pip uninstall onnxruntime, and install onnxruntime-gpu; {cuda.INSTALL}"
        )
    preload_libraries()
    device = cuda.check_device(cuda.read_driver(), device_id, cuda_version())
    if missing := cuda.missing_libraries(cuda.library_names(cuda_version())):
        raise ConfigError(
            f"CUDA's libraries are missing or do not load: {'; '.join(missing.values())}; onnxruntime-gpu[cuda,cudnn] "
            f"brings them: {cuda.INSTALL}"
        )
    return device


@cache
def preload_libraries() -> None:
    """Load CUDA's and cuDNN's libraries from their Python packages, which no loader's path names; once a process."""
    ort.set_default_logger_severity(3)  # errors: it warns of each session that its CUDA is none of the newer plugins
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it misses; this module says so itself
        ort.preload_dlls(directory="")


def record_placement(options: ort.SessionOptions) -> None:
    """Have a session tell where its nodes are, for ``check_placement``."""
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")


def check_placement(session: ort.InferenceSession, file: str) -> None:
    """Raises ConfigError when the CUDA provider did not load, and BundleError naming the nodes that are on the CPU."""
    if session.get_providers()[0] != CUDA:
        raise ConfigError(f"{file}: ONNX Runtime's CUDA provider does not load: {_why_not()}; {cuda.INSTALL}")
    if nodes := misplaced_nodes(session):
        raise BundleError(
            f"{file}: ONNX Runtime {runtime_version()} would run {', '.join(nodes)} on the CPU, having no CUDA kernel "
            "for them: export the checkpoint again, with the version of onnxruntime that serves it"
        )


def misplaced_nodes(session: ort.InferenceSession) -> list[str]:
    """The nodes, operator and name, that are not on CUDA and compute more than shapes.

    The session must have been opened with ``record_placement``.
    """
    return [
        f"{node.op_type} {node.name}".strip()
        for group in session.get_provider_graph_assignment_info()
        if group.ep_name != CUDA
        for node in group.get_nodes()
        if node.op_type not in HOST_OPERATORS
    ]


def _why_not() -> str:
    """What the loader says of ONNX Runtime's CUDA library, which ONNX Runtime itself only logs."""
    folder = Path(ort.__file__).parent / "capi"
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return "its own log tells why"
