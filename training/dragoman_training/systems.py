"""Whoever turns source lines into output lines: a checkpoint here, a bundle or a server through ``dragoman generate``,
or a file of outputs made earlier.

All treat a line as the service does: blank lines and the blanks around a line come back unchanged and never reach the
model; a line that the model does not accept gives an empty output. One difference remains: where a tokenizer has no
way to spell a character, a checkpoint reads ``<unk>``, and the service refuses the line.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dragoman_training.checkpoint import LoadedCheckpoint, load_model, read_json
from dragoman_training.corpus import read_lines
from dragoman_training.data import encode_source
from dragoman_training.decode import BeamOptions, Hypothesis, beam_search_all, greedy_all
from dragoman_training.errors import CheckpointError, DataError
from dragoman_training.tokenizer import PlainTokenizer, Tokenizer


@dataclass(frozen=True)
class Outputs:
    """One output line a source line, and how long they took together (0: unknown, the outputs came from a file).

    ``cut`` are the lines that reached the limit before they ended, ``refused`` those whose source was not accepted.
    """

    lines: list[str]
    seconds: float
    cut: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Task:
    """What the outputs are: text in SentencePiece pieces, or plain units, of which one is a character or a piece."""

    is_text: bool = True
    unit: str = "piece"


class System(Protocol):
    """Something to evaluate or to learn from."""

    name: str
    task: Task

    def identity(self) -> dict[str, object]:
        """What makes its outputs what they are: two systems of equal identity are the same."""

    def outputs(self, sources: Sequence[str]) -> Outputs:
        """One output a source, in order."""


def translate(
    sources: Sequence[str],
    tokenizers: tuple[Tokenizer, Tokenizer],
    max_source_tokens: int,
    search: Callable[[list[list[int]]], list[Hypothesis]],
) -> Outputs:
    """Tokenize, search, detokenize. ``search`` gets the accepted sources, closed by ``</s>``; its time is counted."""
    source_tokenizer, target_tokenizer = tokenizers
    contents = [text.strip() for text in sources]
    encoded = {n: encode_source(source_tokenizer, content) for n, content in enumerate(contents) if content}
    accepted = [n for n, ids in encoded.items() if len(ids) <= max_source_tokens]
    start = time.perf_counter()
    found = dict(zip(accepted, search([encoded[n] for n in accepted]), strict=True))
    seconds = time.perf_counter() - start
    lines = []
    for n, (text, content) in enumerate(zip(sources, contents, strict=True)):
        if n in found:
            before, after = text.split(content, 1)
            lines.append(f"{before}{target_tokenizer.decode(found[n].tokens)}{after}")
        else:
            lines.append("" if content else text)
    cut = frozenset(n for n, hypothesis in found.items() if hypothesis.finish_reason == "length")
    return Outputs(lines, seconds, cut, frozenset(encoded.keys() - found.keys()))


class CheckpointSystem:
    """A checkpoint, or the best of a run, decoded by the reference: greedily, or with a beam."""

    def __init__(self, folder: Path, beam_size: int = 1) -> None:
        if beam_size < 1:
            raise DataError(f"the beam size is {beam_size}: it must be at least 1")
        self.name, self.beam_size = str(folder), beam_size
        self.checkpoint: LoadedCheckpoint = load_model(folder)
        tokenizer = self.checkpoint.target_tokenizer
        self.task = Task(False, tokenizer.unit) if isinstance(tokenizer, PlainTokenizer) else Task()

    def identity(self) -> dict[str, object]:
        """The weights' SHA-256 and the width of the beam."""
        weights = (self.checkpoint.folder / "model.safetensors").read_bytes()
        return {"weights_sha256": hashlib.sha256(weights).hexdigest(), "beam_size": self.beam_size}

    def outputs(self, sources: Sequence[str]) -> Outputs:
        """Decoded here and now."""
        checkpoint = self.checkpoint
        tokenizers = checkpoint.source_tokenizer, checkpoint.target_tokenizer
        return translate(sources, tokenizers, checkpoint.max_source_tokens, self.search)

    def search(self, sources: list[list[int]]) -> list[Hypothesis]:
        """The best hypothesis of each source."""
        model, limit, special = self.checkpoint.model, self.checkpoint.max_target_tokens, self.checkpoint.special
        if self.beam_size == 1:
            return greedy_all(model, sources, limit, special)
        options = BeamOptions(beam_size=self.beam_size, max_new_tokens=limit)
        return [found[0] for found in beam_search_all(model, sources, options, special)]


class ServedSystem:
    """What ``dragoman generate``, run as a process, answers: from a bundle, or from a running server."""

    def __init__(self, name: str, options: Sequence[str], identity: dict[str, object], task: Task) -> None:
        self.name, self.task = name, task
        self._options, self._identity = list(options), identity

    @classmethod
    def of_bundle(cls, bundle: Path) -> ServedSystem:
        """A bundle, which its manifest describes."""
        try:
            content = (bundle / "manifest.json").read_bytes()
            entry = json.loads(content)["tokenizers"]["target"]
            task = Task(False, read_json(bundle / entry["file"])["unit"]) if entry["kind"] == "plain" else Task()
        except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
            raise DataError(f"{bundle} is no bundle ({error}): make one with dragoman export") from error
        return cls(
            str(bundle), ["--bundle", str(bundle)], {"manifest_sha256": hashlib.sha256(content).hexdigest()}, task
        )

    @classmethod
    def of_server(cls, address: str) -> ServedSystem:
        """A server at HOST:PORT. Its answers are taken for text."""
        return cls(address, ["--target", address], {"server": address}, Task())

    def identity(self) -> dict[str, object]:
        """The manifest's SHA-256 (it holds those of all files), or the server's address."""
        return self._identity

    def outputs(self, sources: Sequence[str]) -> Outputs:
        """The answers; the process' start counts as time. ``DataError`` with its last words when it fails."""
        arguments = ["generate", "--json", "--on-error", "keep-going", *self._options]
        command = [sys.executable, "-m", "dragoman.cli.main", *arguments]
        start = time.perf_counter()
        text = "".join(f"{source}\n" for source in sources).encode("utf-8")
        done = subprocess.run(command, input=text, capture_output=True, check=False)
        seconds = time.perf_counter() - start
        answers = done.stdout.split(b"\n")[:-1]
        if done.returncode not in (0, 1) or len(answers) != len(sources):  # 1: some lines were refused
            words = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            raise DataError(f"dragoman {' '.join(arguments)} ended with status {done.returncode}: {words[0]}")
        replies = [json.loads(answer) for answer in answers]
        refused = frozenset(n for n, reply in enumerate(replies) if "error" in reply)
        cut = frozenset(
            n
            for n, reply in enumerate(replies)
            if any(segment["hypotheses"][0]["finish_reason"] == "length" for segment in reply.get("segments", []))
        )
        return Outputs([reply.get("text", "") for reply in replies], seconds, cut, refused)


class FileSystem:
    """Outputs made earlier, one a line."""

    def __init__(self, path: Path) -> None:
        self.name, self.task = str(path), Task()
        self._lines = read_lines(path)

    def identity(self) -> dict[str, object]:
        """The lines' SHA-256."""
        return {"lines_sha256": hashlib.sha256("\n".join(self._lines).encode("utf-8")).hexdigest()}

    def outputs(self, sources: Sequence[str]) -> Outputs:
        """The file's lines; ``DataError`` unless there is one for each source."""
        if len(self._lines) != len(sources):
            raise DataError(f"{len(self._lines)} outputs but {len(sources)} source lines: line n must match line n")
        return Outputs(self._lines, 0.0)


def system_at(path: Path, beam_size: int = 1) -> System:
    """What lies at a path: a file of outputs, a bundle, or a run or checkpoint."""
    if path.is_file():
        return FileSystem(path)
    if (path / "manifest.json").is_file():
        return ServedSystem.of_bundle(path)
    return CheckpointSystem(path, beam_size)
