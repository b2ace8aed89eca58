"""The alignment graph of a bundle: declared like every other file, and optional."""

import dataclasses
import re

import pytest

from dragoman.bundle import Alignment, Graph, ModelBundle, save_bundle
from dragoman.errors import BundleError
from dragoman.inspection import describe
from dragoman.testing import scripted_manifest

GRAPH = Graph("alignment.onnx", (), (), {"Softmax": 1}, {"Softmax": 1}, {"Softmax": 1})
ALIGNMENT = Alignment(GRAPH, 2, 3, 1, "copied", 0.9375, 800, 2e-7, 0.998)
FILES = dict.fromkeys(("source.json", "target.json", "none.onnx", "golden.jsonl"), b"")


@pytest.mark.parametrize("alignment", [ALIGNMENT, dataclasses.replace(ALIGNMENT, head=None, basis="diagonal")])
def test_what_is_saved_of_an_alignment_is_loaded(tmp_path, alignment):
    """One head or the mean of all; the graph is a file like the others."""
    manifest = dataclasses.replace(scripted_manifest(), alignment=alignment)
    save_bundle(manifest, {**FILES, "alignment.onnx": b"graph"}, tmp_path / "bundle")
    assert ModelBundle.load(tmp_path / "bundle").manifest.alignment == alignment


@pytest.mark.parametrize("files", [FILES, {**FILES, "alignment.onnx": b"graph"}])
def test_a_graph_that_is_not_there_whole_is_named(tmp_path, files):
    """A manifest never promises what the bundle lacks: the graph, or the weights that it shares with others."""
    graph = dataclasses.replace(GRAPH, weights="weights.bin")
    manifest = dataclasses.replace(scripted_manifest(), alignment=dataclasses.replace(ALIGNMENT, graph=graph))
    missing = ", ".join(sorted({"alignment.onnx", "weights.bin"} - set(files)))
    with pytest.raises(BundleError, match=rf"does not declare: {re.escape(missing)}$"):
        save_bundle(manifest, files, tmp_path / "bundle")


@pytest.mark.parametrize(("name", "value"), [("shift", 2), ("basis", "guess")])
def test_a_field_without_a_meaning_is_refused(name, value):
    """By name and value."""
    with pytest.raises(BundleError, match=rf"alignment\.{name} is .*{value}"):
        dataclasses.replace(ALIGNMENT, **{name: value})


@pytest.mark.parametrize(
    ("alignment", "line"),
    [
        (None, "none"),
        (
            ALIGNMENT,
            "decoder layer 2, head 3, at the step that reads a token: 93.8% of 800 copied tokens aligned with "
            "themselves; the place of 99.8% of all tokens is PyTorch's, weights are at most 2e-07 from its",
        ),
        (
            dataclasses.replace(ALIGNMENT, head=None, shift=0, basis="diagonal"),
            "decoder layer 2, the mean of all heads, at the step that produces a token: 0.062 of a line's length from "
            "the diagonal, mean of 800 tokens, as too few are copied; the place of 99.8% of all "
            "tokens is PyTorch's, weights are at most 2e-07 from its",
        ),
    ],
)
def test_the_choice_is_shown(alignment, line):
    """In words, with the graph's nodes."""
    lines = describe(dataclasses.replace(scripted_manifest(), alignment=alignment), {})
    assert any(shown.startswith("  alignment") and shown.endswith(f" {line}") for shown in lines)
    assert ("graph for alignment" in lines) == (alignment is not None)
