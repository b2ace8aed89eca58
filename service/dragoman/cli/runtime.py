"""What ``serve`` and ``generate`` share: choosing a bundle, engine settings, and a look at the installation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from dragoman.config import (
    DEFAULT_MODEL,
    PROVIDERS,
    DeviceConfig,
    EngineConfig,
    ServerConfig,
    embedded_bundle,
    embedded_models,
)
from dragoman.errors import ConfigError

Config = type[EngineConfig] | type[DeviceConfig] | type[ServerConfig]
C = TypeVar("C", EngineConfig, DeviceConfig, ServerConfig)

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
    "share_equal": ("--no-sharing", "compute the answers to equal requests of one caller each by itself"),
}
_DEVICE_FLAGS: Final = {
    "device_id": ("--device", "the GPU to use, as CUDA counts them"),
    "mem_limit_bytes": ("--gpu-mem-limit", "bytes of the GPU's memory that each model takes at most; 0: all of it"),
    "cuda_graphs": ("--no-cuda-graphs", "launch every kernel of a step by itself, to look for faults"),
}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of ``EngineConfig`` as options, and which of a bundle's graphs to run, and where."""
    parser.add_argument(
        "--provider",
        choices=PROVIDERS,
        default=PROVIDERS[0],
        help="what to run the graphs on; cuda-dry does on the CPU what cuda does, for tests (default: cpu)",
    )
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
    add_settings(parser.add_argument_group("GPU, with --provider cuda"), DeviceConfig, _DEVICE_FLAGS)


def changed_engine_flags(args: argparse.Namespace) -> list[str]:
    """The flags of the engine and of the GPU that were given a value of their own."""
    return _changed(args, EngineConfig, _ENGINE_FLAGS) + _changed(args, DeviceConfig, _DEVICE_FLAGS)


def check_device_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for settings of a GPU that is not used."""
    if args.provider == "cpu" and (own := _changed(args, DeviceConfig, _DEVICE_FLAGS)):
        raise ConfigError(f"{', '.join(own)} was given without --provider cuda: graphs on the CPU have no use for it")


def _changed(args: argparse.Namespace, config: Config, flags: dict[str, tuple[str, str]]) -> list[str]:
    defaults = {field.name: field.default for field in fields(config)}
    return [flag for name, (flag, _) in flags.items() if getattr(args, name, defaults[name]) != defaults[name]]


def add_settings(group: Any, config: Config, flags: dict[str, tuple[str, str]]) -> None:
    """One option for each named field of a settings class, with its type and default."""
    defaults = {field.name: field.default for field in fields(config)}
    for name, (flag, help_text) in flags.items():
        default: Any = defaults[name]
        if isinstance(default, bool):  # the flag says the opposite
            group.add_argument(flag, dest=name, action="store_false" if default else "store_true", help=help_text)
            continue
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
