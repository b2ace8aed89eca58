"""The vocabulary shortlist: exact for each row's own candidates, blind to company, proven and limited at the export."""

import argparse
import dataclasses
import io
import json
import random
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.bundle import ModelBundle, ModelShape, Shortlist, save_bundle
from dragoman.cli import inspect
from dragoman.config import EngineConfig
from dragoman.engine.candidates import Candidates, read_arrays
from dragoman.engine.replica import TokenRules, generate_all
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.errors import BundleError
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel
from dragoman.types import DecodingOptions, GenerationRequest, SearchOptions
from dragoman_export import quality
from dragoman_export.cli import export as command
from dragoman_export.errors import ExportError
from dragoman_export.exporter import ExportOptions, export
from dragoman_export.graph_sets import write_graphs
from dragoman_export.graphs import DecoderGraph
from dragoman_export.quality import compare_shortlist
from dragoman_export.quantize import Range, to_int8
from dragoman_export.shortlist import ShortlistOptions, to_bytes
from dragoman_export.shortlist_graph import with_columns
from dragoman_export.targets import FP32, INT8
from dragoman_export.trace import trace
from dragoman_export.verify import check_shortlist, run_targets
from dragoman_training.checkpoint import load_model
from dragoman_training.config import ModelConfig
from dragoman_training.model import Transformer

LIMITS = TextLimits(65536, 256)
RULES = TokenRules(decoder_start=1, eos=2, never_generated=(0, 1, 3))
SIZE = 600


class Model:
    """A model of random weights."""

    def __init__(self, folder, *, tied, bias):
        torch.manual_seed(3)
        self.config = ModelConfig(
            d_model=32,
            num_heads=2,
            ffn_dim=64,
            encoder_layers=1,
            decoder_layers=2,
            source_vocab_size=40,
            target_vocab_size=SIZE,
            tied_embeddings=tied,
        )
        self.model = Transformer(self.config).eval()
        with torch.no_grad():
            if bias:
                self.model.projection.bias.normal_()
            for layer in self.model.decoder_layers():
                for parameter in layer.parameters():
                    parameter += 0.1 * torch.randn_like(parameter)
        self.folder = folder


class Graphs:
    """Its int8 graphs without a shortlist and with one of a random table."""

    def __init__(self, model, *, static):
        layers = [name for name, module in model.model.named_modules() if isinstance(module, torch.nn.Linear)]
        self.model = model
        self.ranges = {layer: Range(-4.0, 4.0) for layer in layers} if static else None
        written = write_graphs(model.model, [INT8], self.ranges, model.folder, shortlist=True)
        self.graphs, (decoder, self.projection) = written.sets[INT8], written.shortlist
        rng = np.random.default_rng(1)
        offsets = np.arange(41, dtype=np.int32) * 12
        tokens = rng.integers(4, SIZE, 40 * 12).astype(np.int32)
        self.candidates = Candidates(SIZE, offsets, tokens, np.array([2, 5, 6, 7], np.int32))
        self.content = {file.name: file.read_bytes() for file in model.folder.iterdir()}
        self.content["table"] = to_bytes(self.candidates, self.projection)
        self.shortlist = Shortlist("cpu", "int8", "table", decoder, "", 12, 4, 0.0, {})
        self.shape = ModelShape(*(getattr(model.config, field.name) for field in dataclasses.fields(ModelShape)))

    def runner(self, *, short, num_slots=8, table=None):
        content = {**self.content, "table": table or self.content["table"]}
        shortlist = self.shortlist if short else None
        model = OrtModel(self.shape, self.graphs, content.__getitem__, shortlist=shortlist)
        return OrtRunner(model, num_slots, 1 << 28)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """One table for embedding and projection, and a bias."""
    return Model(tmp_path_factory.mktemp("tied"), tied="target", bias=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A projection of its own, and no bias: the exporter leaves zeros out."""
    return Model(tmp_path_factory.mktemp("untied"), tied="none", bias=False)


@pytest.fixture(scope="module")
def models(tied):
    return Graphs(tied, static=True)


@pytest.fixture(params=["tied", "untied"])
def model(request):
    return request.getfixturevalue(request.param)


def random_sources(count, seed=0, longest=9):
    rng = random.Random(seed)
    return [(*rng.choices(range(4, 40), k=rng.randint(1, longest)), 2) for _ in range(count)]


def random_targets(count, seed=1):
    rng = random.Random(seed)
    return [tuple(rng.choices(range(4, SIZE), k=rng.randint(1, 12))) for _ in range(count)]


@pytest.mark.parametrize("static", [True, False], ids=["static", "row"])
def test_a_candidates_logit_is_bit_for_bit_that_of_the_full_product(model, static):
    """In each of the ways in which the last product is written, at every step of ragged rows; beside it is -inf."""
    kind = Graphs(model, static=static)
    sources, targets = random_sources(20), random_targets(20)
    full, short = kind.runner(short=False), kind.runner(short=True)
    for begin in range(0, 20, 8):
        part = slice(begin, begin + 8)
        expected = run_targets(full, sources[part], targets[part], RULES.decoder_start)
        actual = run_targets(short, sources[part], targets[part], RULES.decoder_start)
        for source, one, other in zip(sources[part], expected, actual, strict=True):
            own = kind.candidates.of(source)
            assert 4 < len(own) < SIZE / 2
            assert np.array_equal(other.logits[:, own], one.logits[:, own])
            assert (np.delete(other.logits, own, axis=1) == -np.inf).all()
    check_shortlist(full, short, kind.candidates, sources, targets, RULES.decoder_start)
    files = kind.content
    assert len(files["shortlist.cpu.int8.onnx"]) < len(files["decoder.cpu.int8.onnx"]) + 4096


@pytest.mark.parametrize("name", ["weights", "scales", "bias"])
def test_another_projection_fails_the_export(models, name):
    """One number that is a little off, in one candidate's column."""
    arrays = read_arrays(models.content["table"])
    arrays[name].flat[5 * (32 if name == "weights" else 1)] += 1
    out = io.BytesIO()
    np.savez(out, **arrays)
    full, short = models.runner(short=False), models.runner(short=True, table=out.getvalue())
    with pytest.raises(ExportError, match="source 0: its logits with the shortlist are not those without"):
        check_shortlist(full, short, models.candidates, random_sources(2), random_targets(2), RULES.decoder_start)


def test_a_decoder_without_an_output_projection_at_its_end_has_no_shortlist(models):
    """The last product must have a column for each token."""
    decoder = to_int8(trace(DecoderGraph(models.model.model), "decoder"), models.ranges)
    decoder.graph.output[0].type.tensor_type.shape.dim[1].dim_value = SIZE - 8
    with pytest.raises(ExportError, match=r"last product has 600 columns, its logits 592"):
        with_columns(decoder)


SEARCHES = [SearchOptions(), SearchOptions(beam_size=3, num_hypotheses=2), SearchOptions(temperature=1.0, seed=7)]


def request(source, index):
    return GenerationRequest(source, 12, return_scores=True, search=SEARCHES[index % 3], num_top=index % 2 * 3)


@pytest.fixture(scope="module")
def alone(models):
    """What each of some requests is answered when nobody else is there."""
    requests = [request(source, index) for index, source in enumerate(random_sources(24, seed=5))]
    return [(r, generate_all(models.runner(short=True), RULES, [r], EngineConfig())[0].hypotheses) for r in requests]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 23), min_size=2, max_size=24, unique=True), st.sampled_from([3, 4, 8, 17]))
def test_company_changes_no_bit_of_an_answer(models, alone, chosen, num_slots):
    """Tokens, scores and the best of each place: alone, and among any others, in any order, greedy, in beams, drawn."""
    runner = models.runner(short=True, num_slots=num_slots)
    outcomes = generate_all(runner, RULES, [alone[index][0] for index in chosen], EngineConfig())
    assert [outcome.hypotheses for outcome in outcomes] == [alone[index][1] for index in chosen]


def test_every_token_of_an_answer_is_a_candidate_of_its_source(models, alone):
    """And the answers are not all alike."""
    for asked, hypotheses in alone:
        own = set(models.candidates.of(asked.source).tolist())
        for hypothesis in hypotheses:
            assert set(hypothesis.tokens) <= own
            assert {token for step in hypothesis.top for token, _ in step} <= own
    assert len({hypotheses[0].tokens for _, hypotheses in alone}) > 8


def test_scores_are_shares_of_the_candidates(models):
    """Log-probabilities over the row's own tokens alone, as from the full logits they would be."""
    (source,) = random_sources(1, seed=8)
    asked = GenerationRequest(source, 6, return_scores=True)
    answer = generate_all(models.runner(short=True), RULES, [asked], EngineConfig())[0].hypotheses[0]
    (full,) = run_targets(models.runner(short=False), [source], [answer.tokens], RULES.decoder_start)
    own = [token for token in models.candidates.of(source) if token not in RULES.never_generated]
    logits = full.logits[:, own].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for step, score in enumerate(answer.token_scores):
        assert score == pytest.approx(expected[step].max(), abs=1e-5)


def outside(models, source):
    own = set(models.candidates.of(source).tolist())
    return next(token for token in range(4, SIZE) if token not in own)


def test_a_prefix_beside_the_candidates_is_taken_and_may_come_again(models):
    """Its tokens are the row's own from then on, and nobody else's."""
    first, second = random_sources(2, seed=9)
    token = outside(models, first)
    runner = models.runner(short=True)
    runner.reserve(10, 10)
    runner.admit([first, second], [[0, 1], [2]], [(token,), ()])
    logits = runner.decode(np.full(3, RULES.decoder_start))
    assert np.isfinite(logits[:2, token]).all()
    assert np.isfinite(logits[2, token]) == (token in models.candidates.of(second))
    asked = GenerationRequest(first, 4, prefix=(token,), return_scores=True)
    answer = generate_all(runner, RULES, [asked], EngineConfig())[0].hypotheses[0]
    assert answer.tokens[0] == token and len(answer.tokens) > 1


def test_a_given_answer_beside_the_candidates_is_scored(models):
    """Each of its tokens has a finite score."""
    (source,) = random_sources(1, seed=10)
    target = (outside(models, source), 5, outside(models, source))
    asked = GenerationRequest(source, 9, prefix=target, score_prefix=True, return_scores=True)
    answer = generate_all(models.runner(short=True), RULES, [asked], EngineConfig())[0].hypotheses[0]
    assert answer.tokens == target
    assert len(answer.token_scores) == 4 and np.isfinite(answer.token_scores).all()


def test_a_step_binds_nothing_anew_while_nobody_comes(models):
    """The columns are put in place when rows begin."""
    runner = models.runner(short=True)
    runner.reserve(10, 10)
    runner.admit(random_sources(8), [[slot] for slot in range(8)])
    columns = runner._columns
    before = columns.generation, columns.weights.ctypes.data, columns.weights.copy()
    for _ in range(5):
        runner.decode(np.full(8, 5))
    assert before[:2] == (columns.generation, columns.weights.ctypes.data)
    assert np.array_equal(before[2], columns.weights)


# From a trained model to a server


def run_export(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


def options(data, files, **more):
    lines = {side: tuple((data / f"dev.{side}").read_text().splitlines()) for side in ("source", "target")}
    return ExportOptions(
        "reverse",
        "1",
        targets=(INT8, FP32),
        sources=lines["source"],
        test=quality.TestSet(lines["source"], lines["target"]),
        shortlist=ShortlistOptions(*files, num_per_token=1, num_always=1),
        **more,
    )


@pytest.fixture(scope="module")
def bundle(reverse_data, reverse_run, tmp_path_factory):
    """The toy model, whose letters have one candidate each."""
    files = reverse_data / "train.source", reverse_data / "train.target"
    out = tmp_path_factory.mktemp("shortlist") / "bundle"
    return export(load_model(reverse_run), options(reverse_data, files), out).bundle


def test_the_manifest_says_how_short_it_is_and_what_it_costs(bundle):
    """Letter by letter what it becomes, which is all that this task needs: the error rate is that without it."""
    shortlist = bundle.manifest.shortlist
    assert (shortlist.provider, shortlist.precision) == ("cpu", "int8")
    assert shortlist.num_per_token == 1 and shortlist.num_always <= 2
    assert 2 <= shortlist.mean_candidates < 8
    costs = shortlist.quality
    assert costs["num_lines"] == 300
    assert costs["word_error_rate"] <= costs["word_error_rate_without"] + 0.003
    letters = json.loads(bundle.read("source.tokenizer.json"))["tokens"]
    capitals = json.loads(bundle.read("target.tokenizer.json"))["tokens"]
    table = Candidates.checked(read_arrays(bundle.read(shortlist.table)), bundle.manifest.model)
    for index in range(4, len(letters)):
        assert letters[index].upper() in {capitals[token] for token in table.of((index,))}


async def answers(path, words, *, shortlist):
    model = ServedModel.load(path, EngineConfig(num_slots=8), LIMITS, precision="int8", shortlist=shortlist)
    assert (model.shortlist is not None) == shortlist
    model.start()
    try:
        return [(await model.pipeline.generate(word, DecodingOptions())).text for word in words]
    finally:
        await model.close()


async def test_a_server_with_the_shortlist_answers_as_one_without(bundle, reverse_data):
    """It has proven itself by a golden set of its own; what it lacks is what it never says."""
    words = (reverse_data / "dev.source").read_text().split()[:40]
    short, full = [await answers(bundle.path, words, shortlist=which) for which in (True, False)]
    assert sum(a == b for a, b in zip(short, full, strict=True)) >= 39


async def test_the_shortlists_graphs_are_chosen_unless_others_are_asked_for(bundle, reverse_bundle, tmp_path):
    """Asked for alone, it brings its precision; with another precision it is refused, and where there is none."""
    reordered = dataclasses.replace(bundle.manifest, graphs=bundle.manifest.graphs[::-1])
    path = resaved(bundle, tmp_path / "bundle", reordered)
    assert ModelBundle.load(path).graph_set("cpu").precision == "fp32"
    model = ServedModel.load(path, EngineConfig(num_slots=8), LIMITS, shortlist=True)
    assert model.graphs.precision == "int8"
    await model.close()
    with pytest.raises(BundleError, match=r"shortlist for cpu/int8, not for cpu/fp32: leave --shortlist out"):
        ServedModel.load(bundle.path, EngineConfig(), LIMITS, precision="fp32", shortlist=True)
    with pytest.raises(BundleError, match=r"has no shortlist: serve it without --shortlist, or export"):
        ServedModel.load(reverse_bundle, EngineConfig(), LIMITS, shortlist=True)


def resaved(bundle, path, manifest=None, **files):
    """The bundle with other content under correct hashes."""
    content = {name: bundle.read(name) for name in bundle.manifest.files}
    return save_bundle(manifest or bundle.manifest, {**content, **files}, path).path


def damaged(bundle, change):
    arrays = read_arrays(bundle.read(bundle.manifest.shortlist.table))
    change(arrays)
    out = io.BytesIO()
    np.savez(out, **arrays)
    return {bundle.manifest.shortlist.table: out.getvalue()}


def swap_weights(arrays):
    arrays["weights"] = arrays["weights"][::-1].copy()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda arrays: arrays.pop("scales"), r"shortlist\.cpu\.int8\.npz: it has no array 'scales'"),
        (lambda arrays: arrays.update(always=arrays["always"] + 100), r"shortlist\.cpu\.int8\.npz: its always hold"),
        (swap_weights, r"golden\.shortlist\.cpu\.int8\.jsonl: this machine does not reproduce the golden answer"),
    ],
)
def test_a_damaged_shortlist_is_not_served(bundle, tmp_path, change, words):
    """Under right hashes too: what cannot be is refused, and what could be gives other answers."""
    path = resaved(bundle, tmp_path / "bundle", **damaged(bundle, change))
    with pytest.raises(BundleError, match=words):
        ServedModel.load(path, EngineConfig(num_slots=8), LIMITS, shortlist=True)


def test_a_shortlist_for_graphs_that_are_not_there_is_refused(bundle):
    """A manifest promises nothing that it lacks."""
    manifest = bundle.manifest
    with pytest.raises(BundleError, match="shortlist is for cpu/int8, of which there are no graphs"):
        dataclasses.replace(manifest, graphs=manifest.graphs[1:])
    with pytest.raises(BundleError, match=r"does not declare: shortlist\.cpu\.int8\.npz"):
        files = {name: b"" for name in manifest.files if not name.endswith(".npz")}
        save_bundle(manifest, files, bundle.path.parent / "incomplete")


def test_inspect_shows_and_verifies_it(bundle, tmp_path, capsys):
    """Figures and nodes; its golden set is replayed beside the others, and a flipped byte is found."""
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    assert inspect.run(parser.parse_args([str(bundle.path), "--verify"])) == 0
    out = capsys.readouterr().out
    for words in (
        "for cpu/int8, shortlist.cpu.int8.npz: at most 1 candidates a source token",
        "graph for the shortlist, cpu, int8, golden set golden.shortlist.cpu.int8.jsonl",
        "word_error_rate_without",
        "shortlist.cpu.int8.onnx",
        "reproduced here: cpu/int8, cpu/fp32, cpu/int8 with the shortlist",
    ):
        assert words in out, words
    copy = shutil.copytree(bundle.path, tmp_path / "copy")
    table = copy / "shortlist.cpu.int8.npz"
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)
    assert inspect.run(parser.parse_args([str(copy), "--verify"])) == 1
    assert "shortlist.cpu.int8.npz is damaged" in capsys.readouterr().err


def test_text_of_another_model_fails_the_export(reverse_data, reverse_run, tmp_path):
    """Letters that become others: what it costs on the test set is named, and nothing is written."""
    letters = str.maketrans("ABCDEFGH", "BCDEFGHA")
    (tmp_path / "target").write_text((reverse_data / "train.target").read_text().translate(letters))
    files = reverse_data / "train.source", tmp_path / "target"
    with pytest.raises(ExportError, match=r"the shortlist costs .* word error rate .* raise --shortlist-candidates"):
        export(load_model(reverse_run), options(reverse_data, files), tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_shortlist_that_costs_little_is_recorded():
    """Both figures stand in the manifest."""
    found = compare_shortlist({"bleu": 30.0, "chrf": 55.0}, {"bleu": 30.1, "chrf": 55.5})
    assert found == {"bleu": 30.0, "chrf": 55.0, "bleu_without": 30.1, "chrf_without": 55.5}


@pytest.mark.parametrize(
    ("short", "full", "words"),
    [
        ({"bleu": 29.8}, {"bleu": 30.1}, r"0\.3 BLEU on the test set; at most 0\.2"),
        ({"word_error_rate": 0.3}, {"word_error_rate": 0.29}, r"0\.01 word error rate on the test set; at most 0\.003"),
    ],
)
def test_a_shortlist_that_costs_too_much_is_refused(short, full, words):
    """The loss, the limit and the remedy are named."""
    with pytest.raises(ExportError, match=rf"the shortlist costs {words} is allowed: raise --shortlist-candidates"):
        compare_shortlist(short, full)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--precision", "fp32", "--shortlist", "a", "b"], "a shortlist is for the graphs of int8"),
        (["--shortlist-candidates", "9"], "--shortlist-candidates was given without --shortlist"),
        (["--precision", "int8", "--shortlist", "a", "b", "--shortlist-candidates", "0"], "num_per_token of the"),
    ],
)
def test_impossible_options_are_refused(reverse_run, tmp_path, capsys, arguments, words):
    """In one line, before anything is traced."""
    assert run_export(reverse_run, *arguments, "--out", tmp_path / "bundle") == 2
    assert words in capsys.readouterr().err


def test_a_bundle_has_none_unless_it_is_asked_for(reverse_bundle):
    """Off by default, at the export as in serving."""
    assert ModelBundle.load(reverse_bundle).manifest.shortlist is None
