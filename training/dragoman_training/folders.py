"""Folders that appear under their name complete or not at all, whenever the process is killed."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dragoman_training.errors import TrainingError

WRITING_PREFIX = ".writing-"


def flush(path: Path) -> None:
    """Have the operating system put a file's or folder's content on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_space(path: Path) -> str:
    """The free space of the disk that holds a path, for a person."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB"


@contextmanager
def explained(folder: Path, kind: type[TrainingError]) -> Iterator[None]:
    """An ``OSError`` of writing ``folder`` becomes a ``kind``: with the folder, the free space and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and folder.is_dir():
            raise kind(f"{folder} was filled by another process meanwhile: choose another --out") from error
        raise kind(
            f"{folder} could not be written ({error.strerror or error}), {free_space(folder)} free: make room, or"
            " choose another --out, and run the command again"
        ) from error


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A new folder to write files into: it takes the name ``folder`` when the block ends, and goes when it raises.

    Until then it lies beside ``folder`` under a name of its own, so that two processes never write into one. What a
    killed process left there is removed by the next one that writes the same folder, but for file systems that cannot
    tell that the process is gone (they need locks on a folder, which NFS lacks). ``folder`` may be there already only
    if it is empty: ``OSError`` otherwise.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    temporary, descriptor = claimed(folder)
    try:
        yield temporary
        for path in temporary.iterdir():
            flush(path)
        flush(temporary)
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # the error that is on its way matters more than what stays
        raise
    finally:
        os.close(descriptor)
    flush(folder.parent)


def claimed(folder: Path) -> tuple[Path, int]:
    """A new temporary folder beside ``folder``, and the descriptor that keeps ``remove_leftovers`` away from it."""
    while True:
        # Not mkdtemp, whose folders nobody else may read: this one gets the usual permissions.
        temporary = folder.with_name(f"{WRITING_PREFIX}{folder.name}-{secrets.token_hex(4)}")
        temporary.mkdir()
        try:
            descriptor = os.open(temporary, os.O_RDONLY)
        except FileNotFoundError:
            continue  # taken for a leftover before it could be locked: a new one
        with suppress(OSError):  # a file system without locks: nobody else gets one either, and so removes nothing
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # shared, as NFS wants a file open for writing for the other kind
        if temporary.exists():
            return temporary, descriptor
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of ``folder`` whose processes are gone: those on which no one holds a lock."""
    for leftover in folder.parent.glob(f"{WRITING_PREFIX}{glob.escape(folder.name)}-*"):
        try:
            descriptor = os.open(leftover, os.O_RDONLY)
        except OSError:
            continue  # it took its name, or went, meanwhile; or it is another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)  # what cannot be removed is in nobody's way
        except OSError:
            continue  # its process lives, or cannot be asked
        finally:
            os.close(descriptor)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock file ``path``, made if missing: other processes wait. A killed process lets go of it.

    Without ``wait``, raises ``BlockingIOError`` where another process holds it.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
