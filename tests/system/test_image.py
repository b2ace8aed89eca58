"""The container image, built for real and run: it serves the embedded model as it comes."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TAG = "dragoman-test"
BUILD_SECONDS = 1500

# Runs inside the image. The server's ports are free ones, because a builder may share this machine's network.
IN_IMAGE = """
import importlib.util, json, os, shutil, signal, subprocess, sys

serve = ["dragoman", "serve", "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"]
server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
try:
    ready = json.loads(server.stdout.readline())
    target = f"127.0.0.1:{ready['port']}"
    generate = ["dragoman", "generate", "--target", target]
    answers = subprocess.run(generate, input="giraffe\\n\\nqueue\\n", capture_output=True, text=True, timeout=60)
    server.send_signal(signal.SIGTERM)
    status = server.wait(60)
finally:
    server.kill()
print("REPORT " + json.dumps({
    "models": ready["models"],
    "answers": answers.stdout,
    "errors": answers.stderr,
    "status": status,
    "uid": os.getuid(),
    "installed": [name for name in ("torch", "onnx", "pip", "hatchling") if importlib.util.find_spec(name)],
    "compilers": [name for name in ("cc", "gcc", "g++", "clang") if shutil.which(name)],
}))
"""


def build_and_run() -> subprocess.CompletedProcess[str]:
    """Build the image and run IN_IMAGE in it: by the command in IMAGE_BUILDER, else by Docker."""
    command = ["python", "-c", IN_IMAGE]
    if builder := os.environ.get("IMAGE_BUILDER"):
        return run([builder, "deploy/Dockerfile", TAG, "--", *command])
    if docker := working_docker():
        built = run([docker, "build", "-q", "-f", "deploy/Dockerfile", "-t", TAG, "."])
        if built.returncode != 0:
            return built
        return run([docker, "run", "--rm", "--entrypoint", command[0], TAG, *command[1:]])
    reason = "no image builder: neither IMAGE_BUILDER nor a running Docker engine"
    if os.environ.get("REQUIRE_IMAGE"):
        pytest.fail(f"{reason}, and REQUIRE_IMAGE is set")
    pytest.skip(reason)


def working_docker() -> str | None:
    """Docker's client, if it has an engine to talk to."""
    docker = shutil.which("docker")
    if docker is None or run([docker, "info"]).returncode != 0:
        return None
    return docker


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run in the repository, which is the build's context; both outputs together."""
    return subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What IN_IMAGE found."""
    done = build_and_run()
    reports = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert done.returncode == 0, done.stdout[-5000:]
    assert len(reports) == 1, done.stdout[-5000:]
    found: dict[str, Any] = json.loads(reports[0].removeprefix("REPORT "))
    return found


def test_the_image_serves_the_embedded_model(report):
    """Started without arguments, the image answers the client inside it, line for line, and stops cleanly."""
    assert report["models"] == ["g2p-en"]
    assert report["answers"] == "JH ER AE F\n\nK Y UW\n", report["errors"]
    assert report["status"] == 0


def test_the_image_does_not_run_as_root(report):
    """The process has the numeric user of the Dockerfile."""
    assert report["uid"] == 10001


def test_the_image_holds_no_build_tools(report):
    """No torch, no onnx, no installer, no compiler: only what serving needs."""
    assert report["installed"] == []
    assert report["compilers"] == []
