"""The container image, built for real and run: it serves the embedded models as it comes."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman.client import Client

ROOT = Path(__file__).resolve().parents[2]
TAG = "dragoman-test"
BUILD_SECONDS = 1500
MAX_CONTENT_BYTES = 350 << 20

# Runs inside the image, until its input ends. The server's ports are free ones, because a builder may share this
# machine's network.
IN_IMAGE = """
import importlib.util, json, os, shutil, signal, subprocess, sys

def run(*command, text=""):
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)

serve = ["dragoman", "serve", "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"]
server = subprocess.Popen(serve, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
try:
    ready = json.loads(server.stdout.readline())
    print("READY " + json.dumps(ready), flush=True)
    target = f"127.0.0.1:{ready['port']}"
    health = run("dragoman", "health", "--address", target)
    answers = run("dragoman", "generate", "--target", target, "--model", "g2p-en", text="giraffe\\n\\nqueue\\n")
    sys.stdin.read()
    server.send_signal(signal.SIGTERM)
    status = server.wait(60)
finally:
    server.kill()
try:
    open("/written", "w")
    refusal = 0
except OSError as error:
    refusal = error.errno
files = [os.path.join(folder, name) for folder, _, names in os.walk("/opt/dragoman") for name in names]
print("REPORT " + json.dumps({
    "models": ready["models"],
    "health": health.stdout,
    "answers": answers.stdout,
    "errors": health.stderr + answers.stderr,
    "status": status,
    "uid": os.getuid(),
    "installed": [name for name in ("torch", "onnx", "pip", "hatchling") if importlib.util.find_spec(name)],
    "compilers": [name for name in ("cc", "gcc", "g++", "clang") if shutil.which(name)],
    "refusal": refusal,
    "bytes": sum(os.lstat(path).st_size for path in files),
}))
"""

# Runs a command as the image's user, on a root that cannot be written to, in a network that has nothing but itself.
SEALED = """
set -e
root=$1
shift
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind /proc "$root/proc"
mount --bind /dev "$root/dev"
"$PYTHON" - <<'UP'
import fcntl, socket, struct
with socket.socket() as control:  # the loopback device is down in a new network
    fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", 1))
UP
exec chroot --userspec=10001:10001 "$root" env -i PATH=/opt/dragoman/bin:/usr/bin:/bin ORT_DISABLE_TELEMETRY=1 "$@"
"""


@contextmanager
def running() -> Iterator[subprocess.Popen[str]]:
    """IN_IMAGE in the image, which is built first: by the command in IMAGE_BUILDER, else by Docker."""
    command = ["python", "-c", IN_IMAGE]
    if builder := os.environ.get("IMAGE_BUILDER"):
        started = [builder, "deploy/Dockerfile", TAG, "--", *command]
    elif docker := working_docker():
        built = run([docker, "build", "-q", "-f", "deploy/Dockerfile", "-t", TAG, "."])
        assert built.returncode == 0, built.stdout[-5000:]
        options = ["--rm", "-i", "--read-only", "--tmpfs", "/tmp", "--network", "host", "--entrypoint", command[0]]
        started = [docker, "run", *options, TAG, *command[1:]]
    else:
        reason = "no image builder: neither IMAGE_BUILDER nor a running Docker engine"
        if os.environ.get("REQUIRE_IMAGE"):
            pytest.fail(f"{reason}, and REQUIRE_IMAGE is set")
        pytest.skip(reason)
    with subprocess.Popen(
        started, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


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


def line_of(printed: str, word: str) -> dict[str, Any]:
    """The JSON behind a word at the beginning of a line, of which there must be one."""
    found = [line.removeprefix(word + " ") for line in printed.splitlines() if line.startswith(word + " ")]
    assert len(found) == 1, printed[-5000:]
    content: dict[str, Any] = json.loads(found[0])
    return content


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What IN_IMAGE found, and what a caller outside was answered meanwhile."""
    with running() as process:
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line
            if line.startswith("READY "):
                break
        port = line_of(printed, "READY")["port"]
        with Client(f"127.0.0.1:{port}", model="g2p-en") as client:
            outside = client.generate("giraffe").text
        rest, _ = process.communicate("", timeout=120)
        assert process.returncode == 0, (printed + rest)[-5000:]
    return {**line_of(rest, "REPORT"), "outside": outside}


def test_the_image_serves_the_embedded_models(report):
    """Started without arguments, the image answers the client inside it, line for line, and stops cleanly."""
    assert "g2p-en" in report["models"]
    assert report["health"] == "SERVING\n", report["errors"]
    assert report["answers"] == "JH ER AE F\n\nK Y UW\n", report["errors"]
    assert report["status"] == 0


def test_the_image_answers_callers_outside(report):
    """A client of this machine reaches the server in the image, over gRPC."""
    assert report["outside"] == "JH ER AE F"


def test_the_image_does_not_run_as_root(report):
    """The process has the numeric user of the Dockerfile."""
    assert report["uid"] == 10001


def test_the_image_holds_no_build_tools(report):
    """No torch, no onnx, no installer, no compiler: only what serving needs."""
    assert report["installed"] == []
    assert report["compilers"] == []


def test_the_image_is_small(report):
    """What is on top of the base image stays within its bound."""
    assert report["bytes"] <= MAX_CONTENT_BYTES


def test_the_image_serves_without_network_on_a_root_that_cannot_be_written(report, tmp_path):
    """As by ``docker run --network none --read-only --user 10001 --tmpfs /tmp``."""
    if "IMAGE_BUILDER" not in os.environ or shutil.which("buildah") is None:
        pytest.skip("buildah has not built the image")
    script = tmp_path / "sealed.sh"
    script.write_text(SEALED)
    environment = {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot", "PYTHON": sys.executable}
    container = output(["buildah", "from", "--pull-never", f"localhost/{TAG}"], environment)
    try:
        root = output(["buildah", "mount", container], environment)
        sealed = ["unshare", "--mount", "--net", "sh", str(script), root, "python", "-c", IN_IMAGE]
        found = line_of(output(sealed, environment), "REPORT")
    finally:
        output(["buildah", "rm", container], environment)
    assert found["refusal"] == errno.EROFS
    assert found["uid"] == 10001
    assert found["answers"] == report["answers"], found["errors"]
    assert found["status"] == 0


def output(command: list[str], environment: dict[str, str]) -> str:
    """What a command prints, which must end well."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout.strip()
