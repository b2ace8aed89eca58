"""``dragoman export``: what it refuses before it begins, what it tells meanwhile, and that it leaves nothing behind."""

import argparse
import signal
import time

import pytest
from tests.processes import start_command

from dragoman.bundle import ModelBundle
from dragoman.work_folder import work_folder
from dragoman_export import exporter
from dragoman_export.cli import export as command

NUM_LINES = 60


@pytest.fixture
def run_export(reverse_run, reverse_data, tmp_path, monkeypatch):
    """Runs the command in this process, in a folder with texts, and returns its exit status."""
    monkeypatch.chdir(tmp_path)
    for side in ("source", "target"):
        lines = (reverse_data / f"dev.{side}").read_text().splitlines(keepends=True)[:NUM_LINES]
        (tmp_path / f"dev.{side}").write_text("".join(lines))
    (tmp_path / "digits").write_text("1\n22\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "one").write_text("a\n")
    (tmp_path / "wrong").write_text("Z\n" * NUM_LINES)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "nan.json").write_text('{"bleu": NaN}')
    (tmp_path / "nested.json").write_text('{"bleu": {"value": 30}}')
    (tmp_path / "cut.json").write_text('{"bleu": ')

    def run(*arguments):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        return command.run(parser.parse_args([str(reverse_run), "--out", "out", *arguments]))

    return run


DEV = ("--sources", "dev.source", "--precision", "int8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sources", "nowhere"], "nowhere cannot be read"),
        (["--sources", "digits"], "--sources: the model accepts none of the 2 sources"),
        ([*DEV, "--calibration", "nowhere"], "nowhere cannot be read"),
        ([*DEV, "--calibration", "digits"], "--calibration: the model accepts none of the 2 sources"),
        ([*DEV, "--test", "dev.source", "nowhere"], "nowhere cannot be read"),
        ([*DEV, "--test", "dev.source", "one"], f"the test set has {NUM_LINES} sources and 1 targets"),
        ([*DEV, "--test", "digits", "digits"], "--test: the model accepts none of the 2 sources"),
        ([*DEV, "--test", "dev.source", "wrong"], "all of PyTorch's own answers to the test set are wrong"),
        ([*DEV, "--shortlist", "dev.source", "nowhere"], "nowhere cannot be read"),
        ([*DEV, "--shortlist", "dev.source", "one"], f"dev.source has {NUM_LINES} lines and one 1"),
        ([*DEV, "--shortlist", "empty", "empty"], "the text for the shortlist holds no pair"),
        ([*DEV, "--notice", "nowhere"], "nowhere"),
        ([*DEV, "--notice", "."], "Is a directory"),
        ([*DEV, "--quality", "nowhere"], "nowhere"),
        ([*DEV, "--quality", "cut.json"], "cut.json is not JSON"),
        ([*DEV, "--quality", "list.json"], "list.json holds no JSON object"),
        ([*DEV, "--quality", "nested.json"], "nested.json holds no figures"),
        ([*DEV, "--quality", "nan.json"], "nan.json holds no figures, or one that is no number"),
        (["--name", ""], "the model's name has 0 characters; it must have at least 1"),
        (["--name", "en\nde"], r"the model's name is 'en\nde': it may hold printable characters alone"),
        (["--name", " en-de"], "the model's name is ' en-de': it may hold"),
        (["--model-version", "1" * 129], "the model's version has 129 characters; it must have"),
        (["--split-sentences"], "--split-sentences was given without --source-language"),
        (["--target-language", "de"], "--target-language was given without --source-language"),
        (["--source-language", "English"], "texts.source_language is 'English'; it must be a code of ISO 639"),
        (["--source-language", "en", "--protect-with", "itself,magic"], "texts.protect_with has 'magic'; it may have"),
        (["--model-version", "1\x1b[2J"], r"the model's version is '1\x1b[2J'"),
    ],
)
def test_what_is_wrong_with_the_options_is_said_before_anything_is_traced(
    run_export, tmp_path, monkeypatch, capsys, arguments, words
):
    """In one line at the end, with exit status 2; nothing is written."""
    monkeypatch.setattr(exporter, "write_graphs", lambda *_, **__: pytest.fail("it was traced"))
    before = sorted(tmp_path.iterdir())
    assert run_export(*arguments) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == before


def test_it_tells_on_stderr_what_it_does(run_export, tmp_path, capsys):
    """With counts; stdout has the report alone, in which fp32 is the reference, as it is not in the bundle."""
    assert run_export(*DEV, "--test", "dev.source", "dev.target") == 0
    captured = capsys.readouterr()
    told = [line.split("s  ", 1)[1] for line in captured.err.splitlines()]
    assert told == [
        f"PyTorch answers {NUM_LINES} lines of the test set",
        f"PyTorch answers {NUM_LINES} sources, {NUM_LINES} of them by a beam of 4 too",
        f"calibrating on {NUM_LINES} sources",
        "tracing encoder.cpu.fp32.onnx",
        "writing encoder.cpu.fp32.onnx",
        "writing encoder.cpu.int8.onnx",
        "tracing decoder.cpu.fp32.onnx",
        "writing decoder.cpu.fp32.onnx",
        "writing decoder.cpu.int8.onnx",
        "fp32: comparing what every layer reads with PyTorch, on 8 sources",
        f"fp32: comparing {NUM_LINES} answers with PyTorch's, and {NUM_LINES} of a beam of 4",
        f"fp32: measuring {NUM_LINES} lines of the test set",
        "int8: comparing what every layer reads with PyTorch, on 8 sources",
        f"int8: comparing {NUM_LINES} answers with PyTorch's, and {NUM_LINES} of a beam of 4",
        f"int8: measuring {NUM_LINES} lines of the test set",
        "saving 7 files",
    ]
    lines = captured.out.splitlines()
    assert sum(line.startswith("fp32, the reference of the others, not in the bundle: logits") for line in lines) == 1
    assert sum(line.startswith("int8: logits") for line in lines) == 1
    assert not any("tracing" in line for line in lines)
    assert max(len(line) for line in lines if "none of" in line) < 120
    (graphs,) = ModelBundle.load(tmp_path / "out").manifest.graphs
    assert 0 < graphs.parity["relative_input_difference"] < 0.1


def test_quiet_tells_nothing(run_export, monkeypatch, capsys):
    """Neither progress nor anything else comes on stderr."""

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(exporter, "save_bundle", fail)
    monkeypatch.setattr(exporter, "NUM_GENERATED", 8)
    assert run_export("--quiet") == 2
    assert capsys.readouterr().err == "dragoman export: error: disk full\n"


@pytest.mark.parametrize(("end", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_export_that_is_killed_leaves_nothing_for_ever(run_export, reverse_run, tmp_path, end, status):
    """SIGTERM lets it clean up; what stays after SIGKILL, the next export to the same place removes."""
    arguments = [reverse_run, "--sources", "dev.source", "--out", "killed"]
    before = sorted(tmp_path.iterdir())
    process = start_command("export", *arguments, cwd=tmp_path)
    while "tracing" not in process.err:
        assert process.running
        time.sleep(0.01)
    (left,) = set(tmp_path.iterdir()) - set(before)
    process.send_signal(end)
    assert process.wait().status == status
    assert left.exists() == (end == signal.SIGKILL)
    with work_folder(tmp_path / "killed"):
        assert not left.exists()
    assert sorted(tmp_path.iterdir()) == before
