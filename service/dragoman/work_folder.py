"""Where a bundle is made: a folder beside the one that it will be, which goes with the process that made it."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target``, on the same disk; it is removed when the block ends, unless it was renamed.

    What a killed process left there is removed by the next one that makes a work folder for the same ``target``: not
    what a living one holds, nor anything on file systems that cannot tell (they need locks on a folder, which some
    network file systems lack). Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    folder, descriptor = _claimed(target)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _prefix(target: Path) -> str:
    return f".exporting-{target.name}-"


def _claimed(target: Path) -> tuple[Path, int]:
    """A new folder, and the open lock that keeps others from taking it for a leftover."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # it was taken for a leftover already: another one
        with suppress(OSError):  # without locks, nobody gets one, and so nobody removes anything
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)


def _remove_leftovers(target: Path) -> None:
    for leftover in target.parent.glob(f"{glob.escape(_prefix(target))}*"):
        try:
            descriptor = os.open(leftover, os.O_RDONLY)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        except OSError:
            continue  # its process lives, or cannot be asked for
        finally:
            os.close(descriptor)
