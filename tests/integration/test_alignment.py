"""From a trained model to aligned answers; and a graph that shows another attention is not exported."""

import asyncio
import random

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from tests.integration.untrained import SHAPES, untrained

from dragoman.bundle import Alignment, ModelBundle
from dragoman.config import EngineConfig
from dragoman.engine.aligner import OrtForcedPass
from dragoman.engine.runner import open_graph
from dragoman.errors import ModelUnsupportedError
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel
from dragoman.types import DecodingOptions
from dragoman_export import alignment_graph
from dragoman_export.alignment import Choice, Example, compare, cross_attentions, write_alignment
from dragoman_export.alignment_graph import AlignmentGraph
from dragoman_export.counts import FLOAT_PRODUCTS, Products
from dragoman_export.errors import ExportError
from dragoman_export.exporter import ExportOptions, export
from dragoman_export.graphs import EncoderGraph
from dragoman_export.targets import FP32, INT8, Tolerance
from dragoman_export.trace import checked, trace
from dragoman_training import coverage
from dragoman_training.attention import TorchAttention
from dragoman_training.checkpoint import load_model
from dragoman_training.config import ModelConfig
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import SpecialIds

LIMITS = TextLimits(65536, 256)
SCORED = DecodingOptions(return_scores=True)
ALIGNED = DecodingOptions(return_scores=True, return_alignment=True)


@pytest.fixture(scope="module")
def words(reverse_data):
    return (reverse_data / "dev.source").read_text().split()


@pytest.fixture(scope="module", params=[FP32, INT8], ids=lambda target: target.precision)
def aligned(aligned_export, request):
    """The toy model with an alignment graph."""
    return aligned_export(request.param)


async def answers(bundle, texts, options, *, together):
    model = ServedModel.load(bundle.path, EngineConfig(), LIMITS)
    model.start()
    try:
        if together:
            return await asyncio.gather(*(model.pipeline.generate(text, options) for text in texts))
        return [await model.pipeline.generate(text, options) for text in texts]
    finally:
        await model.close()


def links(result):
    return [(p.source_token, p.target_token) for p in result.segments[0].hypotheses[0].alignment]


async def test_a_model_that_reverses_words_is_aligned_in_reverse(aligned, words):
    """Letter i of n became letter n - 1 - i, and mostly the alignment says so, down to the character."""
    texts = [word for word in words[100:] if len(set(word)) > 2][:60]
    right = total = 0
    for text, result in zip(texts, await answers(aligned, texts, ALIGNED, together=True), strict=True):
        (segment,) = result.segments
        assert segment.source_tokens == tuple(text)
        for point in segment.hypotheses[0].alignment:
            start, end = point.source_span
            assert text[start:end] == segment.source_tokens[point.source_token]
            right += point.source_token == len(text) - 1 - point.target_token
            total += 1
    assert total > 200 and right / total > 0.9, f"{right} of {total}"


async def test_asking_changes_no_answer_and_company_no_alignment(aligned, words):
    """Bit for bit: with and without the option, alone and in company."""
    texts = words[100:140]
    plain = await answers(aligned, texts, SCORED, together=True)
    together = await answers(aligned, texts, ALIGNED, together=True)
    alone = await answers(aligned, texts, ALIGNED, together=False)
    for one, other, lone in zip(plain, together, alone, strict=True):
        a, b, c = (result.segments[0].hypotheses[0] for result in (one, other, lone))
        assert a.alignment == () and len(b.alignment) == len(b.tokens)
        assert (a.tokens, a.score, a.token_scores) == (b.tokens, b.score, b.token_scores)
        if b.tokens == c.tokens:
            assert b.alignment == c.alignment
    assert sum(links(other) == links(lone) for other, lone in zip(together, alone, strict=True)) >= len(texts) - 1


async def test_a_bundle_without_an_alignment_graph_says_how_to_get_one(reverse_bundle):
    """At the request, by name of the option."""
    with pytest.raises(ModelUnsupportedError, match=r"return_alignment is set.*--alignment"):
        await answers(ModelBundle.load(reverse_bundle), ["abc"], ALIGNED, together=False)


def test_the_bundle_tells_what_was_chosen_and_why(aligned):
    """A graph with a softmax for each layer that is shown; letters copied as capitals decided; what rounding costs."""
    alignment, (graphs,) = aligned.manifest.alignment, aligned.manifest.graphs
    assert alignment.basis == "copied" and alignment.num_tokens > 100 and alignment.score > 0.9
    assert alignment.graph.required_nodes["Softmax"] == 1  # the one layer is the last one, too
    assert alignment.graph.file == f"alignment.cpu.{graphs.precision}.onnx"
    assert alignment.max_weight_difference < (1e-5 if graphs.precision == "fp32" else 0.2)
    assert alignment.agreement > 0.98


def test_no_weight_of_a_bundle_in_8_bits_is_stored_twice(aligned, reverse_run):
    """One byte each, whichever graphs of the bundle it is in: encoder, decoder, alignment graph, or all."""
    (graphs,) = aligned.manifest.graphs
    places = {}
    for graph in (graphs.encoder, graphs.decoder, aligned.manifest.alignment.graph):
        if graphs.precision == "fp32":
            assert graph.weights is None
            continue
        for tensor in onnx.load(aligned.file(graph.file), load_external_data=False).graph.initializer:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if len(tensor.dims) == 2:
                assert tensor.data_type == TensorProto.INT8 and entries["location"] == graph.weights
                places[int(entries["offset"])] = int(entries["length"])
    if places:
        matrices = [p for p in load_model(reverse_run).model.parameters() if p.ndim == 2]
        assert sum(places.values()) == sum(p.numel() for p in matrices)


def test_without_sources_there_is_nothing_to_choose_by(tmp_path):
    """Refused before anything is traced or written, where the checkpoint records no heads that align."""
    checkpoint = untrained(SHAPES["pre-norm, gelu"], tmp_path / "checkpoint")
    with pytest.raises(ExportError, match="give --sources"):
        export(checkpoint, ExportOptions("x", "1", alignment=True), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


class Recording(TorchAttention):
    """Computes cross-attention by the definition, in double precision, and keeps its weights."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def cross(self, q, k, v, num_heads, lengths):
        batch, steps, width = q.shape
        queries = q.double().reshape(batch, steps, num_heads, -1).permute(0, 2, 1, 3)  # (B, H, T, Dh)
        scores = torch.einsum("bhtd,bhsd->bhts", queries, k.double()) / (width // num_heads) ** 0.5
        for row, length in enumerate(lengths.tolist()):
            scores[row, :, :, length:] = -torch.inf
        weights = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)  # (B, H, T, S)
        self.weights.append(weights.numpy())
        out = torch.einsum("bhts,bhsd->bthd", weights, v.double())
        return out.reshape(batch, steps, width).float()

    def encoder(self, q, k, v, num_heads, lengths):
        return TorchAttention().encoder(q, k, v, num_heads, lengths)


SPECIAL = SpecialIds(pad=0, bos=1, eos=2, unk=3, decoder_start=1)


def small_model(norm_first):
    torch.manual_seed(0)
    config = ModelConfig(
        source_vocab_size=16,
        target_vocab_size=24,
        d_model=32,
        num_heads=2,
        ffn_dim=64,
        encoder_layers=1,
        decoder_layers=3,
        norm_first=norm_first,
    )
    return Transformer(config).eval()


def examples(count):
    rng = random.Random(0)
    return [
        Example(
            (*rng.choices(range(4, 16), k=rng.randint(1, 12)), 2),
            tuple(rng.choices(range(4, 24), k=rng.randint(1, 9))),
            slice(0, -1),
        )
        for _ in range(count)
    ]


def by_definition(model, batch):
    """(layers, B, H, T, S) of a padded batch."""
    recording = Recording()
    model.use_attention(recording)
    with torch.inference_mode():
        model(*map(torch.from_numpy, batch))
    model.use_attention(TorchAttention())
    return np.stack(recording.weights)


def padded(rows):
    source = np.zeros((len(rows), max(len(row.source) for row in rows)), np.int64)
    target = np.zeros((len(rows), 1 + max(len(row.answer) for row in rows)), np.int64)
    for index, row in enumerate(rows):
        source[index, : len(row.source)] = row.source
        target[index, : 1 + len(row.answer)] = (1, *row.answer)
    return source, np.array([len(row.source) for row in rows], np.int32), target


def write(module, file, folder):
    """A module's graph in fp32, checked."""
    return checked(file, trace(module, file), module.required_nodes(Products(FLOAT_PRODUCTS)), folder)


class Written:
    """A small model with the session of its encoder, and its alignment graphs, each traced once."""

    def __init__(self, folder, norm_first):
        self.model, self.folder, self._graphs = small_model(norm_first), folder, {}
        encoder = write(EncoderGraph(self.model), "encoder.onnx", folder)
        self.encoder = open_graph(encoder, folder.joinpath, 1)

    def graph(self, layer, head):
        if (layer, head) not in self._graphs:
            module, file = AlignmentGraph(self.model, layer, head), f"alignment.{layer}.{head}.onnx"
            self._graphs[layer, head] = write(module, file, self.folder)
        return self._graphs[layer, head]

    def forced_pass(self, layer, head, shift=0, encoder=None, content=None):
        graph = Alignment(self.graph(layer, head), layer, head, shift, "copied", 1.0, 100, 0.0, 1.0)
        content = content or self.folder.joinpath
        return OrtForcedPass(graph, encoder or self.encoder, SPECIAL.decoder_start, content)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By whether the norm is first."""
    return {norm_first: Written(tmp_path_factory.mktemp("written"), norm_first) for norm_first in (False, True)}


def run(session, outputs, feeds):
    return dict(zip(outputs, session.run(outputs, feeds), strict=True))


@pytest.mark.parametrize(("norm_first", "layer", "head"), [(False, 0, 1), (True, 2, None)])
def test_the_graph_gives_the_attention_of_its_layer_and_head(written, norm_first, layer, head):
    """Of ragged rows side by side: by the definition, with nothing for padding; and the last layer's beside it."""
    small, rows = written[norm_first], examples(7)
    graph = small.graph(layer, head)
    assert [spec.name for spec in graph.inputs] == [
        *("target", "source_lengths", "cross_key_0", "cross_value_0", "cross_key_1", "cross_value_1", "cross_key_2")
    ]
    source, lengths, target = padded(rows)
    attention = by_definition(small.model, (source, lengths, target))
    expected = attention[layer].mean(axis=1) if head is None else attention[layer][:, head]
    names = [spec.name for spec in graph.inputs[2:]]
    cross = run(small.encoder, names, {"source": source, "source_lengths": lengths})
    session = open_graph(graph, small.folder.joinpath, 1)
    found = run(session, ["weights", "coverage"], {"target": target, "source_lengths": lengths, **cross})
    forced_pass = small.forced_pass(layer, head)
    for index, row in enumerate(rows):
        steps, length = 1 + len(row.answer), len(row.source)
        for output, right in (("weights", expected), ("coverage", attention[-1].mean(axis=1))):
            actual = found[output][index]
            np.testing.assert_allclose(actual[:steps, :length], right[index, :steps, :length], atol=1e-5)
            assert not actual[:, length:].any()
        alone = forced_pass(row.source, row.answer)
        np.testing.assert_allclose(alone, expected[index, : steps - 1, :length], atol=1e-5)


def test_coverage_is_what_training_computes_its_penalty_of(written):
    """The last layer's, whichever is shown: a row for each token that the decoder reads, its start token the first."""
    small = written[False]
    forced_pass = small.forced_pass(0, 1)
    for row in examples(5):
        with torch.inference_mode():
            expected = coverage.attention_weights(small.model, row.source, [SPECIAL.decoder_start, *row.answer])
        np.testing.assert_allclose(forced_pass.coverage(row.source, row.answer), expected, atol=1e-5)


def test_an_encoder_in_half_precision_is_aligned_too(written):
    """As one that runs on a GPU: its keys and values are read as fp32, and cost what their rounding does."""
    small = written[True]

    class Half:
        def run(self, names, feeds):
            return [array.astype(np.float16) for array in small.encoder.run(names, feeds)]

    exact, half = small.forced_pass(2, None), small.forced_pass(2, None, encoder=Half())
    for row in examples(5):
        expected, actual = exact(row.source, row.answer), half(row.source, row.answer)
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, atol=5e-3)


def test_every_attention_is_seen_as_the_definition_has_it():
    """What the choice is made on: all layers and heads, of ragged rows in batches, in the order of the examples."""
    model, rows = small_model(norm_first=True), examples(20)
    seen = list(cross_attentions(model, rows, SPECIAL))
    assert len(seen) == len(rows)
    for row, attention in zip(rows, seen, strict=True):
        np.testing.assert_allclose(attention, by_definition(model, padded([row]))[:, 0], atol=1e-5)


def test_a_graph_of_another_layer_or_with_other_weights_fails_the_export(written):
    """Either is found by comparison with PyTorch."""
    small, rows = written[True], examples(10)

    def compared(choice, tolerance=FP32.tolerance, content=None):
        forced_pass = small.forced_pass(2, None, shift=1, content=content)
        return compare(small.model, forced_pass, choice, rows, SPECIAL, tolerance)

    right = Choice(2, None, 1, "copied", 1.0, 100)
    found = compared(right)
    assert found.max_difference < 1e-5 and found.agreement == 1
    for wrong in (Choice(0, None, 1, "copied", 1.0, 100), Choice(2, 0, 1, "copied", 1.0, 100)):
        with pytest.raises(ExportError, match=r"alignment weights differ from PyTorch's by .* on a source of"):
            compared(wrong)
        with pytest.raises(ExportError, match=r"alignment weights differ from PyTorch's by .* of their size"):
            compared(wrong, Tolerance(logits=1.0, relative=1e-3, token_error_rate=0.0))
    damaged = onnx.load(small.folder / small.graph(2, None).file)
    weight = max(damaged.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.2), weight.name))
    with pytest.raises(ExportError, match="alignment weights differ from PyTorch's"):
        compared(right, content=lambda _: damaged.SerializeToString())


class StepByStep(TorchAttention):
    """Attention as PyTorch has it, in place of single nodes."""

    def __init__(self):
        super().__init__()
        self.queries = []

    def cross(self, q, k, v, num_heads, lengths):
        self.queries.append(q)
        return super().cross(q, k, v, num_heads, lengths)


def test_attention_left_unfused_fails_the_export(tmp_path, monkeypatch):
    """There is one softmax for each layer that is shown, and attention is what the shape requires."""
    monkeypatch.setattr(alignment_graph, "WatchedAttention", StepByStep)
    with pytest.raises(
        ExportError, match=r"alignment\.onnx as exported has .*0 GroupQueryAttention nodes instead of 3"
    ):
        write(AlignmentGraph(small_model(norm_first=True), 1, None), "alignment.onnx", tmp_path)


def test_a_model_that_answers_nothing_cannot_be_aligned(tmp_path):
    """The remedy is named."""
    with pytest.raises(ExportError, match="leave --alignment out"):
        write_alignment(
            small_model(norm_first=True), [Example((4, 2), (), slice(0, 1))], SPECIAL, None, None, tmp_path, {}
        )
