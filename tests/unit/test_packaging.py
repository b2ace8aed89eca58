"""The project as a package: entry points, pins, scripts, and what no file may say."""

import argparse
import json
import re
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMMANDS = PROJECT["entry-points"]["dragoman.commands"]
EXTRAS = PROJECT["optional-dependencies"]
BY_PRODUCTS = {".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "__pycache__", "runs", "dist"}


def tree() -> list[Path]:
    """Every file of the project: what git tracks or would track, or outside of a clone, what is not a by-product."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        files = [
            path
            for path in ROOT.rglob("*")
            if not any(part in BY_PRODUCTS or part.startswith(".venv") for part in path.relative_to(ROOT).parts)
        ]
    return sorted(path for path in files if path.is_file())


SCRIPTS = [path.relative_to(ROOT) for path in tree() if path.suffix == ".sh" or path == ROOT / ".ci" / "run"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_resolves(name):
    """A command is a module with SUMMARY, EXTRA, add_arguments and run, and importing it needs no extra."""
    module = import_module(COMMANDS[name])

    assert isinstance(module.SUMMARY, str)
    assert module.SUMMARY
    assert module.EXTRA is None or set(module.EXTRA.split(",")) <= set(EXTRAS)
    module.add_arguments(argparse.ArgumentParser(prog=name))
    assert callable(module.run)


def pins(file: str = "deploy/constraints.txt") -> dict[str, str]:
    """A constraints file as name to version; anything but ``name==version`` in it fails here."""
    found = {}
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, separator, version = line.partition("==")
            assert separator, f"{file}: {line!r} is no exact pin"
            assert name == canonicalize_name(name), f"{file}: write {canonicalize_name(name)}"
            assert name not in found, f"{file} pins {name} twice"
            found[name] = version
    return found


@pytest.mark.parametrize("extra", ["", "cpu", "explain", "train", "export", "dev"])
def test_every_direct_requirement_is_pinned_within_its_range(extra):
    """What CI and the image install is one of the versions that the wheel allows."""
    pinned = pins() | (pins("deploy/constraints-gpu.txt") if extra == "gpu" else {})
    for text in EXTRAS[extra] if extra else PROJECT["dependencies"]:
        requirement = Requirement(text)
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"deploy/constraints.txt does not pin {requirement.name}"
        assert version in requirement.specifier, f"{requirement.name}=={version} is outside of {requirement.specifier}"


def test_torch_is_pinned_to_one_version_for_every_build():
    """The pin has no build suffix, so that CPU and CUDA builds both satisfy it."""
    assert pins()["torch"] == "2.13.0"


def test_no_extra_but_gpu_brings_a_second_onnxruntime():
    """onnxruntime and onnxruntime-gpu overwrite each other's files: they never meet in one extra or in the base."""
    for extra, requirements in {**EXTRAS, "base": PROJECT["dependencies"]}.items():
        names = {canonicalize_name(Requirement(text).name) for text in requirements}
        assert len(names & {"onnxruntime", "onnxruntime-gpu"}) <= (extra != "base"), extra


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_shell_scripts_stop_at_the_first_error(script):
    """The first line that does anything is ``set -euo pipefail``; a comment before it says what the script is for."""
    lines = (ROOT / script).read_text(encoding="utf-8").splitlines()
    code = [line for line in lines if line and not line.startswith("#")]

    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[1].startswith("# ")
    assert code[0] == "set -euo pipefail"


def test_the_two_constraints_pin_nothing_twice():
    """Whoever takes both gets one version of each."""
    assert not pins().keys() & pins("deploy/constraints-gpu.txt").keys()


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """The Dockerfile's stages by name, in order: what each is made from, and its instructions with their arguments."""
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    assert lines.pop(0) == "ARG BASE=python:3.13-slim"
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for line in lines:
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            assert base == "${BASE}" or base in found, f"{base} is no earlier stage"
            assert name and name not in found
            found[name] = base, []
        else:
            found[name][1].append((instruction, arguments))
    return found


def test_an_image_made_without_a_target_is_the_one_for_cpus():
    """The last stage counts; the other one that runs is for GPUs, and neither holds what built the wheel."""
    found = stages()
    assert list(found)[-1] == "cpu"
    assert {name for name, (_, body) in found.items() if "ENTRYPOINT" in dict(body)} == {"cpu", "gpu"}
    for extra in ("cpu", "gpu"):
        base, body = found[extra]
        assert base == "${BASE}"
        assert ("COPY", f"--from={extra}-environment /opt/dragoman /opt/dragoman") in body
        (install,) = [arguments for kind, arguments in found[f"{extra}-environment"][1] if kind == "RUN"]
        assert f'"$(ls /dist/*.whl)[{extra}]"' in install and "-c deploy/constraints.txt" in install
        assert install.endswith("uninstall --yes pip")


def test_the_build_reads_what_is_there_and_let_in():
    """Every file that a stage copies from the context exists, and .dockerignore does not keep it out."""
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"]
    copied = [
        source
        for _, body in stages().values()
        for kind, arguments in body
        if kind == "COPY" and not arguments.startswith("--from=")
        for source in arguments.split()[:-1]
    ]
    assert "deploy/constraints-gpu.txt" in copied
    for source in copied:
        assert (ROOT / source).exists() and source in let_in, source


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_image_runs_python_as_process_1_and_not_as_root(name):
    """Exec-form entry point, so that SIGTERM reaches the server; a numeric user that is not 0; a known command."""
    body = dict(stages()[name][1])
    assert json.loads(body["ENTRYPOINT"]) == ["/opt/dragoman/bin/dragoman"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", body["USER"])
    assert json.loads(body["CMD"])[0] in COMMANDS


def test_no_file_names_a_machine_path():
    """Nothing in the tree points into somebody's home, work or temporary folder: it would hold on one machine only."""
    folders = "root", "home", "work", "Users", "tmp", "opt/wheels", "opt/pypi"
    machine_path = re.compile(rb"(?<![\w.~$})\]/-])/(?:" + "|".join(folders).encode() + rb")/[\w.-]+")
    offences = [
        f"{path.relative_to(ROOT)}: {match.group().decode()}"
        for path in tree()
        for match in machine_path.finditer(path.read_bytes())
    ]

    assert offences == []
