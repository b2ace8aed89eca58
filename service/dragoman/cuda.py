"""What CUDA there is on this machine, found without ONNX Runtime: driver, devices, libraries, and which attention ran.

Needs the standard library alone, and opens no device: the driver is asked what it knows.

Driver: https://docs.nvidia.com/cuda/cuda-driver-api/.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any, Final

from dragoman.errors import ConfigError

DRIVER: Final = "libcuda.so.1"
INSTALL: Final = (
    "in the source folder, pip install -c deploy/constraints.txt -c deploy/constraints-gpu.txt '.[gpu]', in an "
    "environment of its own"
)
_NO_DEVICE: Final = 100  # CUDA_ERROR_NO_DEVICE
_MEMORY_CLOCK, _BUS_WIDTH, _MAJOR, _MINOR = 36, 37, 75, 76  # CUdevice_attribute

Load = Callable[[str], Any]
"""Opens a shared library by its name, as ``ctypes.CDLL`` does. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, as its driver describes it."""

    index: int
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    bandwidth: float  # of its memory by its clock and width, in bytes a second; 0 where the driver does not tell


@dataclass(frozen=True, slots=True)
class Driver:
    """The newest CUDA that the driver runs, and its devices."""

    version: tuple[int, int]
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Which implementation of attention a node of a graph ran with: ``MATH`` is the one that is not fused."""

    operator: str
    node: str
    kernel: str


def read_driver(load: Load = ctypes.CDLL) -> Driver:
    """Raises ConfigError, with the remedy, where there is no driver, or none that works."""
    try:
        library = load(DRIVER)
    except OSError as error:
        raise ConfigError(
            f"there is no NVIDIA driver here ({error}): install it on the machine, and let a container see it "
            "(docker run --gpus all)"
        ) from error
    status = library.cuInit(0)
    if status not in (0, _NO_DEVICE):
        raise ConfigError(
            f"the NVIDIA driver does not start: cuInit returns error {status}; look at what nvidia-smi says, and "
            "restart the machine if the driver was just updated"
        )
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    if status == 0:
        library.cuDeviceGetCount(ctypes.byref(count))
    devices = tuple(_read_device(library, index) for index in range(count.value))
    return Driver((version.value // 1000, version.value % 1000 // 10), devices)


def _read_device(library: Any, index: int) -> Device:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    bandwidth = 2 * attribute(_MEMORY_CLOCK) * 1000 * attribute(_BUS_WIDTH) / 8  # kHz, twice a clock; bits
    capability = attribute(_MAJOR), attribute(_MINOR)
    return Device(index, name.value.decode(errors="replace"), memory.value, capability, bandwidth)


def check_device(driver: Driver, device_id: int, cuda_version: str) -> Device:
    """The device of that number.

    Raises ConfigError where there is none, or where the driver is too old for an ONNX Runtime that was built for
    ``cuda_version``, like "13.0": a driver runs all minor versions of its major one. An ONNX Runtime that somebody
    built may not tell, and is not checked.
    """
    if cuda_version and driver.version[0] < int(cuda_version.partition(".")[0]):
        raise ConfigError(
            f"the NVIDIA driver is for CUDA {driver.version[0]}.{driver.version[1]}, and ONNX Runtime was built for "
            f"CUDA {cuda_version}: update the driver (CUDA 13 needs 580 or later)"
        )
    if not 0 <= device_id < len(driver.devices):
        raise ConfigError(
            f"device {device_id} was asked for, and the driver shows {len(driver.devices)}, counted from 0: choose "
            "another --device, and check CUDA_VISIBLE_DEVICES and docker run --gpus"
        )
    return driver.devices[device_id]


def library_names(cuda_version: str) -> tuple[str, ...]:
    """The libraries that ONNX Runtime's CUDA provider and its fused attention need, besides the driver.

    The provider opens without cuDNN and NVRTC, but MultiHeadAttention fails without the one at its first run, and what
    cuDNN fuses is compiled by the other. Which major version of CUDA's own it takes is not known where ``cuda_version``
    is empty: then they are left out.
    """
    major = cuda_version.partition(".")[0]
    versioned = [f"lib{name}.so.{major}" for name in ("cublasLt", "cublas", "cudart", "nvrtc")] if major else []
    return (*versioned, "libcurand.so.10", "libcudnn.so.9")


def missing_libraries(names: Iterable[str], load: Load = ctypes.CDLL) -> dict[str, str]:
    """Those that cannot be opened, and why."""
    missing = {}
    for name in names:
        try:
            load(name)
        except OSError as error:
            missing[name] = str(error)
    return missing


def nvidia_packages() -> dict[str, str]:
    """The installed Python packages that hold NVIDIA's libraries, with their versions."""
    found = {item.name: item.version for item in distributions() if item.name.lower().startswith("nvidia-")}
    return dict(sorted(found.items()))


def attention_kernels(output: str) -> tuple[AttentionKernel, ...]:
    """What ONNX Runtime printed of its attention with ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO=1: each line once."""
    found = re.findall(r"Operator=(\S+)(?: Node=(\S+))? .*?SdpaKernel=(\w+)", output)
    return tuple(AttentionKernel(*parts) for parts in dict.fromkeys(found))
