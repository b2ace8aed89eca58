"""Measure a server under a load.

An open loop (--rate) sends at its times whether or not earlier requests were answered, as callers who know nothing of
each other do. Latency counts from the time at which a request was due, so a server that stalls is charged for
everything that had to wait. It is given for OK answers alone; errors are counted by gRPC status. A closed loop
(--callers) sends each caller's next request behind its last answer. No call is retried.

A scenario is a TOML file with stages, ramps, a mix of requests and a service level: deploy/loadtest/ has some, and
dragoman/loadtest/scenario.py says what there may be in one. With it, --rate, --callers and --duration scale its levels
(to this highest one) and its length, and --input, --model, --deadline and the limits take the place of its own.

Exit status: 0; 1 when a limit of the service level is exceeded; 2 when the target cannot be reached.

  dragoman loadtest localhost:50051 --rate 100 --duration 30 --max-error-rate 0 --max-p99-ms 50
  dragoman loadtest localhost:50051 --callers 8 --duration 60 --input sentences.txt --json report.json
  dragoman loadtest localhost:50051 --scenario deploy/loadtest/spike.toml --html report.html
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.cli.credentials import add_credentials_arguments, credentials_of
from dragoman.errors import ConfigError

if TYPE_CHECKING:  # heavy
    from dragoman.loadtest.processes import Plan
    from dragoman.loadtest.report import Report
    from dragoman.loadtest.scenario import Scenario

SUMMARY = "measure a server under a load"
EXTRA: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("target", metavar="TARGET", help="HOST:PORT of the server")
    shape = parser.add_argument_group("the load")
    shape.add_argument("--scenario", type=Path, metavar="FILE", help="what to send, and when (TOML)")
    level = shape.add_mutually_exclusive_group()
    level.add_argument("--rate", type=positive, metavar="R", help="requests a second, on average")
    level.add_argument("--callers", type=count, metavar="N", help="callers who each wait for their answer")
    shape.add_argument("--duration", type=positive, metavar="S", help="for how many seconds to send")
    shape.add_argument(
        "--arrivals", choices=["poisson", "constant"], help="how requests follow each other (default: poisson)"
    )
    shape.add_argument(
        "--warm-up", type=positive, metavar="S", help="seconds of load before, which no figure has (default: 0)"
    )
    shape.add_argument("--streaming", type=ratio, metavar="RATIO", help="the share of streams (default: 0)")
    add_load_arguments(parser)
    output = parser.add_argument_group("the report")
    output.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    output.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots there")


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every load needs: what to send, to whom, from how many, and what it may take."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="texts to send, one a line, drawn at random (default: ten words; equal texts answered at the same "
        "time are computed once, unless the server runs with --no-sharing: give many to measure the model)",
    )
    group.add_argument("--model", metavar="NAME", help="the model to ask (default: the server's)")
    group.add_argument(
        "--deadline",
        type=positive,
        metavar="S",
        help="seconds from when a request was due until it is DEADLINE_EXCEEDED (default: 10)",
    )
    group.add_argument(
        "--processes", type=count, default=1, metavar="N", help="processes that send (default: %(default)s)"
    )
    group.add_argument(
        "--connections", type=count, default=1, metavar="N", help="connections of each (default: %(default)s)"
    )
    group.add_argument(
        "--max-in-flight",
        type=count,
        default=10_000,
        metavar="N",
        help="requests unanswered at a time, of each; one more is not sent: client_limit (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of times and texts (default: %(default)s)")
    level = parser.add_argument_group("the service level")
    level.add_argument("--max-p99-ms", type=positive, metavar="MS", help="99 of 100 answers come within it")
    level.add_argument(
        "--max-p99-first-ms", type=positive, metavar="MS", help="the first piece of 99 of 100 streams does"
    )
    level.add_argument("--max-error-rate", type=ratio, metavar="RATIO", help="so many may fail; 0 allows no error")
    add_credentials_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the load and print its report. Raises ConfigError: a file, the load, or nobody at the target."""
    scenario = with_overrides(_scenario(args), args)
    report = measure(plan_of(scenario, args))
    print(report)
    _write(args, report, scenario)
    exceeded = report.exceeded()
    for sentence in exceeded:
        print(f"exceeded: {sentence}", file=sys.stderr)
    return 1 if exceeded else 0


def measure(plan: Plan) -> Report:
    """Run a load, with its progress on stderr."""
    from dragoman.loadtest.processes import run_plan
    from dragoman.loadtest.progress import Progress
    from dragoman.loadtest.report import summarize

    progress = Progress(sys.stderr, plan.scenario.seconds)
    try:
        outcomes = run_plan(plan, progress)
    finally:
        progress.close()
    return summarize(outcomes, plan.scenario.asked_rate, plan.scenario.slo)


def plan_of(scenario: Scenario, args: argparse.Namespace) -> Plan:
    """A scenario and how to run it. Raises ConfigError."""
    from dragoman.loadtest.processes import Plan

    return Plan(
        args.target,
        scenario,
        credentials_of(args),
        processes=args.processes,
        connections=args.connections,
        max_in_flight=args.max_in_flight,
        seed=args.seed,
        connect_seconds=args.deadline or 10.0,
    )


def with_overrides(scenario: Scenario, args: argparse.Namespace) -> Scenario:
    """The scenario with the texts, model, deadline and limits that were given. Raises ConfigError."""
    from dragoman.loadtest.scenario import read_texts

    parts: dict[str, object] = {}
    if args.input:
        parts["texts"] = read_texts(args.input)
    if args.model:
        parts |= {"model": args.model, "version": ""}
    if args.deadline:
        parts["deadline_ms"] = args.deadline * 1000
    limits = {name: getattr(args, name) for name in ("max_p99_ms", "max_p99_first_ms", "max_error_rate")}
    return replace(
        scenario,
        mix=tuple(replace(part, **parts) for part in scenario.mix),  # type: ignore[arg-type]  # checked by Part
        slo=replace(scenario.slo, **{name: value for name, value in limits.items() if value is not None}),
    )


def _scenario(args: argparse.Namespace) -> Scenario:
    """From the file, scaled, or from the options. Raises ConfigError."""
    from dragoman.loadtest.arrivals import Arrivals, Stage
    from dragoman.loadtest.scenario import Part, Scenario, read_scenario

    level = args.rate or args.callers
    if not args.scenario:
        if not (level and args.duration):
            raise ConfigError("give --scenario, or --duration with --rate or --callers")
        return Scenario(
            (Stage(args.duration, level, level),),
            (Part(streaming=args.streaming or 0.0),),
            closed=args.callers is not None,
            arrivals=Arrivals(args.arrivals or "poisson"),
            warm_up_seconds=args.warm_up or 0.0,
        )
    own = [f"--{n.replace('_', '-')}" for n in ("arrivals", "warm_up", "streaming") if getattr(args, n) is not None]
    if own:
        raise ConfigError(f"--scenario has its own {', '.join(own)}: change the file instead")
    scenario = read_scenario(args.scenario)
    if level and scenario.closed != (args.callers is not None):
        raise ConfigError(
            f"the scenario {args.scenario} is {'a closed' if scenario.closed else 'an open'} loop: scale it with "
            f"--{'callers' if scenario.closed else 'rate'}"
        )
    return scenario.scaled(peak=level, seconds=args.duration)


def _write(args: argparse.Namespace, report: Report, scenario: Scenario) -> None:
    from dragoman.loadtest.page import html_page

    name = args.scenario.stem if args.scenario else f"{scenario.peak:g} {'callers' if scenario.closed else 'a second'}"
    for option, path, content in (
        ("--json", args.json, report.to_json()),
        ("--html", args.html, html_page(report, f"Load test: {name}")),
    ):
        if path:
            try:
                path.write_text(content, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write {option} {path}: {error.strerror}") from error


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
