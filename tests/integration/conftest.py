"""Bundles that several files of tests look at, each exported once."""

from functools import cache

import pytest


@pytest.fixture(scope="session")
def half_export(tmp_path_factory):
    """Of a shape's name: an untrained checkpoint, and its bundle of fp32 and fp16 graphs."""
    # Only here: the tests of the server below this folder also run where torch is not installed.
    from tests.integration.untrained import SHAPES, texts, untrained

    from dragoman_export.exporter import ExportOptions, export
    from dragoman_export.targets import FP16, FP32

    @cache
    def exported(shape):
        folder = tmp_path_factory.mktemp("half")
        checkpoint = untrained(SHAPES[shape], folder / "checkpoint")
        options = ExportOptions("m", "1", targets=(FP32, FP16), sources=tuple(texts(40, seed=1)))
        return checkpoint, export(checkpoint, options, folder / "bundle").bundle

    return exported
