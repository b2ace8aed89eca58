"""``dragoman generate --target`` against a real server."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

import pytest

from dragoman.cli import generate, score
from dragoman.errors import (
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    ModelUnsupportedError,
    NotReadyError,
)

STDIN = """
import argparse, sys
from dragoman.cli import generate
parser = argparse.ArgumentParser()
generate.add_arguments(parser)
sys.exit(generate.run(parser.parse_args()))
"""


async def run(running: Any, *arguments: str, command: Any = generate) -> int:
    """The command in a thread, with an event loop of its own."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--target", f"127.0.0.1:{running.server.port}", *arguments])
    return await asyncio.to_thread(command.run, args)


async def test_texts_are_answered_line_by_line(start_server, capfdbinary):
    """Plain, with a limit, as JSON and as a stream."""
    running = await start_server()
    assert await run(running, "abc", " xyz") == 0
    assert capfdbinary.readouterr().out == b"abc\n xyz\n"
    assert await run(running, "--max-new-tokens", "2", "abc") == 0
    assert capfdbinary.readouterr().out == b"ab\n"
    assert await run(running, "--json", "abc") == 0
    answer = json.loads(capfdbinary.readouterr().out)
    assert (answer["text"], answer["model"]) == ("abc", "scripted")
    assert answer["segments"][0]["hypotheses"][0]["finish_reason"] == "stop"
    assert await run(running, "--stream", " abc\nde") == 0
    assert capfdbinary.readouterr().out == b" abc\nde\n"


async def test_a_refused_text_costs_the_others_nothing(start_server, capfdbinary):
    """An empty line in its place, the server's own words on stderr, exit status 1; --on-error stop ends there."""
    running = await start_server()
    assert await run(running, "abc", "a1", "xyz") == 1
    out, err = capfdbinary.readouterr()
    assert out == b"abc\n\nxyz\n" and err.startswith(b"dragoman generate: text 2: text holds '1'")
    assert await run(running, "--on-error", "stop", "abc", "a1", "xyz") == 1
    assert capfdbinary.readouterr().out == b"abc\n"


async def test_what_the_model_cannot_do_is_told_once(start_server, capfdbinary):
    """Not with each text: nothing is answered."""
    running = await start_server()
    with pytest.raises(InvalidRequestError, match="suppress_tokens names 'none'"):
        await run(running, "--suppress-token", "none", "abc", "xyz")
    with pytest.raises(ModelUnsupportedError, match="unknown_words is copy"):
        await run(running, "--unknown-words", "copy", "abc", "xyz")
    assert capfdbinary.readouterr() == (b"", b"")
    assert running.runner.encoded == []


async def test_all_there_is_to_know_is_in_the_json(start_server, capfdbinary):
    """Several answers, their scores and alternatives, and the seed of what was drawn; a stream shows the best alone."""
    running = await start_server()
    flags = ["--beam-size", "2", "--num-hypotheses", "2", "--return-scores", "--num-top-tokens", "2"]
    assert await run(running, "--json", *flags, "--priority", "1", "abc") == 0
    answer = json.loads(capfdbinary.readouterr().out)
    first, second = answer["segments"][0]["hypotheses"]
    assert first["score"] >= second["score"] and first["log_probability"] == pytest.approx(sum(first["token_scores"]))
    assert set(first["top_tokens"][0][0]) == {"token", "log_probability"}
    assert await run(running, "--json", "--temperature", "1", "--seed", "5", "abc") == 0
    assert json.loads(capfdbinary.readouterr().out)["seed"] == 5
    assert await run(running, "--stop", "d", "--target-prefix", "x", "abcdef") == 0
    assert capfdbinary.readouterr().out == b"xbc\n"


async def test_pairs_are_scored_line_by_line(start_server, capfdbinary):
    """A number each, or as JSON all of them; a line without its tab is named."""
    running = await start_server()
    expected = (await running.client.score("abc", "abd")).log_probability
    assert await run(running, "abc\tabd", "\t", command=score) == 0
    assert capfdbinary.readouterr().out == f"{expected:.6f}\n0.000000\n".encode()
    assert await run(running, "--json", "abc\tabd", command=score) == 0
    answer = json.loads(capfdbinary.readouterr().out)
    assert (answer["tokens"], answer["log_probability"], answer["model"]) == (["a", "b", "d"], expected, "scripted")
    assert await run(running, "--on-error", "keep-going", "abc", "a\tb\tc", "a\t1", command=score) == 1
    out, err = capfdbinary.readouterr()
    assert out == b"\n\n\n"
    lines = err.decode().splitlines()
    assert lines[0] == "dragoman score: text 1: the line has 0 tabs; it must have one, between the text and its answer"
    assert "2 tabs" in lines[1] and "target holds '1'" in lines[2]


async def test_what_a_server_serves_is_printed(start_server, capfdbinary):
    """As one JSON object, without an answer; a bundle or a text has no place there."""
    running = await start_server()
    assert await run(running, "--model-info") == 0
    out = capfdbinary.readouterr().out
    assert out.count(b"\n") == 1
    served, told = await running.client.model_info(), json.loads(out)
    assert (told["model"], told["checksum"]) == ("scripted", served.checksum)
    assert told["created"] == served.created.isoformat()
    with pytest.raises(ConfigError, match="no TEXT"):
        await run(running, "--model-info", "abc")


async def test_a_wrong_model_or_target_is_an_error_of_the_command(start_server):
    """Not of each line in turn."""
    running = await start_server()
    with pytest.raises(NotReadyError):
        await run(running, "--target", "127.0.0.1:1", "abc")
    with pytest.raises(ModelNotFoundError, match="scripted version 1"):
        await run(running, "--model", "other", "--on-error", "keep-going", "abc")


async def test_a_file_through_standard_input_comes_back_line_for_line(start_server):
    """Two thousand lines, blank ones and CRLF among them, many in flight."""
    running = await start_server()
    lines = [b"" if i % 7 == 0 else bytes([97 + i % 26]) * (1 + i % 30) for i in range(2000)]
    data = b"".join(line + (b"\r\n" if i % 3 else b"\n") for i, line in enumerate(lines)) + b"last"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        STDIN,
        "--target",
        f"127.0.0.1:{running.server.port}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(data), 120)
    assert (process.returncode, err) == (0, b"")
    assert out == data


async def test_a_job_that_stops_early_does_not_wait_for_its_input(start_server):
    """The pipe stays open, yet the command ends at the refused line."""
    running = await start_server()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        STDIN,
        "--target",
        f"127.0.0.1:{running.server.port}",
        "--on-error",
        "stop",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(b"abc\n1\n")
    assert await asyncio.wait_for(process.wait(), 60) == 1
    assert await process.stdout.read() == b"abc\n"
    assert (await process.stderr.read()).startswith(b"dragoman generate: line 2")
    process.stdin.close()
