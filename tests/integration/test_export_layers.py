"""What each layer reads is compared with PyTorch: a layer that is wrong in the graphs has a name."""

import itertools
import random

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from dragoman_export.errors import ExportError
from dragoman_export.graph_sets import write_graphs
from dragoman_export.layers import compare_layers, watched
from dragoman_export.quantize import linears
from dragoman_export.targets import FP16, FP32, INT8, W8
from dragoman_training.config import ModelConfig
from dragoman_training.model import Transformer

TARGETS = (FP32, INT8, W8, FP16)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model of two layers a side, and its graphs in each precision, in a folder."""
    torch.manual_seed(0)
    shape = {"d_model": 64, "num_heads": 2, "ffn_dim": 96, "encoder_layers": 2, "decoder_layers": 2}
    model = Transformer(ModelConfig(**shape, source_vocab_size=32, target_vocab_size=32, activation="gelu")).eval()
    folder = tmp_path_factory.mktemp("graphs")
    return model, write_graphs(model, TARGETS, None, folder).sets, folder


def rows():
    """Ragged ones, of one token and of many."""
    rng = random.Random(0)
    lengths = [(1, 0), (9, 3), (4, 20), (17, 1)]
    return tuple([tuple(rng.choices(range(4, 32), k=n)) for n in side] for side in zip(*lengths, strict=True))


def difference(model, graphs, folder, tolerance):
    return compare_layers(model, graphs, folder, *rows(), 1, tolerance)


@pytest.mark.parametrize(
    ("target", "least", "most"),
    [(FP32, 0, 1e-5), (FP16, 1e-5, 5e-3), (INT8, 1e-3, 0.1), (W8, 1e-3, 0.1)],
    ids=lambda value: getattr(value, "precision", None),
)
def test_layers_read_what_pytorchs_do_up_to_their_precision(written, target, least, most):
    """Of one token and of many, at every step that is compared; what rounding costs is seen."""
    model, sets, folder = written
    assert least < difference(model, sets[target], folder, target.tolerance.relative) < most


def test_every_linear_layer_is_watched(written):
    """Each of PyTorch's reads one of the outputs; those that read the same share it."""
    model, sets, folder = written
    names = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    shared = {
        name.replace(first, other)
        for name in names
        for first, other in itertools.product(["query"], ["key", "value"])
        if "self_attention.query" in name
    }
    cross = {f"decoder.{layer}.cross_attention.{kind}" for layer in (0, 1) for kind in ("key", "value")}
    for target in TARGETS:
        found = set()
        for graph in (sets[target].encoder, sets[target].decoder):
            outputs = onnx.load(folder / watched(graph.file)).graph.output
            found |= {output.name for output in outputs} - {spec.name for spec in graph.outputs}
        assert found == names - shared - (cross - {"decoder.0.cross_attention.key"})


def damaged(graph, folder, layer, elsewhere):
    """A copy of a watched graph of fp32 with other weights in one layer."""
    model = onnx.load(folder / watched(graph.file))
    linear = next(linear for linear in linears(model) if linear.name == layer)
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == linear.weight)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.1), weight.name))
    onnx.save(model, elsewhere / watched(graph.file))


@pytest.mark.parametrize(
    ("part", "layer", "behind"),
    [
        ("encoder", "encoder.0.self_attention.query", "encoder.0.self_attention.output"),
        ("encoder", "encoder.1.feed_forward.inner", "encoder.1.feed_forward.outer"),
        ("encoder", "encoder.1.feed_forward.outer", "decoder.0.cross_attention.key"),
        ("decoder", "decoder.0.cross_attention.query", "decoder.0.cross_attention.output"),
        ("decoder", "decoder.1.feed_forward.outer", "projection"),
    ],
)
def test_a_wrong_layer_is_named(written, tmp_path, part, layer, behind):
    """As the last whose input is right, with the first whose is not."""
    model, sets, folder = written
    for name in ("encoder", "decoder"):
        file = watched(getattr(sets[FP32], name).file)
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    damaged(getattr(sets[FP32], part), folder, layer, tmp_path)
    with pytest.raises(ExportError, match=rf"fp32: what {behind} reads differs .* What {layer} reads is right"):
        difference(model, sets[FP32], tmp_path, FP32.tolerance.relative)


def test_what_is_no_number_is_a_difference(written):
    """Weights of NaN in PyTorch's model: never within a tolerance."""
    model, sets, folder = written
    other = Transformer(model.config).eval()
    for parameter in other.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(ExportError, match=r"what encoder\.0\.self_attention\.query reads differs .* by nan of"):
        difference(other, sets[FP32], folder, 1.0)
