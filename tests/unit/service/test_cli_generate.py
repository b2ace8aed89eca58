"""Lines in, lines out."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import io
import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.alignment import AlignmentPoint
from dragoman.answer import TextHypothesis, TextResult, TextSegment, TextUpdate
from dragoman.cli import lines as cli_lines
from dragoman.cli.generate import add_arguments, print_stream, run
from dragoman.cli.lines import answer_lines, lines_of_arguments, lines_of_file, with_alignment
from dragoman.errors import ConfigError, EngineDeadError, InvalidRequestError, OverloadedError
from dragoman.types import FinishReason, Timing


def result(text: str) -> TextResult:
    return TextResult(text, (), 0, 0, Timing())


def text_of(answer: TextResult) -> str:
    return answer.text


async def upper(text: str) -> TextResult:
    """Answers in capitals, later lines first; refuses digits."""
    for _ in range(max(0, 5 - len(text))):
        await asyncio.sleep(0)
    if text.isdigit():
        raise InvalidRequestError(f"text holds {text!r}")
    return result(text.upper())


async def answer(data: bytes, *, stop: bool = True, as_json: bool = False, generate: Any = upper) -> tuple[int, bytes]:
    out = io.BytesIO()
    show = None if as_json else text_of
    status = await answer_lines(lines_of_file(io.BytesIO(data)), generate, out, show=show, stop=stop)
    return status, out.getvalue()


async def test_ten_thousand_lines_of_any_kind_come_back_one_for_one(capsys):
    """Every kind of blank and separator, bad bytes and refused lines among them: as many lines, at their places."""
    kinds = [
        "abc\n",
        "\n",
        "x y\r\n",
        " \t\n",
        "a\rb\n",
        "\r\r\n",
        "\x85\n",
        "a\u2028b\r\n",
        "\x0c\n",
        "12\n",
        "é\x0c\x1cz\n",
    ]
    lines = [kinds[i % len(kinds)] for i in range(10_000)]
    status, out = await answer("".join(lines).encode() + b"\xff", stop=False)
    expected = [line if not line.strip().isdigit() else "\n" for line in lines]
    assert (status, out.decode()) == (1, "".join(expected).upper())
    assert len(capsys.readouterr().err.splitlines()) == lines.count("12\n") + 1


async def test_a_line_end_inside_an_answer_is_a_blank_but_to_a_text_of_several_lines():
    """One line in, one line out, whatever a model makes up; JSON shows it as it is."""

    async def talkative(text: str) -> TextResult:
        return result(f"{text}\n\n!")

    assert await answer(b"a\nb\r\nc", generate=talkative) == (0, b"a  !\nb  !\r\nc  !")
    _, out = await answer(b"a\n", generate=talkative, as_json=True)
    assert json.loads(out)["text"] == "a\n\n!"
    written = io.BytesIO()
    await answer_lines(lines_of_arguments(["a\nb"]), talkative, written, show=text_of, stop=True)
    assert written.getvalue() == b"a\nb\n\n!\n"


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
async def test_a_line_without_an_end_takes_no_more_memory_than_a_long_one(monkeypatch, capsys, end):
    """It is refused, and what comes behind it is answered."""
    monkeypatch.setattr(cli_lines, "_MAX_LINE_BYTES", 10)
    assert await answer(b"a" * 9 + b"\n" + b"b" * 35 + end, stop=False) == (1, b"A" * 9 + b"\n" + end)
    assert capsys.readouterr().err == "dragoman generate: line 2: the line has more than 10 bytes: split it\n"
    assert await answer(b"b" * 20 + b"\nc" + end, stop=False) == (1, b"\nC" + end)


@pytest.mark.parametrize(
    "data",
    [b"", b"a", b"a\n", b"a\r\nb\nc", b"\n\n", b" \r\n\r\n\t", b"a\rb\n", "a\u2028b\x0bc\x85\n".encode(), b"\n" * 500],
)
async def test_lines_and_line_ends_come_back_one_for_one(data):
    """Only LF and CRLF end a line; the last one may have no end."""
    assert await answer(data) == (0, data.decode().upper().encode())


async def test_a_byte_order_mark_is_skipped_where_a_file_begins_and_nowhere_else():
    """Editors write one that nobody typed; elsewhere it is a character of the text."""
    assert await answer(b"\xef\xbb\xbfa\r\n\xef\xbb\xbfb\n") == (0, b"A\r\n\xef\xbb\xbfB\n")


@given(st.lists(st.tuples(st.text("abc \t", max_size=6), st.sampled_from(["\n", "\r\n"])), max_size=300))
def test_answers_are_in_the_order_of_the_lines(lines):
    """However many are in work at once and whichever is done first."""
    data = "".join(text + end for text, end in lines)
    assert asyncio.run(answer(data.encode())) == (0, data.upper().encode())


async def test_a_refused_line_stops_the_job_and_is_named(capsys):
    """What came before it is written; exit status 1."""
    assert await answer(b"a\nb\n3\nd\n") == (1, b"A\nB\n")
    assert capsys.readouterr().err == "dragoman generate: line 3: text holds '3'\n"


async def test_keep_going_leaves_an_empty_line_for_each_refused_one(capsys):
    """So that line numbers still agree; exit status 1 at the end."""
    assert await answer(b"a\n2\r\nc\n4", stop=False) == (1, b"A\n\r\nC\n")
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == ["line 2", "line 4"]


async def test_bytes_that_are_no_utf8_are_an_error_of_their_line(capsys):
    """With the line and the byte."""
    assert await answer(b"a\nb\xffc\nd\n", stop=False) == (1, b"A\n\nD\n")
    assert "line 2: byte 2" in capsys.readouterr().err


async def test_json_has_one_object_a_line(capsys):
    """Refused lines have their error in it."""
    status, out = await answer("é\n2\n".encode(), stop=False, as_json=True)
    good, bad = (json.loads(line) for line in out.splitlines())
    assert status == 1
    assert good["text"] == "É" and set(good) >= {"segments", "timing", "num_source_tokens"}
    assert bad == {"error": {"code": "invalid_request", "message": "text holds '2'"}}


async def test_the_alignment_of_each_segment_follows_the_answer():
    """Pairs of source and target token behind the mark, a part a segment; a blank line has none; of JSON, a field."""

    def hypothesis(*pairs: tuple[int, int]) -> TextHypothesis:
        points = tuple(AlignmentPoint(source, target, 0.5, (0, 1)) for source, target in pairs)
        return TextHypothesis("", (), FinishReason.STOP, alignment=points)

    async def aligned(text: str) -> TextResult:
        answers = {"": [], "ab": [hypothesis((1, 0), (0, 1))], "c\nd": [hypothesis((0, 0)), hypothesis()]}[text]
        segments = tuple(TextSegment(0, 1, (answer,), ("x",)) for answer in answers)
        return TextResult(text.upper(), segments, 0, 0, Timing())

    out = io.BytesIO()
    lines = ["ab", "", "c\nd"]
    await answer_lines(lines_of_arguments(lines), aligned, out, show=with_alignment, stop=True)
    assert out.getvalue() == b"AB ||| 1-0 0-1\n\nC\nD ||| 0-0 ||| \n"
    out = io.BytesIO()
    await answer_lines(lines_of_arguments(["ab"]), aligned, out, show=None, stop=True)
    (segment,) = json.loads(out.getvalue())["segments"]
    assert segment["source_tokens"] == ["x"]
    assert segment["hypotheses"][0]["alignment"][0] == {
        "source_token": 1,
        "target_token": 0,
        "weight": 0.5,
        "source_span": [0, 1],
    }


def test_a_stream_of_text_has_no_place_for_an_alignment():
    """Asked for together, they are refused before any model is opened."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match="--alignment"):
        run(parser.parse_args(["--stream", "--alignment", "abc"]))


async def test_a_dead_engine_is_no_error_of_a_line():
    """It ends the job even when it should keep going."""

    async def dead(text: str) -> TextResult:
        raise EngineDeadError("gone")

    with pytest.raises(EngineDeadError):
        await answer(b"a\nb\n", stop=False, generate=dead)


async def test_a_full_server_is_asked_again():
    """A job can wait for its turn; no line is lost."""
    refusals = iter([True, False] * 10)

    async def busy(text: str) -> TextResult:
        if next(refusals):
            raise OverloadedError("full", retry_after_seconds=0)
        return result(text)

    assert await answer(b"a\nb\nc\n", generate=busy) == (0, b"a\nb\nc\n")


async def test_answers_come_while_the_input_is_silent():
    """A pipe that stays open does not hold back the answer to what was written."""
    read_end, write_end = os.pipe()
    written = asyncio.Event()

    class Out(io.BytesIO):
        def flush(self) -> None:
            if self.getvalue():
                written.set()

    out = Out()
    with os.fdopen(read_end, "rb") as source, os.fdopen(write_end, "wb", buffering=0) as sink:
        job = asyncio.create_task(answer_lines(lines_of_file(source), upper, out, show=text_of, stop=True))
        sink.write(b"abc\n")
        await asyncio.wait_for(written.wait(), 60)
        assert out.getvalue() == b"ABC\n"
        sink.write(b"def")
        sink.close()
        assert await job == 0
    assert out.getvalue() == b"ABC\nDEF"


async def test_input_is_read_as_it_is_needed():
    """A job holds a bounded number of lines, however long its input is."""
    taken = 0
    start = asyncio.Event()

    class Endless(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            nonlocal taken
            taken += 1
            return b"a\n"

    async def stuck(text: str) -> TextResult:
        start.set()
        await asyncio.Event().wait()
        raise AssertionError

    job = asyncio.create_task(answer_lines(lines_of_file(Endless()), stuck, io.BytesIO(), show=text_of, stop=True))
    await start.wait()
    before = -1
    while before != taken:
        before = taken
        for _ in range(1000):
            await asyncio.sleep(0)
    assert taken < 1000
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job


async def test_an_unreadable_input_is_a_clear_error():
    """A folder is no file."""

    class Broken(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            raise IsADirectoryError(21, "Is a directory")

    with pytest.raises(ConfigError, match="Is a directory"):
        await answer_lines(lines_of_file(Broken()), upper, io.BytesIO(), show=text_of, stop=True)


async def test_texts_of_the_command_line_may_hold_anything():
    """Each gives its answer and one LF."""
    out = io.BytesIO()
    assert await answer_lines(lines_of_arguments(["a\nb", "", "c"]), upper, out, show=text_of, stop=True) == 0
    assert out.getvalue() == b"A\nB\n\nC\n"


async def test_what_was_lost_is_told_on_stderr(capsys):
    """With the line's name and the text that is not in the answer; the answer is printed all the same."""

    async def answer(text):
        hypothesis = TextHypothesis("a  b", (), FinishReason.STOP, unprotected=((2, 5), (8, 10)))
        return dataclasses.replace(result("a  b"), segments=(TextSegment(0, len(text), (hypothesis,)),))

    out = io.BytesIO()
    lines = lines_of_arguments(["a {x} b %s"])
    assert await answer_lines(lines, answer, out, show=text_of, stop=True) == 0
    assert out.getvalue() == b"a  b\n"
    assert capsys.readouterr().err == (
        "dragoman generate: text 1: not in the answer as often as in the text: '{x}', '%s'\n"
    )


async def test_a_stream_is_printed_in_the_text_s_own_layout():
    """Pieces of a later segment wait for the earlier ones; blanks stay where they were."""
    text = " ab\r\n\n cd e \n"

    async def items():
        done = TextHypothesis("", (), FinishReason.STOP)
        yield TextUpdate(1, 0, "C", source=(7, 9))
        yield TextUpdate(0, 0, "A", source=(1, 3))
        yield TextUpdate(1, 0, "D", done, source=(7, 9))
        yield TextUpdate(0, 0, "B", done, source=(1, 3))
        yield TextUpdate(2, 0, "E", done, source=(10, 11))
        yield result("")

    out = io.StringIO()
    assert await print_stream(text, items(), out) == 0
    assert out.getvalue() == " AB\r\n\n CD E \n\n"


@pytest.mark.parametrize("text", ["", " \n "])
async def test_a_stream_without_segments_prints_the_text(text):
    """Blank text comes back unchanged."""

    async def items():
        yield result(text)

    out = io.StringIO()
    await print_stream(text, items(), out)
    assert out.getvalue() == text + "\n"
