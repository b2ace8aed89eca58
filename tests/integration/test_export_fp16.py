"""The graphs in float16 for CUDA: fused for it, of one type throughout, within its range, and proven without a GPU."""

import copy
import dataclasses
import random
from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.integration.untrained import DECODER_LAYERS, ENCODER_LAYERS, SHAPES, texts, untrained

from dragoman.bundle import ModelBundle
from dragoman.config import EngineConfig
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.errors import BundleError
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel
from dragoman_export import graph_sets
from dragoman_export.cuda import check, fuse
from dragoman_export.errors import ExportError
from dragoman_export.exporter import ExportOptions, export
from dragoman_export.graph_sets import write_graphs
from dragoman_export.graphs import DecoderGraph, EncoderGraph
from dragoman_export.half import check_range, half_copy
from dragoman_export.layers import watched
from dragoman_export.targets import FP16
from dragoman_export.trace import trace
from dragoman_export.verify import run_targets
from dragoman_training.data import encode_source
from dragoman_training.decode import greedy

LIMITS = TextLimits(65536, 256)


@pytest.fixture(scope="module", params=SHAPES)
def exported(request, half_export):
    """A checkpoint, and its bundle of fp32 and fp16 graphs."""
    return half_export(request.param)


@pytest.fixture(scope="module")
def pre_norm(tmp_path_factory):
    return untrained(SHAPES["pre-norm, gelu"], tmp_path_factory.mktemp("pre-norm") / "checkpoint")


@pytest.fixture(scope="module")
def traced(pre_norm):
    """Each graph of the pre-norm model as it is traced for CUDA, by file, not yet fused."""
    model = half_copy(pre_norm.model)
    modules = {"encoder": EncoderGraph(model, "cuda"), "decoder": DecoderGraph(model, "cuda")}
    return {FP16.file(kind, "onnx"): trace(module, kind) for kind, module in modules.items()}


def graphs_of(bundle, precision):
    (graphs,) = [graphs for graphs in bundle.manifest.graphs if graphs.precision == precision]
    return graphs


def runner_of(bundle, precision):
    return OrtRunner(OrtModel(bundle.manifest.model, graphs_of(bundle, precision), bundle.read), 8, 1 << 28)


def ragged_rows(vocabulary=12, seed=0):
    """Sources and targets of unlike lengths, the shortest and the longest among them."""
    rng = random.Random(seed)

    def tokens(length):
        return tuple(rng.choices(range(4, vocabulary), k=length))

    return [tokens(n) for n in (1, 2, 63, 64, 17, 5, 33, 9)], [tokens(n) for n in (23, 1, 24, 2, 7, 24, 11, 5)]


# What the graphs consist of


def test_the_graphs_are_fused_for_cuda(exported):
    """Each sum with a norm behind it, each bias with a gelu behind it, and each attention is one node: in the file and
    in what ONNX Runtime makes of it."""
    checkpoint, bundle = exported
    config = checkpoint.model.config
    # One norm closes each stack where norms come first; then the first of a stack reads embeddings and positions.
    encoder_norms, decoder_norms = 2 * ENCODER_LAYERS + config.norm_first, 3 * DECODER_LAYERS + config.norm_first
    gelus = config.activation == "gelu"
    encoder, decoder = graphs_of(bundle, "fp16").encoder, graphs_of(bundle, "fp16").decoder
    for nodes in (encoder.exported_nodes, encoder.optimized_nodes):
        assert nodes["MultiHeadAttention"] == ENCODER_LAYERS
        assert nodes["SkipLayerNormalization"] == encoder_norms
        assert nodes.get("BiasGelu", 0) == ENCODER_LAYERS * gelus
        assert not {"LayerNormalization", "Gelu", "Erf", "Softmax"} & set(nodes)
        assert not any(kind.startswith("GroupQueryAttention") for kind in nodes)
    for nodes in (decoder.exported_nodes, decoder.optimized_nodes):
        assert nodes["GroupQueryAttention(self)"] == nodes["GroupQueryAttention(cross)"] == DECODER_LAYERS
        assert nodes["SkipLayerNormalization"] == decoder_norms
        assert nodes.get("BiasGelu", 0) == DECODER_LAYERS * gelus
        assert not {"LayerNormalization", "Gelu", "Erf", "Softmax", "MultiHeadAttention"} & set(nodes)


def test_only_the_positions_are_in_fp32(exported):
    """Weights, caches, keys and values are float16. The wavelengths of the positions are not, nor are the logits."""
    checkpoint, bundle = exported
    half = checkpoint.model.config.d_model // 2
    for graph, outputs in ((graphs_of(bundle, "fp16").encoder, set()), (graphs_of(bundle, "fp16").decoder, {"logits"})):
        model = onnx.load_from_string(bundle.read(graph.file))
        floats = [list(tensor.dims) for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT]
        assert floats == [[half]]
        assert sum(tensor.data_type == TensorProto.FLOAT16 for tensor in model.graph.initializer) > 10
        specs = [*graph.inputs, *graph.outputs]
        assert {spec.name for spec in specs if spec.dtype == "float"} == outputs
        kinds = {spec.dtype for spec in specs if spec.name.startswith(("past", "present", "cross"))}
        assert kinds == {"float16"}
    files = bundle.manifest.files
    assert files["decoder.cuda.fp16.onnx"].bytes < 0.6 * files["decoder.cpu.fp32.onnx"].bytes


def test_fused_nodes_compute_what_the_separate_ones_do(exported):
    """In fp32, where nothing is rounded away: the graph before and after, on ragged rows and positions."""
    model = exported[0].model
    sources, _ = ragged_rows()
    source = np.zeros((len(sources), 64), np.int64)
    for row, tokens in enumerate(sources):
        source[row, : len(tokens)] = tokens
    lengths = np.array([len(tokens) for tokens in sources], np.int32)
    encoder = trace(EncoderGraph(model, "cuda"), "encoder")
    cross = same_outputs(encoder, {"source": source, "source_lengths": lengths})

    layers, rng = range(DECODER_LAYERS), np.random.default_rng(0)
    past = {
        f"past_{kind}_{layer}": rng.standard_normal((8, 2, 16, 32)).astype(np.float32)
        for layer in layers
        for kind in ("key", "value")
    }
    feeds = {
        "tokens": np.arange(4, 12),
        "cached": np.arange(8, dtype=np.int32),
        "source_lengths": lengths,
        "target_capacity": np.array([16], np.int32),
        "source_capacity": np.array([64], np.int32),
        **past,
        **dict(zip((f"cross_{kind}_{layer}" for layer in layers for kind in ("key", "value")), cross, strict=True)),
    }
    same_outputs(trace(DecoderGraph(model, "cuda"), "decoder"), feeds)


def same_outputs(model, feeds):
    """Of a graph before and after it is fused, by ONNX Runtime without its own optimisation."""
    fused = copy.deepcopy(model)
    fuse(fused)
    assert len(fused.graph.node) < len(model.graph.node)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    before, after = (
        ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)
        for m in (model, fused)
    )
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-6 * np.abs(one).max())
    return before


def test_an_approximate_gelu_is_left_alone(traced):
    """BiasGelu is exact: what is not, it must not replace."""
    model = copy.deepcopy(traced["encoder.cuda.fp16.onnx"])
    for node in model.graph.node:
        if node.op_type == "Gelu":
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("approximate", "tanh"))
    fuse(model)
    kinds = Counter(node.op_type for node in model.graph.node)
    assert kinds["Gelu"] == ENCODER_LAYERS and not kinds["BiasGelu"]


def test_equal_models_give_equal_files(pre_norm, traced):
    """Traced twice, the same bytes."""
    again = trace(DecoderGraph(half_copy(copy.deepcopy(pre_norm.model)), "cuda"), "decoder")
    assert again.SerializeToString(deterministic=True) == traced["decoder.cuda.fp16.onnx"].SerializeToString(
        deterministic=True
    )


# What they compute


def test_fp16_is_as_near_to_pytorch_as_eleven_bits_are(exported):
    """Rows of unlike lengths, side by side: off by rounding, and by no more."""
    checkpoint, bundle = exported
    sources, targets = ragged_rows()
    start = checkpoint.special.decoder_start
    for source, target, actual in zip(
        sources, targets, run_targets(runner_of(bundle, "fp16"), sources, targets, start), strict=True
    ):
        inputs = torch.tensor([[start, *target]])
        with torch.inference_mode():
            expected = checkpoint.model(torch.tensor([source]), torch.tensor([len(source)], dtype=torch.int32), inputs)
        difference = np.abs(actual.logits - expected[0].numpy()).max()
        assert 0 < difference < 0.005 * np.abs(expected.numpy()).max()
    parity = graphs_of(bundle, "fp16").parity
    assert 1e-5 < parity["relative_layer_difference"] < 0.005
    assert parity["greedy_token_error_rate"] < 0.02
    assert not graphs_of(bundle, "fp16").batch_invariant


def test_a_row_does_not_feel_the_padding_beside_it(exported):
    """Keys and values of a short source, alone and beside the longest."""
    _, bundle = exported
    encoder = OrtModel(bundle.manifest.model, graphs_of(bundle, "fp16"), bundle.read).encoder
    short = np.array([[5, 7, 2]])
    padded = np.full((2, 64), 9)
    padded[0, :3] = short
    alone = encoder.run(None, {"source": short, "source_lengths": np.array([3], np.int32)})
    beside = encoder.run(None, {"source": padded, "source_lengths": np.array([3, 64], np.int32)})
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_allclose(one[0].astype(np.float32), other[0, :, :3].astype(np.float32), rtol=0.01, atol=0.01)


def test_caches_have_the_graphs_type_and_half_the_bytes(exported):
    """What the store allocates and says of itself follows the decoder's declaration."""
    _, bundle = exported
    fp32, fp16 = runner_of(bundle, "fp32"), runner_of(bundle, "fp16")
    for runner, dtype in ((fp32, np.float32), (fp16, np.float16)):
        runner.reserve(100, 200)
        store = runner.kv
        arrays = [*store.self_keys, *store.self_values, *store.cross_keys, *store.cross_values]
        assert {array.dtype for array in arrays} == {np.dtype(dtype)}
        assert runner.kv_cache_bytes == sum(array.nbytes for array in arrays)
    assert 2 * fp16.kv_cache_bytes == fp32.kv_cache_bytes


def test_caches_of_two_types_are_refused(exported):
    """A decoder has one type of cache."""
    _, bundle = exported
    graphs = graphs_of(bundle, "fp16")
    first = next(spec for spec in graphs.decoder.inputs if spec.name.startswith("past"))
    inputs = tuple(
        dataclasses.replace(spec, dtype="float") if spec.name == first.name else spec for spec in graphs.decoder.inputs
    )
    decoder = dataclasses.replace(graphs.decoder, inputs=inputs)
    with pytest.raises(BundleError, match=r"caches are declared as \['float', 'float16'\]"):
        OrtModel(bundle.manifest.model, dataclasses.replace(graphs, decoder=decoder), bundle.read)


# What fails an export


def write_damaged(checkpoint, traced, folder, monkeypatch, damage):
    """Write the fp16 graphs of a model, with ``damage`` done to the encoder once it is fused."""

    def fuse_and_damage(model):
        fuse(model)
        if any(value.name == "source" for value in model.graph.input):
            damage(model)

    monkeypatch.setattr(graph_sets, "trace", lambda module, file: copy.deepcopy(traced.get(file)))
    monkeypatch.setattr(graph_sets, "fuse", fuse_and_damage)
    return write_graphs(checkpoint.model, [FP16], None, folder).sets[FP16]


def test_sound_graphs_are_written(pre_norm, traced, tmp_path, monkeypatch):
    """What the damage below is compared with."""
    graphs = write_damaged(pre_norm, traced, tmp_path, monkeypatch, lambda model: None)
    files = {graphs.encoder.file, graphs.decoder.file}
    beside = {graph.file for graph in graphs.device.all()}
    assert {path.name for path in tmp_path.iterdir()} == {*files, *map(watched, files), *beside}
    assert graphs.provider == "cuda"


def first_of(model, kind):
    return next(index for index, node in enumerate(model.graph.node) if node.op_type == kind)


def split_a_norm(model):
    index = first_of(model, "SkipLayerNormalization")
    node = model.graph.node[index]
    x, skip, scale, bias = node.input
    epsilon = node.attribute[0].f
    apart = [
        helper.make_node("Add", [x, skip], [node.output[3]]),
        helper.make_node("LayerNormalization", [node.output[3], scale, bias], [node.output[0]], epsilon=epsilon),
    ]
    nodes = [*model.graph.node[:index], *apart, *model.graph.node[index + 1 :]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def leave_a_weight_in_fp32(model):
    index = first_of(model, "MatMul")
    name = model.graph.node[index].input[1]
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
    values = numpy_helper.to_array(tensor).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(values, f"{name}.float"))
    model.graph.node.insert(index, helper.make_node("Cast", [tensor.name], [name], to=TensorProto.FLOAT16))


def compute_a_product_in_fp32(model):
    index = first_of(model, "MatMul")
    product = model.graph.node[index]
    (output,) = product.output
    casts = []
    for place in (0, 1):
        casts.append(helper.make_node("Cast", [product.input[place]], [f"{output}.{place}"], to=TensorProto.FLOAT))
        product.input[place] = f"{output}.{place}"
    product.output[0] = f"{output}.float"
    back = helper.make_node("Cast", [product.output[0]], [output], to=TensorProto.FLOAT16)
    nodes = [*model.graph.node[:index], *casts, product, back, *model.graph.node[index + 1 :]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def attend_by_group_query(model):
    """As the graphs for the CPU do, and rightly there; on CUDA, a short row may attend to its padding."""
    node = model.graph.node[first_of(model, "MultiHeadAttention")]
    query, key, value, _, lengths = node.input
    node.op_type = "GroupQueryAttention"
    node.attribute.extend([helper.make_attribute("kv_num_heads", 2), helper.make_attribute("causal", 0)])
    del node.input[:]
    node.input.extend([query, key, value, "", "", lengths, lengths])


def add_a_node_that_only_the_cpu_has(model):
    name = model.graph.output[0].name
    for node in model.graph.node:
        if node.output[0] == name:
            node.output[0] = f"{name}.before"
    model.graph.node.append(helper.make_node("Mish", [f"{name}.before"], [name]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (split_a_norm, r"encoder\.cuda\.fp16\.onnx as exported has 2 SkipLayerNormalization nodes instead of 3"),
        (attend_by_group_query, r"has 0 MultiHeadAttention nodes instead of 1, 1 GroupQueryAttention.* instead of 0"),
        (leave_a_weight_in_fp32, r"encoder\.cuda\.fp16\.onnx holds .*\.float in fp32"),
        (compute_a_product_in_fp32, r"encoder\.cuda\.fp16\.onnx computes MatMul .* in fp32"),
        (add_a_node_that_only_the_cpu_has, r"encoder\.cuda\.fp16\.onnx has Mish, of which .* no CUDA kernel"),
    ],
)
def test_a_damaged_graph_fails_the_export(pre_norm, traced, tmp_path, monkeypatch, damage, message):
    """A norm unfused, another attention, a weight or a product in fp32, a node without a kernel: found, and named."""
    with pytest.raises(ExportError, match=message):
        write_damaged(pre_norm, traced, tmp_path, monkeypatch, damage)


def test_keys_and_values_in_fp32_fail_the_export(traced):
    """Their type is a part of the signature."""
    model = copy.deepcopy(traced["decoder.cuda.fp16.onnx"])
    fuse(model)
    check("decoder", model)
    model.graph.input[5].type.tensor_type.elem_type = TensorProto.FLOAT
    with pytest.raises(ExportError, match="decoder has past_key_0 in fp32"):
        check("decoder", model)


# What float16 has no room for


def scaled(checkpoint, factor):
    """The checkpoint with one weight of a feed-forward layer so many times as large."""
    model = copy.deepcopy(checkpoint.model)
    model.encoder[0].feed_forward.inner.weight.data *= factor
    return dataclasses.replace(checkpoint, model=model)


def test_a_model_that_overflows_is_refused(pre_norm, tmp_path):
    """Its activations in float16 are infinite in PyTorch, too; the export says where, and writes nothing."""
    large = scaled(pre_norm, 30_000)
    with pytest.raises(ExportError, match=r"encoder\.0\.feed_forward\.\w+ reaches .* for fp16.* beyond 65504"):
        export(large, ExportOptions("m", "1", targets=(FP16,), sources=tuple(texts(10))), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    half = copy.deepcopy(large.model).half()
    source = torch.tensor([encode_source(large.source_tokenizer, "abcdefgh")])
    with torch.inference_mode():
        assert not half.encode(source, torch.tensor([source.shape[1]], dtype=torch.int32)).isfinite().all()


def test_a_model_within_the_range_is_not_refused(pre_norm):
    """Neither as it is, nor with a weight three hundred times as large, of which PyTorch's float16 makes numbers."""
    for checkpoint in (pre_norm, scaled(pre_norm, 300)):
        sources = [encode_source(checkpoint.source_tokenizer, text) for text in texts(10)]
        answers = greedy(checkpoint.model, sources, 24, checkpoint.special)
        check_range(checkpoint.model, sources, answers, checkpoint.special)
        half = copy.deepcopy(checkpoint.model).half()
        with torch.inference_mode():
            for source in sources:
                lengths = torch.tensor([len(source)], dtype=torch.int32)
                assert half.encode(torch.tensor([source]), lengths).isfinite().all()


def test_a_weight_beyond_the_range_is_refused(pre_norm):
    """By name, before anything is traced."""
    large = scaled(pre_norm, 1_000_000)
    with pytest.raises(ExportError, match=r"encoder\.0\.feed_forward\.inner\.weight holds .*; float16 ends at 65504"):
        half_copy(large.model)


def test_a_rounded_copy_shares_what_the_model_shares(pre_norm):
    """One table for embeddings and projection; the model itself stays in fp32."""
    rounded = half_copy(pre_norm.model)
    assert rounded.projection.weight is rounded.source_embedding.weight
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.float16}
    assert {parameter.dtype for parameter in pre_norm.model.parameters()} == {torch.float32}
    torch.testing.assert_close(rounded.projection.weight, pre_norm.model.projection.weight.half())


# What the service says of them


def test_the_service_says_which_provider_graphs_are_for(exported):
    """Each way round: what was asked for, whose the graphs are, and which precisions the bundle has."""
    _, bundle = exported
    with pytest.raises(BundleError, match=r"fp16 graphs are for cuda, and --provider is cpu: .* \(fp32\)"):
        ServedModel.load(bundle.path, EngineConfig(), LIMITS, precision="fp16")
    with pytest.raises(BundleError, match=r"fp32 graphs are for cpu, and --provider is cuda-dry: .* \(fp16\)"):
        ServedModel.load(bundle.path, EngineConfig(), LIMITS, provider="cuda-dry", precision="fp32")
    assert ServedModel.load(bundle.path, EngineConfig(), LIMITS).graphs.precision == "fp32"
    assert ModelBundle.load(bundle.path).manifest == bundle.manifest
