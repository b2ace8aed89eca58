"""deploy/quickstart.sh and deploy/loadtest/smoke.sh in the environment that runs the tests: nothing is installed."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "deploy/quickstart.sh"
SMOKE = ROOT / "deploy/loadtest/smoke.sh"
SECONDS = 120.0

# Stands for the console script. It notes its process id as a server, and then behaves as MODE says.
FAKE_DRAGOMAN = """#!/usr/bin/env bash
set -euo pipefail
if [ "$1" = serve ]; then
  echo $$ >"{folder}/pid"
  echo "a line of the server's log" >&2
  [ "{mode}" != refuses ] || exit 3
  exec "{folder}/bin/python" "{folder}/server.py"
fi
[ "{mode}" != mute ] || exit 1
if [ "{mode}" = dies ] && mkdir "{folder}/once" 2>/dev/null; then
  kill -USR1 "$(cat "{folder}/pid")"
fi
case "$*" in
  *--stream*) echo "streamed by $5: ${{*: -1}}" ;;
  *) tr a-z A-Z ;;
esac
"""
FAKE_SERVER = """
import json, signal, threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

stop = threading.Event()
status = 0

def end(number, frame):
    global status
    status = 70 if number == signal.SIGUSR1 else 0
    stop.set()

signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, end)
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("", getattr(health_pb2.HealthCheckResponse, STATUS))
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(json.dumps({"port": port, "metrics_port": 1, "models": ["en-de", "g2p-en"]}), flush=True)
stop.wait()
server.stop(None).wait()
raise SystemExit(status)
"""


# A shell that runs the tests in the background, or under nohup, makes them ignore signals, and what they start inherits
# that.
WITH_INTERRUPTS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def started(script: Path, *arguments: str, venv: Path | str = sys.prefix) -> Iterator[subprocess.Popen[str]]:
    """The script in a process group of its own, as a terminal would start it; ended with the block at the latest."""
    with subprocess.Popen(
        [sys.executable, "-c", WITH_INTERRUPTS, "bash", str(script), *arguments],
        env={**os.environ, "VENV": str(venv)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()  # the script's own clean-up runs; nothing happens when it has ended


def run(script: Path, *arguments: str, venv: Path | str = sys.prefix) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a script that ends by itself."""
    with started(script, *arguments, venv=venv) as process:
        out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def read_until_serving(process: subprocess.Popen[str]) -> str:
    """What the script prints up to the line that says it serves."""
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("serving on "):
            break
    return "".join(lines)


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Path]:
    """Makes an environment whose ``dragoman`` behaves as the mode says."""

    def make(mode: str, health: str = "SERVING") -> Path:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (tmp_path / "bin/dragoman").write_text(FAKE_DRAGOMAN.format(folder=tmp_path, mode=mode))
        server = FAKE_SERVER.replace("STATUS", repr(health))
        (tmp_path / "server.py").write_text(server)
        for name in ("python", "dragoman"):
            (tmp_path / "bin" / name).chmod(0o755)
        return tmp_path

    return make


def is_running(venv: Path) -> bool:
    """Whether the fake server still exists."""
    try:
        os.kill(int((venv / "pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_once_prints_right_answers_and_ends():
    """The sentences and words of the tour with their answers, where the metrics are, status 0, and no server left."""
    status, out, err = run(QUICKSTART, "--once")
    url = re.search(r"^metrics +(http://127\.0\.0\.1:\d+/metrics)$", out, re.MULTILINE)

    assert status == 0, err
    for line in (
        "The children are playing in front of the school. -> Die Kinder spielen vor der Schule.",
        "The old man sat on the bench and read his newspaper. -> Der alte Mann saß auf der Bank und las seine Zeitung.",
        "attention -> AH T EH N SH AH N",
        "queue -> K Y UW",
        "giraffe -> JH ER AE F",
    ):
        assert line in out.splitlines()
    assert url, out
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url[1], timeout=10)


def test_each_model_that_is_served_is_asked_what_it_is_for(fake):
    """Sentences for the translator, the last one as it comes; words for the other; then how to go on."""
    with started(QUICKSTART, venv=fake("works")) as process:
        lines = read_until_serving(process).splitlines()

    sentence = "The children are playing in front of the school."
    assert f"{sentence} -> {sentence.upper()}" in lines
    assert sum("streamed by en-de: The old man" in line for line in lines) == 1
    assert "giraffe -> GIRAFFE" in lines
    assert [line.endswith(f'"{sentence}"') for line in lines if line.startswith("ask it ")] == [True]


def test_it_serves_until_ctrl_c():
    """Without --once the printed ports answer until SIGINT, which ends it all with status 0."""
    with started(QUICKSTART) as process:
        text = read_until_serving(process)
        url = re.search(r"^metrics +(http://127\.0\.0\.1:\d+/metrics)$", text, re.MULTILINE)
        target = re.search(r"^serving on (\S+) ", text, re.MULTILINE)
        assert url, text
        assert target, text
        with urllib.request.urlopen(url[1], timeout=10) as answer:
            metrics = answer.read()
        with grpc.insecure_channel(target[1], options=[("grpc.enable_http_proxy", 0)]) as channel:
            grpc.channel_ready_future(channel).result(timeout=10)
        os.killpg(process.pid, signal.SIGINT)  # as the terminal's Ctrl-C
        _, err = process.communicate(timeout=SECONDS)

    assert b"dragoman_" in metrics
    assert process.returncode == 0, err


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_script_alone_takes_the_server_with_it(fake, number, expected):
    """Whoever ends the script ends its server too, without a word about a failed step."""
    venv = fake("works")
    with started(QUICKSTART, venv=venv) as process:
        read_until_serving(process)
        process.send_signal(number)
        _, err = process.communicate(timeout=SECONDS)

    assert process.returncode == expected
    assert "failed" not in err
    assert not is_running(venv)


@pytest.mark.parametrize(
    ("mode", "health", "step", "status"),
    [
        ("refuses", "SERVING", "start", 1),
        ("works", "NOT_SERVING", "start", 1),
        ("mute", "SERVING", "generate", 1),
        ("dies", "SERVING", "serve", 70),
    ],
)
def test_a_failed_step_is_named_with_the_servers_log(fake, mode, health, step, status):
    """A server that does not start, is not healthy, does not answer or dies: step, log, status, and no process left."""
    venv = fake(mode, health)
    found, _, err = run(QUICKSTART, venv=venv)

    assert found == status
    assert f"deploy/quickstart.sh: step '{step}' failed" in err
    assert "a line of the server's log" in err
    assert not is_running(venv)


@pytest.mark.parametrize("arguments", [("--twice",), ("--once", "more")])
def test_wrong_arguments_show_the_usage(arguments):
    """Anything but --once is refused before anything is made."""
    status, out, err = run(QUICKSTART, *arguments)

    assert status == 2
    assert out == ""
    assert "usage: bash deploy/quickstart.sh [--once]" in err


def test_without_an_interpreter_it_says_how_to_name_one():
    """A machine without a fitting Python gets a sentence, and the step's name, instead of a shell error."""
    done = subprocess.run(
        ["bash", str(QUICKSTART), "--once"],
        env={**{k: v for k, v in os.environ.items() if k != "VENV"}, "PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert done.returncode == 1
    assert "there is no interpreter 'no-such-python'" in done.stderr
    assert "step 'environment' failed" in done.stderr


def test_the_smoke_load_ends_without_errors():
    """A short open-loop load against a server of its own: no errors, and the server ends cleanly."""
    status, out, err = run(SMOKE, "30", "2")

    assert status == 0, err
    assert "0 errors (0.00%)" in out
    assert "the server ended cleanly" in out


def test_the_smoke_load_fails_on_errors(fake):
    """Where calls fail, so does the smoke test, naming the step and showing the server's log."""
    venv = fake("mute")
    status, _, err = run(SMOKE, "30", "1", venv=venv)

    assert status == 1
    assert "deploy/loadtest/smoke.sh: step 'load' failed" in err
    assert "a line of the server's log" in err
    assert not is_running(venv)
