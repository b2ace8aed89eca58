"""Argos packages: a zip file with one folder, which has metadata.json, sentencepiece.model and a CTranslate2 folder.

Its translator adds nothing to the pieces of a source but what the model's own configuration says, and begins a target
with ``target_prefix`` of metadata.json, which few packages have and which is not supported.
"""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from dragoman_training.errors import ModelImportError
from dragoman_training.importing.ctranslate2 import read_ctranslate2
from dragoman_training.importing.imported import Imported, refuse

MOST_BYTES = 4 * 2**30  # unpacked: no translation model is as large
DESCRIPTION = ("package_version", "argos_version", "from_code", "from_name", "to_code", "to_name", "license")


def read_argos(path: Path) -> Imported:
    """Read a package. Raises ``ModelImportError`` naming the file, and its member, that is damaged or not supported.

    Members that would lie outside the folder they are unpacked to, links, and packages of more than ``MOST_BYTES`` are
    refused before anything is unpacked; that happens in a temporary folder, which is removed.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="dragoman-argos-") as folder:
            root = _unpack(path, Path(folder))
            return _read(root)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelImportError(f"{path} is no Argos package that can be read: {error}") from error
    except ModelImportError as error:
        raise ModelImportError(f"{path}: {error}") from error


def _unpack(path: Path, folder: Path) -> Path:
    """Unpack what an import reads; returns the folder with metadata.json."""
    with zipfile.ZipFile(path) as package:
        members = package.infolist()
        for member in members:
            _check_member(member)
        size = sum(member.file_size for member in members)
        if size > MOST_BYTES:
            raise ModelImportError(f"it would have {size:,} bytes unpacked: {MOST_BYTES:,} are allowed")
        roots = [PurePosixPath(m.filename).parent for m in members if m.filename.endswith("/model/model.bin")]
        if len(roots) != 1:
            raise ModelImportError(f"it holds {len(roots)} models in CTranslate2's format: it must hold one")
        root = roots[0].parent
        for member in members:
            name = PurePosixPath(member.filename)
            if member.is_dir() or name.parent not in (root, root / "model"):
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with package.open(member) as source, (folder / name).open("xb") as target:
                shutil.copyfileobj(source, target)
    return folder / root


def _check_member(member: zipfile.ZipInfo) -> None:
    name = PurePosixPath(member.filename)
    if name.is_absolute() or ".." in name.parts or "\\" in member.filename or ":" in member.filename:
        raise ModelImportError(f"its member {member.filename!r} would lie outside its folder: do not use this package")
    if stat.S_ISLNK(member.external_attr >> 16):
        raise ModelImportError(f"its member {member.filename!r} is a link: do not use this package")


def _read(root: Path) -> Imported:
    metadata = _metadata(root / "metadata.json")
    reasons = []
    if metadata.get("type", "translate") != "translate":
        reasons.append(f"a package of type {metadata['type']}")
    if metadata.get("target_prefix"):
        reasons.append(f"a prefix of all targets ({metadata['target_prefix']})")
    tokenizer = root / "sentencepiece.model"
    if not tokenizer.is_file():
        reasons.append("a tokenizer that is no sentencepiece.model")
    refuse(reasons)
    imported = read_ctranslate2(root / "model", tokenizer)
    known = {name: metadata[name] for name in DESCRIPTION if isinstance(metadata.get(name), str)}
    return replace(imported, origin={**imported.origin, "argos": known})


def _metadata(path: Path) -> dict[str, Any]:
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelImportError(f"metadata.json cannot be read: {error}") from error
    if not isinstance(metadata, dict):
        raise ModelImportError("metadata.json holds no description")
    return metadata
