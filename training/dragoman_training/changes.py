"""What differs between a run and the configuration that it is to be resumed with, and what may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

from dragoman_training.config import ModelConfig, TrainConfig
from dragoman_training.errors import CheckpointError, ConfigError

# Settings that may differ when a run is resumed with --allow-change; of data, schedule and loop all may.
CHANGEABLE = (
    "data.",
    "schedule.",
    "loop.",
    "optimizer.",
    "processes",
    "tokenizer.sampling",
    "model.dropout",
    "model.attention_dropout",
    "model.activation_dropout",
)
# A change of these gives other batches, so that the place in the epoch means nothing any more. loop.accumulate does
# not: a step takes more or fewer shares of the same plan.
OF_THE_PLAN = (
    "data.train_source",
    "data.train_target",
    "data.max_source_tokens",
    "data.max_target_tokens",
    "data.batch_tokens",
    "data.length_spread",
    "tokenizer.sampling",
    "loop.seed",
    "loop.workers",
    "processes",
)
# A change of these makes the figures of earlier validations incomparable.
OF_THE_METRIC = ("data.dev_source", "data.dev_target", "loop.metric", "loop.bleu_tokenizer")

Changes = dict[str, tuple[Any, Any]]
"""Name of what differs to its old and its new value."""


def changed_fields(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Changes:
    """The fields whose values differ, as ``section.name`` to the old and the new value (None where there is none)."""
    changed: Changes = {}
    for key in [*saved, *(key for key in now if key not in saved)]:
        old, new = saved.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changed |= changed_fields(old, new, f"{prefix}{key}.")
        elif old != new:
            changed[f"{prefix}{key}"] = (old, new)
    return changed


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """The settings in which two config.json differ, named as in a configuration file; files by ``data.NAME.sha256``."""
    try:
        (old, old_files), (new, new_files) = (
            (
                {"model": asdict(ModelConfig(**r["model"])), **r["training"], "processes": r["processes"]},
                {"data": r["data"]},
            )
            for r in (saved, now)
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"config.json is incomplete: {error}") from error
    return changed_fields(old, new) | changed_fields(old_files, new_files)


def covered(name: str, keys: Sequence[str]) -> bool:
    """Whether a changed field is one of ``keys`` or belongs to one: ``data.dev_source.sha256`` to ``data``."""
    return any(name == key or name.startswith(f"{key.rstrip('.')}.") for key in keys)


def refuse_changes(run: Path, changes: Changes, allowed: Sequence[str]) -> None:
    """``CheckpointError`` naming the first changed setting that is not allowed, or cannot be."""
    for name, (old, new) in changes.items():
        found = f"{run} cannot be resumed: {name} is {new!r}, was {old!r}"
        if not covered(name, CHANGEABLE) or name == "optimizer.kind":
            raise CheckpointError(f"{found}; the saved state would not fit: restore it, or choose another --out")
        if not covered(name, allowed):
            key = ".".join(name.split(".")[:2])
            raise CheckpointError(f"{found}; restore it, give --allow-change {key}, or choose another --out")


def refuse_unknown(allowed: Sequence[str]) -> None:
    """``ConfigError`` for a key of ``--allow-change`` that is no setting."""
    sections = {name: list(get_type_hints(kind)) for name, kind in get_type_hints(TrainConfig).items()}
    for key in allowed:
        section, _, name = key.partition(".")
        if key != "processes" and name not in sections.get(section, []):
            known = [f"{section}.{name}" for name in sections[section]] if section in sections else None
            choices = ", ".join(known or [*(f"{name}.KEY" for name in sections), "processes"])
            raise ConfigError(f"--allow-change {key}: there is no such setting; known here: {choices}")
