"""Measure a server under a steady rate of requests.

Requests leave at random times (a Poisson process) at an average rate, whether or not earlier ones were answered, as
those of independent callers do. Latency counts from the time at which a request was due, so a server that stalls is
charged for everything that had to wait. It is given for OK answers alone; errors are counted by gRPC status.

Exit status: 0; 1 when --max-error-rate or --max-p99-ms is exceeded; 2 when the target cannot be reached.

  dragoman loadtest localhost:50051 --rate 100 --duration 30 --max-error-rate 0 --max-p99-ms 50
  dragoman loadtest localhost:50051 --rate 20 --duration 60 --input sentences.txt --json report.json
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from pathlib import Path

from dragoman.cli.credentials import add_credentials_arguments, credentials_of
from dragoman.errors import ConfigError

SUMMARY = "measure a server under a steady rate of requests"
EXTRA: str | None = None

_WORDS = (
    "sloth",
    "attention",
    "transformer",
    "queue",
    "giraffe",
    "measure",
    "through",
    "language",
    "pronunciation",
    "of",
)
_MAX_REQUESTS = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("target", metavar="TARGET", help="HOST:PORT of the server")
    parser.add_argument("--rate", type=positive, required=True, metavar="R", help="requests a second, on average")
    parser.add_argument("--duration", type=positive, required=True, metavar="S", help="for how many seconds to send")
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="texts to send, one a line, drawn at random (default: ten words; equal texts answered at the same "
        "time are computed once, unless the server runs with --no-sharing: give many to measure the model)",
    )
    parser.add_argument(
        "--connections",
        type=count,
        default=1,
        metavar="N",
        help="connections to spread them over (default: %(default)s)",
    )
    parser.add_argument(
        "--deadline",
        type=positive,
        default=10.0,
        metavar="S",
        help="seconds from when a request was due until it is DEADLINE_EXCEEDED (default: %(default)g)",
    )
    parser.add_argument(
        "--max-in-flight",
        type=count,
        default=10_000,
        metavar="N",
        help="requests unanswered at a time; one more is not sent: the error client_limit (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of times and texts (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--max-error-rate", type=ratio, metavar="RATIO", help="fail above it; 0 allows no error")
    parser.add_argument("--max-p99-ms", type=positive, metavar="MS", help="fail above it")
    add_credentials_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the load and print its report. Raises ConfigError: a file, the size, or nobody at the target."""
    from dragoman.loadtest.arrivals import poisson_arrivals
    from dragoman.loadtest.load import run_load
    from dragoman.loadtest.report import Outcome, summarize
    from dragoman.loadtest.target import connect

    texts = read_texts(args.input) if args.input else _WORDS
    if args.rate * args.duration > _MAX_REQUESTS:
        raise ConfigError(
            f"--rate {args.rate:g} for --duration {args.duration:g} is {args.rate * args.duration:.0f} requests; every "
            f"outcome is kept in memory, so at most {_MAX_REQUESTS} are allowed: lower one of them"
        )

    async def load() -> list[Outcome]:
        async with connect(
            args.target,
            texts,
            connections=args.connections,
            connect_seconds=args.deadline,
            seed=args.seed,
            credentials=credentials_of(args),
        ) as call:
            return await run_load(
                call,
                poisson_arrivals(args.rate, args.duration, args.seed),
                deadline_seconds=args.deadline,
                max_in_flight=args.max_in_flight,
            )

    report = summarize(asyncio.run(load()), asked_rate=args.rate)
    print(report)
    if args.json:
        try:
            args.json.write_text(report.to_json(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write --json {args.json}: {error.strerror}") from error
    exceeded = report.exceeded(args.max_error_rate, args.max_p99_ms)
    for sentence in exceeded:
        print(f"exceeded: {sentence}", file=sys.stderr)
    return 1 if exceeded else 0


def read_texts(path: Path) -> list[str]:
    """The lines of a file that are not blank. Raises ConfigError when there are none, or the file cannot be read."""
    try:
        texts = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --input {path}: {error}") from error
    if not texts:
        raise ConfigError(f"--input {path} holds no text: give it one text a line")
    return texts


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def ratio(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def count(text: str) -> int:
    """A whole number, 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value
