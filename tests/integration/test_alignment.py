"""From a trained model to aligned answers; and a graph that shows another attention is not exported."""

import asyncio
import random

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from dragoman.bundle import Alignment, ModelBundle
from dragoman.config import EngineConfig
from dragoman.engine.aligner import OrtForcedPass
from dragoman.errors import ModelUnsupportedError
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel
from dragoman.types import DecodingOptions
from dragoman_export.alignment import Choice, Example, compare, cross_attentions, write_alignment
from dragoman_export.alignment_graph import AlignmentGraph
from dragoman_export.errors import ExportError
from dragoman_export.exporter import ExportOptions, export
from dragoman_export.trace import checked, trace
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


@pytest.fixture(scope="module")
def aligned(reverse_run, words, tmp_path_factory):
    """The toy model with an alignment graph."""
    options = ExportOptions("reverse", "1", sources=tuple(words[:100]), alignment=True)
    return export(load_model(reverse_run), options, tmp_path_factory.mktemp("aligned") / "bundle").bundle


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
    """A graph with one softmax; letters copied as capitals decided; weights as PyTorch's."""
    alignment = aligned.manifest.alignment
    assert alignment.basis == "copied" and alignment.num_tokens > 100 and alignment.score > 0.9
    assert alignment.max_weight_difference < 1e-5
    assert alignment.graph.required_nodes["Softmax"] == 1
    assert alignment.graph.file == "alignment.cpu.fp32.onnx"


def test_without_sources_there_is_nothing_to_choose_by():
    """Refused before anything is loaded."""
    with pytest.raises(ExportError, match="give --sources"):
        ExportOptions("x", "1", alignment=True)


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


@pytest.mark.parametrize(("norm_first", "layer", "head"), [(False, 0, 1), (True, 2, None)])
def test_the_graph_gives_the_attention_of_its_layer_and_head(norm_first, layer, head):
    """Of ragged rows side by side: by the definition, with nothing for padding; and only what it takes is in it."""
    model, rows = small_model(norm_first), examples(7)
    module = AlignmentGraph(model, layer, head)
    traced = checked("alignment.onnx", trace(module, "alignment.onnx"), module.required_nodes())
    forced_pass = OrtForcedPass(declared(traced, layer, head), 1, lambda _: traced.content)
    source, lengths, target = padded(rows)
    expected = by_definition(model, (source, lengths, target))[layer]
    expected = expected.mean(axis=1) if head is None else expected[:, head]
    feeds = {"source": source, "source_lengths": lengths, "target": target}
    (weights,) = forced_pass._session.run(None, feeds)
    for index, row in enumerate(rows):
        steps, length = 1 + len(row.answer), len(row.source)
        np.testing.assert_allclose(weights[index, :steps, :length], expected[index, :steps, :length], atol=1e-5)
        assert not weights[index, :, length:].any()
        alone = forced_pass(row.source, row.answer)
        np.testing.assert_allclose(alone, expected[index, : steps - 1, :length], atol=1e-5)


def declared(traced, layer=0, head=None, shift=0):
    return Alignment(traced.declaration, layer, head, shift, "copied", 1.0, 100, 0.0)


def test_every_attention_is_seen_as_the_definition_has_it():
    """What the choice is made on: all layers and heads, of ragged rows in batches, in the order of the examples."""
    model, rows = small_model(norm_first=True), examples(20)
    seen = list(cross_attentions(model, rows, SPECIAL))
    assert len(seen) == len(rows)
    for row, attention in zip(rows, seen, strict=True):
        np.testing.assert_allclose(attention, by_definition(model, padded([row]))[:, 0], atol=1e-5)


def test_a_graph_of_another_layer_or_with_other_weights_fails_the_export():
    """Either is found by comparison with PyTorch."""
    model, rows = small_model(norm_first=False), examples(10)
    module = AlignmentGraph(model, 1, None)
    traced = checked("alignment.onnx", trace(module, "alignment.onnx"), module.required_nodes())
    right = Choice(1, None, 1, "copied", 1.0, 100)
    forced_pass = OrtForcedPass(declared(traced, shift=1), 1, lambda _: traced.content)
    assert compare(model, forced_pass, right, rows, SPECIAL) < 1e-5
    for wrong in (Choice(0, None, 1, "copied", 1.0, 100), Choice(1, 0, 1, "copied", 1.0, 100)):
        with pytest.raises(ExportError, match="alignment weights differ from PyTorch's"):
            compare(model, forced_pass, wrong, rows, SPECIAL)
    graph = onnx.load_from_string(traced.content)
    weight = max(graph.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.2), weight.name))
    damaged = OrtForcedPass(declared(traced, shift=1), 1, lambda _: graph.SerializeToString())
    with pytest.raises(ExportError, match="alignment weights differ from PyTorch's"):
        compare(model, damaged, right, rows, SPECIAL)


class Unfused(AlignmentGraph):
    def forward(self, source, source_lengths, target):
        def use(_):
            pass

        original, self.model.use_attention = self.model.use_attention, use
        try:
            return super().forward(source, source_lengths, target)
        finally:
            self.model.use_attention = original


def test_attention_left_unfused_fails_the_export():
    """There is one softmax in the graph, which is its result, and attention is what the shape requires."""
    module = Unfused(small_model(norm_first=True), 1, None)
    with pytest.raises(
        ExportError, match=r"alignment\.onnx as exported has .*0 GroupQueryAttention nodes instead of 2"
    ):
        checked("alignment.onnx", trace(module, "alignment.onnx"), module.required_nodes())


def test_a_model_that_answers_nothing_cannot_be_aligned(tmp_path):
    """The remedy is named."""
    with pytest.raises(ExportError, match="leave --alignment out"):
        write_alignment(small_model(norm_first=True), [Example((4, 2), ())], SPECIAL, None, None, tmp_path)
