"""config.json of a run and of each of its checkpoints: what the run is."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman_training.config import ModelConfig, TrainConfig
from dragoman_training.tokenizer import SpecialIds, Tokenizer, file_names

FORMAT = 1


def config_record(config: TrainConfig) -> dict[str, Any]:
    """A configuration section by section. Data files go in by name, never by their place on a disk."""
    record = json.loads(json.dumps(asdict(config)))  # lists for tuples, as it will be read back
    for name in ("train_source", "train_target", "dev_source", "dev_target"):
        record["data"][name] = Path(record["data"][name]).name
    return dict(record)


def run_record(
    model: ModelConfig,
    special: SpecialIds,
    tokenizers: tuple[Tokenizer, Tokenizer],
    config: TrainConfig,
    data: Mapping[str, Any],
    processes: int = 1,
) -> dict[str, Any]:
    """The content of config.json. ``data`` tells what the files hold; ``history`` gets what ``--resume`` changed."""
    training = config_record(config)
    del training["model"]  # "model" has it, with the vocabulary sizes
    return {
        "format": FORMAT,
        "model": asdict(model),
        "special_ids": special.as_dict(),
        "tokenizers": tokenizer_record(tokenizers),
        "limits": {
            "max_source_tokens": config.data.max_source_tokens,
            "max_target_tokens": config.data.max_target_tokens,
        },
        "training": training,
        "processes": processes,
        "data": json.loads(json.dumps(data)),
        "history": [],
        "tools": tool_record(),
    }


def tokenizer_record(tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, Any]:
    """The file of each side, and what makes it the tokenizer of this model and no other."""
    files = file_names(*tokenizers)
    return {
        side: {
            "kind": tokenizer.kind,
            "file": files[side],
            "sha256": hashlib.sha256(tokenizer.to_bytes()).hexdigest(),
            "num_tokens": len(tokenizer),
            "normalization": tokenizer.normalization,
        }
        for side, tokenizer in zip(("source", "target"), tokenizers, strict=True)
    }


def tool_record() -> dict[str, str]:
    """The versions of what computes."""
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
