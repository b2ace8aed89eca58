"""``dragoman``: finding commands, and what becomes of their errors."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

import dragoman
from dragoman.cli import main as cli
from dragoman.errors import ConfigError


def command(run: Callable[[argparse.Namespace], int], extra: str | None = None) -> types.ModuleType:
    module: Any = types.ModuleType("made_up", "What it does.")
    module.SUMMARY = "does things"
    module.EXTRA = extra
    module.add_arguments = lambda parser: parser.add_argument("--count", type=int, default=1)
    module.run = run
    return module  # type: ignore[no-any-return]  # a module with attributes of our own


@pytest.fixture
def install(monkeypatch):
    """Registers a module as the only command, ``thing``."""

    def register(module: types.ModuleType) -> None:
        monkeypatch.setitem(sys.modules, "made_up", module)
        entries = [EntryPoint("thing", "made_up", cli.GROUP)]
        monkeypatch.setattr(cli, "entry_points", lambda group: entries)

    return register


def fail(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_help_lists_every_command_and_examples(install, capsys):
    """The overview is enough to start."""
    install(command(lambda args: 0))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "thing  does things" in out
    assert "dragoman serve" in out and "dragoman generate" in out
    assert cli.main([]) == 0
    assert capsys.readouterr().out == out


def test_a_command_gets_its_arguments_and_gives_its_status(install, capsys):
    """Its own --help shows what it does."""
    install(command(lambda args: args.count))
    assert cli.main(["thing", "--count", "7"]) == 7
    with pytest.raises(SystemExit):
        cli.main(["thing", "--help"])
    assert "What it does." in capsys.readouterr().out


def test_an_unknown_command_is_named_with_those_there_are(install, capsys):
    """Exit status 2."""
    install(command(lambda args: 0))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["thnig"])
    assert exit_.value.code == 2
    assert "'thnig'; there is thing" in capsys.readouterr().err


def test_a_dragoman_error_is_one_line_and_status_2(install, capsys):
    """No traceback for what a person can put right."""
    install(command(fail(ConfigError("port is 99999;\nit must be smaller"))))
    assert cli.main(["thing"]) == 2
    assert capsys.readouterr().err == "dragoman thing: error: port is 99999; it must be smaller\n"


def test_a_missing_package_is_told_with_the_extra_that_has_it(install, capsys):
    """One line instead of a traceback."""
    install(command(fail(ModuleNotFoundError("No module named 'torch'", name="torch.nn")), "train"))
    assert cli.main(["thing"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("dragoman thing needs torch, ") and message.count("\n") == 1
    assert "pip install -c deploy/constraints.txt '.[train]'" in message


@pytest.mark.parametrize(("extra", "name"), [(None, "torch"), ("train", "dragoman_training.gone")])
def test_a_missing_module_of_ours_is_a_bug_and_raises(install, extra, name):
    """No extra would help."""
    install(command(fail(ModuleNotFoundError("gone", name=name)), extra))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["thing"])


def test_an_interrupt_is_status_130(install):
    """As shells expect it."""
    install(command(fail(KeyboardInterrupt())))
    assert cli.main(["thing"]) == 130


def test_version_is_the_package_s(install, capsys):
    """``dragoman --version``."""
    install(command(lambda args: 0))
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"dragoman {dragoman.__version__}\n"


def test_a_reader_that_leaves_ends_the_command_quietly():
    """No traceback when ``head`` has seen enough; the status is that of a broken pipe."""
    code = """
import sys, types
from importlib.metadata import EntryPoint
from dragoman.cli import main as cli
m = sys.modules["made_up"] = types.ModuleType("made_up")
m.EXTRA, m.SUMMARY, m.add_arguments = None, "", lambda parser: None
def run(args):
    while True:
        print("x" * 1000)
m.run = run
cli.entry_points = lambda group: [EntryPoint("thing", "made_up", group)]
sys.exit(cli.main(["thing"]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), errors) == (141, b"")


def test_looking_for_help_loads_nothing_heavy():
    """``dragoman --help`` stays quick."""
    code = (
        "import sys, dragoman.cli.main, dragoman.cli.serve, dragoman.cli.generate\n"
        "sys.exit(repr({'grpc', 'onnxruntime', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_stream_is_the_null_device(closed):
    """A caller that closed stdin, stdout or stderr gets the right status and nothing in another stream's place."""
    program = "import sys; from dragoman.cli.main import main; sys.exit(main(['serve', '--port', '70000']))"
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" "$@" {closed}>&-', sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert ("70000" in done.stderr) == (closed != 2)
    assert "Traceback" not in done.stderr
