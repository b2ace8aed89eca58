"""What proves the GPU half on a GPU, as far as a CPU goes: it runs, it says what it skipped, and it finds faults."""

import argparse
import dataclasses
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from dragoman.cli import doctor, generate, serve
from dragoman.engine.device import Device

ROOT = Path(__file__).resolve().parents[2]
DRY = Device("cuda-dry")


def load_script(name):
    """A script beside run.sh as a module: the folder is no package."""
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", ROOT / "tests" / "gpu" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for the types that they name
    spec.loader.exec_module(module)
    return module


check = load_script("check")


@pytest.fixture(scope="module")
def bundle(half_export):
    """A bundle with graphs for CUDA, and in fp32 for the CPU."""
    return half_export("pre-norm, gelu")[1]


@pytest.fixture
def subject(bundle):
    """What is looked at."""
    return check.take(bundle.path)


def test_without_a_gpu_one_command_checks_what_a_cpu_can_and_names_what_it_skipped(tmp_path):
    """Nothing needs to be told it; the figures are in a file, too."""
    file = tmp_path / "new" / "check.json"
    command = ["bash", "tests/gpu/run.sh", "--provider", "cuda-dry", "--slots", "4", "--json", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    results = {result["name"]: result for result in report["results"]}
    by_state = {
        state: {name for name, result in results.items() if result["state"] == state}
        for state in ("ok", "skipped", "measured")
    }
    assert sum(map(len, by_state.values())) == len(results)
    assert by_state["ok"] == {
        "parity",
        "a step writes its own positions alone",
        "a row does not feel its neighbours",
    }
    assert by_state["skipped"] >= {"everything that only a GPU can show", "CUDA graphs", "CTranslate2"}
    assert by_state["measured"] == {"first runs, on the CPU", *(f"{rows} rows, on the CPU" for rows in (1, 2, 4))}
    assert all(name in done.stdout and result["detail"] in done.stdout for name, result in results.items())
    four = results["4 rows, on the CPU"]["figures"]
    assert four["bytes_to_host_per_step"] == 4 * 8  # a token and its logit for each row, and nothing else
    assert 0 < results["parity"]["figures"]["relative_difference"] < 0.005
    assert (report["provider"], report["gpu"], report["versions"]["dragoman"]) == ("cuda-dry", None, "0.1.0")


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this ONNX Runtime has CUDA")
def test_a_gpu_that_was_asked_for_and_cannot_be_used_is_an_error():
    """Nothing is checked on the CPU instead."""
    script = ROOT / "tests" / "gpu" / "check.py"
    done = subprocess.run([sys.executable, script, "--provider", "cuda"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "install onnxruntime-gpu" in done.stderr


def test_graphs_of_other_weights_are_found(subject, tmp_path):
    """Parity is with the fp32 graphs of the same model."""
    (skipped,) = check.check_parity(dataclasses.replace(subject, reference=None), DRY, tmp_path)
    assert skipped.state == "skipped"
    folder = shutil.copytree(subject.folder, tmp_path / "other")
    weights = bytearray((folder / subject.graphs.decoder.file).read_bytes())
    place = len(weights) // 2
    weights[place : place + 4000] = np.full(2000, 0.5, np.float16).tobytes()
    (folder / subject.graphs.decoder.file).write_bytes(weights)
    result, *rest = check.check_parity(dataclasses.replace(subject, folder=folder), DRY, tmp_path)
    assert result.state == "FAILED"
    assert {one.state for one in rest} == {"skipped"}


def subject_with(subject, spoil):
    """The subject, whose runners have ``spoil(runner)`` done to them after each step."""

    class Spoilt(check.Subject):
        def runner(self, device, num_slots):
            runner = super().runner(device, num_slots)
            decode = runner.decode

            def decode_and_spoil(tokens):
                offers = decode(tokens)
                spoil(runner)
                return offers

            runner.decode = decode_and_spoil
            return runner

    return Spoilt(**{field.name: getattr(subject, field.name) for field in dataclasses.fields(subject)})


def overwrite_a_neighbour(runner):
    (buffer, *_) = runner.kv.self_buffers.values()
    values = buffer.read()
    values[-1, :, 40] += 1
    buffer.write(values)


def mix_rows(runner):
    logits = runner.logits.read()
    runner.logits.write(logits + 0.1 * logits[-1])


def test_a_step_that_writes_elsewhere_is_found(subject):
    """One position of a row that no step was for."""
    (sound,) = check.check_in_place(subject, DRY)
    (spoilt,) = check.check_in_place(subject_with(subject, overwrite_a_neighbour), DRY)
    assert (sound.state, spoilt.state) == ("ok", "FAILED")
    assert spoilt.detail == "wrong: key_0"


def test_a_row_that_feels_its_neighbours_is_found(subject):
    """A tenth of another row's logits."""
    (sound,) = check.check_neighbours(subject, DRY)
    (spoilt,) = check.check_neighbours(subject_with(subject, mix_rows), DRY)
    assert (sound.state, spoilt.state) == ("ok", "FAILED")


def test_a_part_that_raises_has_failed_and_hides_no_other(subject, tmp_path, monkeypatch):
    """One run on a GPU shall tell as much as it can."""

    def broken(*_):
        raise RuntimeError("no such kernel")

    for name in ("check_parity", "check_neighbours"):
        monkeypatch.setattr(check, name, broken)
    results = list(check.examine(subject, DRY, 1, None, tmp_path))
    assert [result.detail for result in results if result.state == "FAILED"] == ["RuntimeError: no such kernel"] * 2
    assert {"ok", "measured", "skipped"} < {result.state for result in results}


def test_a_share_of_bandwidth_is_of_what_a_step_reads(subject):
    """Weights, and the filled part of each row's caches: of a made-up GPU that moves so much a second."""
    gpu = check.cuda.Device(0, "a GPU", 1 << 30, (9, 0), 1e9)
    runner = subject.runner(DRY, 2)
    figures = check.measure_bucket(subject, runner, 2, "here", gpu).figures
    a_token = 2 * 2 * 64  # keys and values of one layer, in float16
    steps = subject.limits.max_new_tokens
    assert steps < check.STEPS
    caches = 2 * a_token * (check.SOURCE_TOKENS + steps // 2)
    assert figures["bytes_per_step"] == check.decoder_bytes(subject) + caches
    assert figures["share_of_bandwidth"] == pytest.approx(figures["bytes_per_step"] / figures["step_seconds"] / 1e9)


@pytest.mark.skipif(importlib.util.find_spec("ctranslate2") is None, reason="CTranslate2 is not installed")
def test_ctranslate2_decodes_rows_of_one_length():
    """On the CPU here; the script fails where a row ends early."""
    request = {"device": "cpu", "device_id": 0, "compute_type": "float32"}
    request |= {"encoder_layers": 1, "decoder_layers": 1, "num_heads": 1, "d_model": 16, "ffn_dim": 32}
    request |= {"source_vocab_size": 64, "target_vocab_size": 64, "rows": [1, 3], "source_tokens": 5, "steps": 4}
    script = ROOT / "tests" / "gpu" / "ctranslate.py"
    done = subprocess.run([sys.executable, script, json.dumps(request)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    speeds = json.loads(done.stdout)["tokens_per_second"]
    assert set(speeds) == {"1", "3"} and all(speed > 0 for speed in speeds.values())


# The commands, with --provider cuda-dry


def run_command(command, *arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


def test_generate_answers_as_the_golden_set_has_it(bundle, capfdbinary):
    """The device's graphs, buckets and buffers, on the CPU."""
    cases = list(bundle.golden(bundle.graph_set("cuda")))
    arguments = ["--bundle", bundle.path, "--provider", "cuda-dry", "--slots", "4"]
    assert run_command(generate, *arguments, *(case.text for case in cases)) == 0
    assert capfdbinary.readouterr().out.decode().splitlines() == [case.answer for case in cases]


def test_doctor_loads_a_bundle_for_the_provider(bundle, capsys):
    """And says that there is no kernel of a GPU to tell of."""
    assert run_command(doctor, bundle.path, "--provider", "cuda-dry") == 0
    out = capsys.readouterr().out
    assert "loads for cuda-dry, and gives its golden answers (cpu/fp32, cuda/fp16)" in out
    assert out.endswith("no problems for --provider cuda-dry\n")


def test_serve_tells_the_plan_of_memory_and_the_warm_up(bundle, monkeypatch, caplog):
    """On stderr, before it serves: what a replica takes, and each shape that is run for the first time."""

    async def serve_nobody(server):
        await server.start()
        await server.close()
        return 0

    monkeypatch.setattr(serve, "serve", serve_nobody)
    caplog.set_level(logging.INFO)
    ports = ("--host", "127.0.0.1", "--port", "0", "--metrics-port", "0")
    assert run_command(serve, bundle.path, "--provider", "cuda-dry", "--slots", "4", *ports) == 0
    messages = [record.getMessage() for record in caplog.records]
    assert [m for m in messages if "decoder" in m] == [f"toy warms up: decoder, shape {i} of 3" for i in (1, 2, 3)]
    assert any(m.startswith("toy warms up: encoder, shape 1 of ") for m in messages)
    (plan,) = [m for m in messages if m.startswith("toy on cuda-dry takes, each replica: weights ")]
    assert "KV cache" in plan and plan.endswith("limit none")


def test_a_plan_beyond_the_limit_is_refused_with_its_parts(bundle):
    """Before anything is allocated."""
    with pytest.raises(serve.ConfigError, match=r"weights .* MiB; KV cache .* MiB.*raise --gpu-mem-limit"):
        run_command(serve, bundle.path, "--provider", "cuda-dry", "--gpu-mem-limit", "100000")
