"""Answer texts: each TEXT, or each line of stdin, gives one line on stdout, in the same order.

It runs the model here, without a server, unless --target names one. Only LF and CRLF end a line, and line ends are
kept; blank lines come back unchanged. Input is read as it is needed, and many lines are in work at once.
--model-info asks a server what it serves, and answers nothing.

  dragoman generate giraffe
  dragoman generate < words.txt > answers.txt
  dragoman generate --target localhost:50051 --json giraffe
  dragoman generate --target localhost:50051 --model-info
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from dragoman import document
from dragoman.cli import runtime
from dragoman.cli.lines import answer_lines, lines_of_arguments, lines_of_file
from dragoman.config import EngineConfig, ServerConfig
from dragoman.errors import ConfigError, RequestError

if TYPE_CHECKING:  # heavy
    from dragoman.pipeline import TextResult, TextUpdate
    from dragoman.types import DecodingOptions

SUMMARY = "answer texts or lines, here or through a server"
EXTRA: str | None = "cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("text", nargs="*", metavar="TEXT", help="a text to answer; without one, lines from stdin")
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="the model to run here: a folder of dragoman export")
    parser.add_argument("--model", metavar="NAME", help=f"{runtime.model_help()}; with --target, the served model")
    parser.add_argument("--target", metavar="HOST:PORT", help="ask this server instead of running a model here")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="decoding steps (default: the model's limit)")
    parser.add_argument(
        "--json", action="store_true", help="print each answer as a JSON object with all there is to know"
    )
    parser.add_argument(
        "--model-info",
        action="store_true",
        help="with --target: print what the server serves as a JSON object (name, version, checksum, limits, ...)",
    )
    parser.add_argument("--stream", action="store_true", help="print the answer to one TEXT as it comes")
    parser.add_argument(
        "--on-error",
        choices=("stop", "keep-going"),
        default="stop",
        help="at a line that is refused: stop there, or print an empty line for it (default: stop)",
    )
    runtime.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a line was refused."""
    from dragoman.types import DecodingOptions

    options = DecodingOptions(max_new_tokens=args.max_new_tokens)
    if args.stream and (len(args.text) != 1 or args.json):
        raise ConfigError("--stream needs exactly one TEXT and no --json")
    if args.target is not None and args.bundle is not None:
        raise ConfigError("--bundle and --target were both given: a server chooses its own bundle")
    if args.model_info:
        if args.target is None or args.text:
            raise ConfigError("--model-info needs --target and no TEXT; of a bundle, dragoman inspect tells all")
        return asyncio.run(_print_model_info(args))
    return asyncio.run(_run(args, options))


async def _run(args: argparse.Namespace, options: DecodingOptions) -> int:
    async with _served(args) if args.target is not None else _in_process(args) as generator:
        if args.stream:
            try:
                return await print_stream(args.text[0], generator.stream(args.text[0], options), sys.stdout)
            except RequestError as error:  # the text was refused: as without --stream
                print(f"dragoman generate: text 1: {error}", file=sys.stderr)
                return 1
        # Not sys.stdin, whose lock the reading thread may hold at exit.
        stdin = open(0, "rb", closefd=False)  # noqa: SIM115  # its reader may never return: the exit closes it
        lines = lines_of_arguments(args.text) if args.text else lines_of_file(stdin)
        return await answer_lines(
            lines,
            lambda text: generator.generate(text, options),
            sys.stdout.buffer,
            as_json=args.json,
            stop=args.on_error == "stop",
        )


async def _print_model_info(args: argparse.Namespace) -> int:
    from dragoman.client import AsyncClient

    async with AsyncClient(args.target, model=args.model or "") as client:
        info = dataclasses.asdict(await client.model_info())
    print(json.dumps({**info, "created": info["created"].isoformat()}, ensure_ascii=False))
    return 0


@dataclass(frozen=True, slots=True)
class _Generator:
    """Whoever answers: a model here, or a server."""

    generate: Callable[[str, DecodingOptions], Awaitable[TextResult]]
    stream: Callable[[str, DecodingOptions], AsyncGenerator[TextUpdate | TextResult]]


@asynccontextmanager
async def _in_process(args: argparse.Namespace) -> AsyncIterator[_Generator]:
    runtime.check_runtime()
    from dragoman.pipeline import TextLimits
    from dragoman.served_model import ServedModel

    server = ServerConfig()
    engine = runtime.settings(EngineConfig, args)
    limits = TextLimits(server.max_text_bytes, server.max_segments)
    model = ServedModel.load(runtime.bundle_path(args.bundle, args.model), engine, limits)
    model.start()
    try:
        yield _Generator(model.pipeline.generate, model.pipeline.stream)
    finally:
        await model.close()


@asynccontextmanager
async def _served(args: argparse.Namespace) -> AsyncIterator[_Generator]:
    from dragoman.client import AsyncClient

    async with AsyncClient(args.target, model=args.model or "") as client:
        yield _Generator(client.generate, client.stream)


async def print_stream(text: str, items: AsyncGenerator[TextUpdate | TextResult], out: TextIO) -> int:
    """Write the answer to one text as it comes, in the text's layout: pieces wait for the segments before theirs."""
    from dragoman.pipeline import TextResult

    segments = document.split(text)
    pieces: list[list[str]] = [[] for _ in segments]
    ended = [False] * len(segments)
    current, position = 0, 0
    if segments:
        out.write(text[: segments[0].start])
    async with aclosing(items):
        async for item in items:
            if isinstance(item, TextResult):
                break
            pieces[item.segment].append(item.delta)
            ended[item.segment] = item.result is not None
            while current < len(segments):
                out.write("".join(pieces[current]))
                pieces[current].clear()
                if not ended[current]:
                    break
                position = segments[current].end
                current += 1
                out.write(text[position : segments[current].start if current < len(segments) else len(text)])
            out.flush()
    out.write(text if not segments else "")
    out.write("\n")
    return 0
