"""Whoever turns source lines into output lines: a checkpoint here, a bundle or a server through ``dragoman generate``,
or a file of outputs made earlier.

All treat a line as the service does: blank lines, lines of which the tokenizer keeps nothing (one zero-width blank,
say) and the blanks around a line come back unchanged and never reach the model; a line that the model does not accept
gives an empty output. One difference remains: where a tokenizer has no way to spell a character, a checkpoint reads
``<unk>``, and the service refuses the line.
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
from typing import Any, Protocol

from dragoman_training.beam import BeamOptions, beam_search_all
from dragoman_training.checkpoint import LoadedCheckpoint, load_model, read_json
from dragoman_training.corpus import read_lines
from dragoman_training.data import encode_source
from dragoman_training.decode import Hypothesis, greedy_all
from dragoman_training.errors import CheckpointError, DataError
from dragoman_training.tokenizer import SPECIAL_IDS, PlainTokenizer, SpecialIds, Tokenizer

MOST_BEAMS = 1000  # no quality comes of wider beams, and each step sorts all their continuations
REFUSALS = ("invalid_request", "source_too_long")
"""The service's error codes that are the text's own fault; after any other, the same text may be answered later."""


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
    special: SpecialIds = SPECIAL_IDS,
) -> Outputs:
    """Tokenize, search, detokenize. ``search`` gets the accepted sources, closed by ``</s>``; its time is counted.

    Text of which the tokenizer keeps nothing comes back as it is, without a search.
    """
    source_tokenizer, target_tokenizer = tokenizers
    contents = [text.strip() for text in sources]
    encoded = {n: encode_source(source_tokenizer, content, special) for n, content in enumerate(contents)}
    nothing = special.source([])  # </s> alone: there is nothing to translate
    encoded = {n: ids for n, ids in encoded.items() if ids != nothing}
    accepted = [n for n, ids in encoded.items() if len(ids) <= max_source_tokens]
    start = time.perf_counter()
    found = dict(zip(accepted, search([encoded[n] for n in accepted]), strict=True))
    seconds = time.perf_counter() - start
    refused = frozenset(encoded.keys() - found.keys())
    lines = []
    for n, (text, content) in enumerate(zip(sources, contents, strict=True)):
        if n in found:
            before, after = text.split(content, 1)
            lines.append(f"{before}{target_tokenizer.decode(found[n].tokens)}{after}")
        else:
            lines.append("" if n in refused else text)
    cut = frozenset(n for n, hypothesis in found.items() if hypothesis.finish_reason == "length")
    return Outputs(lines, seconds, cut, refused)


class CheckpointSystem:
    """A checkpoint, or the best of a run, decoded by the reference: greedily, or with a beam."""

    def __init__(self, folder: Path, beam_size: int = 1) -> None:
        if not 1 <= beam_size <= MOST_BEAMS:
            raise DataError(f"the beam size is {beam_size}: it must be 1 to {MOST_BEAMS}")
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
        return translate(sources, tokenizers, checkpoint.max_source_tokens, self.search, checkpoint.special)

    def search(self, sources: list[list[int]]) -> list[Hypothesis]:
        """The best hypothesis of each source."""
        model, limit, special = self.checkpoint.model, self.checkpoint.max_target_tokens, self.checkpoint.special
        if self.beam_size == 1:
            return greedy_all(model, sources, limit, special)
        options = BeamOptions(beam_size=self.beam_size, max_new_tokens=limit)
        return [found[0] for found in beam_search_all(model, sources, options, special)]


class ServedSystem:
    """What ``dragoman generate``, run as a process, answers: from a bundle, or from a running server."""

    def __init__(self, name: str, options: Sequence[str], identity: dict[str, object] | None, task: Task) -> None:
        """``identity`` None: it will be asked for."""
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
        return cls(address, ["--target", address], None, Task())

    def identity(self) -> dict[str, object]:
        """The manifest's SHA-256 (it holds those of all files), or what the server says that it serves.

        A server is asked once, at the first call, and may lie at another address the next time. ``DataError`` when it
        does not answer.
        """
        if self._identity is None:
            (served,) = self._generate(["--model-info"], "", 1)
            self._identity = {name: served[name] for name in ("model", "version", "checksum")}
        return self._identity

    def outputs(self, sources: Sequence[str]) -> Outputs:
        """The answers; the process' start counts as time.

        ``DataError`` when the process fails, or when a line has no answer for a reason that is not its own, such as a
        server that stays full: an empty output would pass for the model's.
        """
        start = time.perf_counter()
        text = "".join(f"{source}\n" for source in sources)
        replies = self._generate(["--json", "--on-error", "keep-going"], text, len(sources))
        seconds = time.perf_counter() - start
        errors = {n: reply["error"] for n, reply in enumerate(replies) if "error" in reply}
        for n, error in errors.items():
            if error["code"] not in REFUSALS:
                raise DataError(
                    f"{self.name} has no answer to {sources[n][:60]!r}, which is not the text's fault:"
                    f" {error['message']} ({error['code']}): run the command again"
                )
        refused = frozenset(errors)
        cut = frozenset(
            n
            for n, reply in enumerate(replies)
            if any(segment["hypotheses"][0]["finish_reason"] == "length" for segment in reply.get("segments", []))
        )
        return Outputs([reply.get("text", "") for reply in replies], seconds, cut, refused)

    def _generate(self, arguments: Sequence[str], text: str, count: int) -> list[dict[str, Any]]:
        """The ``count`` JSON objects that the command prints. ``DataError`` with its last words when it fails."""
        words = ["generate", *arguments, *self._options]
        command = [sys.executable, "-m", "dragoman.cli.main", *words]
        done = subprocess.run(command, input=text.encode("utf-8"), capture_output=True, check=False)
        answers = done.stdout.split(b"\n")[:-1]
        if done.returncode not in (0, 1) or len(answers) != count:  # 1: some lines have an error for an answer
            last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            raise DataError(f"dragoman {' '.join(words)} ended with status {done.returncode}: {last[0]}")
        return [json.loads(answer) for answer in answers]


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
            raise DataError(
                f"{self.name} has {len(self._lines)} lines but there are {len(sources)} sources: line n must match"
                " line n"
            )
        return Outputs(self._lines, 0.0)


def system_at(path: Path, beam_size: int = 1) -> System:
    """What lies at a path: a file of outputs, a bundle, or a run or checkpoint."""
    if path.is_file():
        return FileSystem(path)
    if (path / "manifest.json").is_file():
        return ServedSystem.of_bundle(path)
    return CheckpointSystem(path, beam_size)
