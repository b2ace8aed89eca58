"""Bundles that several files of tests look at, each exported once, and quicker exports."""

import sys
from functools import cache

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_table_of_operators():
    """PyTorch's exporter builds its table of operators, always the same, anew for each graph: a second each time."""
    if "torch" not in sys.modules:
        return  # no test of this process exports
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    ONNXRegistry.from_torchlib = staticmethod(cache(ONNXRegistry.from_torchlib))


@pytest.fixture(scope="session")
def half_export(tmp_path_factory, shared_folder, made_once):
    """Of a shape's name: an untrained checkpoint, and its bundle of fp32 and fp16 graphs."""
    # Only here: the tests of the server below this folder also run where torch is not installed.
    from tests.integration.untrained import SHAPES, texts, untrained

    from dragoman.bundle import ModelBundle
    from dragoman_export.exporter import ExportOptions, export
    from dragoman_export.targets import FP16, FP32

    @cache
    def exported(shape):
        checkpoint = untrained(SHAPES[shape], tmp_path_factory.mktemp("half") / "checkpoint")
        options = ExportOptions("m", "1", targets=(FP32, FP16), sources=tuple(texts(40, seed=1)))
        bundle = shared_folder / shape
        made_once(f"half {shape}", lambda: export(checkpoint, options, bundle))
        return checkpoint, ModelBundle.load(bundle)

    return exported
