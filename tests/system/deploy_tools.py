"""What the tests of deploy/ share: its tools, and servers in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MODEL = "g2p-en"
SECONDS = 60.0
T = TypeVar("T")


def tool(name: str) -> str:
    """The path of a program: of .venv-deploy, which tests/run.sh makes, else of the system."""
    folder = os.environ.get("DEPLOY_TOOLS", str(ROOT / ".venv-deploy" / "bin"))
    path = shutil.which(name, path=folder) or shutil.which(name)
    if path is None:
        reason = f"there is no {name}: tests/run.sh installs Python's, apt-get install prometheus the rest"
        if os.environ.get("REQUIRE_DEPLOY"):
            pytest.fail(f"{reason}, and REQUIRE_DEPLOY is set")
        pytest.skip(reason)
    return path


def run(*command: str, cwd: Path = ROOT) -> str:
    """What a command prints, both outputs together; it must end well."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A server of the embedded pronunciations, and what it said when it was ready."""
    flags = ("--model", MODEL, "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0", "--log-level", "error")
    command = [sys.executable, "-m", "dragoman.cli.main", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def until(what: str, found: Callable[[], T]) -> T:
    """Ask until the answer is true."""
    deadline = time.monotonic() + SECONDS
    while not (answer := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return answer


def fetch(url: str) -> bytes:
    """The body of a page; empty while nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            body: bytes = reply.read()
            return body
    except OSError:
        return b""
