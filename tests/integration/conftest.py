"""Bundles that several files of tests look at, each exported once, and quicker exports."""

import sys
from functools import cache
from pathlib import Path

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
        options = ExportOptions("toy", "1", targets=(FP32, FP16), sources=tuple(texts(40, seed=1)))
        bundle = shared_folder / shape
        made_once(f"half {shape}", lambda: export(checkpoint, options, bundle))
        return checkpoint, ModelBundle.load(bundle)

    return exported


@pytest.fixture(scope="session")
def aligned_export(reverse_data, reverse_run, shared_folder, made_once):
    """Of a target: the toy model's bundle with an alignment graph."""
    from dragoman.bundle import ModelBundle
    from dragoman_export.exporter import ExportOptions, export
    from dragoman_training.checkpoint import load_model

    @cache
    def exported(target):
        sources = tuple((reverse_data / "dev.source").read_text().split()[:100])
        options = ExportOptions("reverse", "1", (target,), sources=sources, alignment=True)
        bundle = shared_folder / f"aligned {target.precision}"
        made_once(f"aligned {target.precision}", lambda: export(load_model(reverse_run), options, bundle))
        return ModelBundle.load(bundle)

    return exported


@pytest.fixture(scope="session")
def transliteration(tmp_path_factory, shared_folder, made_once):
    """A real model of CTranslate2's, Arabic to English by the letter: its folder, what import and export made of it."""
    folder = Path(__file__).parents[3] / "shared" / "data" / "ct2-aren-transliteration"
    if not folder.is_dir():
        pytest.skip(f"the model is not there: {folder}")
    from dragoman_export.exporter import ExportOptions, export
    from dragoman_export.targets import FP32
    from dragoman_training.checkpoint import load_model
    from dragoman_training.importing.kinds import import_model

    checkpoint, bundle = tmp_path_factory.mktemp("imported") / "checkpoint", shared_folder / "transliteration"
    import_model(folder, checkpoint)
    options = ExportOptions("m", "1", targets=(FP32,), sources=("\u0645 \u062d \u0645 \u062f", "\u0639 \u0644 \u064a"))
    made_once("transliteration", lambda: export(load_model(checkpoint), options, bundle))
    return folder, checkpoint, bundle
