"""Models, checkpoints and bundles damaged on purpose: the export or the load fails, and says where."""

import argparse
import copy
import dataclasses
import json
import shutil

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from dragoman.bundle import ModelBundle, save_bundle
from dragoman.config import EngineConfig, embedded_bundle
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.errors import BundleError
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel, token_rules
from dragoman_export import trace as trace_module
from dragoman_export.cli import export as command
from dragoman_export.counts import FLOAT_PRODUCTS, Products
from dragoman_export.errors import ExportError
from dragoman_export.exporter import ExportOptions, export
from dragoman_export.graphs import DecoderGraph
from dragoman_export.targets import FP32
from dragoman_export.trace import OPSET, checked, trace
from dragoman_export.verify import References, verify
from dragoman_training.attention import TorchAttention, length_mask, merge_heads, split_heads
from dragoman_training.checkpoint import load_model
from dragoman_training.config import ModelConfig
from dragoman_training.decode import greedy
from dragoman_training.model import Transformer

LIMITS = TextLimits(65536, 256)
FILES = ("encoder.cpu.fp32.onnx", "decoder.cpu.fp32.onnx", "source.tokenizer.json", "golden.cpu.fp32.jsonl")


@pytest.fixture(scope="module")
def checkpoint(reverse_run):
    return load_model(reverse_run)


@pytest.fixture(scope="module")
def bundle(reverse_bundle):
    return ModelBundle.load(reverse_bundle)


@pytest.fixture(scope="module")
def embedded():
    return ModelBundle.load(embedded_bundle("g2p-en"))


def graph_of(bundle, part):
    """A graph's declaration, and the graph to be damaged."""
    declaration = getattr(bundle.manifest.graphs[0], part)
    return declaration, onnx.load(bundle.file(declaration.file))


def resaved(bundle, path, manifest=None, **files):
    """The bundle with other content under correct hashes."""
    content = {name: bundle.read(name) for name in bundle.manifest.files}
    return save_bundle(manifest or bundle.manifest, {**content, **files}, path)


def run_export(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


def write(module, file, folder):
    """A module's graph, checked."""
    return checked(file, trace(module, file), module.required_nodes(Products(FLOAT_PRODUCTS)), folder)


def prove(checkpoint, bundle, content, sources):
    """Compare fp32 graphs of other content with PyTorch."""
    runner = OrtRunner(OrtModel(bundle.manifest.model, bundle.manifest.graphs[0], content), 8, 1 << 28)
    references = greedy(checkpoint.model, sources, 32, checkpoint.special)
    verify(
        checkpoint.model,
        runner,
        token_rules(bundle.manifest),
        sources,
        References(references, {}),
        (2,),
        32,
        32,
        FP32.tolerance,
    )


# A layer left unfused


class StepByStep(TorchAttention):
    """Self-attention becomes the standard's operator, cross-attention two products and a softmax."""

    def step_cross(self, q, k, v, num_heads, lengths):
        scores = split_heads(q, num_heads) @ k.transpose(2, 3)  # (R, H, 1, L)
        mask = length_mask(lengths, k.shape[2])
        return merge_heads(scores.masked_fill(~mask, -1e9).softmax(-1) @ v)  # (R, 1, D)


class OneLayerUnfused(DecoderGraph):
    """The last layer computes its attentions by itself."""

    def forward(self, tokens, cached, source_lengths, target_capacity, source_capacity, past, cross):
        use_attention = self.model.use_attention

        def use_but_in_one(ops):
            use_attention(ops)
            self.model.decoder[-1].self_attention.ops = StepByStep()
            self.model.decoder[-1].cross_attention.ops = StepByStep()

        self.model.use_attention = use_but_in_one
        try:
            return super().forward(tokens, cached, source_lengths, target_capacity, source_capacity, past, cross)
        finally:
            del self.model.use_attention


def test_one_decoder_layer_left_unfused_fails_the_export(tmp_path):
    """One of two: the message has the graph, every node that is wrong, and both counts."""
    shape = {"d_model": 16, "num_heads": 2, "ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 2}
    model = Transformer(ModelConfig(**shape, source_vocab_size=16, target_vocab_size=16)).eval()
    with pytest.raises(ExportError) as caught:
        write(OneLayerUnfused(model), "tiny.onnx", tmp_path)
    assert str(caught.value) == (
        "tiny.onnx as exported has 1 GroupQueryAttention(self) nodes instead of 2, 1 GroupQueryAttention(cross) nodes "
        "instead of 2, 19 MatMul+Gemm+FusedMatMul nodes instead of 17, 1 Softmax nodes instead of 0, 1 Attention nodes "
        "instead of 0: the model's shape requires those"
    )


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_the_embedded_graphs_are_counted_as_their_manifest_says(embedded, tmp_path, part):
    """Counting anew, before and after ONNX Runtime's optimisation, gives what is declared."""
    declaration, model = graph_of(embedded, part)
    # Read with its constants, the graph is whole again: it shares no file of weights.
    whole = dataclasses.replace(declaration, weights=None)
    assert checked(declaration.file, model, declaration.required_nodes, tmp_path) == whole


def test_a_node_that_onnx_runtime_makes_fails_the_export(tmp_path, monkeypatch):
    """The graph is right as exported; what ONNX Runtime makes of it, with one optimizer more, is slow on the CPU."""
    a, b, out = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["B", "S", 16]) for name in "abc")
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "scale", "bias"], ["c"]),
    ]
    weights = [numpy_helper.from_array(np.ones(16, np.float32), name) for name in ("scale", "bias")]
    graph = helper.make_graph(nodes, "norm", [a, b], [out], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    required = {"LayerNormalization": 1, "SkipLayerNormalization": 0}
    checked("norm.onnx", model, required, tmp_path)
    monkeypatch.setattr("dragoman.engine.runner.DISABLED_OPTIMIZERS", [])
    message = (
        r"norm\.onnx as optimised by ONNX Runtime has 0 LayerNormalization nodes instead of 1, "
        r"1 SkipLayerNormalization nodes instead of 0"
    )
    with pytest.raises(ExportError, match=message):
        checked("norm.onnx", model, required, tmp_path)


@pytest.mark.parametrize(("part", "kind"), [("encoder", "LayerNormalization"), ("decoder", "MatMulIntegerToFloat")])
def test_a_node_too_many_fails_the_export(embedded, tmp_path, part, kind):
    """Whatever a layer's norms and projections are not, is named with both counts."""
    declaration, model = graph_of(embedded, part)
    node = copy.deepcopy(next(node for node in model.graph.node if node.op_type == kind))
    node.output[0] = "unused"
    model.graph.node.append(node)
    with pytest.raises(ExportError, match=rf"{declaration.file} as exported has \d+ {kind}\S* nodes instead of \d+"):
        checked(declaration.file, model, declaration.required_nodes, tmp_path)


# A swapped cache binding


def swap(names, one, other):
    names[one], names[other] = names[other], names[one]


def cached_attention(model, index):
    """Self-attention of layer 0, cross-attention of layer 0, self-attention of layer 1, and so on."""
    return [node for node in model.graph.node if node.op_type == "GroupQueryAttention"][index]


def keys_for_values(model):
    swap(cached_attention(model, 2).input, 3, 4)


def memory_keys_for_values(model):
    swap(cached_attention(model, 1).input, 3, 4)


def past_of_other_layer(model):
    first, second = cached_attention(model, 0), cached_attention(model, 2)
    for index in (3, 4):
        first.input[index], second.input[index] = second.input[index], first.input[index]


def present_of_other_layer(model):
    first, second = cached_attention(model, 0), cached_attention(model, 2)
    for index in (1, 2):
        first.output[index], second.output[index] = second.output[index], first.output[index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (keys_for_values, r"\(self\) of layer 1 reads \['past_value_1', 'past_key_1'\] instead of \['past_key_1', "),
        (memory_keys_for_values, r"\(cross\) of layer 0 reads \['cross_value_0', 'cross_key_0'\] instead of "),
        (past_of_other_layer, r"\(self\) of layer 0 reads \['past_key_1', 'past_value_1'\] instead of "),
        (present_of_other_layer, r"\(self\) of layer 0 writes \['present_key_1', 'present_value_1'\] instead of "),
    ],
)
def test_a_swapped_cache_binding_fails_the_export(embedded, tmp_path, change, message):
    """Signature and counts are as before: the message names graph, node, layer, and both bindings."""
    declaration, model = graph_of(embedded, "decoder")
    change(model)
    with pytest.raises(ExportError, match=rf"decoder\.cpu\.int8\.onnx as exported: GroupQueryAttention{message}"):
        checked(declaration.file, model, declaration.required_nodes, tmp_path)


def swapped_outputs(bundle):
    """The encoder with the names of its keys and values exchanged, which nothing but their numbers tells apart."""
    declaration, model = graph_of(bundle, "encoder")
    other = {"cross_key_0": "cross_value_0", "cross_value_0": "cross_key_0"}
    for node in model.graph.node:
        node.output[:] = [other.get(name, name) for name in node.output]
    return declaration.file, model.SerializeToString()


def test_swapped_outputs_fail_the_comparison(bundle, checkpoint):
    """What no count and no name shows, the logits do."""
    file, content = swapped_outputs(bundle)
    files = {name: bundle.read(name) for name in bundle.manifest.files} | {file: content}
    with pytest.raises(ExportError, match="logits differ from PyTorch's"):
        prove(checkpoint, bundle, files.__getitem__, [(4, 5, 6, 2), (7, 8, 2)])


def test_swapped_outputs_are_refused_at_the_load(bundle, tmp_path):
    """Under correct hashes: the golden set tells."""
    file, content = swapped_outputs(bundle)
    resaved(bundle, tmp_path / "other", **{file: content})
    with pytest.raises(BundleError, match=r"golden\.cpu\.fp32\.jsonl: this machine does not reproduce"):
        ServedModel.load(tmp_path / "other", EngineConfig(), LIMITS)


# A wrong special id


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decoder_start", 9, "special_ids.decoder_start of the checkpoint is 9; .* 1, the id of <s>"),
        ("eos", 5, "special_ids.eos of the checkpoint is 5; .* 2, the id of </s>"),
        ("unk", 0, "special_ids.unk of the checkpoint is 0; .* 3, the id of <unk>"),
        ("pad", 400, "special_ids.pad of the checkpoint is 400; .* 0, the id of <pad>"),
    ],
)
def test_a_wrong_special_id_fails_the_export(checkpoint, tmp_path, name, value, message):
    """Both decoders would agree on it, so that no comparison could tell."""
    wrong = dataclasses.replace(checkpoint, special=dataclasses.replace(checkpoint.special, **{name: value}))
    with pytest.raises(ExportError, match=message):
        export(wrong, ExportOptions("wrong", "1", sources=("abc",)), tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"decoder_start": 9}, {"eos": 5}])
def test_a_wrong_special_id_is_refused_at_the_load(bundle, tmp_path, change):
    """Under a correct checksum: the golden set tells."""
    ids = dataclasses.replace(bundle.manifest.special_ids, **change)
    resaved(bundle, tmp_path / "other", dataclasses.replace(bundle.manifest, special_ids=ids))
    with pytest.raises(BundleError, match=r"golden\.cpu\.fp32\.jsonl: this machine does not reproduce"):
        ServedModel.load(tmp_path / "other", EngineConfig(), LIMITS)


# A tokenizer of another run


def of_another_run(content):
    """A vocabulary of the same size and the same tokens, in another order."""
    data = json.loads(content)
    data["tokens"][4:] = reversed(data["tokens"][4:])
    return json.dumps(data).encode()


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_tokenizer_of_another_run_fails_the_export(reverse_run, reverse_data, tmp_path, capsys, side):
    """The checkpoint knows its own: the file is named, nothing is written."""
    copied = shutil.copytree((reverse_run / "best").resolve(), tmp_path / "checkpoint")
    file = copied / f"{side}.tokenizer.json"
    file.write_bytes(of_another_run(file.read_bytes()))
    assert run_export(copied, "--sources", reverse_data / "dev.source", "--out", tmp_path / "bundle") == 2
    assert f"{side}.tokenizer.json is not the tokenizer that the model was trained with" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_tokenizer_of_another_run_is_refused_at_the_load(bundle, tmp_path, side):
    """Of equal size and under a correct hash: the golden set's texts tell, and the side is named."""
    file = f"{side}.tokenizer.json"
    resaved(bundle, tmp_path / "other", **{file: of_another_run(bundle.read(file))})
    with pytest.raises(BundleError, match=rf"golden\.cpu\.fp32\.jsonl: the {side} tokenizer .* belongs to another"):
        ServedModel.load(tmp_path / "other", EngineConfig(), LIMITS)


# A truncated file, a flipped byte


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_file_is_refused_at_the_load(bundle, tmp_path, name, damage):
    """Before any graph is opened, by name."""
    copied = shutil.copytree(bundle.path, tmp_path / "other")
    content = bytearray((copied / name).read_bytes())
    if damage == "truncated":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(BundleError, match=rf"{name} (has \d+ bytes; its manifest says|is damaged: its SHA-256)"):
        ServedModel.load(copied, EngineConfig(), LIMITS)


def test_truncated_weights_fail_the_export(reverse_run, reverse_data, tmp_path, capsys):
    """One line that names the file; nothing is written."""
    copied = shutil.copytree((reverse_run / "best").resolve(), tmp_path / "checkpoint")
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert run_export(copied, "--sources", reverse_data / "dev.source", "--out", tmp_path / "bundle") == 2
    error = capsys.readouterr().err
    assert "model.safetensors cannot be read" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "bundle").exists()


def test_a_flipped_byte_of_a_graph_in_memory_fails_the_export(bundle, checkpoint):
    """One bit of one weight's exponent, between tracing and comparing: the logits tell."""
    declaration, model = graph_of(bundle, "decoder")
    weight = next(w for w in model.graph.initializer if len(w.dims) == 2 and w.data_type == onnx.TensorProto.FLOAT)
    raw = bytearray(weight.raw_data)
    raw[len(raw) // 2 // 4 * 4 + 3] ^= 0x40  # little-endian: the last byte has sign and exponent
    weight.raw_data = bytes(raw)
    files = {name: bundle.read(name) for name in bundle.manifest.files} | {declaration.file: model.SerializeToString()}
    sources = [(*range(4, 4 + length), 2) for length in range(1, 9)]
    with pytest.raises(ExportError, match="logits differ from PyTorch's"):
        prove(checkpoint, bundle, files.__getitem__, sources)


def test_a_graph_beyond_what_a_file_may_hold_fails_the_export(checkpoint, tmp_path, monkeypatch):
    """Its size and the limit are named, before anything else tries to write it."""
    monkeypatch.setattr(trace_module, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ExportError, match=r"decoder\.onnx would have \d+ bytes; an ONNX file holds at most 1000"):
        write(DecoderGraph(checkpoint.model), "decoder.onnx", tmp_path)
