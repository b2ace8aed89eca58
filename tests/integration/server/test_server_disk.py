"""What happens to the disk while it serves, a server does not notice: it reads all before, and writes but its log."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman.client import Client
from dragoman.config import embedded_bundle

FULL = Path("/dev/full")  # takes no byte, as a full disk


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_and_lost_model_files_change_no_answer(tmp_path):
    """The log is lost and the answers are not; a server that is told to end ends well."""
    bundle = shutil.copytree(embedded_bundle("g2p-en"), tmp_path / "bundle")
    command = [sys.executable, "-m", "dragoman.cli.main", "serve", str(bundle), "--host", "127.0.0.1", "--port", "0"]
    with (
        FULL.open("w") as full,
        subprocess.Popen([*command, "--metrics-port", "0"], stdout=subprocess.PIPE, stderr=full, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            target = f"127.0.0.1:{json.loads(process.stdout.readline())['port']}"
            shutil.rmtree(bundle)
            with Client(target) as client:
                for _ in range(20):
                    assert client.generate("giraffe", timeout=60).text == "JH ER AE F"
                assert client.model_info(timeout=60).model == "g2p-en"
                assert client.score("giraffe", "JH ER AE F", timeout=60).model == "g2p-en"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_server_that_cannot_say_that_it_is_ready_does_not_serve():
    """Whoever waits for that line would wait for ever."""
    command = [sys.executable, "-m", "dragoman.cli.main", "serve", str(embedded_bundle("g2p-en"))]
    with FULL.open("w") as full:
        done = subprocess.run(
            [*command, "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
