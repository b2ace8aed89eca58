"""Where bundles are: folders given one by one, and a folder of models that is looked through.

    DIR/BUNDLE/manifest.json             a model by itself
    DIR/NAME/VERSION/manifest.json       versions of a model

A model's name and version are those of its manifest; ``NAME`` and ``VERSION`` must say the same, so that nobody is
misled by the name of a folder. Folders whose names begin with a dot are passed over: copy a new version to such a name,
beside where it is to be, and rename it when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dragoman.bundle import MANIFEST_NAME, load_manifest
from dragoman.errors import BundleError, ConfigError

Fingerprint = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class FoundBundle:
    """A bundle that somebody put there. Only its manifest has been read."""

    name: str
    version: str
    path: Path
    fingerprint: Fingerprint  # names, sizes and times of its files: another one means that it was changed
    problem: str = ""  # what is wrong with it; name and version are the folders' then


class ModelRepository:
    """Finds bundles. Holds no state: every ``scan`` reads the folders anew."""

    def __init__(self, bundles: Sequence[Path] = (), folder: Path | None = None) -> None:
        """``bundles`` are folders of one bundle each, ``folder`` is one of many."""
        self._bundles = tuple(bundles)
        self._folder = folder

    def scan(self) -> list[FoundBundle]:
        """All bundles, those with a problem among them, in the order given, then by name.

        Blocks. Raises ConfigError for two that are alike, and where there is none or the folder cannot be read: that is
        a mount that is missing rather than the wish to serve nothing.
        """
        paths = [(path, "", "") for path in self._bundles]
        if self._folder is not None:
            paths += _folders_in(self._folder)
        found: list[FoundBundle] = []
        for path, name, version in paths:
            bundle = _look(path, name, version)
            for other in found:
                if not (bundle.problem or other.problem) and _names(other) == _names(bundle):
                    raise ConfigError(
                        f"{other.path} and {path} are both {bundle.name} version {bundle.version}: keep one of them, "
                        "or export one with another --model-version"
                    )
            found.append(bundle)
        if not found:
            raise ConfigError(f"there is no bundle in {self._folder}: make one with dragoman export")
        return found


def _folders_in(folder: Path) -> list[tuple[Path, str, str]]:
    """The folders of bundles, each with the name and version that it claims."""
    found = []
    for path in _subfolders(folder):
        if (path / MANIFEST_NAME).exists():
            found.append((path, "", ""))
        else:
            found += [(version, path.name, version.name) for version in _subfolders(path)]
    return found


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"cannot read the folder of models {folder}: {error.strerror or error}") from error


def _look(path: Path, name: str, version: str) -> FoundBundle:
    """``name`` and ``version``: what the folder claims; empty where it claims nothing."""
    fingerprint = _fingerprint(path)
    try:
        manifest = load_manifest(path)
    except BundleError as error:
        return FoundBundle(name or path.name, version, path, fingerprint, str(error))
    for what, claimed, told in (("name", name, manifest.name), ("version", version, manifest.version)):
        if claimed and claimed != told:
            problem = (
                f"{path} is of the {what} {told!r}, says its manifest: rename the folder or export it as {claimed!r}"
            )
            return FoundBundle(name, version, path, fingerprint, problem)
    return FoundBundle(manifest.name, manifest.version, path, fingerprint)


def _names(bundle: FoundBundle) -> tuple[str, str]:
    return bundle.name, bundle.version


def _fingerprint(path: Path) -> Fingerprint:
    """Empty where the folder cannot be read; what happens to it meanwhile shows the next time."""
    try:
        with os.scandir(path) as entries:
            files = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in files))
