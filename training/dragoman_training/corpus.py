"""Parallel text on disk: aligned files, TSV and JSONL, read as a stream of (source, target) pairs.

Files are UTF-8; a name that ends in ``.gz`` is unpacked. Only LF and CRLF end a line: U+2028, U+0085, form feeds and a
CR alone are text. Text is kept as it is: nothing is normalised or stripped, but for the mark (BOM, U+FEFF) with which
some programs begin a UTF-8 file. Whatever cannot be read is a ``DataError`` that names the file and, where it can, the
line. So is what is no regular file: most text is read more than once, and a pipe gives its content once.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, cast

from dragoman_training.errors import DataError

CHUNK_BYTES = 1 << 20


def require_file(path: Path) -> None:
    """Refuse what is no regular file, or none at all, without opening it: a pipe that nobody fills has no end."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except ValueError as error:  # a NUL in it
        raise DataError(f"{str(path)!r} is no path ({error}): check it") from error
    if stat.S_ISDIR(mode):
        raise DataError(f"{path} is a folder: name a file")
    if not stat.S_ISREG(mode):
        raise DataError(f"{path} is no regular file: text is read more than once, name a file instead of a pipe")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a text file, unpacked."""
    require_file(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield cast(BinaryIO, file)
    except (OSError, EOFError, zlib.error) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"{path} cannot be read ({reason}): check the path") from error


def iterate_lines(path: Path) -> Iterator[str]:
    """The lines of a file, one at a time."""
    with opened(path) as file:
        for number, raw in enumerate(file, start=1):
            line = raw[:-2] if raw.endswith(b"\r\n") else raw.removesuffix(b"\n")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{path} is not UTF-8 in line {number}: convert it") from error


def read_lines(path: Path) -> list[str]:
    """The lines of a file, all in memory."""
    return list(iterate_lines(path))


def count_lines(path: Path) -> int:
    """How many lines a file has; the last needs no line feed."""
    count, last = 0, b"\n"
    with opened(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            count += chunk.count(b"\n")
            last = chunk[-1:]
    return count + (last != b"\n")


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes as they lie on the disk, in hexadecimal."""
    require_file(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the path") from error


def unequal(source: Path, target: Path, source_lines: int, target_lines: int) -> DataError:
    """The refusal of two files whose lines cannot belong together, with both counts."""
    return DataError(f"{source} has {source_lines} lines but {target} has {target_lines}: line n must match line n")


def check_aligned(source: Path, target: Path, source_lines: int, target_lines: int) -> None:
    """Refuse two files of so many lines unless they can belong together and hold something."""
    if source_lines != target_lines:
        raise unequal(source, target, source_lines, target_lines)
    if not source_lines:
        raise DataError(f"{source} and {target} are empty: at least one pair is needed")


def iterate_pairs(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """Line n of one file with line n of the other; refused, at the end, when one of them has more lines."""
    for source_line, target_line in zip_longest(iterate_lines(source), iterate_lines(target)):
        if source_line is None or target_line is None:
            raise unequal(source, target, count_lines(source), count_lines(target))
        yield source_line, target_line


def read_aligned(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """The lines of two files that belong together, all in memory; ``DataError`` with both counts when they do not."""
    sources, targets = read_lines(source), read_lines(target)
    check_aligned(source, target, len(sources), len(targets))
    return sources, targets


def iterate_tsv(path: Path, source_column: int = 1, target_column: int = 2) -> Iterator[tuple[str, str]]:
    """Two columns, counted from 1, of a tab-separated file. Quotes are text: there is no quoting and no heading."""
    for number, line in enumerate(iterate_lines(path), start=1):
        fields = line.split("\t")
        if len(fields) < max(source_column, target_column):
            raise DataError(
                f"{path} has {len(fields)} columns in line {number}: columns {source_column} and {target_column} are"
                " needed"
            )
        yield fields[source_column - 1], fields[target_column - 1]


def iterate_jsonl(path: Path, source_key: str = "source", target_key: str = "target") -> Iterator[tuple[str, str]]:
    """Two keys of a file with one JSON object a line; both must hold text."""
    for number, line in enumerate(iterate_lines(path), start=1):
        try:
            content = json.loads(line)
            pair = content[source_key], content[target_key]
            for text in pair:
                text.encode("utf-8")  # an escaped half of a surrogate pair is no text
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            wanted = f"an object with texts under {source_key!r} and {target_key!r}"
            raise DataError(f"{path} has no pair in line {number}: {wanted} is needed ({error!r})") from error
        yield pair


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """One line each, LF, UTF-8, whatever the platform."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)
