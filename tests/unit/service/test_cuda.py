"""What is read of CUDA's driver and libraries, from a driver that follows a script."""

# ruff: noqa: N802  # libcuda's functions have names of their own

import ctypes

import pytest

from dragoman.cuda import (
    AttentionKernel,
    Device,
    Driver,
    attention_kernels,
    check_device,
    library_names,
    missing_libraries,
    read_driver,
)
from dragoman.errors import ConfigError

H200 = Device(0, "NVIDIA H200", 143771 << 20, (9, 0), 2 * 3_201_000_000 * 6144 / 8)


class ScriptedDriver:
    """Answers through pointers, as libcuda does: https://docs.nvidia.com/cuda/cuda-driver-api/."""

    def __init__(self, status=0, num_devices=1):
        self.status, self.num_devices = status, num_devices

    def cuInit(self, flags):
        assert flags == 0
        return self.status

    def cuDriverGetVersion(self, version):
        version._obj.value = 13010

    def cuDeviceGetCount(self, count):
        count._obj.value = self.num_devices

    def cuDeviceGet(self, device, index):
        device._obj.value = index

    def cuDeviceGetName(self, name, size, device):
        name.value = H200.name.encode()
        assert size > len(H200.name)

    def cuDeviceTotalMem_v2(self, size, device):
        assert isinstance(size._obj, ctypes.c_size_t)
        size._obj.value = H200.memory_bytes

    def cuDeviceGetAttribute(self, value, number, device):
        value._obj.value = {36: 3_201_000, 37: 6144, 75: 9, 76: 0}[number]


def test_the_driver_tells_its_version_and_devices():
    """CUDA 13.1 is 13010 to it; the bandwidth is that of the datasheet, 4.8 TB/s and a little."""
    driver = read_driver(lambda name: ScriptedDriver())
    assert driver == Driver((13, 1), (H200,))
    assert 4.8e12 < driver.devices[0].bandwidth < 5e12
    assert len(read_driver(lambda name: ScriptedDriver(num_devices=3)).devices) == 3


def test_a_driver_without_a_device_has_none():
    """Its first call says so, by an error of its own."""
    assert read_driver(lambda name: ScriptedDriver(status=100)) == Driver((13, 1), ())


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


def test_a_missing_or_broken_driver_is_refused_with_the_remedy():
    """Not installed, or not seen from inside a container; or not the one that the kernel has loaded."""
    with pytest.raises(ConfigError, match=r"no NVIDIA driver here \(libcuda\.so\.1: .*--gpus all"):
        read_driver(no_library)
    with pytest.raises(ConfigError, match=r"error 803; look at what nvidia-smi says"):
        read_driver(lambda name: ScriptedDriver(status=803))


def test_an_older_driver_and_an_absent_device_are_refused():
    """A driver runs every minor version of its major one."""
    driver = Driver((12, 9), (H200,))
    with pytest.raises(ConfigError, match=r"driver is for CUDA 12\.9, .* built for CUDA 13\.0: update the driver"):
        check_device(driver, 0, "13.0")
    assert check_device(driver, 0, "12.9") == H200
    assert check_device(Driver((13, 0), (H200,)), 0, "13.3") == H200
    assert check_device(driver, 0, "") == H200  # an ONNX Runtime that does not tell
    for device_id in (1, -1):
        with pytest.raises(ConfigError, match=rf"device {device_id} was asked for, and the driver shows 1"):
            check_device(driver, device_id, "12.9")


def test_the_libraries_are_those_of_the_runtimes_cuda():
    """cuBLAS and the others by CUDA's major version, cuDNN and cuRAND by their own."""
    assert {"libcublas.so.13", "libcublasLt.so.13", "libcudart.so.13", "libnvrtc.so.13"} < set(library_names("13.0"))
    assert {"libcurand.so.10", "libcudnn.so.9"} == set(library_names(""))
    assert missing_libraries(["libcudnn.so.9"], no_library) == {
        "libcudnn.so.9": "libcudnn.so.9: cannot open shared object file"
    }
    assert missing_libraries(["libcudnn.so.9"], lambda name: None) == {}


def test_the_kernel_of_each_attention_node_is_read_once():
    """ONNX Runtime prints a line a run, in colour, and its options before; a node may have no name, or several."""
    output = (
        "\x1b[36mAttentionKernelOptions: FLASH_ATTENTION=1 CUDNN_FLASH_ATTENTION=1 MATH=1\x1b[0m\n"
        "\x1b[36mOperator=MultiHeadAttention Node=encoder.0 DataType=fp16 SdpaKernel=CUDNN_FLASH_ATTENTION\x1b[0m\n"
        + "\x1b[36mOperator=GroupQueryAttention Node=self.0 DataType=fp16 SdpaKernel=FLASH_ATTENTION\x1b[0m\n" * 3
        + "\x1b[36mOperator=GroupQueryAttention DataType=bf16 SdpaKernel=MATH\x1b[0m\n"
    )
    assert attention_kernels(output) == (
        AttentionKernel("MultiHeadAttention", "encoder.0", "CUDNN_FLASH_ATTENTION"),
        AttentionKernel("GroupQueryAttention", "self.0", "FLASH_ATTENTION"),
        AttentionKernel("GroupQueryAttention", "", "MATH"),
    )
    assert attention_kernels("nothing of the kind\n") == ()
