"""Say how probable given answers are: each PAIR, or each line of stdin, gives one number on stdout, in the same order.

A pair is a text and an answer to it, each of one line, with a tab between them: paste makes such lines of two files.
The number is the sum of the natural log-probabilities of the answer's tokens, the end token included; --json shows each
of them. Nothing is generated. A pair that is refused is told on stderr and gives an empty line; the others are scored,
and the exit status is 1. --on-error stop ends there instead.

It runs the model here, without a server, unless --target names one.

  dragoman score "$(printf 'giraffe\\tJH ER AE F')"
  paste words.txt answers.txt | dragoman score > scores.txt
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from dragoman.cli import runtime
from dragoman.cli.answerer import Answerer, add_answerer_arguments, check_answerer, open_answerer
from dragoman.cli.lines import answer_lines, lines_of_arguments, lines_of_file
from dragoman.errors import InvalidRequestError

if TYPE_CHECKING:  # heavy
    from dragoman.answer import TextScore

SUMMARY = "say how probable given answers are, here or through a server"
EXTRA: str | None = "cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("pair", nargs="*", metavar="PAIR", help="text, tab, answer; without one, lines from stdin")
    add_answerer_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="print each score as a JSON object with all there is to know"
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "keep-going"),
        default="keep-going",
        help="at a line that is refused: print an empty line for it (with --json, its error), or stop there (default: "
        "keep-going)",
    )
    runtime.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a line was refused."""
    check_answerer(args)
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    async with open_answerer(args) as answerer:
        stdin = open(0, "rb", closefd=False)  # noqa: SIM115  # its reader may never return: the exit closes it
        return await answer_lines(
            lines_of_arguments(args.pair) if args.pair else lines_of_file(stdin),
            lambda pair: _score(answerer, pair),
            sys.stdout.buffer,
            show=None if args.json else lambda score: f"{score.log_probability:.6f}",
            stop=args.on_error == "stop",
            command="score",
        )


async def _score(answerer: Answerer, pair: str) -> TextScore:
    if (num_tabs := pair.count("\t")) != 1:
        raise InvalidRequestError(f"the line has {num_tabs} tabs; it must have one, between the text and its answer")
    text, _, target = pair.partition("\t")
    return await answerer.score(text, target)
