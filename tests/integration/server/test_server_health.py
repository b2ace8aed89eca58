"""``dragoman health`` against a real server, as a probe runs it."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from typing import Any

import pytest

from dragoman.cli import health
from dragoman.errors import ConfigError


async def probe(running: Any, *arguments: str) -> int:
    """The command in a thread."""
    parser = argparse.ArgumentParser()
    health.add_arguments(parser)
    args = parser.parse_args(["--address", f"127.0.0.1:{running.server.port}", *arguments])
    return await asyncio.to_thread(health.run, args)


async def test_a_server_that_serves_is_ready_and_alive(start_server, capsys):
    """As are its model, this version of it, and each service."""
    running = await start_server()
    for arguments in (
        (),
        ("--live",),
        ("--model", "scripted"),
        ("--model", "scripted/1"),
        ("--service", "dragoman.v1.GenerationService"),
    ):
        assert await probe(running, *arguments) == 0
        assert capsys.readouterr() == ("SERVING\n", "")


async def test_a_server_that_drains_is_alive_and_not_ready(start_server, capsys):
    """So a container is left alone while it finishes its work."""
    running = await start_server()
    await running.server.drain()
    assert await probe(running) == await probe(running, "--model", "scripted") == 1
    assert capsys.readouterr().out == "NOT_SERVING\n" * 2
    assert await probe(running, "--live") == 0


async def test_what_is_not_there_is_not_healthy(start_server, capsys):
    """An unknown model, and a server that does not answer, each with a line that says so."""
    running = await start_server()
    assert await probe(running, "--model", "other") == 1
    assert "NOT_FOUND" in capsys.readouterr().err
    await running.server.close()
    assert await probe(running) == 1
    assert f"127.0.0.1:{running.server.port}: UNAVAILABLE" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--timeout is 0"):
        await probe(running, "--timeout", "0")


def test_a_probe_loads_nothing_heavy():
    """It runs every few seconds: no ONNX Runtime, no numpy, no engine."""
    code = """
import sys
from dragoman.cli.main import main
assert main(["health", "--address", "127.0.0.1:1"]) == 1
print(sorted({"onnxruntime", "numpy", "sentencepiece", "prometheus_client", "dragoman.engine"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
