"""Files that are read again when they change, while the server runs: certificates and tokens are renewed in place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from dragoman.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Stamp = tuple[tuple[int, int, int] | None, ...]


class Renewed(Generic[T]):
    """What some files say together. Files that cannot be used change nothing, which is logged once. Thread-safe."""

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """``name`` is for the log. ``read`` makes a value of the files. Raises what it raises."""
        self._name = name
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self.value = read()

    def renew(self) -> bool:
        """Look whether the files have changed, and if so, read them; True when there is a new ``value``."""
        with self._lock:
            before = self._stamp()
            if before == self._seen:
                return False
            try:
                value = self._read()
            except ConfigError as error:
                self._seen = before  # they are looked at again when they change again
                logger.error("%s: the new files cannot be used, the old ones stay in force: %s", self._name, error)
                return False
            if self._stamp() != before:
                return False  # they are being written: the next look finds them whole
            self._seen, self.value = before, value
            logger.info("%s: renewed", self._name)
            return True

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
