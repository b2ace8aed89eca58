"""An export proves itself, and one that is wrong is not written."""

import dataclasses
import json
import random
import re
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from dragoman.bundle import GraphSet, ModelBundle, count_of, save_bundle
from dragoman.config import EngineConfig
from dragoman.engine.replica import generate_all
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.errors import BundleError
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel, load_tokenizers, token_rules
from dragoman.types import GenerationRequest
from dragoman_export.counts import FLOAT_PRODUCTS, Products
from dragoman_export.errors import ExportError
from dragoman_export.graphs import DecoderGraph, EncoderGraph
from dragoman_export.targets import FP32
from dragoman_export.trace import checked, trace
from dragoman_export.verify import (
    References,
    compare_activations,
    count_beam_ties,
    find_ties,
    generate,
    reference_activations,
    run_targets,
    verify,
)
from dragoman_training.attention import TorchAttention
from dragoman_training.beam import BeamOptions, beam_search_all
from dragoman_training.checkpoint import load_model
from dragoman_training.data import encode_pairs, make_batch
from dragoman_training.decode import greedy

LIMITS = TextLimits(65536, 256)


@pytest.fixture(scope="module")
def checkpoint(reverse_run):
    return load_model(reverse_run)


@pytest.fixture(scope="module")
def bundle(reverse_bundle):
    return ModelBundle.load(reverse_bundle)


@pytest.fixture(scope="module")
def rules(bundle):
    return token_rules(bundle.manifest)


def runner_of(bundle, num_slots=16, content=None):
    graphs = bundle.manifest.graphs[0]
    return OrtRunner(OrtModel(bundle.manifest.model, graphs, content or bundle.read), num_slots, 1 << 28)


@pytest.fixture
def runner(bundle):
    return runner_of(bundle)


def random_sources(count, longest=31, seed=0):
    rng = random.Random(seed)
    return [(*rng.choices(range(4, 12), k=rng.randint(1, longest)), 2) for _ in range(count)]


def resaved(bundle, path, manifest=None, **files):
    """The bundle with other content under correct hashes: what only the golden set can find."""
    content = {name: bundle.read(name) for name in bundle.manifest.files}
    return save_bundle(manifest or bundle.manifest, {**content, **files}, path)


def write(module, file, folder):
    """A module's graph, checked."""
    return checked(file, trace(module, file), module.required_nodes(Products(FLOAT_PRODUCTS)), folder)


def run_logits(runner, sources, targets, start):
    return [activations.logits for activations in run_targets(runner, sources, targets, start)]


def max_logit_difference(checkpoint, runner, rules, sources, targets):
    return compare_activations(
        checkpoint.model, runner, sources, targets, rules.decoder_start, FP32.tolerance
    ).max_logit


def test_the_manifest_tells_what_was_checked(bundle, checkpoint):
    """Counts, parity, limits, special ids and provenance stand in the manifest; no path of the machine does."""
    graphs = bundle.manifest.graphs[0]
    for graph, fused in (
        (graphs.encoder, {"GroupQueryAttention(encoder)": 1, "LayerNormalization": 3, FLOAT_PRODUCTS: 8}),
        (graphs.decoder, {"GroupQueryAttention(self)": 1, "GroupQueryAttention(cross)": 1, FLOAT_PRODUCTS: 9}),
    ):
        for nodes in (graph.exported_nodes, graph.optimized_nodes):
            assert {kind: count_of(kind, nodes) for kind in fused} == fused
            assert "Softmax" not in nodes
        assert graph.required_nodes["Softmax"] == 0
    assert graphs.parity["max_logit_difference"] < 1e-3 and graphs.parity["num_greedy_sources"] == 300
    assert bundle.manifest.limits.max_source_tokens == checkpoint.max_source_tokens
    assert bundle.manifest.provenance["torch"] == torch.__version__
    for name in bundle.manifest.files:
        assert str(checkpoint.folder.parent.parent.parent).encode() not in bundle.read(name)
        assert b"site-packages" not in bundle.read(name)


def test_the_decoder_starts_with_one_constant_everywhere(bundle, checkpoint, reverse_data):
    """Training batches, the checkpoint, the manifest and the engine agree on the first decoder input."""
    words = (reverse_data / "dev.source").read_text().split("\n")[:3]
    targets = (reverse_data / "dev.target").read_text().split("\n")[:3]
    pairs = list(encode_pairs(words, targets, checkpoint.source_tokenizer, checkpoint.target_tokenizer, 32, 32))
    start = bundle.manifest.special_ids.decoder_start
    assert make_batch(pairs).target[:, 0].tolist() == [start] * 3
    assert checkpoint.special.decoder_start == start
    assert token_rules(bundle.manifest).sequence(GenerationRequest((4, 2), 1)).hypotheses[0].next_input == start
    assert bundle.manifest.tokenizers.target.start == (start,)


def test_logits_equal_pytorch_on_ragged_rows(runner, checkpoint, rules):
    """Lengths 1, 2, max - 1 and max side by side, targets of unlike lengths: every step within 1e-4."""
    sources = [(2,), (5, 2), *random_sources(20), (*[4] * 30, 2), (*[7] * 31, 2)]
    targets = [s[:-1] for s in random_sources(len(sources), longest=30, seed=1)]
    assert max_logit_difference(checkpoint, runner, rules, sources, targets) < 1e-4


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [1, 2, 5, 32])
def test_every_batch_and_length_runs(runner, checkpoint, rules, batch, length):
    """No axis was frozen by the export: a grid of rows and source lengths gives PyTorch's logits."""
    sources = [(*[4 + row] * (length - 1), 2) for row in range(batch)]
    assert max_logit_difference(checkpoint, runner, rules, sources, [(5, 6)] * batch) < 1e-4


def test_a_rows_logits_do_not_depend_on_its_neighbours(bundle, rules):
    """One source alone, beside a short one, beside the longest: the same logits, and no NaN from any padding."""
    source, target = (6, 9, 4, 2), (5, 6, 7)
    runner = runner_of(bundle)
    (alone,) = run_logits(runner, [source], [target], rules.decoder_start)
    assert np.isfinite(alone).all()
    for others in ([(2,)], [(*[8] * 31, 2)], random_sources(15)):
        beside = run_logits(
            runner_of(bundle), [*others, source], [(4,) * 9] * len(others) + [target], rules.decoder_start
        )
        np.testing.assert_allclose(beside[-1], alone, atol=1e-5)


def encoder_outputs(bundle, lengths, size=8):
    """The encoder's outputs for rows of the same tokens and the given lengths, straight from the graph."""
    graphs = bundle.manifest.graphs[0]
    session = OrtModel(bundle.manifest.model, graphs, bundle.read).encoder
    source = np.tile(np.arange(4, 4 + size), (len(lengths), 1))
    feeds = {"source": source, "source_lengths": np.array(lengths, np.int32)}
    return [array.copy() for array in session.run(None, feeds)]


@pytest.mark.parametrize("middle", [0, 1, 3, 8])
def test_a_masked_row_gives_no_nan_and_leaves_its_neighbours_alone(bundle, middle):
    """Three rows, the one in the middle fully masked, of length 1, or longer: all finite, the others as without it."""
    with_row = encoder_outputs(bundle, [3, middle, 5])
    without = encoder_outputs(bundle, [3, 5])
    for a, b in zip(with_row, without, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a[0, :, :3], b[0, :, :3], atol=1e-6)
        np.testing.assert_allclose(a[2, :, :5], b[1, :, :5], atol=1e-6)


def test_fused_attention_equals_unfused_for_every_mask_that_can_be_made(bundle, checkpoint):
    """The only mask is a length, on the right: the fused encoder equals PyTorch's on the real positions of each."""
    lengths = list(range(1, 9))
    fused = encoder_outputs(bundle, lengths)
    source = torch.tensor(np.tile(np.arange(4, 12), (8, 1)))
    with torch.inference_mode():
        memory = checkpoint.model.encode(source, torch.tensor(lengths, dtype=torch.int32))
        unfused = [tensor.numpy() for pair in checkpoint.model.keys_values(memory) for tensor in pair]
    for a, b in zip(fused, unfused, strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(a[row, :, :length], b[row, :, :length], atol=1e-4)


def test_what_a_slot_held_before_leaves_no_trace(runner, rules):
    """A slot used by a long request and then by a short one gives what a fresh slot gives."""
    source, target = (6, 9, 2), (5, 6, 7)
    (fresh,) = run_logits(runner, [source], [target], rules.decoder_start)
    run_logits(runner, [(*[8] * 31, 2)], [(4,) * 31], rules.decoder_start)
    for array in (*runner.kv.cross_keys, *runner.kv.cross_values, *runner.kv.self_keys, *runner.kv.self_values):
        array[0] = np.where(array[0] == 0, 1e9, array[0])  # make what is beyond the lengths loud
    (used,) = run_logits(runner, [source], [target], rules.decoder_start)
    assert np.array_equal(fresh, used)


def test_a_step_writes_its_own_rows_in_place(runner, rules):
    """A step over three of four rows changes one position of those, nothing of the fourth, and no address."""
    sources = random_sources(4, longest=6)
    runner.admit(sources, [[slot] for slot in range(4)])
    runner.decode(np.array([rules.decoder_start] * 4))
    arrays = [*runner.kv.self_keys, *runner.kv.self_values]
    before = [(array.ctypes.data, array.copy()) for array in arrays]
    runner.decode(np.array([5, 6, 7]))
    for array, (address, old) in zip(arrays, before, strict=True):
        assert array.ctypes.data == address
        changed = np.argwhere((array != old).any(axis=(1, 3)))  # (slot, position)
        assert changed.tolist() == [[0, 1], [1, 1], [2, 1]]
    assert runner.kv.cached[:4].tolist() == [2, 2, 2, 1]


def test_growing_the_capacity_in_flight_changes_no_answer(bundle, rules):
    """A row that has decoded three tokens goes on the same after the buffers were replaced by larger ones."""
    runners = [runner_of(bundle), runner_of(bundle)]
    steps = []
    for runner in runners:
        runner.admit([(6, 9, 4, 2)], [[0]])
        for token in (rules.decoder_start, 5, 6):
            runner.decode(np.array([token]))
        if runner is runners[1]:
            runner.reserve(200, 200)
        steps.append(runner.decode(np.array([7])).copy())
    np.testing.assert_allclose(steps[0], steps[1], atol=1e-6)


def test_greedy_output_is_pytorchs(runner, checkpoint, rules):
    """300 sources, continuously batched in 16 slots: PyTorch's tokens; scores within 1e-4."""
    sources = random_sources(300, longest=10)
    references = greedy(checkpoint.model, sources, 32, checkpoint.special)
    outcomes = generate_all(
        runner, rules, [GenerationRequest(s, 32, return_scores=True) for s in sources], EngineConfig()
    )
    for outcome, reference in zip(outcomes, references, strict=True):
        (hypothesis,) = outcome.hypotheses
        assert hypothesis.tokens == tuple(reference.tokens)
        assert hypothesis.finish_reason.value == reference.finish_reason
        assert hypothesis.score == pytest.approx(reference.score, abs=1e-4)


def test_two_traces_are_byte_equal(checkpoint, bundle, tmp_path):
    """The same checkpoint gives the same graphs, in this process as in the one that exported."""
    for module, graph in ((EncoderGraph, "encoder"), (DecoderGraph, "decoder")):
        file = getattr(bundle.manifest.graphs[0], graph).file
        write(module(checkpoint.model), file, tmp_path)
        assert (tmp_path / file).read_bytes() == bundle.read(file)
    checkpoint.model.use_attention(TorchAttention())


class UnfusedEncoder(EncoderGraph):
    def forward(self, source, source_lengths):
        self.model.use_attention(TorchAttention())
        memory = self.model.encode(source, source_lengths)
        return [t.contiguous() for pair in self.model.keys_values(memory) for t in pair]


def test_attention_left_unfused_fails_the_export(checkpoint, tmp_path):
    """A module that computes attention itself has the wrong node counts, and the message says so."""
    message = r"encoder\.onnx as exported has 0 GroupQueryAttention\(encoder\) nodes instead of 1, .*1 Attention nodes"
    with pytest.raises(ExportError, match=message):
        write(UnfusedEncoder(checkpoint.model), "encoder.onnx", tmp_path)


def exported_elsewhere(run, dev, folder, *options):
    """The run copied to another folder, and exported there from within that folder."""
    shutil.copytree(run, folder / "run", symlinks=True)
    for side in ("source", "target"):
        shutil.copy(dev.with_suffix(f".{side}"), folder / f"words.{side}")
    command = [sys.executable, "-m", "dragoman.cli.main", "export", "run", "--out", "reverse"]
    command += ["--precision", "fp32,int8,w8", "--sources", "words.source", "--test", "words.source", "words.target"]
    return subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def test_the_same_checkpoint_gives_the_same_bundle_from_anywhere(bundle, reverse_run, reverse_data, tmp_path):
    """Copied, under another name, over an older bundle: every byte is the same but for the moment of the export."""
    resaved(bundle, tmp_path / "reverse", dataclasses.replace(bundle.manifest, version="older"))
    done = exported_elsewhere(reverse_run.resolve(), reverse_data / "dev.source", tmp_path, "--force")
    assert done.returncode == 0, done.stderr
    for graph in ("encoder", "decoder"):
        header = rf"{graph}\.cpu\.fp32\.onnx +required +exported +optimised"
        assert re.search(rf"^{header}$", done.stdout, re.MULTILINE)
    assert re.search(r"^  GroupQueryAttention\(self\) +1 +1 +1$", done.stdout, re.MULTILINE)
    other = ModelBundle.load(tmp_path / "reverse")
    assert {name: other.read(name) for name in other.manifest.files} == {
        name: bundle.read(name) for name in bundle.manifest.files
    }
    then = dataclasses.replace(other.manifest, created=bundle.manifest.created)
    assert then.to_json().encode() == bundle.read("manifest.json")


def damaged(bundle, graph, change):
    """One graph file with its weights changed."""
    file = getattr(bundle.manifest.graphs[0], graph).file
    model = onnx.load_from_string(bundle.read(file))
    weights = [w for w in model.graph.initializer if len(w.dims) == 2 and w.data_type == onnx.TensorProto.FLOAT]
    array = numpy_helper.to_array(weights[-1]).copy()
    change(array)
    weights[-1].CopyFrom(numpy_helper.from_array(array, weights[-1].name))
    return file, model.SerializeToString()


@pytest.mark.parametrize("graph", ["encoder", "decoder"])
def test_a_wrong_weight_fails_the_comparison(bundle, checkpoint, rules, graph):
    """One number of one weight off by a half: the export stops before anything is written."""
    file, content = damaged(bundle, graph, lambda array: array.__setitem__((0, 0), array[0, 0] + 0.5))
    files = {name: bundle.read(name) for name in bundle.manifest.files} | {file: content}
    runner = runner_of(bundle, content=files.__getitem__)
    sources = random_sources(40, longest=8)
    references = greedy(checkpoint.model, sources, 32, checkpoint.special)
    with pytest.raises(ExportError, match="logits differ"):
        verify(checkpoint.model, runner, rules, sources, References(references, {}), (2,), 32, 32, FP32.tolerance)


def test_other_tokens_fail_the_comparison(checkpoint, runner, rules):
    """A reference that differs in one token without a tie is an error, and the message names source and token."""
    sources = [(4, 5, 6, 2), (7, 8, 2)]
    references = greedy(checkpoint.model, sources, 32, checkpoint.special)
    references[1] = dataclasses.replace(references[1], tokens=[references[1].tokens[0], 4])
    with pytest.raises(ExportError, match="source 1: token 1 is"):
        find_ties(checkpoint.model, rules, sources, references, generate(runner, rules, sources, 32))


def test_beams_are_compared_with_pytorch(bundle):
    """Every source's best of a beam of four: equal, and the manifest says of how many."""
    parity = bundle.manifest.graphs[0].parity
    assert parity["num_beam_sources"] == parity["num_beam_equal"] + parity["num_beam_ties"] == 300


def test_another_beam_fails_the_comparison(checkpoint, runner, rules):
    """An answer that is worse than PyTorch's best is an error, and the message has both."""
    sources = [(4, 5, 6, 2), (7, 8, 2)]
    options = BeamOptions(beam_size=4, max_new_tokens=32)
    found = beam_search_all(checkpoint.model, sources, options, checkpoint.special)
    references = [best for best, *_ in found]
    answers = generate(runner, rules, sources, 32, 4)
    assert count_beam_ties(references, answers) == 0
    answers[1] = dataclasses.replace(answers[1], tokens=(4,), score=answers[1].score - 0.1)
    with pytest.raises(ExportError, match="source 1: the best of a beam of 4 has the score"):
        count_beam_ties(references, answers)


@pytest.mark.parametrize("graph", ["encoder", "decoder"])
def test_a_server_refuses_a_bundle_that_does_not_reproduce_its_golden_set(bundle, tmp_path, graph):
    """Weights changed under correct hashes: the start-up self-test finds it and names the golden set."""
    file, content = damaged(bundle, graph, lambda array: array.__imul__(-1))
    other = resaved(bundle, tmp_path / "other", **{file: content})
    with pytest.raises(BundleError, match=r"golden\.cpu\.fp32\.jsonl"):
        ServedModel.load(other.path, EngineConfig(), LIMITS)


def test_a_server_refuses_a_wrong_decoder_start(bundle, tmp_path):
    """A special id changed under a correct checksum: found by the golden set."""
    ids = dataclasses.replace(bundle.manifest.special_ids, decoder_start=9)
    other = resaved(bundle, tmp_path / "other", dataclasses.replace(bundle.manifest, special_ids=ids))
    with pytest.raises(BundleError, match=r"golden\.cpu\.fp32\.jsonl"):
        ServedModel.load(other.path, EngineConfig(), LIMITS)


def test_a_server_refuses_a_graph_with_another_signature(bundle, tmp_path):
    """Encoder and decoder swapped: the signature check names the file."""
    graphs = bundle.manifest.graphs[0]
    swapped = {graphs.encoder.file: bundle.read(graphs.decoder.file)}
    other = resaved(bundle, tmp_path / "other", **swapped)
    with pytest.raises(BundleError, match=rf"{graphs.encoder.file}: the manifest declares inputs"):
        ServedModel.load(other.path, EngineConfig(), LIMITS)


def test_a_server_refuses_the_tokenizer_of_another_model(bundle, tmp_path):
    """One token more than it was trained with: refused by size, by name."""
    data = json.loads(bundle.read("target.tokenizer.json"))
    data["tokens"].append("Z")
    other = resaved(bundle, tmp_path / "other", **{"target.tokenizer.json": json.dumps(data).encode()})
    with pytest.raises(BundleError, match=r"target\.tokenizer\.json has 13 tokens, the manifest says 12"):
        load_tokenizers(other)


def test_the_golden_set_is_decided_at_every_step(bundle, checkpoint, rules):
    """Every golden answer has a margin of 0.1 at each step, and PyTorch gives it."""
    graphs: GraphSet = bundle.manifest.graphs[0]
    cases = list(bundle.golden(graphs))
    assert len(cases) == 32
    for case in cases:
        logits = reference_activations(checkpoint.model, case.source, case.tokens, rules.decoder_start).logits.copy()
        logits[:, list(rules.never_generated)] = -np.inf
        best_two = np.sort(logits, axis=1)[:, -2:]
        assert (best_two[:, 1] - best_two[:, 0]).min() >= 0.1
        assert logits.argmax(axis=1).tolist() == [*case.tokens, rules.eos]


def test_an_export_never_overwrites(reverse_data, reverse_bundle):
    """A second export to the same folder is refused in one line and leaves the first."""
    import argparse

    from dragoman_export.cli import export

    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    copy = shutil.copytree(reverse_bundle, reverse_data / "kept")
    status = export.run(
        parser.parse_args(
            [str(reverse_data / "run"), "--sources", str(reverse_data / "dev.source"), "--out", str(copy)]
        )
    )
    assert status == 2
    ModelBundle.load(copy)
