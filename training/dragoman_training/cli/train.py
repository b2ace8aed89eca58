"""Train a model from a configuration file or a preset, or draw the curves of a run.

Each validation prints a line, appends to RUN/metrics.jsonl and writes a checkpoint; RUN/best and RUN/last link to two
of them. Ctrl-C and SIGTERM save before they end; --resume goes on from there, after a kill from the newest checkpoint,
and ends with the weights of a run that was never stopped. Before training begins there is nothing to save: the same
command starts again.

  dragoman train tiny --out runs/mine                                        a preset, on the data in data/
  dragoman train tiny --set schedule.steps=6000 --set loop.seed=2 --out runs/other
  dragoman train my.toml --out runs/mine --resume
  dragoman train my.toml --out runs/mine --resume --allow-change schedule.steps
  dragoman train report runs/mine                                            loss, quality and speed to report.png
  torchrun --nproc-per-node 2 -m dragoman.cli.main train my.toml --out runs/mine     each process is one worker
  dragoman train --list                                                      the presets

A changed setting is refused on --resume unless --allow-change names it. Where it changes the batches (loop.workers,
data.batch_tokens, loop.seed, the training files, ...), the epoch starts again from its first batch.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from dragoman_training.errors import ConfigError, TrainingError

SUMMARY = "train a model, or draw the curves of a run"
EXTRA: str | None = "train"
REPORT = "report"  # in the place of a configuration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a TOML file or a preset's name, or: report")
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="report: the run to draw")
    parser.add_argument("--out", type=Path, metavar="RUN", help="the run's folder; report: the PNG (RUN/report.png)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out after its newest checkpoint")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, section.key=value; repeatable"
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="with --resume: a setting, section.key, that may differ from the run's; repeatable",
    )
    parser.add_argument("--list", action="store_true", help="list the presets")


def run(args: argparse.Namespace) -> int:
    """0 at the end and after SIGTERM, 130 after Ctrl-C, 2 for a refusal or a failed run.

    The two signals save the state; one that comes before training begins finds none, and ends the command at once.
    """
    try:
        if args.list:
            return list_presets()
        if args.config == REPORT:
            return draw_report(args)
        return train(args)
    except TrainingError as error:
        print(f"dragoman train: error: {error}", file=sys.stderr)
        return 2


def list_presets() -> int:
    """Print each preset with what it is for."""
    from dragoman_training.configfile import preset_names, preset_summary

    names = preset_names()
    for name in names:
        print(f"{name:<{max(map(len, names))}}  {preset_summary(name)}")
    return 0


def draw_report(args: argparse.Namespace) -> int:
    """Draw the curves of a run and print where they are."""
    from dragoman_training import report

    if args.run is None:
        raise ConfigError("report needs a run: dragoman train report RUN")
    out = args.out or args.run / "report.png"
    report.draw(args.run, out)
    print(out)
    return 0


def train(args: argparse.Namespace) -> int:
    """Train, or continue."""
    from dragoman_training.configfile import load_config, preset_names
    from dragoman_training.train import train

    if args.config is None:
        raise ConfigError(f"a configuration is missing: a TOML file, or a preset ({', '.join(preset_names())})")
    if args.run is not None:
        raise ConfigError(f"unexpected {str(args.run)!r}: the run's folder goes to --out")
    if args.out is None:
        raise ConfigError("--out is missing: name the run's folder")
    stopped_by = train(load_config(args.config, args.set), args.out, args.resume, args.allow_change)
    return 130 if stopped_by == signal.SIGINT else 0
