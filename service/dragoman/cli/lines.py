"""Lines in, lines out: many in work at once, answers in order, nothing lost or added."""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import json
import queue
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

from dragoman.errors import (
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    ReplyTooLargeError,
    RowError,
    SourceTooLongError,
)

if TYPE_CHECKING:  # heavy
    from dragoman.answer import TextResult, TextScore

A = TypeVar("A", "TextResult", "TextScore")

_WINDOW: Final = 128
"""Lines in work at once: enough to fill an engine, and a bound on what is held in memory."""

ALIGNMENT_MARK: Final = " ||| "
"""Between an answer and its alignment, as Marian has it (https://marian-nmt.github.io/docs)."""

_MAX_LINE_BYTES: Final = 16 << 20
"""Of a longer line, nothing is kept but the pieces of this size that are read ahead, ``_WINDOW`` at most."""

_LINE_ERRORS: Final = (InvalidRequestError, SourceTooLongError, ReplyTooLargeError, OverloadedError, RowError)
"""What can be wrong with one line; anything else, such as a wrong model or a dead engine, is wrong with all of them."""

_OVERLOAD_TRIES: Final = 30
"""How often a line is offered to a server that is full, at the server's own pace."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of input: its text or why it has none, and the line end to write behind its answer."""

    name: str
    text: str | InvalidRequestError
    end: bytes


async def lines_of_arguments(texts: list[str]) -> AsyncGenerator[Line]:
    """One line a text, whatever is in it."""
    for number, text in enumerate(texts, start=1):
        yield Line(f"text {number}", text, b"\n")


async def lines_of_file(file: BinaryIO) -> AsyncGenerator[Line]:
    """A file's lines, read as they are taken. A byte order mark at its beginning belongs to none of them.

    Raises ConfigError when it cannot be read.
    """
    number = 0
    is_rest = False  # of a line that is too long
    async for raw in _read_lines(file):
        content = raw.removesuffix(b"\n").removesuffix(b"\r") if raw.endswith(b"\n") else raw
        end = raw[len(content) :]
        has_rest = len(raw) == _MAX_LINE_BYTES and content == raw
        if number == 0:
            content = content.removeprefix(codecs.BOM_UTF8)
        text: str | InvalidRequestError
        if is_rest or has_rest:
            text = InvalidRequestError(f"the line has more than {_MAX_LINE_BYTES} bytes: split it")
        else:
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                text = InvalidRequestError(f"byte {error.start + 1} of the line is no UTF-8: {error.reason}")
        is_rest = has_rest
        if not has_rest:
            number += 1
            yield Line(f"line {number}", text, end)
    if is_rest:
        yield Line(f"line {number + 1}", text, b"")


async def _read_lines(file: BinaryIO) -> AsyncGenerator[bytes]:
    """The file's lines, read in a thread: a pipe may be silent for long, and answers go on meanwhile.

    The thread is a daemon, because nothing can wake it from a read when the job stops early.
    """
    loop = asyncio.get_running_loop()
    news = asyncio.Event()
    ahead: queue.Queue[bytes | OSError] = queue.Queue(_WINDOW)

    def read() -> None:
        try:
            while True:
                line: bytes | OSError
                try:
                    line = file.readline(_MAX_LINE_BYTES)
                except OSError as error:
                    line = error
                ahead.put(line)
                loop.call_soon_threadsafe(news.set)
                if not line or isinstance(line, OSError):
                    return
        except RuntimeError:  # the event loop is closed: nobody wants lines any more
            return

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while True:
        await news.wait()
        news.clear()
        while not ahead.empty():
            line = ahead.get_nowait()
            if isinstance(line, OSError):
                raise ConfigError(f"cannot read the input: {line.strerror or line}") from line
            if not line:
                return
            yield line


async def answer_lines(
    lines: AsyncGenerator[Line],
    answer: Callable[[str], Awaitable[A]],
    out: BinaryIO,
    *,
    show: Callable[[A], str] | None,
    stop: bool,
    command: str = "generate",
) -> int:
    """Answer lines, many at once, and write the answers in order. Returns the exit status.

    ``show`` says what to write of an answer; None: all there is to know, as JSON.

    A line that is refused is told on stderr; the job then goes on with an empty answer, or stops. Other errors are
    raised. A line end inside the answer to a text of one line, which a model may make, becomes a blank.
    """
    from dragoman.answer import TextResult

    work: asyncio.Queue[tuple[Line, asyncio.Task[A]] | None] = asyncio.Queue()
    window = asyncio.Semaphore(_WINDOW)

    async def read() -> None:
        try:
            async with aclosing(lines):
                async for line in lines:
                    await window.acquire()
                    work.put_nowait((line, asyncio.create_task(_answer(line, answer))))
        finally:
            work.put_nowait(None)

    reader = asyncio.create_task(read())
    status = 0
    try:
        while (item := await work.get()) is not None:
            line, task = item
            try:
                result = await task
                if isinstance(line.text, str) and isinstance(result, TextResult):
                    tell_lost(command, line.name, line.text, result)
                written = _json(dataclasses.asdict(result)) if show is None else show(result)
            except _LINE_ERRORS as error:
                status = 1
                print(f"dragoman {command}: {line.name}: {error}", file=sys.stderr)
                if stop:
                    return status
                written = _json({"error": {"code": error.code, "message": str(error)}}) if show is None else ""
            if isinstance(line.text, str) and "\n" not in line.text:  # one line in, one line out
                written = written.replace("\n", " ")
            out.write(written.encode("utf-8") + line.end)
            window.release()
            if work.empty():
                out.flush()
        await reader  # raises what stopped it
        return status
    finally:
        left: list[asyncio.Task[Any]] = [reader]
        while not work.empty():
            if (item := work.get_nowait()) is not None:
                left.append(item[1])
        for unfinished in left:
            unfinished.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        out.flush()


def tell_lost(command: str, name: str, text: str, result: TextResult) -> None:
    """Say on stderr what of a text was to be protected and is not in its answer, or is there too often."""
    spans = [span for segment in result.segments for span in segment.hypotheses[0].unprotected]
    if spans:
        lost = ", ".join(repr(text[start:end]) for start, end in spans)
        print(f"dragoman {command}: {name}: not in the answer as often as in the text: {lost}", file=sys.stderr)


def with_alignment(result: TextResult) -> str:
    """The answer, and ``0-0 1-2`` for each segment: source and target token, as word aligners write pairs."""
    alignments = [
        " ".join(f"{point.source_token}-{point.target_token}" for point in segment.hypotheses[0].alignment)
        for segment in result.segments
    ]
    return ALIGNMENT_MARK.join([result.text, *alignments])


async def _answer(line: Line, answer: Callable[[str], Awaitable[A]]) -> A:
    if isinstance(line.text, InvalidRequestError):
        raise line.text
    for _ in range(_OVERLOAD_TRIES):
        try:
            return await answer(line.text)
        except OverloadedError as error:  # a job can wait for its turn
            await asyncio.sleep(error.retry_after_seconds)
    return await answer(line.text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
