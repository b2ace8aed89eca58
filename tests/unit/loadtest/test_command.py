"""``dragoman loadtest`` against a real gRPC server in this process that answers as a test says."""

import argparse
import asyncio
import json
import math
import re
import threading

import grpc
import pytest

from dragoman.cli import capacity, loadtest
from dragoman.cli.command import Command
from dragoman.errors import ConfigError
from dragoman.loadtest.requests import draw_requests
from dragoman.loadtest.scenario import Part
from dragoman.loadtest.target import connect
from dragoman.v1.generation_pb2 import GenerateRequest, GenerateResponse, StreamGenerateResponse

HANG = object()


class StubServer:
    """``Generate`` answers the text itself, or with the status that ``statuses`` names, in turn; never for HANG."""

    def __init__(self, statuses=(None,)):
        self.statuses, self.texts, self.requests, self.peers = statuses, [], [], set()
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
        stream_handler = grpc.unary_stream_rpc_method_handler(
            self._stream, GenerateRequest.FromString, StreamGenerateResponse.SerializeToString
        )
        methods = {"Generate": handler, "StreamGenerate": stream_handler}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("dragoman.v1.GenerationService", methods),)
        )
        self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._ready.set()
        await self._stop.wait()
        await server.stop(None)

    async def _generate(self, request, context):
        status = self.statuses[len(self.texts) % len(self.statuses)]
        self.texts.append(request.text)
        self.requests.append(request)
        self.peers.add(context.peer())
        if status is HANG:
            await asyncio.Future()  # until the call is cancelled
        if status is not None:
            await context.abort(status, "as the test wants")
        return GenerateResponse(text=request.text)

    async def _stream(self, request, context):
        yield StreamGenerateResponse()  # a piece without text is none
        yield StreamGenerateResponse(delta=(await self._generate(request, context)).text)
        await asyncio.sleep(0.05)
        yield StreamGenerateResponse(final=True)


def run(*arguments: str, command: Command = loadtest) -> int:
    """The command as the console script runs it."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


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
        async with connect(server.target, draw_requests([Part()], seed=0), connections=1) as jobs:
            statuses = [(await next(jobs).send(timeout)).status for timeout in (10.0, 0.0, -1.0)]

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


MIXED = """
warm_up_seconds = 0.2
[[stages]]
seconds = 0.5
from_rate = 100
rate = 300
[[mix]]
name = "plain"
words = [2, 4]
options = { beam_size = 3, stop = ["."] }
model = "one"
[[mix]]
name = "streams"
streaming = 1.0
texts = "texts.txt"
[slo]
max_p99_ms = 9000
max_error_rate = 0
"""


@pytest.fixture
def scenario(tmp_path):
    """A file with a ramp, a warm-up and two parts."""
    (tmp_path / "texts.txt").write_text("a text\n", encoding="utf-8")
    (tmp_path / "mixed.toml").write_text(MIXED, encoding="utf-8")
    return tmp_path / "mixed.toml"


def test_a_scenario_sends_what_its_parts_say(scenario, capsys, tmp_path):
    """Options, model and lengths of each part arrive at the server; streams have a time to the first piece."""
    with StubServer() as server:
        status = run(server.target, "--scenario", str(scenario), "--json", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    plain = [request for request in server.requests if request.model == "one"]
    streams = [request for request in server.requests if request.model == ""]

    assert status == 0, capsys.readouterr().err
    assert all(request.options.beam_size == 3 and request.options.stop == ["."] for request in plain)
    assert {len(request.text.split()) for request in plain} == {2, 3, 4}
    assert {request.text for request in streams} == {"a text"}
    assert report["parts"]["plain"]["first_ms"] is None
    assert 0 < report["parts"]["streams"]["first_ms"]["p50"] <= report["parts"]["streams"]["latency_ms"]["p50"] - 45
    assert 0 < report["requests"] < len(server.requests)  # those of the warm-up are in no figure


def test_a_scenario_is_scaled(scenario):
    """Its highest rate and its length can be others: the mean of 100 and 300 becomes that of 20 and 60."""
    with StubServer() as server:
        run(server.target, "--scenario", str(scenario), "--rate", "60", "--duration", "1", "--model", "two")

    assert len(server.requests) == pytest.approx(40 + 0.2 * 20, abs=30)
    assert {request.model for request in server.requests} == {"two"}


def test_options_that_a_scenario_has_itself_are_refused(scenario):
    """Nothing is ignored in silence; a closed loop has no rate."""
    with pytest.raises(ConfigError, match="--warm-up"):
        run("127.0.0.1:1", "--scenario", str(scenario), "--warm-up", "1")
    with pytest.raises(ConfigError, match="an open loop"):
        run("127.0.0.1:1", "--scenario", str(scenario), "--callers", "2")
    with pytest.raises(ConfigError, match="--duration"):
        run("127.0.0.1:1", "--rate", "1")


@pytest.mark.parametrize("streaming", ["0", "1"])
def test_requests_that_are_cancelled_on_purpose_are_no_errors(tmp_path, capsys, streaming):
    """A server that never answers, and a scenario that cancels all: no error, no answer."""
    file = tmp_path / "cancels.toml"
    file.write_text(
        f"[[stages]]\nseconds = 0.3\nrate = 100\n[[mix]]\ncancel = 1.0\nstreaming = {streaming}.0\n"
        "cancel_after_ms = [20, 40]\n[slo]\nmax_error_rate = 0\n"
    )
    with StubServer((HANG,)) as server:
        status = run(server.target, "--scenario", str(file))
    printed = capsys.readouterr().out

    assert status == 0
    assert f"0 OK, 0 errors (0.00%), {len(server.texts)} cancelled here" in printed
    assert len(server.texts) > 10


def test_a_closed_loop_has_no_more_requests_open_than_callers(capsys):
    """Each caller waits for its answer; no rate was asked for."""
    with StubServer() as server:
        status = run(server.target, "--callers", "3", "--duration", "0.3")

    assert status == 0
    assert "closed loop" in capsys.readouterr().out
    assert len(server.texts) > 3


def test_several_processes_share_the_load(tmp_path):
    """Two processes, two connections: the same schedule as one process has, each request sent once."""
    reports = []
    for processes in ("1", "2"):
        file = tmp_path / f"{processes}.json"
        with StubServer() as server:
            run(server.target, "--rate", "60", "--duration", "1", "--processes", processes, "--json", str(file))
        report = json.loads(file.read_text())
        assert len(server.texts) == report["requests"] == report["ok"]
        assert len(server.peers) == int(processes)
        reports.append(report)

    assert [m["due"] for m in reports[0]["timeline"]] == [m["due"] for m in reports[1]["timeline"]]


def test_a_process_that_finds_nobody_says_so():
    """The error of one of several processes is the command's."""
    with StubServer() as server:
        target = server.target

    with pytest.raises(ConfigError, match=f"cannot connect to {target}"):
        run(target, "--rate", "10", "--duration", "0.1", "--deadline", "0.2", "--processes", "2")


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    """One file: no script, no link, no address but the name of SVG; what it shows is escaped."""
    file = tmp_path / "report.html"
    with StubServer((None, grpc.StatusCode.UNAVAILABLE)) as server:
        run(server.target, "--rate", "100", "--duration", "0.3", "--html", str(file), "--max-error-rate", "0.1")
    page = file.read_text()

    assert page.count("<svg") == page.count("</svg>") == 3
    assert "Service level missed: the error rate is" in page
    assert "UNAVAILABLE" in page
    assert not re.search(r"<script|<link|@import|url\(|src=|href=", page)
    assert page.replace("http://www.w3.org/2000/svg", "").count("http") == 0


def test_capacity_finds_the_rate_at_which_a_server_begins_to_refuse(tmp_path, capsys):
    """A server that refuses while more than so many calls came within a moment: a rate below, and its replicas."""

    class Limited(StubServer):
        async def _generate(self, request, context):
            loop = asyncio.get_running_loop()
            self.texts.append(loop.time())
            if sum(time > loop.time() - 0.2 for time in self.texts[-40:]) > 20:  # 100 a second
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
            return GenerateResponse()

    options = ("--seconds", "0.4", "--first-rate", "20", "--precision", "0.5", "--max-p99-ms", "5000")
    with Limited() as server:
        status = run(server.target, *options, "--wanted-rate", "700", "--json", str(tmp_path / "c"), command=capacity)
    found = json.loads((tmp_path / "c").read_text())

    assert status == 0
    assert 20 <= found["capacity"] < 160
    assert found["replicas"] == math.ceil(1000 / found["capacity"])
    assert f"replicas  {found['replicas']} for 700/s, each used to 70%" in capsys.readouterr().out


def test_capacity_needs_a_limit_to_hold():
    """Without one, every rate would hold."""
    with pytest.raises(ConfigError, match="--max-p99-ms"):
        run("127.0.0.1:1", command=capacity)
