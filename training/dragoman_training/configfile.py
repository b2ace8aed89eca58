"""TOML to a ``TrainConfig``: files and presets.

Unknown keys, missing keys and wrong types are a ``ConfigError`` that names the key as ``section.key``, the value and
what would be valid. The dataclasses check values further themselves. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from dragoman_training.config import TrainConfig, require
from dragoman_training.errors import ConfigError

Config = TypeVar("Config")


def read_section(kind: type[Config], table: Mapping[str, Any], prefix: str = "") -> Config:
    """Make a dataclass from a TOML table: nested dataclasses from nested tables, integers accepted as floats."""
    hints = get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]  # a dataclass, as the caller sees to
    for key in table:
        require(key in fields, f"key {prefix}{key}", table[key], f"unknown; known here: {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, spec in fields.items():
        if name in table:
            values[name] = read_value(hints[name], table[name], f"{prefix}{name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name} is missing: add it")
    return kind(**values)


def read_value(hint: Any, value: Any, key: str) -> Any:
    """Check one TOML value against its type hint."""
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, dict), key, value, f"it must be a table: write [{key}]")
        return read_section(hint, value, f"{key}.")  # type: ignore[arg-type]  # is_dataclass does not narrow to a type
    if hint is float and type(value) is int:
        return float(value)
    if get_origin(hint) is tuple:  # tuple[item, ...]
        require(isinstance(value, list), key, value, f"it must be a list, not {type(value).__name__}")
        return tuple(read_value(get_args(hint)[0], item, f"{key}[{index}]") for index, item in enumerate(value))
    # `type() is` and not isinstance: true is an int in Python, but no number in a configuration
    expected = get_args(hint) or (hint,)
    names = " or ".join("bool (true or false)" if t is bool else t.__name__ for t in expected if t is not NoneType)
    require(type(value) in expected, key, value, f"it must be of type {names}, not {type(value).__name__}")
    return value


def set_value(table: dict[str, Any], assignment: str) -> None:
    """Put ``section.key=value`` into a table as read from TOML. Where the key takes text, the value needs no quotes."""
    key, equals, text = assignment.partition("=")
    section, dot, name = key.partition(".")
    require(bool(equals and dot), "--set", assignment, "write section.key=value")
    sections = get_type_hints(TrainConfig)
    require(section in sections, f"key {key}", text, f"unknown; known sections: {', '.join(sections)}")
    hints = get_type_hints(sections[section])
    require(name in hints, f"key {key}", text, f"unknown; known here: {', '.join(hints)}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:  # text without quotes
        value = text
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--set {key}: the value cannot be read ({error}): shorten it") from error
    hint = hints[name]
    takes_text = get_origin(hint) is not tuple and str in (get_args(hint) or (hint,))
    values = table.setdefault(section, {})
    require(isinstance(values, dict), section, values, f"it must be a table: write [{section}]")
    values[name] = text if takes_text and not isinstance(value, str) else value


def parse_config(text: str, name: str, assignments: Sequence[str] = ()) -> TrainConfig:
    """Read a configuration from TOML text and ``section.key=value`` texts, which win; ``name`` is for messages."""
    try:
        table = tomllib.loads(text)
        for assignment in assignments:
            set_value(table, assignment)
        return read_section(TrainConfig, table)
    except (ValueError, RecursionError, OverflowError) as error:  # the others: absurd numbers, absurd nesting
        raise ConfigError(f"{name} is no valid TOML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def preset_names() -> list[str]:
    """The presets that ship with the package, without ``.toml``."""
    folder = resources.files("dragoman_training") / "presets"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """The TOML text of a preset."""
    preset = resources.files("dragoman_training") / "presets" / f"{name}.toml"
    return preset.read_text(encoding="utf-8")


def preset_summary(name: str) -> str:
    """What the comment on a preset's first line says."""
    return preset_text(name).splitlines()[0].lstrip("# ")


def load_config(path_or_preset: str, assignments: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file, or a preset by its name (a file of that name wins); ``section.key=value`` texts win over it.

    A byte order mark at the start of the file is skipped.
    """
    path = Path(path_or_preset)
    if path.is_file():
        try:
            return parse_config(path.read_text(encoding="utf-8-sig"), str(path), assignments)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    if path_or_preset in preset_names():
        return parse_config(preset_text(path_or_preset), f"preset {path_or_preset}", assignments)
    raise ConfigError(f"no file and no preset {path_or_preset!r}: presets are {', '.join(preset_names())}")
