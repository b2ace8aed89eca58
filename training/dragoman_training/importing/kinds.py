"""Which toolkit a model comes from, and the import itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from dragoman_training.errors import CheckpointError, ModelImportError
from dragoman_training.importing.argos import read_argos
from dragoman_training.importing.ctranslate2 import read_ctranslate2
from dragoman_training.importing.imported import Imported, write_checkpoint_of
from dragoman_training.importing.marian import read_marian

READERS: dict[str, Callable[[Path], Imported]] = {
    "ctranslate2": read_ctranslate2,
    "argos": read_argos,
    "marian": read_marian,
}


def import_model(source: Path, out: Path, kind: str | None = None) -> Imported:
    """Read the model at ``source`` and write the checkpoint folder ``out``; returns what was read.

    ``kind`` is one of ``READERS``, or found out. Raises ``ModelImportError`` for a source that is damaged or not
    supported, ``CheckpointError`` where ``out`` holds something or cannot be written. Then nothing is written.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CheckpointError(f"{out} is there already: choose another --out")
    imported = READERS[kind or kind_of(source)](source)
    write_checkpoint_of(imported, out)
    return imported


def kind_of(source: Path) -> str:
    """The kind of model at a path, by the files that it has. Raises ``ModelImportError`` for anything else."""
    if source.is_file():
        return "argos"
    if (source / "model.bin").is_file():
        return "ctranslate2"
    try:
        if json.loads((source / "config.json").read_text(encoding="utf-8"))["model_type"] == "marian":
            return "marian"
    except (OSError, ValueError, KeyError, TypeError):  # not of that kind either
        pass
    raise ModelImportError(
        f"{source} is no model that is known here: it must be a folder with model.bin (CTranslate2), a file .argosmodel"
        ' (Argos), or a folder whose config.json has "model_type": "marian" (Hugging Face)'
    )
