"""The graphs in 8 bits: exact products, blind to the neighbours, and what they cost is measured and limited."""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from dragoman.bundle import ModelBundle
from dragoman.config import EngineConfig
from dragoman.engine.replica import generate_all
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.errors import BundleError
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel, token_rules
from dragoman.types import GenerationRequest
from dragoman_export import quantize
from dragoman_export.calibrate import calibrate
from dragoman_export.cli import export as command
from dragoman_export.errors import ExportError
from dragoman_export.quality import check_measures, compare
from dragoman_export.quantize import Range, linears, quantized_columns, to_int8
from dragoman_export.trace import OPSET, checked
from dragoman_training.checkpoint import load_model
from dragoman_training.decode import encode_sources, greedy

LIMITS = TextLimits(65536, 256)


@pytest.fixture(scope="module")
def checkpoint(reverse_run):
    return load_model(reverse_run)


@pytest.fixture(scope="module")
def bundle(reverse_bundle):
    return ModelBundle.load(reverse_bundle)


def random_sources(count, longest=31, seed=0):
    rng = random.Random(seed)
    return [(*rng.choices(range(4, 12), k=rng.randint(1, longest)), 2) for _ in range(count)]


def run_export(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


# One product


def one_layer(weight, bias):
    """x (M, K) @ weight (K, N) + bias, as the exporter writes it."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", weight.shape[0]])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", weight.shape[1]])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"], name="layer"), helper.make_node("Add", ["p", "b"], ["y"])]
    constants = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")]
    graph = helper.make_graph(nodes, "layer", [x], [y], constants)
    domains = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def run(model, x):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.x64quantprecision", "1")  # as the runner opens every graph
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def layer_and_rows(seed, rows, width, outputs):
    rng = np.random.default_rng(seed)
    weight, bias = rng.standard_normal((width, outputs)), rng.standard_normal(outputs)
    x = rng.standard_normal((rows, width)) * rng.uniform(0.1, 10, (rows, 1))
    return weight.astype(np.float32), bias.astype(np.float32), x.astype(np.float32)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 33), st.sampled_from([8, 32, 96]), st.integers(1, 40))
def test_a_static_product_is_the_integers_product(seed, rows, width, outputs):
    """Against whole numbers in numpy: rounded to the grid, multiplied exactly, scaled back; values beyond are cut."""
    weight, bias, x = layer_and_rows(seed, rows, width, outputs)
    seen = Range(-4.0, 6.0)
    actual = run(to_int8(one_layer(weight, bias), {"layer": seen}), x)
    step, zero = np.float32(10 / 255), round(4 / (10 / 255))
    grid = np.clip(np.rint(x / step) + zero, 0, 255).astype(np.int64) - zero
    columns = np.abs(weight).max(axis=0) / np.float32(127)
    integers = np.rint(weight / columns).astype(np.int64)
    expected = (grid @ integers) * (step * columns).astype(np.float64) + bias
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 33), st.sampled_from([8, 32, 96]), st.integers(1, 40))
def test_a_row_product_is_the_integers_product(seed, rows, width, outputs):
    """The same with the scale that each row has by itself, a row of zeros included."""
    weight, bias, x = layer_and_rows(seed, rows, width, outputs)
    x[0] = 0
    actual = run(to_int8(one_layer(weight, bias), None), x)
    size = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-30))
    grid = np.rint((x / size) / np.float32(1 / 127)).astype(np.int64)
    columns = np.abs(weight).max(axis=0) / np.float32(127)
    expected = (grid @ np.rint(weight / columns).astype(np.int64)) * columns.astype(np.float64) * size / 127 + bias
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(actual[0], bias)


LARGEST_PRODUCTS = """
    import sys
    import numpy as np
    import onnx, onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
    y = session.run(None, {"x": np.full((3, 64), 255, np.float32)})[0]
    print(y.ravel().tolist())
"""


def largest_products(folder):
    """A graph whose sums of two neighbouring products are 64,770, which 16 signed bits do not hold."""
    weight = np.full((64, 16), 127, np.float32)
    model = to_int8(one_layer(weight, np.zeros(16, np.float32)), {"layer": Range(0, 255)})
    path = folder / "largest.onnx"
    onnx.save(model, path)
    return path, [float(64 * 255 * 127)] * 3 * 16


def test_the_largest_products_do_not_saturate(tmp_path):
    """Every activation 255, every weight 127: exact on this CPU, with VNNI or without."""
    path, expected = largest_products(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LARGEST_PRODUCTS), path], capture_output=True, text=True, check=True
    )
    assert eval(done.stdout) == expected


HASWELL = ["qemu-x86_64", "-cpu", "Haswell"]
needs_emulator = pytest.mark.skipif(shutil.which(HASWELL[0]) is None, reason="qemu-user is not installed")


@needs_emulator
def test_the_embedded_model_gives_its_golden_answers_on_a_haswell():
    """Tokens exactly, scores within the tolerance, on an emulated CPU that has AVX2 and no VNNI."""
    command = [*HASWELL, sys.executable, "-m", "dragoman.cli.main", "inspect", "g2p-en", "--verify", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["replayed"] == ["cpu/int8", "the alignment graph"]


@needs_emulator
def test_the_largest_products_do_not_saturate_on_a_haswell(tmp_path):
    """The same on an emulated CPU that has AVX2 and no VNNI."""
    path, expected = largest_products(tmp_path)
    done = subprocess.run(
        [*HASWELL, sys.executable, "-c", textwrap.dedent(LARGEST_PRODUCTS), path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == expected


@pytest.mark.parametrize("shape", [(8, 3), (1, 1), (64, 32)])
def test_a_column_is_at_most_half_a_step_off(shape):
    """Whole numbers of -127..127, and a column of zeros stays one."""
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    weight[:, 0] = 0
    integers, scale = quantized_columns(weight)
    assert integers.dtype == np.int8 and np.abs(integers.astype(int)).max(initial=0) <= 127
    assert (np.abs(integers * scale - weight) <= scale * 0.5001).all()


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.0, 2.0), (-5.0, -1.0), (0.5, 4.0), (0.0, 0.0)])
def test_zero_is_on_the_grid(low, high):
    """So that a relu's zeros and a mask's stay zeros, whatever was seen."""
    scale, zero = Range(low, high).scale_and_zero()
    assert scale > 0
    assert 0 <= int(zero) <= 255
    assert (255 - int(zero)) * scale >= max(high, 0) - scale and int(zero) * scale >= max(-low, 0) - scale


# The whole graph


def of_precision(bundle, precision, num_slots=64):
    graphs = bundle.graph_set("cpu", precision)
    return OrtRunner(OrtModel(bundle.manifest.model, graphs, bundle.read), num_slots, 1 << 28)


@pytest.fixture(scope="module")
def row_bundle(reverse_data, reverse_run):
    """As for a model that comes without any data: random sources, a scale a row."""
    assert run_export(reverse_run, "--precision", "int8", "--out", reverse_data / "row") == 0
    return ModelBundle.load(reverse_data / "row")


@pytest.mark.parametrize("activations", ["static", "row"])
def test_batch_size_order_and_neighbours_change_no_bit(bundle, row_bundle, activations):
    """Tokens and scores of a row alone equal those in any batch: sizes 1 to 64, shuffled, among other requests."""
    chosen = bundle if activations == "static" else row_bundle
    assert chosen.graph_set("cpu", "int8").activations == activations
    rules = token_rules(chosen.manifest)
    requests = [GenerationRequest(source, 24, return_scores=True) for source in random_sources(80)]

    def answers(order, num_slots):
        runner = of_precision(chosen, "int8", num_slots)
        outcomes = generate_all(runner, rules, [requests[i] for i in order], EngineConfig())
        return {index: outcome.hypotheses for index, outcome in zip(order, outcomes, strict=True)}

    alone = {i: answers([i], 1)[i] for i in range(0, 80, 4)}
    rng = random.Random(5)
    for num_slots in (1, 2, 3, 8, 17, 64):
        order = list(range(80))
        rng.shuffle(order)
        together = answers(order, num_slots)
        assert {i: together[i] for i in alone} == alone


def test_an_encoders_rows_do_not_depend_on_their_neighbours(bundle):
    """Sources of unlike lengths, padded beside each other: the same keys and values, bit for bit."""
    runner = of_precision(bundle, "int8")
    sources = random_sources(40, seed=2)
    runner.reserve(32, 32)
    runner.admit(sources, [[slot] for slot in range(40)])
    together = [runner.kv.row(slot) for slot in range(40)]
    for index in (0, 7, 23, 39):
        runner.admit([sources[index]], [[0]])
        for name, array in runner.kv.row(0).items():
            assert np.array_equal(array, together[index][name]), name


def test_w8_says_that_it_is_not_batch_invariant(bundle):
    """The manifest of each precision says whether it is."""
    assert {g.precision: g.batch_invariant for g in bundle.manifest.graphs} == {"fp32": True, "int8": True, "w8": False}


def test_static_ranges_are_those_of_the_decode_loop(checkpoint):
    """Watched at every step of the cached greedy loop, source by source, where nothing is padded."""
    sources = random_sources(30, longest=9)
    answers = greedy(checkpoint.model, sources, 32, checkpoint.special)
    ranges = calibrate(checkpoint.model, sources, answers, checkpoint.special)
    seen = {}

    def watch(name):
        def see(_module, inputs):
            low, high = float(inputs[0].min()), float(inputs[0].max())
            old = seen.get(name, (low, high))
            seen[name] = min(old[0], low), max(old[1], high)

        return see

    layers = [(name, m) for name, m in checkpoint.model.named_modules() if isinstance(m, torch.nn.Linear)]
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in layers]
    with torch.inference_mode():
        for source, answer in zip(sources, answers, strict=True):
            lengths, memory, past = encode_sources(checkpoint.model, [source], checkpoint.special)
            past = [
                type(layer)(*(torch.zeros(1, *half.shape[1:2], 40, half.shape[3]) for half in layer)) for layer in past
            ]
            for position, token in enumerate([checkpoint.special.decoder_start, *answer.tokens]):
                cached = torch.tensor([position], dtype=torch.int32)
                _, past = checkpoint.model.step(torch.tensor([token]), cached, past, memory, lengths)
    for handle in handles:
        handle.remove()
    assert set(ranges) == set(seen)
    for name, (low, high) in seen.items():
        assert ranges[name].low == pytest.approx(low, abs=1e-4)
        assert ranges[name].high == pytest.approx(high, abs=1e-4)


def traced_decoder(bundle):
    return onnx.load_from_string(bundle.read("decoder.cpu.fp32.onnx"))


def test_a_layer_without_a_range_fails_the_export(bundle):
    """It is named; nothing is guessed."""
    decoder = traced_decoder(bundle)
    ranges = {linear.name: Range(-1, 1) for linear in linears(decoder)}
    del ranges["decoder.0.feed_forward.outer"]
    with pytest.raises(ExportError, match=r"saw no input of decoder\.0\.feed_forward\.outer"):
        to_int8(decoder, ranges)


def left_in_fp32(bundle):
    """The decoder of int8 with one product of floats."""
    declaration = bundle.graph_set("cpu", "int8").decoder
    model = onnx.load(bundle.file(declaration.file))
    fp32 = traced_decoder(bundle)
    linear = next(linears(fp32))
    node = next(node for node in model.graph.node if node.output[0] == linear.output)
    weight = next(tensor for tensor in fp32.graph.initializer if tensor.name == linear.weight)
    model.graph.initializer.append(weight)
    product = helper.make_node("MatMul", [linear.input, linear.weight], [linear.product])
    addition = helper.make_node("Add", [linear.product, linear.bias], [linear.output])
    at = list(model.graph.node).index(node)
    model.graph.node.remove(node)
    model.graph.node.insert(at, addition)
    model.graph.node.insert(at, product)
    return declaration, model


def test_a_weight_left_in_fp32_fails_the_export(bundle, tmp_path):
    """One layer that a quantizer skipped: both kinds are counted, and named."""
    declaration, model = left_in_fp32(bundle)
    message = (
        r"decoder\.cpu\.int8\.onnx as exported has 1 MatMul\+Gemm\+FusedMatMul nodes instead of 0, "
        r"8 MatMulIntegerToFloat nodes instead of 9"
    )
    with pytest.raises(ExportError, match=message):
        checked(declaration.file, model, declaration.required_nodes, tmp_path)


def test_one_scale_for_all_rows_fails_the_export(bundle, tmp_path):
    """DynamicQuantizeMatMul would tie a row to its neighbours."""
    declaration = bundle.graph_set("cpu", "int8").decoder
    model = onnx.load(bundle.file(declaration.file))
    node = next(node for node in model.graph.node if node.op_type == "MatMulIntegerToFloat")
    x = node.input[0].removesuffix(".quantized")
    dynamic = helper.make_node(
        "DynamicQuantizeMatMul",
        [x, node.input[1], node.input[3], "", node.input[6]],
        node.output,
        domain="com.microsoft",
    )
    at = list(model.graph.node).index(node)
    model.graph.node.remove(node)
    model.graph.node.insert(at, dynamic)
    with pytest.raises(ExportError, match=r"1 DynamicQuantizeMatMul\+DynamicQuantizeLinear nodes instead of 0"):
        checked(declaration.file, model, declaration.required_nodes, tmp_path)


def test_every_weight_is_stored_once_in_a_byte(bundle, checkpoint):
    """The decoder's table and its projection, which are tied, are one; no matrix of floats is left."""
    model = onnx.load(bundle.file("decoder.cpu.int8.onnx"))
    of_encoder = ("encoder", "source_embedding", "decoder.0.cross_attention.key", "decoder.0.cross_attention.value")
    matrices = [p for n, p in checkpoint.model.named_parameters() if p.ndim == 2 and not n.startswith(of_encoder)]
    stored = [t for t in model.graph.initializer if len(t.dims) == 2]
    assert {t.data_type for t in stored} == {TensorProto.INT8}
    assert sum(len(numpy_helper.to_array(t).ravel()) for t in stored) == sum(p.numel() for p in matrices)


def test_fp32_tied_embeddings_are_stored_once(bundle, checkpoint):
    """No more floats than parameters, and little besides."""
    model = checkpoint.model
    decoder = sum(p.numel() for n, p in model.named_parameters() if not n.startswith(("encoder", "source_embedding")))
    assert len(bundle.read("decoder.cpu.fp32.onnx")) < 1.1 * 4 * decoder + 30_000


def test_a_table_left_in_fp32_fails_the_export(bundle):
    """One that is read by something unknown is named."""
    decoder = traced_decoder(bundle)
    matrices = {tensor.name for tensor in decoder.graph.initializer if len(tensor.dims) == 2}
    (gather,) = [n for n in decoder.graph.node if n.op_type == "Gather" and n.input[0] in matrices]
    gather.op_type = "GatherElements"
    with pytest.raises(ExportError, match=rf"{re.escape(gather.input[0])} would stay in fp32"):
        to_int8(decoder, None)


# What it costs


def test_the_manifest_has_what_each_precision_costs(bundle):
    """On the test set, beside PyTorch's own figures, and the comparison of answers."""
    for precision in ("fp32", "int8", "w8"):
        graphs = bundle.graph_set("cpu", precision)
        assert graphs.quality["num_lines"] == 300
        assert graphs.quality["word_error_rate"] <= graphs.quality["word_error_rate_of_pytorch"] + 0.003
        assert graphs.parity["num_greedy_equal"] >= 0.95 * graphs.parity["num_greedy_sources"]
        assert 0 < graphs.parity["relative_logit_difference"] < {"fp32": 1e-5}.get(precision, 0.1)


@pytest.mark.parametrize(
    ("graphs", "pytorch", "words"),
    [
        ({"bleu": 30.0, "word_error_rate": 0.9}, {"bleu": 30.3, "word_error_rate": 0.9}, r"0\.3 BLEU .* at most 0\.2"),
        ({"word_error_rate": 0.31}, {"word_error_rate": 0.3}, r"0\.01 word error rate .* at most 0\.003"),
    ],
)
def test_a_precision_that_costs_too_much_is_refused(graphs, pytorch, words):
    """The loss, the limit and the remedy are named."""
    with pytest.raises(ExportError, match=rf"int8 costs {words} is allowed: try --activations row"):
        compare(graphs, pytorch, "int8")


def test_a_test_set_that_can_measure_nothing_is_refused():
    """Where PyTorch itself has no line right, the targets are hardly those of the sources."""
    with pytest.raises(ExportError, match="are its targets those of its sources"):
        check_measures({"word_error_rate": 1.0})


def test_a_precision_that_costs_little_is_recorded():
    """Both figures stand in the manifest; to be better than PyTorch is no fault."""
    found = compare({"bleu": 30.2, "word_error_rate": 0.8}, {"bleu": 30.1, "word_error_rate": 0.9}, "int8")
    assert found == {
        "bleu": 30.2,
        "word_error_rate": 0.8,
        "bleu_of_pytorch": 30.1,
        "word_error_rate_of_pytorch": 0.9,
    }


def test_gibberish_fails_the_export(reverse_data, reverse_run, tmp_path, capsys, monkeypatch):
    """Weights of three values alone: what they cost is named, with the first layer that it is too much for."""
    monkeypatch.setattr(quantize, "LEVELS", 1)
    arguments = ["--precision", "int8", "--sources", reverse_data / "dev.source", "--out", tmp_path / "bundle"]
    assert run_export(reverse_run, *arguments) == 2
    message = r"what encoder\.0\.\S+ reads differs from PyTorch's by [\d.]+ of its size; at most 0\.2 is allowed"
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_without_data_quality_is_unmeasured_and_scales_are_the_rows(row_bundle):
    """Random sources take the place of a dev set; nothing is claimed of a test set."""
    (graphs,) = row_bundle.manifest.graphs
    assert (graphs.precision, graphs.activations) == ("int8", "row")
    assert graphs.quality == {"status": "unmeasured"}
    assert graphs.encoder.required_nodes["ReduceMax"] == graphs.encoder.required_nodes["QuantizeLinear"] == 5


def test_calibration_sources_may_be_others(reverse_data, reverse_run, tmp_path):
    """With a file to calibrate on, scales are static even without sources to compare on."""
    arguments = ["--precision", "int8", "--calibration", reverse_data / "dev.source", "--out", tmp_path / "bundle"]
    assert run_export(reverse_run, *arguments) == 0
    assert ModelBundle.load(tmp_path / "bundle").manifest.graphs[0].activations == "static"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--precision", "int4"], "no precision 'int4': choose among fp32, int8, w8"),
        (["--precision", "fp32,fp32"], "'fp32,fp32' names a precision twice"),
        (["--precision", "w8", "--activations", "static"], "--activations static needs sources to calibrate on"),
        (["--precision", "fp32,fp16", "--activations", "row"], "--activations was given without a precision that has"),
        (["--calibration", "dev.source"], "--calibration was given without a precision that has int8 activations"),
        (
            ["--precision", "int8", "--activations", "row", "--calibration", "dev.source"],
            "--calibration was given, and --activations row calibrates nothing",
        ),
    ],
)
def test_impossible_options_are_refused(reverse_run, tmp_path, capsys, arguments, words):
    """In one line, before anything is traced."""
    assert run_export(reverse_run, *arguments, "--out", tmp_path / "bundle") == 2
    assert words in capsys.readouterr().err


# Serving


@pytest.mark.parametrize(("asked", "got"), [(None, "fp32"), ("int8", "int8"), ("w8", "w8")])
async def test_a_server_runs_the_first_precision_or_the_one_that_is_asked_for(bundle, asked, got):
    """And proves it by its own golden set."""
    served = ServedModel.load(bundle.path, EngineConfig(num_slots=8), LIMITS, precision=asked)
    assert served.graphs.precision == got
    await served.close()


def test_a_precision_that_the_bundle_lacks_is_refused(row_bundle):
    """Those that it has are named."""
    with pytest.raises(BundleError, match=r"no graphs for cpu/fp32; it has cpu/int8"):
        ServedModel.load(row_bundle.path, EngineConfig(), LIMITS, precision="fp32")
