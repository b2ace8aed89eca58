"""``dragoman``: finds the subcommand, runs it, and turns what goes wrong into one line and an exit status.

Exit status: 0 done, 1 some work failed, 2 wrong use or setting, 130 interrupted, 141 the reader of our output left.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import dragoman
from dragoman.cli.command import Command
from dragoman.errors import DragomanError

GROUP: Final = "dragoman.commands"

EXAMPLES: Final = """\
examples:
  dragoman serve                                   serve the embedded model on port 50051
  dragoman serve BUNDLE --port 0                   serve a bundle on a free port (printed as JSON when ready)
  dragoman generate giraffe                        answer here, without a server
  dragoman generate --target localhost:50051 < words.txt > answers.txt
  dragoman explain --text giraffe                  show where the model looks
  dragoman prepare cmudict --out g2p-data          from data to a served model:
  dragoman train g2p-en --out runs/g2p-en
  dragoman evaluate runs/g2p-en --source g2p-data/test.source --target g2p-data/test.target
  dragoman export runs/g2p-en --sources g2p-data/dev.source --out bundles/g2p-en
  dragoman inspect bundles/g2p-en --verify
  dragoman serve bundles/g2p-en

Every command explains itself: dragoman COMMAND --help
"""

_OWN_PACKAGES: Final = ("dragoman", "dragoman_training", "dragoman_export")


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_standard_streams()
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    try:
        if arguments and arguments[0] in commands:
            return _run(commands[arguments[0]], arguments[1:])
        return _overview(commands, arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _open_standard_streams() -> None:
    """Put the null device where the caller closed stdin, stdout or stderr, which Python then leaves out."""
    if sys.stdin is None or sys.stdout is None or sys.stderr is None:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
            pass  # the lowest free number: this fills the gaps among 0, 1 and 2
        os.close(descriptor)
        sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115  # for the life of the process
        sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  # the same
        sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115  # the same


def _run(entry: EntryPoint, arguments: Sequence[str]) -> int:
    extra = None
    try:
        command: Command = entry.load()
        extra = command.EXTRA
        parser = argparse.ArgumentParser(
            prog=f"dragoman {entry.name}", description=command.__doc__, formatter_class=argparse.RawTextHelpFormatter
        )
        command.add_arguments(parser)
        status = command.run(parser.parse_args(arguments))
        sys.stdout.flush()
        return status
    except DragomanError as error:
        return _fail(f"dragoman {entry.name}: error: {error}")
    except BrokenPipeError:
        raise
    except OSError as error:  # a file or folder that a person named
        return _fail(f"dragoman {entry.name}: error: {error}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if extra is None or missing in ("", *_OWN_PACKAGES):
            raise  # a fault of ours, not of the installation
        return _fail(
            f"dragoman {entry.name} needs {missing}, which is not installed here: in the source folder, "
            f"pip install -c deploy/constraints.txt '.[{extra}]'"
        )


def _overview(commands: Mapping[str, EntryPoint], arguments: Sequence[str]) -> int:
    """``dragoman`` without a command: help, version, or a complaint."""
    width = max(map(len, commands), default=0)
    listing = "\n".join(f"  {name:<{width}}  {_summary(commands[name])}" for name in sorted(commands))
    parser = argparse.ArgumentParser(
        prog="dragoman",
        usage="dragoman [-h] [--version] COMMAND ...",
        description=f"Train, export and serve encoder-decoder transformers.\n\ncommands:\n{listing}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dragoman {dragoman.__version__}")
    if arguments and not arguments[0].startswith("-"):
        parser.error(f"there is no command {arguments[0]!r}; there is {', '.join(sorted(commands)) or 'none'}")
    parser.parse_args(arguments)
    parser.print_help()
    return 0


def _summary(entry: EntryPoint) -> str:
    try:
        command: Command = entry.load()
    except ModuleNotFoundError as error:
        return f"(not available: {error})"
    return command.SUMMARY


def _fail(line: str) -> int:
    print(" ".join(line.split("\n")), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
