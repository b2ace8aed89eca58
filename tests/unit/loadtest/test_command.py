"""``dragoman loadtest`` against a real gRPC server in this process that answers as a test says."""

import argparse
import asyncio
import json
import threading

import grpc
import pytest

from dragoman.cli import loadtest
from dragoman.errors import ConfigError
from dragoman.loadtest.target import connect
from dragoman.v1.generation_pb2 import GenerateRequest, GenerateResponse

HANG = object()


class StubServer:
    """``Generate`` answers the text itself, or with the status that ``statuses`` names, in turn; never for HANG."""

    def __init__(self, statuses=(None,)):
        self.statuses, self.texts, self.peers = statuses, [], set()
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self):
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exc):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self):
        self._stop = asyncio.Event()
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(
            self._generate, GenerateRequest.FromString, GenerateResponse.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("dragoman.v1.GenerationService", {"Generate": handler}),)
        )
        self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._ready.set()
        await self._stop.wait()
        await server.stop(None)

    async def _generate(self, request, context):
        status = self.statuses[len(self.texts) % len(self.statuses)]
        self.texts.append(request.text)
        self.peers.add(context.peer())
        if status is HANG:
            await asyncio.Future()  # until the call is cancelled
        if status is not None:
            await context.abort(status, "as the test wants")
        return GenerateResponse(text=request.text)


def run(*arguments: str) -> int:
    """The command as the console script runs it."""
    parser = argparse.ArgumentParser()
    loadtest.add_arguments(parser)
    return loadtest.run(parser.parse_args(arguments))


def test_all_answers_ok_exits_0_and_prints_the_figures(capsys):
    """A server that answers everything: no errors, percentiles printed, status 0 under a zero error limit."""
    with StubServer() as server:
        status = run(server.target, "--rate", "200", "--duration", "0.5", "--max-error-rate", "0")
    printed = capsys.readouterr().out

    assert status == 0
    assert f"{len(server.texts)}: {len(server.texts)} OK, 0 errors" in printed
    assert len(server.texts) > 50
    assert all(name in printed for name in ("asked 200/s", "p50", "p95", "p99", "max"))


def test_every_third_call_rejected_is_a_third_of_errors(tmp_path):
    """Rejections are counted under their gRPC status, in the JSON file too."""
    rejecting = (None, None, grpc.StatusCode.RESOURCE_EXHAUSTED)
    with StubServer(rejecting) as server:
        status = run(server.target, "--rate", "300", "--duration", "0.5", "--json", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())

    assert status == 0  # no limit was given
    assert report["requests"] == len(server.texts)
    assert report["errors"] == {"RESOURCE_EXHAUSTED": len(server.texts) // 3}
    assert report["error_rate"] == pytest.approx(1 / 3, abs=0.02)


def test_an_exceeded_limit_exits_1_and_names_it(capsys):
    """More errors than allowed: status 1, and the measured rate and the limit on stderr."""
    with StubServer((None, grpc.StatusCode.UNAVAILABLE)) as server:
        status = run(server.target, "--rate", "200", "--duration", "0.3", "--max-error-rate", "0.1")

    assert status == 1
    assert "the limit is 0.1" in capsys.readouterr().err


def test_a_call_without_an_answer_ends_at_its_deadline(capsys):
    """A server that never answers: every call ends DEADLINE_EXCEEDED, and there is no latency to print."""
    with StubServer((HANG,)) as server:
        run(server.target, "--rate", "100", "--duration", "0.2", "--deadline", "0.5")
    printed = capsys.readouterr().out

    assert f"errors    {len(server.texts)} DEADLINE_EXCEEDED" in printed
    assert "no request ended OK" in printed


async def test_a_deadline_that_passed_before_sending_is_exceeded():
    """A request that this side could not send within its deadline counts as DEADLINE_EXCEEDED, not as a crash."""
    with StubServer() as server:
        async with connect(server.target, ["text"], connections=1, connect_seconds=10.0, seed=0) as call:
            statuses = [await call(0, 10.0), await call(1, 0.0), await call(2, -1.0)]

    assert statuses == ["OK", "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"]


def test_texts_come_from_the_file_and_repeat_with_the_seed(tmp_path):
    """Only the file's lines are sent, drawn at random; the same seed draws the same."""
    file = tmp_path / "texts.txt"
    file.write_text("one\n\ntwo \x0b words\n", encoding="utf-8")
    sent = []
    for seed in ("5", "5", "6"):
        with StubServer() as server:
            run(server.target, "--rate", "100", "--duration", "0.3", "--input", str(file), "--seed", seed)
        sent.append(sorted(server.texts))

    assert set(sent[0]) == {"one", "two \x0b words"}
    assert sent[0] == sent[1]
    assert sent[0] != sent[2]


def test_connections_are_real_ones():
    """Three connections are three sockets at the server, not one shared under three names."""
    with StubServer() as server:
        run(server.target, "--rate", "100", "--duration", "0.2", "--connections", "3")

    assert len(server.peers) == 3


def test_nobody_at_the_target_is_a_clear_error():
    """A target that refuses connections is no finding about a server: an error that names it."""
    with StubServer() as server:
        target = server.target

    with pytest.raises(ConfigError, match=f"cannot connect to {target}"):
        run(target, "--rate", "10", "--duration", "0.1", "--deadline", "0.2")


@pytest.mark.parametrize("content", [None, b"", b" \n\n", b"\xff\n"])
def test_an_input_file_without_texts_is_refused(tmp_path, content):
    """Missing, empty, blank or undecodable: an error that names the file, before anything is sent."""
    file = tmp_path / "texts.txt"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError, match=r"texts\.txt"):
        run("127.0.0.1:1", "--rate", "1", "--duration", "1", "--input", str(file))


def test_a_load_too_large_to_keep_is_refused():
    """A rate and duration whose outcomes would fill the memory are refused, naming the count."""
    with pytest.raises(ConfigError, match="100000000 requests"):
        run("127.0.0.1:1", "--rate", "1e6", "--duration", "100")


@pytest.mark.parametrize(
    "wrong",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--rate", "many"],
        ["--duration", "-1"],
        ["--duration", "inf"],
        ["--connections", "0"],
        ["--max-in-flight", "1.5"],
        ["--max-error-rate", "1.1"],
    ],
)
def test_wrong_numbers_are_usage_errors(wrong, capsys):
    """Numbers that make no load are refused with the option's name, exit status 2."""
    with pytest.raises(SystemExit) as exited:
        run("127.0.0.1:1", "--rate", "1", "--duration", "1", *wrong)

    assert exited.value.code == 2
    assert wrong[0] in capsys.readouterr().err
