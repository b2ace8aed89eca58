"""Folders that appear under their name complete or not at all, whenever the process is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITING_PREFIX = ".writing-"


def flush(path: Path) -> None:
    """Have the operating system put a file's or folder's content on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A new folder to write files into: it takes the name ``folder`` when the block ends, and goes when it raises.

    What a killed process left is removed by the next one that writes the same folder. ``folder`` may be there already
    only if it is empty: ``OSError`` otherwise.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{WRITING_PREFIX}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.iterdir():
            flush(path)
        flush(temporary)
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush(folder.parent)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock file ``path``, made if missing: other processes wait. A killed process lets go of it.

    Without ``wait``, raises ``BlockingIOError`` where another process holds it.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
