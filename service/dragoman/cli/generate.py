r"""Answer texts: each TEXT, or each line of stdin, gives one line on stdout, in the same order.

It runs the model here, without a server, unless --target names one. Only LF and CRLF end a line, and line ends are
kept; blank lines come back unchanged. Input is read as it is needed, and many lines are in work at once.
A line that is refused is told on stderr and gives an empty line, so that there are as many lines as texts; the others
are answered, and the exit status is 1. --on-error stop ends there instead.
--model-info asks a server what it serves, and answers nothing.
--alignment appends which source token each target token comes from: " ||| " and pairs like 0-0 1-2, source token first,
both counted from 0. Of a TEXT of several lines or sentences, there is one such part for each of them.
--protect numbers, --protect '\{\w+\}' and so on: such parts of a text arrive unchanged, or it is told on stderr which
do not; the answer is printed all the same.
Options that contradict each other, or would have no effect together, are refused.

  dragoman generate giraffe
  dragoman generate < words.txt > answers.txt
  dragoman generate --beam-size 4 --num-hypotheses 4 --return-scores --json giraffe
  dragoman generate --temperature 0.8 --top-p 0.9 --seed 1 giraffe
  dragoman generate --target localhost:50051 --json giraffe
  dragoman generate --target localhost:50051 --model-info
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, TextIO

from dragoman.cli import runtime
from dragoman.cli.answerer import add_answerer_arguments, check_answerer, open_answerer
from dragoman.cli.credentials import credentials_of
from dragoman.cli.decoding import add_decoding_arguments, decoding_options, json_only
from dragoman.cli.lines import answer_lines, lines_of_arguments, lines_of_file, tell_lost, with_alignment
from dragoman.errors import ConfigError, RequestError

if TYPE_CHECKING:  # heavy
    from dragoman.answer import TextResult, TextUpdate
    from dragoman.types import DecodingOptions

SUMMARY = "answer texts or lines, here or through a server"
EXTRA: str | None = "cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("text", nargs="*", metavar="TEXT", help="a text to answer; without one, lines from stdin")
    add_answerer_arguments(parser)
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
        default="keep-going",
        help="at a line that is refused: print an empty line for it (with --json, its error), or stop there (default: "
        "keep-going)",
    )
    add_decoding_arguments(parser)
    runtime.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a line was refused."""
    options = decoding_options(args)
    if args.stream and (len(args.text) != 1 or args.json or args.return_alignment):
        raise ConfigError("--stream needs exactly one TEXT and neither --json nor --alignment")
    if not args.json and (flags := json_only(options)):
        raise ConfigError(f"{', '.join(flags)} was given without --json: a line of text has no place for what it gives")
    check_answerer(args)
    if args.model_info:
        if args.target is None or args.text:
            raise ConfigError("--model-info needs --target and no TEXT; of a bundle, dragoman inspect tells all")
        return asyncio.run(_print_model_info(args))
    return asyncio.run(_run(args, options))


async def _run(args: argparse.Namespace, options: DecodingOptions) -> int:
    async with open_answerer(args) as answerer:
        if args.stream:
            try:
                return await print_stream(args.text[0], answerer.stream(args.text[0], options), sys.stdout)
            except RequestError as error:  # the text was refused: as without --stream
                print(f"dragoman generate: text 1: {error}", file=sys.stderr)
                return 1
        # Not sys.stdin, whose lock the reading thread may hold at exit.
        stdin = open(0, "rb", closefd=False)  # noqa: SIM115  # its reader may never return: the exit closes it
        lines = lines_of_arguments(args.text) if args.text else lines_of_file(stdin)
        await answerer.generate("", options)  # what this model cannot do is refused once, not with each line
        return await answer_lines(
            lines,
            lambda text: answerer.generate(text, options),
            sys.stdout.buffer,
            show=None if args.json else with_alignment if args.return_alignment else lambda result: result.text,
            stop=args.on_error == "stop",
        )


async def _print_model_info(args: argparse.Namespace) -> int:
    from dragoman.client import AsyncClient

    async with AsyncClient(args.target, model=args.model or "", credentials=credentials_of(args)) as client:
        info = dataclasses.asdict(await client.model_info())
    print(json.dumps({**info, "created": info["created"].isoformat()}, ensure_ascii=False))
    return 0


async def print_stream(text: str, items: AsyncGenerator[TextUpdate | TextResult], out: TextIO) -> int:
    """Write the answer to one text as it comes, in the text's layout: pieces wait for the segments before theirs."""
    from dragoman.answer import TextResult

    waiting: dict[int, deque[TextUpdate]] = {}
    current = position = 0
    async with aclosing(items):
        async for item in items:
            if isinstance(item, TextResult):
                tell_lost("generate", "text 1", text, item)
                break
            waiting.setdefault(item.segment, deque()).append(item)
            while pieces := waiting.get(current):
                piece = pieces.popleft()
                start, end = piece.source
                out.write(text[position:start] + piece.delta)
                position = max(position, start)
                if piece.result is not None:
                    position = end
                    current += 1
            out.flush()
    out.write(text[position:])
    out.write("\n")
    return 0
