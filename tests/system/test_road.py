"""The whole road in real processes: train, export, serve, call, stop; and what stops it at the start."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dragoman.client import Client
from dragoman.config import embedded_bundle
from dragoman.errors import InvalidRequestError

SERVE = [sys.executable, "-m", "dragoman.cli.main", "serve", "--host", "127.0.0.1"]


@contextlib.contextmanager
def serving(*arguments, cwd="/"):
    """A server process that is ready, on free ports; killed at the end if it still runs."""
    command = [*SERVE, "--port", "0", "--metrics-port", "0", *map(str, arguments)]
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield process, json.loads(line)
        finally:
            if process.poll() is None:
                process.kill()


def serve_fails(*arguments):
    """What a server that does not start says; it must exit with status 2 and print nothing on stdout."""
    command = [*SERVE, "--port", "0", "--metrics-port", "0", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    return done.stderr


def test_a_trained_model_is_served_with_exact_answers(reverse_bundle, reverse_data):
    """The toy task's dev words, through a real server: every answer right but for what the model itself gets wrong."""
    words = (reverse_data / "dev.source").read_text().splitlines()
    expected = (reverse_data / "dev.target").read_text().splitlines()
    with serving(reverse_bundle) as (process, ready):
        assert ready["models"] == ["reverse"]
        target = f"127.0.0.1:{ready['port']}"
        with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
            status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        with Client(target) as client:
            answers = [result.text for result in client.batch(words)]
            with pytest.raises(InvalidRequestError, match=r"'Z' \(U\+005A\)"):
                client.generate("abZ")
        assert sum(a == e for a, e in zip(answers, expected, strict=True)) >= 0.97 * len(words)
        metrics = (
            urllib.request.urlopen(f"http://127.0.0.1:{ready['metrics_port']}/metrics", timeout=10).read().decode()
        )
        assert 'dragoman_requests_total{code="ok",method="BatchGenerate",model="reverse"} 300.0' in metrics
        assert 'dragoman_slots_used{model="reverse"} 0.0' in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_serve_without_arguments_serves_the_embedded_models():
    """The translator, which is the default, and the pronunciation model, found from any folder."""
    with serving() as (process, ready):
        assert ready["models"] == ["en-de", "g2p-en"]
        with Client(f"127.0.0.1:{ready['port']}") as client:
            assert client.generate("The children are playing in front of the school.").text == (
                "Die Kinder spielen vor der Schule."
            )
            assert client.generate("").text == ""
            assert client.model_info().unknown_policy == "byte_fallback"
        with Client(f"127.0.0.1:{ready['port']}", model="g2p-en") as client:
            assert client.generate("giraffe").text == "JH ER AE F"
            assert client.model_info().unknown_policy == "refuse"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_two_models_are_served_side_by_side(reverse_bundle):
    """Each answers to its name, the first to no name; two alike are refused."""
    with serving(reverse_bundle, embedded_bundle("g2p-en")) as (process, ready):
        assert ready["models"] == ["reverse", "g2p-en"]
        target = f"127.0.0.1:{ready['port']}"
        answers = {}
        for name in ("", *ready["models"]):
            with Client(target, model=name) as client:
                answers[name] = client.generate("abba").text
        assert answers["reverse"] == "A B B A" == answers[""]
        assert answers["g2p-en"] == "AE B AH"
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{ready['metrics_port']}/metrics", timeout=10).read()
        for name, count in (("reverse", 2), ("g2p-en", 1)):
            line = f'dragoman_requests_total{{code="ok",method="Generate",model="{name}"}} {count}.0'
            assert line in metrics.decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert "are both reverse version 1: keep one of them" in serve_fails(reverse_bundle, reverse_bundle)


def test_generate_in_process_and_through_a_server_agree(tmp_path):
    """The same lines give the same output, byte for byte, blank lines and line ends included."""
    words = tmp_path / "words.txt"
    words.write_bytes(b"giraffe\n\n race \r\nqueue\nattention")
    generate = [sys.executable, "-m", "dragoman.cli.main", "generate", "--model", "g2p-en"]

    def run(*arguments):
        with words.open("rb") as file:
            return subprocess.run(
                [*generate, *arguments], stdin=file, capture_output=True, timeout=120, check=True
            ).stdout

    with serving("--replicas", "2") as (_, ready):
        served = run("--target", f"127.0.0.1:{ready['port']}")
    assert served == run()
    assert served.splitlines(keepends=True)[:2] == [b"JH ER AE F\n", b"\n"]
    assert served.count(b"\n") == 4 and served.splitlines()[2].startswith(b" R EY S ")


@pytest.mark.parametrize("name", ["manifest.json", "decoder.cpu.int8.onnx", "source.tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_bundle_is_never_served(tmp_path, name, damage):
    """The process does not start, and its message names the file."""
    bundle = shutil.copytree(embedded_bundle("g2p-en"), tmp_path / "bundle")
    if damage == "missing":
        (bundle / name).unlink()
    else:
        os.truncate(bundle / name, 100)
    assert name in serve_fails(bundle)


def test_a_folder_that_is_not_there_is_named():
    """One line with the folder's name, no traceback."""
    message = serve_fails("/nowhere/bundle")
    assert "/nowhere/bundle" in message and "Traceback" not in message


def test_a_port_in_use_stops_the_second_server():
    """Two servers never share a port in silence: the second one names it and exits with status 2."""
    with serving() as (_, ready):
        for flag in ("port", "metrics_port"):
            command = [*SERVE, "--port", "0", "--metrics-port", "0", f"--{flag.replace('_', '-')}", str(ready[flag])]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 2
            assert str(ready[flag]) in done.stderr and "Traceback" not in done.stderr
