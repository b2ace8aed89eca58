"""Find the highest rate at which a server holds a service level, and how many servers a wanted rate needs.

Rates are tried one behind the other, each for --seconds: doubled until one is missed, then bisected. A rate holds when
no limit is exceeded; one that does not is tried once more, as a stray pause of the machine is no finding. Requests are
those of --scenario's mix (its stages do not count), or words; the limits are its own, or those given.

Run it from another machine than the server's, or with cores to spare: what the load takes is missing to the server.

  dragoman capacity localhost:50051 --max-p99-ms 200 --wanted-rate 500
  dragoman capacity localhost:50051 --scenario deploy/loadtest/steady.toml --seconds 30

Exit status: 0; 1 when no rate holds; 2 when the target cannot be reached.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from dragoman.cli.loadtest import add_load_arguments, measure, plan_of, positive, ratio, with_overrides
from dragoman.errors import ConfigError

SUMMARY = "find the highest rate that holds a service level"
EXTRA: str | None = None

_DEFAULT_ERROR_RATE = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("target", metavar="TARGET", help="HOST:PORT of the server")
    group = parser.add_argument_group("the search")
    group.add_argument("--scenario", type=Path, metavar="FILE", help="whose mix, arrivals and limits to use (TOML)")
    group.add_argument(
        "--seconds", type=positive, default=10.0, metavar="S", help="for each rate (default: %(default)g)"
    )
    group.add_argument(
        "--first-rate", type=positive, default=10.0, metavar="R", help="the rate to begin with (default: %(default)g)"
    )
    group.add_argument(
        "--max-rate", type=positive, default=10_000.0, metavar="R", help="no rate above it (default: %(default)g)"
    )
    group.add_argument(
        "--precision",
        type=positive,
        default=0.05,
        metavar="RATIO",
        help="end when a rate that is missed is so little above one that holds (default: %(default)g)",
    )
    group.add_argument("--wanted-rate", type=positive, metavar="R", help="print how many servers it needs")
    group.add_argument(
        "--utilization",
        type=ratio,
        default=0.7,
        metavar="RATIO",
        help="of each one's capacity: the rest is for bursts, and for one that fails (default: %(default)g)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    add_load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Search, each rate on a line of stderr. Raises ConfigError: a file, no limit, or nobody at the target."""
    from dragoman.loadtest.arrivals import Stage
    from dragoman.loadtest.capacity import find_capacity, num_replicas
    from dragoman.loadtest.scenario import Scenario, read_scenario

    if args.utilization == 0:
        raise ConfigError("--utilization is 0; it must be above 0")
    begin = (Stage(args.seconds, args.first_rate, args.first_rate),)
    base = replace(read_scenario(args.scenario), stages=begin, closed=False) if args.scenario else Scenario(begin)
    scenario = with_overrides(base, args)
    if scenario.slo.max_p99_ms is None and scenario.slo.max_p99_first_ms is None:
        raise ConfigError("there is no limit to hold: give --max-p99-ms or --max-p99-first-ms")
    if scenario.slo.max_error_rate is None:
        scenario = replace(scenario, slo=replace(scenario.slo, max_error_rate=_DEFAULT_ERROR_RATE))
    trials: list[dict[str, object]] = []

    def holds(rate: float) -> bool:
        report = measure(plan_of(scenario.scaled(peak=rate), args))
        exceeded = report.exceeded()
        figures = report.all
        p99 = figures.latency_ms.p99 if figures.latency_ms else None
        trials.append({"rate": rate, "p99_ms": p99, "error_rate": figures.error_rate, "holds": not exceeded})
        said = "; ".join(exceeded) or f"holds, p99 {p99:.1f} ms, goodput {figures.goodput:.1f}/s"
        print(f"{rate:.1f}/s: {said}; send lag {report.max_send_lag_ms:.0f} ms at most", file=sys.stderr, flush=True)
        return not exceeded

    capacity = find_capacity(holds, first_rate=args.first_rate, max_rate=args.max_rate, precision=args.precision)
    print(f"capacity  {capacity:.1f}/s" if capacity else "capacity  none: no rate that was tried holds")
    replicas = None
    if args.wanted_rate and capacity:
        replicas = num_replicas(args.wanted_rate, capacity, args.utilization)
        print(f"replicas  {replicas} for {args.wanted_rate:g}/s, each used to {args.utilization:.0%}")
    if args.json:
        found = {"capacity": capacity, "replicas": replicas, "trials": trials}
        try:
            args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write --json {args.json}: {error.strerror}") from error
    return 0 if capacity else 1
