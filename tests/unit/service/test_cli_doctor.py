"""``dragoman doctor``: what it looks at, what it says of it, and how it exits."""

import argparse
import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from dragoman.cli import doctor
from dragoman.cli.doctor import State, check_attention, check_gpu, check_machine
from dragoman.config import DeviceConfig, EngineConfig, embedded_bundle
from dragoman.machine import Machine

ZEN3 = Machine("EPYC", ("avx2",), 8, None, 64 << 30, None)


@pytest.fixture
def examine(capsys):
    """Runs the command in this process; returns its exit status and stdout."""

    def run(*arguments):
        parser = argparse.ArgumentParser()
        doctor.add_arguments(parser)
        status = doctor.run(parser.parse_args([str(argument) for argument in arguments]))
        return status, capsys.readouterr().out

    return run


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_a_sound_installation_has_no_problem(examine):
    """On the CPU, with the embedded model loaded as a server would load it."""
    status, out = examine("--provider", "cpu")
    assert status == 0
    assert "g2p-en" in out and "loads for cpu, and gives its golden answers (cpu/int8)" in out
    assert "CPUExecutionProvider" in out
    assert out.endswith("no problems for --provider cpu\n")


def test_programs_get_the_same_as_json(examine):
    """One object; each finding with its group, state and remedy."""
    status, out = examine("--provider", "cpu", "--json")
    report = json.loads(out)
    assert (status, report["ok"], report["provider"]) == (0, True, "cpu")
    assert {finding["group"] for finding in report["findings"]} >= {"packages", "machine", "GPU", "models"}
    assert {"python", "onnxruntime", "grpcio", "protobuf"} <= {finding["name"] for finding in report["findings"]}


def test_a_damaged_bundle_is_a_problem(examine, tmp_path):
    """Named with the file at fault."""
    bundle = shutil.copytree(embedded_bundle("g2p-en"), tmp_path / "copy")
    content = bytearray((bundle / "decoder.cpu.int8.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / "decoder.cpu.int8.onnx").write_bytes(content)
    status, out = examine(bundle, "--provider", "cpu")
    assert status == 1
    assert "X copy" in out and "decoder.cpu.int8.onnx is damaged" in out
    assert out.endswith("1 problem for --provider cpu\n")


def test_a_bundle_without_graphs_for_the_provider_is_a_problem(examine):
    """An embedded one is not: nobody asked for it."""
    findings = by_name(doctor.check_models(None, "cuda", EngineConfig(), DeviceConfig()))
    assert findings["g2p-en"].state is State.NOTE
    assert "no graphs for cuda" in findings["g2p-en"].remedy
    status, out = examine(embedded_bundle("g2p-en"), "--provider", "cuda-dry")
    assert status == 1 and "it has no graphs for cuda" in out


WITHOUT_RUNTIME = """
import argparse, importlib.metadata, importlib.util, sys
sys.modules["onnxruntime"] = None  # importing it fails
asked = importlib.metadata.version
def version(name):
    if name.startswith("onnxruntime"):
        raise importlib.metadata.PackageNotFoundError(name)
    return asked(name)
importlib.metadata.version = version
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "onnxruntime" else find(name)
from dragoman.cli import doctor
parser = argparse.ArgumentParser()
doctor.add_arguments(parser)
sys.exit(doctor.run(parser.parse_args(["--provider", "cpu"])))
"""


def test_it_works_without_onnx_runtime_and_says_what_to_install():
    """In a process that cannot import it; the rest is looked at all the same."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_RUNTIME], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "X onnxruntime" in done.stdout and "not installed" in done.stdout and "extra [cpu]" in done.stdout
    assert "processor" in done.stdout
    assert "X g2p-en" in done.stdout and "whole (cpu/int8), but does not load" in done.stdout


def test_a_missing_package_is_a_problem(monkeypatch):
    """Named, with what to install."""

    def version(name):
        if name == "grpcio":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(doctor, "version", version)
    findings = by_name(doctor.check_packages())
    assert (findings["grpcio"].state, findings["grpcio"].found) == (State.PROBLEM, "not installed")


def test_the_provider_is_the_installed_runtimes(examine, monkeypatch):
    """Whoever installed onnxruntime-gpu means to use it."""
    monkeypatch.setattr(doctor, "_version", lambda name: "1.31.1" if name != "onnxruntime" else None)
    for name in ("check_packages", "check_machine", "check_gpu", "check_models"):
        monkeypatch.setattr(doctor, name, lambda *_: [doctor.Finding("group", "name", "found")])
    assert json.loads(examine("--json")[1])["provider"] == "cuda"


def test_threads_and_memory_are_held_against_what_there_is():
    """More threads than a control group gives cores for, and caches beyond its memory, are worth a look."""
    limited = Machine("EPYC", ("avx2", "vnni"), 8, 2.5, 64 << 30, 3 << 30)
    for machine, engine, states in (
        (ZEN3, EngineConfig(num_replicas=4, num_threads=2), (State.OK, State.OK)),
        (ZEN3, EngineConfig(num_replicas=4, num_threads=3), (State.NOTE, State.OK)),
        (limited, EngineConfig(num_replicas=2), (State.OK, State.NOTE)),
        (limited, EngineConfig(num_replicas=3), (State.NOTE, State.NOTE)),
        (limited, EngineConfig(), (State.OK, State.OK)),
    ):
        findings = by_name(check_machine(machine, engine))
        assert (findings["threads"].state, findings["memory"].state) == states, (machine, engine)
    assert "gives the time of 2.5" in by_name(check_machine(limited, EngineConfig()))["cores"].found
    assert by_name(check_machine(ZEN3, EngineConfig()))["threads"].found.endswith("--replicas 8")


def test_a_processor_without_vnni_is_worth_a_look():
    """int8 is right there, and slower."""
    assert by_name(check_machine(ZEN3, EngineConfig()))["int8"].state is State.NOTE
    fast = Machine("Xeon", ("avx2", "avx512", "vnni"), 8, None, None, None)
    assert by_name(check_machine(fast, EngineConfig()))["int8"].state is State.OK


def no_driver():
    raise doctor.ConfigError("there is no NVIDIA driver here")


def test_a_missing_driver_matters_to_cuda_alone(monkeypatch):
    """A server on the CPU needs none."""
    monkeypatch.setattr(doctor.cuda, "read_driver", no_driver)
    for provider in ("cpu", "cuda-dry"):
        assert [finding.state for finding in check_gpu(provider, DeviceConfig())] == [State.OK]
    findings = by_name(check_gpu("cuda", DeviceConfig()))
    assert findings["driver"].state is State.PROBLEM and "no NVIDIA driver" in findings["driver"].remedy
    assert findings["CUDA"].state is State.PROBLEM


def test_the_kernels_of_attention_come_from_a_process_of_its_own(tmp_path):
    """It loads the bundle and answers nothing; what is not fused is worth a look."""
    calls = []

    def run(command, **options):
        calls.append((command, options))
        out = "Operator=A Node=n DataType=fp16 SdpaKernel=FLASH_ATTENTION\nOperator=B DataType=fp16 SdpaKernel=MATH\n"
        return subprocess.CompletedProcess(command, 0, out, "")

    fused, unfused = check_attention(tmp_path, DeviceConfig(device_id=3), run)
    assert (fused.name, fused.found, fused.state) == ("A n", "FLASH_ATTENTION", State.OK)
    assert (unfused.name, unfused.found, unfused.state) == ("B", "MATH", State.NOTE)
    ((command, options),) = calls
    assert command[:5] == [sys.executable, "-m", "dragoman.cli.main", "generate", "--bundle"]
    assert command[command.index("--device") + 1] == "3"
    assert options["env"]["ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"] == "1"
    assert options["stdin"] == subprocess.DEVNULL


@pytest.mark.parametrize(("status", "err", "reason"), [(2, "a\nno memory\n", "no memory"), (0, "", "told nothing")])
def test_kernels_that_cannot_be_told_are_no_problem(tmp_path, status, err, reason):
    """Of another version, say."""

    def run(command, **options):
        return subprocess.CompletedProcess(command, status, "", err)

    (finding,) = check_attention(tmp_path, DeviceConfig(), run)
    assert finding.state is State.NOTE and reason in finding.found
