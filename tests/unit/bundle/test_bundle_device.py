"""The graphs for a device: declared with the graph set that they are for, as files like the others."""

import dataclasses

import pytest

from dragoman.bundle import DeviceGraphs, Graph, ModelBundle, save_bundle
from dragoman.errors import BundleError
from dragoman.inspection import describe
from dragoman.testing import scripted_manifest

FILES = dict.fromkeys(("source.json", "target.json", "none.onnx", "golden.jsonl"), b"")
NAMES = ("copy.onnx", "best.onnx", "ranked.onnx", "row.onnx")


def manifest():
    plain = scripted_manifest()
    device = DeviceGraphs(*(Graph(name, (), (), {}, {}, {}) for name in NAMES))
    return dataclasses.replace(plain, graphs=(dataclasses.replace(plain.graphs[0], device=device),))


def test_what_is_saved_of_a_device_is_loaded(tmp_path):
    """All four, each with its file; and none where there is none."""
    save_bundle(manifest(), {**FILES, **dict.fromkeys(NAMES, b"graph")}, tmp_path / "bundle")
    (graphs,) = ModelBundle.load(tmp_path / "bundle").manifest.graphs
    assert [graph.file for graph in graphs.all_graphs()] == ["none.onnx", "none.onnx", *NAMES]
    save_bundle(scripted_manifest(), FILES, tmp_path / "without")
    assert ModelBundle.load(tmp_path / "without").manifest.graphs[0].device is None


@pytest.mark.parametrize("missing", NAMES)
def test_a_file_that_is_not_there_is_named(tmp_path, missing):
    """A manifest never promises what the bundle lacks."""
    files = {**FILES, **{name: b"graph" for name in NAMES if name != missing}}
    with pytest.raises(BundleError, match=f"does not declare: {missing}"):
        save_bundle(manifest(), files, tmp_path / "bundle")


def test_they_are_shown():
    """By name, with their graph set."""
    line = f"  without weights, for a device: {', '.join(NAMES)}"
    assert line in describe(manifest(), {})
    assert line not in describe(scripted_manifest(), {})
