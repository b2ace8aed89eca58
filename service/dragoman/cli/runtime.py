"""What ``serve`` and ``generate`` share: choosing a bundle, engine settings, and a look at the installation."""

from __future__ import annotations

import argparse
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from dragoman.config import DEFAULT_MODEL, EngineConfig, ServerConfig, embedded_bundle, embedded_models
from dragoman.errors import ConfigError

C = TypeVar("C", EngineConfig, ServerConfig)

_ENGINE_FLAGS: Final = {
    "num_slots": ("--slots", "rows that a replica decodes together"),
    "num_replicas": ("--replicas", "engine threads over one copy of the weights"),
    "num_threads": ("--threads", "ONNX Runtime threads of one run"),
    "max_waiting": ("--max-waiting", "requests that may wait; more are refused"),
    "max_encode_tokens": ("--max-encode-tokens", "source tokens, padding included, of one encoder run"),
    "max_kv_cache_bytes": (
        "--max-kv-cache-bytes",
        "KV memory of one replica; a model that could need more is not served",
    ),
    "stuck_seconds": ("--stuck-seconds", "a step that takes longer means a hung engine: the server exits"),
}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of ``EngineConfig`` as options, and which of a bundle's graphs to run."""
    parser.add_argument(
        "--precision", metavar="NAME", help="the graphs to run, of those that the bundle has (default: its first)"
    )
    parser.add_argument(
        "--shortlist",
        action="store_true",
        help="make answers of the candidates that the bundle's shortlist has for their sources: faster, where the "
        "vocabulary is large; the model must have been exported with --shortlist",
    )
    add_settings(parser.add_argument_group("engine"), EngineConfig, _ENGINE_FLAGS)


def changed_engine_flags(args: argparse.Namespace) -> list[str]:
    """The flags of ``EngineConfig`` that were given a value of their own."""
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    return [flag for name, (flag, _) in _ENGINE_FLAGS.items() if getattr(args, name, defaults[name]) != defaults[name]]


def add_settings(
    group: Any, config: type[EngineConfig] | type[ServerConfig], flags: dict[str, tuple[str, str]]
) -> None:
    """One option for each named field of a settings class, with its type and default."""
    defaults = {field.name: field.default for field in fields(config)}
    for name, (flag, help_text) in flags.items():
        default: Any = defaults[name]
        group.add_argument(
            flag,
            dest=name,
            type=type(default),
            default=default,
            metavar={int: "N", float: "SECONDS", str: "HOST"}[type(default)],
            help=f"{help_text} (default: {default})",
        )


def settings(config: type[C], args: argparse.Namespace) -> C:
    """The settings that the options ask for. Raises ConfigError."""
    return config(**{field.name: getattr(args, field.name) for field in fields(config) if hasattr(args, field.name)})


def model_help() -> str:
    """What --model may be."""
    return f"an embedded model: {', '.join(embedded_models()) or 'this build has none'} (default: {DEFAULT_MODEL})"


def bundle_path(bundle: Path | None, model: str | None) -> Path:
    """The folder to load. Raises ConfigError."""
    if bundle is not None and model is not None:
        raise ConfigError("a bundle and --model were both given: choose one")
    return bundle if bundle is not None else embedded_bundle(model or DEFAULT_MODEL)


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
