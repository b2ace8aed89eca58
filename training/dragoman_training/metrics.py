"""metrics.jsonl of a run: one JSON line a validation. A figure that is no finite number is null there."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman_training.folders import WRITING_PREFIX, flush

Line = dict[str, Any]


def finite(line: Mapping[str, Any]) -> Line:
    """The line with None for NaN and infinity, of which JSON has neither."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }


def encode(line: Mapping[str, Any]) -> str:
    """The text of a line, with its end."""
    return json.dumps(finite(line), ensure_ascii=False, allow_nan=False) + "\n"


def append_metrics(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line to metrics.jsonl, whole or not at all, and flush it to disk."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(encode(line))
        flush(path)
        flush(path.parent)
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


def read_metrics(path: Path) -> list[Line]:
    """The lines of metrics.jsonl that have a step; others are left out: half a one, say. Of a missing file, none.

    Raises ``OSError`` where the file cannot be read.
    """
    found = []
    for text in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            line = json.loads(text.decode("utf-8"))
        except ValueError:
            continue  # what a killed process or a damaged disk left is no validation
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            found.append(line)
    return found


def truncate_metrics(path: Path, step: int) -> None:
    """Keep the lines up to ``step``: a killed session may have written some, or half a one, of later steps."""
    if not path.exists():
        return
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    temporary = path.with_name(f"{WRITING_PREFIX}{path.name}")
    temporary.write_text("".join(map(encode, kept)), encoding="utf-8")
    flush(temporary)
    temporary.replace(path)
