"""``--shortlist``: off by default, and never ignored in silence."""

import argparse
import dataclasses

import pytest

from dragoman.bundle import Graph, ModelBundle, Shortlist, save_bundle
from dragoman.cli import generate, serve
from dragoman.cli.runtime import settings
from dragoman.config import ModelConfig
from dragoman.errors import BundleError, ConfigError, LoadError
from dragoman.inspection import describe
from dragoman.testing import scripted_manifest

GRAPH = Graph("shortlist.onnx", (), (), {"MatMul": 1}, {"MatMul": 1}, {"MatMul": 1})
SHORTLIST = Shortlist("cpu", "fp32", "shortlist.npz", GRAPH, "short.jsonl", 50, 357, 553.2, {"bleu": 30.5})
FILES = dict.fromkeys(("source.json", "target.json", "none.onnx", "golden.jsonl"), b"")


def parse(command, *arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("command", [serve, generate])
def test_it_is_off_by_default(command):
    """In the server as in the process."""
    assert not settings(ModelConfig, parse(command)).shortlist
    assert settings(ModelConfig, parse(command, "--shortlist")).shortlist


@pytest.mark.parametrize(("command", "arguments"), [(serve, ["--port", "0"]), (generate, ["word"])])
def test_a_model_without_one_is_refused(command, arguments):
    """The embedded model has none: nothing starts, and nothing is answered by the whole vocabulary instead."""
    with pytest.raises((BundleError, LoadError), match="'en-de' has no shortlist"):
        command.run(parse(command, "--shortlist", *arguments))


def test_a_server_chooses_for_itself():
    """The caller's wish would have no effect."""
    with pytest.raises(ConfigError, match="--shortlist and --target"):
        generate.run(parse(generate, "--shortlist", "--target", "localhost:1", "word"))


def test_what_is_saved_of_a_shortlist_is_loaded(tmp_path):
    """Table, graph and golden set are files like all others; one that is missing is named."""
    manifest = dataclasses.replace(scripted_manifest(), shortlist=SHORTLIST)
    files = {**FILES, "shortlist.onnx": b"graph", "shortlist.npz": b"table", "short.jsonl": b""}
    save_bundle(manifest, files, tmp_path / "bundle")
    assert ModelBundle.load(tmp_path / "bundle").manifest.shortlist == SHORTLIST
    for name in ("shortlist.onnx", "shortlist.npz", "short.jsonl"):
        with pytest.raises(BundleError, match=f"does not declare: {name}"):
            save_bundle(manifest, {key: value for key, value in files.items() if key != name}, tmp_path / "other")


def test_a_shortlist_for_graphs_that_are_not_there_is_refused():
    """Of another precision or another provider."""
    for other in (dataclasses.replace(SHORTLIST, precision="int8"), dataclasses.replace(SHORTLIST, provider="cuda")):
        with pytest.raises(BundleError, match=r"shortlist is for .* of which there are no graphs"):
            dataclasses.replace(scripted_manifest(), shortlist=other)


def test_inspect_tells_of_it():
    """How short it is, what it costs, and its graph's nodes; or that there is none."""
    lines = describe(dataclasses.replace(scripted_manifest(), shortlist=SHORTLIST), {})
    summary = "for cpu/fp32, shortlist.npz: at most 50 candidates a source token and 357 for all; 553 in the mean"
    assert any(line.startswith("  shortlist") and summary in line for line in lines)
    assert "graph for the shortlist, cpu, fp32, golden set short.jsonl" in lines
    assert "  on a test set: bleu 30.5" in lines
    assert any(line.startswith("  shortlist.onnx") for line in lines)
    lines = describe(scripted_manifest(), {})
    assert any(line.split() == ["shortlist", "none"] for line in lines)
