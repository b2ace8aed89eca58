"""Constants that several graphs share are in one file, each once, and the graphs compute what they did."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the runtime alone has no tools of the export")

import onnx
from onnx import TensorProto, helper, numpy_helper

from dragoman.bundle import Graph, TensorSpec
from dragoman.engine.runner import open_graph
from dragoman.errors import BundleError
from dragoman_export.weights import SharedWeights

WIDTH = 32


def write_product(folder, name, **constants):
    """A graph of x (B, 32) times all of the constants, in turn; returns its declaration."""
    values = ["x", *(f"{constant}.product" for constant in constants)]
    nodes = [
        helper.make_node("MatMul", [before, constant], [after])
        for before, constant, after in zip(values, constants, values[1:], strict=False)
    ]
    inputs, outputs = (
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, ["B", WIDTH])] for value in (values[0], values[-1])
    )
    initializers = [numpy_helper.from_array(array, constant) for constant, array in constants.items()]
    graph = helper.make_graph(nodes, name, inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / name)
    specs = ((TensorSpec(value, "float", ("B", WIDTH)),) for value in (values[0], values[-1]))
    return Graph(name, *specs, {}, {}, {})


def matrix(seed):
    return np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32)


def taken(folder):
    """Two graphs with one constant in common, under unlike names, after they were taken."""
    folder.mkdir()
    first = write_product(folder, "first.onnx", a=matrix(0), b=matrix(1))
    second = write_product(folder, "second.onnx", c=matrix(2), d=matrix(0))
    weights = SharedWeights(folder, "weights.bin")
    return [weights.take(graph) for graph in (first, second)]


def test_what_two_graphs_have_in_common_is_stored_once(tmp_path):
    """Whatever it is called; the file holds the three matrices, and no graph any."""
    first, second = taken(tmp_path / "one")
    content = (tmp_path / "one" / "weights.bin").read_bytes()
    assert content == b"".join(matrix(seed).tobytes() for seed in (0, 1, 2))
    for graph in (first, second):
        assert graph.files == (graph.file, "weights.bin")
        assert (tmp_path / "one" / graph.file).stat().st_size < 1000


def test_the_same_graphs_give_the_same_bytes(tmp_path):
    """File by file."""
    taken(tmp_path / "one"), taken(tmp_path / "other")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()


@pytest.mark.parametrize("kind", ["bytes", "path"])
def test_a_graph_computes_what_it_did(tmp_path, kind):
    """From bytes, as a server opens it, and from files."""
    x = np.random.default_rng(9).standard_normal((3, WIDTH)).astype(np.float32)
    folder = tmp_path / "one"
    content = (lambda file: (folder / file).read_bytes()) if kind == "bytes" else folder.joinpath
    for graph, expected in zip(taken(folder), (x @ matrix(0) @ matrix(1), x @ matrix(2) @ matrix(0)), strict=True):
        (actual,) = open_graph(graph, content, 1).run(None, {"x": x})
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_small_constants_stay_in_their_graph(tmp_path):
    """ONNX needs some of them where they are; a graph with none else names no file."""
    graph = write_product(tmp_path, "small.onnx", a=matrix(0)[:, :1])
    before = (tmp_path / "small.onnx").read_bytes()
    assert SharedWeights(tmp_path, "weights.bin").take(graph) == graph
    assert (tmp_path / "small.onnx").read_bytes() == before
    assert not (tmp_path / "weights.bin").exists()


def test_weights_that_are_too_short_are_refused(tmp_path):
    """With the name of the graph that cannot be opened."""
    folder = tmp_path / "one"
    first, _ = taken(folder)
    content = {file: (folder / file).read_bytes() for file in first.files}
    content["weights.bin"] = content["weights.bin"][:5000]
    with pytest.raises(BundleError, match=r"first\.onnx: ONNX Runtime cannot open it"):
        open_graph(first, content.__getitem__, 1)
