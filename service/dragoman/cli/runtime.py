"""What ``serve`` and ``generate`` share: choosing a bundle, engine settings, and a look at the installation."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from dragoman.config import (
    DEFAULT_MODEL,
    MODEL_SECTIONS,
    SECTIONS,
    DeviceConfig,
    EngineConfig,
    embedded_bundle,
    embedded_models,
)
from dragoman.errors import ConfigError
from dragoman.setting import Setting, Value, settings_of

C = TypeVar("C")

_HELP_WIDTH: Final = 92
_METAVARS: Final[dict[type, str]] = {int: "N", float: "X", str: "NAME"}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """How one model runs, as options with their defaults: for commands that run it themselves."""
    for title, section in SECTIONS.items():
        if section in MODEL_SECTIONS:
            add_settings(parser.add_argument_group(title), section)


def changed_engine_flags(args: argparse.Namespace) -> list[str]:
    """The flags of the engine and of the GPU that were given a value of their own."""
    return _changed(args, EngineConfig) + _changed(args, DeviceConfig)


def check_device_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for settings of a GPU that is not used."""
    if args.provider == "cpu" and (own := _changed(args, DeviceConfig)):
        raise unused_device(own)


def unused_device(names: Sequence[str]) -> ConfigError:
    """These settings, by the names that they were given by, have no effect."""
    return ConfigError(f"{', '.join(names)} was given without --provider cuda: graphs on the CPU have no use for it")


def _changed(args: argparse.Namespace, section: type) -> list[str]:
    given = [(known, getattr(args, known.name)) for known in settings_of(section)]
    return [known.flag_of(value) for known, value in given if value != known.default]


def add_settings(group: Any, section: type, *, given_only: bool = False, omit: Sequence[str] = ()) -> None:
    """An option for each setting of a section, but for secrets and those to omit, under the setting's name.

    ``given_only``: those that are not given do not appear in the result, so that other sources can have them.
    """
    for known in settings_of(section):
        if known.secret or known.name in omit:
            continue
        shown = str(known.default).lower() if known.kind is bool else known.default
        default = "" if shown in ("", ()) else f" (default: {_words(shown)})"
        options: dict[str, Any] = {
            "dest": known.name,
            "default": argparse.SUPPRESS if given_only else known.default,
            "help": textwrap.fill((known.help + default).replace("%", "%%"), _HELP_WIDTH),
        }
        if known.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = known.parse if known.is_list else known.kind
            options["choices"] = known.choices or None
            options["metavar"] = None if known.choices else known.metavar or _metavar(known)
        group.add_argument(known.flag, **options)


def _metavar(known: Setting) -> str:
    word = "SECONDS" if known.name.endswith("_seconds") else _METAVARS[known.kind]
    return f"{word},..." if known.is_list else word


def _words(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings(section: type[C], args: argparse.Namespace) -> C:
    """The settings that the options ask for. Raises ConfigError."""
    given = {known.field: known.name for known in settings_of(section) if hasattr(args, known.name)}
    return section(**{field: getattr(args, name) for field, name in given.items()})


def model_help() -> str:
    """What --model may be."""
    return f"an embedded model: {', '.join(embedded_models()) or 'this build has none'} (default: {DEFAULT_MODEL})"


def bundle_path(bundle: Path | None, model: str | None) -> Path:
    """The folder to load. Raises ConfigError."""
    if bundle is not None and model is not None:
        raise ConfigError("a bundle and --model were both given: choose one")
    return bundle if bundle is not None else embedded_bundle(model or DEFAULT_MODEL)


def served_paths(bundles: Sequence[Path], model: str | None) -> list[Path]:
    """The folders to serve: those given, or the one embedded model, or all embedded ones with the default first.

    Raises ConfigError.
    """
    if len(bundles) > 1 and model is None:
        return list(bundles)
    if bundles or model is not None:
        return [bundle_path(bundles[0] if bundles else None, model)]
    return [embedded_bundle(name) for name in sorted(embedded_models(), key=lambda name: name != DEFAULT_MODEL)]


def check_runtime() -> None:
    """Raises ConfigError unless exactly one ONNX Runtime is installed: two overwrite each other's files."""
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
    if len(installed) > 1:
        raise ConfigError(
            "both onnxruntime and onnxruntime-gpu are installed, which breaks either: "
            "pip uninstall onnxruntime onnxruntime-gpu, then install this project with the extra [cpu] or [gpu]"
        )
    if not installed and find_spec("onnxruntime") is None:
        raise ConfigError("onnxruntime is not installed: install this project with the extra [cpu] (or [gpu])")


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
