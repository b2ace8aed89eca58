"""What a subcommand is."""

from __future__ import annotations

import argparse
from typing import Protocol


class Command(Protocol):
    """A module with these names, registered in the entry-point group ``dragoman.commands``.

    Importing it must be quick, because ``dragoman --help`` imports every command: heavy imports belong in ``run``.
    """

    SUMMARY: str
    """One line for ``dragoman --help``."""
    EXTRA: str | None
    """The extra of the package that holds what ``run`` imports; None if it needs no more than the base."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit status. DragomanError becomes one line and exit status 2."""
