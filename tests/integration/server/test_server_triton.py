"""NVIDIA's Triton client, as it comes, against a server in a process of its own.

It is installed apart from everything else (tests/run.sh does so): it wants protobuf below 7, and its messages have the
names of ours, which no process can have twice.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.config import embedded_bundle

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("triton_client.py")
MODEL = "g2p-en"


@pytest.fixture(scope="module")
def triton_python() -> str:
    """The interpreter of the client's environment."""
    python = os.environ.get("TRITON_PYTHON", str(ROOT / ".venv-triton" / "bin" / "python"))
    if not Path(python).exists():
        reason = f"there is no {python}: tests/run.sh makes it"
        if os.environ.get("REQUIRE_TRITON"):
            pytest.fail(f"{reason}, and REQUIRE_TRITON is set")
        pytest.skip(reason)
    return python


@pytest.fixture(scope="module")
def target(triton_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose models callers may load and unload."""
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(embedded_bundle(MODEL), models / MODEL)
    flags = ("--port", "0", "--metrics-port", "0", "--models", str(models), "--allow-model-control")
    server = subprocess.Popen(
        [sys.executable, "-m", "dragoman.cli.main", "serve", "--log-level", "error", "--host", "127.0.0.1", *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        yield f"127.0.0.1:{json.loads(server.stdout.readline())['port']}"
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


@pytest.fixture(scope="module")
def seen(triton_python: str, target: str) -> dict[str, Any]:
    """What the client saw."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [triton_python, str(SCRIPT), target, MODEL],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def giraffe(seen: dict[str, Any]) -> str:
    """One answer: how the word is pronounced."""
    answer = seen["row"][0]
    assert isinstance(answer, str) and answer.split()[0] == "JH"
    return answer


def test_it_finds_the_server_and_its_model(seen):
    """Live, ready, metadata, configuration."""
    assert int(seen["protobuf"].split(".")[0]) < 7
    assert (seen["live"], seen["ready"], seen["model_ready"]) == (True, True, [True, False, False])
    assert seen["server"]["name"] == "dragoman"
    assert seen["metadata"]["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": ["-1", "1"]}]
    assert seen["metadata"]["outputs"][0]["name"] == "text_output"
    assert seen["config"]["max_batch_size"] == 1024 and "dynamic_batching" in seen["config"]
    assert seen["config"]["input"] == [{"name": "text_input", "data_type": "TYPE_STRING", "dims": ["1"]}]


def test_its_texts_are_answered_in_their_shape(seen, giraffe):
    """Rows, columns, compressed, asynchronous, and in typed contents."""
    assert [row for (row,) in seen["column"]] == seen["row"] == [row for (row,) in seen["compressed"]]
    assert len(seen["row"]) == 3 and seen["row"][1] == "" and seen["row"][2].count("\n") == 1
    assert seen["asynchronous"] == [[giraffe]] and seen["typed"] == [giraffe]


def test_its_options_outputs_and_ids_are_honoured(seen, giraffe):
    """Two of two beams, best first, with their scores."""
    beams = seen["beams"]
    assert seen["id"] == "mine"
    assert beams["text_output"][0][0] == giraffe != beams["text_output"][0][1]
    assert beams["finish_reason"] == [["stop", "stop"]]
    assert 0 > beams["score"][0][0] > beams["score"][0][1]


def test_its_errors_are_statuses(seen):
    """With messages that say what to do."""
    statuses = [status for status, _ in seen["failures"]]
    messages = [message for _, message in seen["failures"]]
    assert statuses == [
        "StatusCode.NOT_FOUND",
        "StatusCode.INVALID_ARGUMENT",
        "StatusCode.INVALID_ARGUMENT",
        "StatusCode.INVALID_ARGUMENT",
        "StatusCode.UNIMPLEMENTED",
        "StatusCode.NOT_FOUND",
    ]
    assert (
        "did you mean" in messages[1] and "'sequence_" in messages[2] and messages[3].startswith("text_input[1]: text")
    )


def test_its_streams_are_answered_as_they_grow(seen, giraffe):
    """Deltas add up, the last is marked, an error leaves the stream open unless it should end it."""
    *parts, last = seen["stream"]
    assert last[2] is True and not any(part[2] for part in parts) and {part[0] for part in seen["stream"]} == {"1"}
    grown = ["".join(row[i][0] for _, row, _ in seen["stream"]) for i in range(2)]
    assert grown[0] == giraffe and dict(seen["stream_aio"]) == {"a": grown[0], "b": grown[1]}
    *parts, last = seen["stream_empty_final"]
    assert last[1:] == [None, True] and "".join(part[1][0][0] for part in parts) == giraffe
    error, *parts = seen["stream_error"]
    assert error[0] is None and "text has 70000 bytes" in error[1]
    assert "".join(part[1][0][0] for part in parts) == grown[1]
    assert len(seen["stream_status"]) == 1 and "INVALID_ARGUMENT" in seen["stream_status"][0][1]


def test_it_counts_what_was_computed(seen):
    """Lines that were answered and texts that were not, with all times."""
    assert seen["statistics"]["name"] == MODEL
    assert seen["statistics"]["inferences"] > 10 and seen["statistics"]["failed"] == 6
    assert seen["statistics"]["measured"] == ["compute_infer", "compute_input", "queue", "success"]


def test_it_unloads_and_loads_a_model(seen, giraffe):
    """Where the server lets callers do so."""
    (entry,) = seen["index"]
    assert (entry["name"], entry["state"]) == (MODEL, "READY")
    assert seen["unloaded"] == [False, "StatusCode.NOT_FOUND"] and seen["index_ready"] == 0
    assert seen["loaded"] == [True, [[giraffe]]]
