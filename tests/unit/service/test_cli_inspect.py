"""``dragoman inspect``: what a bundle says of itself, and whether it holds."""

import argparse
import dataclasses
import json
import re
import shutil
from importlib.metadata import EntryPoint

import pytest

from dragoman.bundle import MANIFEST_NAME, ModelBundle, save_bundle
from dragoman.cli import inspect as command
from dragoman.cli import main as cli
from dragoman.config import embedded_bundle
from dragoman.errors import BundleError


@pytest.fixture
def bundle(tmp_path):
    """A copy of the embedded bundle, to be damaged."""
    return shutil.copytree(embedded_bundle("g2p-en"), tmp_path / "copy")


@pytest.fixture
def inspect(capsys):
    """Runs the command in this process; returns its exit status, stdout and stderr."""

    def run(*arguments):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        status = command.run(parser.parse_args([str(argument) for argument in arguments]))
        return status, *capsys.readouterr()

    return run


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_everything_that_matters_is_shown(inspect):
    """Each fact of the manifest stands in the table, every required node with its three counts, every file's size."""
    status, out, err = inspect("g2p-en")
    manifest = ModelBundle.load(embedded_bundle("g2p-en")).manifest
    assert (status, err) == (0, "")
    assert out.startswith(f"{manifest.name} version {manifest.version}\n")
    for expected in (
        "4 encoder and 2 decoder layers, width 128, 4 heads of 32",
        "1,333,040",
        "source.tokenizer.json: plain, 31 tokens, normalization identity, template TEXT 2",
        "target.tokenizer.json: plain, 43 tokens, normalization identity, template 1 TEXT 2",
        "64 source tokens, 64 new tokens",
        "end 2, decoder start 1, never generated 0 1 3",
        "graphs for cpu, int8, opset 23",
        "activations: static; batch invariant",
        "max_logit_difference",
        "word_error_rate 0.2676, num_empty 0",
        "word_error_rate_of_pytorch 0.2701",
        "exact_match 0.7299",
        "optimizer: beta1 0.9",
        manifest.checksum,
    ):
        assert expected in out
    lines = [line.split() for line in out.splitlines()]
    for kind, number in (
        ("GroupQueryAttention(encoder)", 4),
        ("GroupQueryAttention(cross)", 2),
        ("MatMulIntegerToFloat", 28),
    ):
        assert [kind, *[str(number)] * 3] in lines
    for name, entry in manifest.files.items():
        assert [name, f"{entry.bytes:,}"] in lines
    assert out.count("    its larger weights are in weights.8bit.bin\n") == 3  # encoder, decoder, alignment


def test_json_is_the_manifest_and_what_was_checked(inspect, bundle):
    """One object, with the manifest's own fields."""
    status, out, _ = inspect(bundle, "--json")
    data = json.loads(out)
    assert status == 0
    assert (data.pop("problems"), data.pop("hashed")) == ([], False)
    assert (data.pop("replayed"), data.pop("not_replayed")) == ([], {})
    assert data == json.loads((bundle / MANIFEST_NAME).read_text())


def test_verify_replays_the_golden_set(inspect, bundle):
    """And runs the alignment graph; both are said."""
    status, out, _ = inspect(bundle, "--verify")
    assert status == 0
    assert out.endswith("verified: every file's SHA-256; reproduced here: cpu/int8, the alignment graph\n")
    _, out, _ = inspect(bundle, "--verify", "--json")
    assert json.loads(out)["replayed"] == ["cpu/int8", "the alignment graph"]


def test_verify_says_what_it_left_out(inspect, bundle, tmp_path):
    """Graphs for a GPU, and, where there are no others, the alignment graph: each with the reason."""
    whole = ModelBundle.load(bundle)
    (graphs,) = whole.manifest.graphs
    manifest = dataclasses.replace(
        whole.manifest, graphs=(dataclasses.replace(graphs, provider="cuda", precision="fp16"),)
    )
    save_bundle(manifest, {file: whole.read(file) for file in whole.manifest.files}, tmp_path / "other")
    status, out, _ = inspect(tmp_path / "other", "--verify")
    assert status == 0
    assert "reproduced here: nothing\n" in out
    assert "not replayed: cuda/fp16: its graphs are for a GPU" in out
    assert "not replayed: the alignment graph: there are no graphs for the CPU to run it with" in out
    _, out, _ = inspect(tmp_path / "other", "--verify", "--json")
    assert json.loads(out)["not_replayed"].keys() == {"cuda/fp16", "the alignment graph"}


def test_kinds_of_nodes_that_must_not_be_there_take_one_line(inspect):
    """Of each graph; all of them are in the JSON."""
    _, out, _ = inspect("g2p-en")
    lines = [line.strip() for line in out.splitlines() if line.strip().startswith("none of")]
    manifest = ModelBundle.load(embedded_bundle("g2p-en")).manifest
    kinds = manifest.graphs[0].encoder.required_nodes
    number = sum(len(kind.split("+")) for kind, required in kinds.items() if not required)
    assert lines[0].startswith(f"none of {number} others: attention unfused") and len(lines[0]) < 120
    assert len(lines) == 3  # encoder, decoder, alignment


def test_a_flipped_byte_is_found_by_verify(inspect, bundle):
    """Names and sizes are right, so that a glance shows nothing; the hash does, and the table marks the file."""
    flip(bundle / "encoder.cpu.int8.onnx")
    assert inspect(bundle)[0] == 0
    status, out, err = inspect(bundle, "--verify")
    assert status == 1
    assert re.search(r"encoder\.cpu\.int8\.onnx is damaged: its SHA-256 differs", err)
    assert re.search(r"^  encoder\.cpu\.int8\.onnx +[\d,]+  DOES NOT HOLD$", out, re.MULTILINE)
    assert "verified" not in out


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_file_of_another_size_or_none_is_found_at_a_glance(inspect, bundle, damage):
    """Every file at fault is named, in JSON too."""
    for name in ("NOTICE", "decoder.cpu.int8.onnx"):
        file = bundle / name
        content = file.read_bytes()
        file.unlink()
        if damage == "truncated":
            file.write_bytes(content[:-1])
    status, out, err = inspect(bundle, "--json")
    problems = json.loads(out)["problems"]
    assert status == 1
    assert [name in problem for name, problem in zip(("NOTICE", "decoder"), problems, strict=True)] == [True, True]
    assert err.count("\n") == 2


def test_an_empty_golden_set_is_status_1(inspect, bundle, tmp_path):
    """It proves nothing."""
    whole = ModelBundle.load(bundle)
    name = whole.manifest.graphs[0].golden
    files = {file: whole.read(file) for file in whole.manifest.files}
    save_bundle(whole.manifest, {**files, name: b""}, tmp_path / "other")
    status, _, err = inspect(tmp_path / "other", "--verify")
    assert status == 1
    assert f"{name} holds no case" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: case.update(tokens=case["tokens"][::-1]), "target tokenizer gives"),
        (lambda case: case.update(source=case["source"][::-1]), "source tokenizer gives"),
        (lambda case: case.update(score=case["score"] - 1), "does not reproduce the golden answer"),
    ],
)
def test_an_answer_that_does_not_come_out_is_status_1(inspect, bundle, tmp_path, change, message):
    """Tokens, texts or scores of the golden set changed under right hashes."""
    whole = ModelBundle.load(bundle)
    name = whole.manifest.graphs[0].golden
    cases = [json.loads(line) for line in whole.read(name).splitlines()]
    change(next(case for case in cases if len(set(case["tokens"])) > 1))
    files = {file: whole.read(file) for file in whole.manifest.files}
    files[name] = "".join(f"{json.dumps(case)}\n" for case in cases).encode()
    save_bundle(whole.manifest, files, tmp_path / "other")
    assert inspect(tmp_path / "other")[0] == 0
    status, _, err = inspect(tmp_path / "other", "--verify")
    assert status == 1
    assert re.search(rf"golden\.cpu\.int8\.jsonl: .*{message}", err)


def test_graph_draws_every_operator(inspect):
    """A bar for each, as long as its count, and the sum."""
    status, out, _ = inspect("g2p-en", "--graph")
    assert status == 0
    graph = ModelBundle.load(embedded_bundle("g2p-en")).manifest.graphs[0].decoder
    drawn = out[out.rindex("decoder.cpu.int8.onnx  ", 0, out.index("\nprovenance")) :]
    lines = [line.split() for line in drawn.splitlines()]
    for kind, number in graph.exported_nodes.items():
        assert [kind, str(number), str(graph.optimized_nodes.get(kind, 0)), "#" * number] in lines
    assert f"all nodes {sum(graph.exported_nodes.values())} " in " ".join(drawn.split())


def test_what_is_no_bundle_of_this_version_is_refused(inspect, bundle, tmp_path):
    """Exit status 2 and one line, as for any error of the command line."""
    with pytest.raises(BundleError, match=r"nowhere is no bundle"):
        inspect(tmp_path / "nowhere")
    text = (bundle / MANIFEST_NAME).read_text()
    (bundle / MANIFEST_NAME).write_text(text.replace('"format_version": 4', '"format_version": 5'))
    with pytest.raises(BundleError, match=r"format_version 5; this version of dragoman reads 4"):
        inspect(bundle)
    (bundle / MANIFEST_NAME).write_text(text.replace('"eos": 2', '"eos": 3'))
    with pytest.raises(BundleError, match="altered after the export"):
        inspect(bundle)


def test_the_exit_status_of_a_refusal_is_2(monkeypatch, capsys, tmp_path):
    """Through the console script."""
    entries = [EntryPoint("inspect", "dragoman.cli.inspect", cli.GROUP)]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"dragoman inspect: error: {tmp_path} is no bundle")


def test_a_folder_comes_before_an_embedded_model_of_its_name(inspect, tmp_path, monkeypatch):
    """What lies here is what is meant."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g2p-en").mkdir()
    with pytest.raises(BundleError, match="is no bundle"):
        inspect("g2p-en")
