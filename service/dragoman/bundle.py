"""The bundle: the one contract between build time and run time.

A bundle is a folder: ``manifest.json``, graphs, tokenizer files, golden sets. The manifest declares every other file
with its size and SHA-256, and carries a checksum of itself, so that a missing, cut or altered file is found before any
other library reads it. This module needs the standard library alone: the export writes with it, the service reads.

It does not know what a graph means; ``engine/runner.py`` checks signatures against the sessions.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import re
import shutil
import stat
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman.errors import BundleError
from dragoman.work_folder import work_folder

FORMAT_VERSION = 4
VOCABULARY_MULTIPLE = 8
"""A model's vocabulary may be its tokenizer's, rounded up to a multiple of this: matrices of such sizes are fast."""
MANIFEST_NAME = "manifest.json"
PROTECTION_KINDS = ("braces", "code", "itself")
"""What ``TextRules.protect_with`` may have; the first that keeps all spans is used."""
_LANGUAGE = re.compile("[a-z]{2,3}(-[a-z0-9]{2,8})*")
MAX_LABEL_CHARACTERS = 128
"""Of a model's name or version: they stand in every answer, in labels of metrics and on the command line."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that a runner needs to allocate its buffers. The vocabularies' include padding."""

    d_model: int
    num_heads: int
    head_dim: int
    encoder_layers: int
    decoder_layers: int
    source_vocab_size: int
    target_vocab_size: int

    def __post_init__(self) -> None:
        _check_positive("model", self)


@dataclass(frozen=True)
class SpecialIds:
    """Target-side ids with a meaning. ``decoder_start`` is the first decoder input; ``never_generated`` is masked."""

    eos: int
    decoder_start: int
    never_generated: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.eos in self.never_generated:
            raise BundleError(f"special_ids.never_generated holds the end token {self.eos}: no answer could ever end")


@dataclass(frozen=True)
class Limits:
    """What the model accepts. Both counts are in tokens; the source's include its template."""

    max_source_tokens: int
    max_new_tokens: int

    def __post_init__(self) -> None:
        _check_positive("limits", self)


@dataclass(frozen=True)
class TokenizerEntry:
    """One side's tokenizer, and the sequence template around the text's own tokens."""

    kind: str  # "plain", "sentencepiece" or "sentencepiece+vocab": how the file is read
    file: str
    size: int  # in tokens, without the model's padding
    start: tuple[int, ...]
    end: tuple[int, ...]
    normalization: str  # the rule by which text is changed before it is split; "identity" for none


@dataclass(frozen=True)
class Tokenizers:
    """Both sides, always apart; they may name the same file."""

    source: TokenizerEntry
    target: TokenizerEntry


@dataclass(frozen=True)
class TextRules:
    """What the model's texts are. Languages are codes of ISO 639, such as ``en``; None where there are several.

    ``split_sentences``: whether each sentence is a segment unless a request or the server says otherwise.
    ``protect_with``: what may stand for a protected span, in the order in which it is tried; see ``protection.py``.
    """

    source_language: str
    target_language: str | None
    split_sentences: bool
    protect_with: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("source_language", "target_language"):
            value = getattr(self, name)
            if value is not None and not _LANGUAGE.fullmatch(value):
                raise BundleError(
                    f"texts.{name} is {value[:40]!r}; it must be a code of ISO 639, such as en, pt-br or zh-hant"
                )
        if unknown := [kind for kind in self.protect_with if kind not in PROTECTION_KINDS]:
            raise BundleError(f"texts.protect_with has {unknown[0]!r}; it may have {', '.join(PROTECTION_KINDS)}")


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output. A dimension is a number, or the name of a dynamic one."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Graph:
    """One ONNX file, its signature, and its nodes: how many of each operator.

    ``required_nodes`` follows from the model's shape, zeros included; a key may name several operators, joined by "+",
    whose sum it is. ``exported_nodes`` are the file's, ``optimized_nodes`` those that ONNX Runtime had made of them
    when it opened the file for the export. Both hold what is required. Attention with a cache has two kinds,
    ``GroupQueryAttention(self)`` and ``GroupQueryAttention(cross)``. ``weights`` is the file that the larger constants
    are in, which other graphs may share; None where the graph's own holds them.
    """

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    required_nodes: dict[str, int]
    exported_nodes: dict[str, int]
    optimized_nodes: dict[str, int]
    weights: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """All that it takes to open the graph."""
        return (self.file,) if self.weights is None else (self.file, self.weights)

    def __post_init__(self) -> None:
        for stage, nodes in (("as exported", self.exported_nodes), ("as optimised", self.optimized_nodes)):
            if problems := wrong_counts(self.required_nodes, nodes):
                raise BundleError(f"{self.file} {stage}: {problems}")


@dataclass(frozen=True)
class DeviceGraphs:
    """What runs on a device beside a model's graphs, without weights; ``engine/device_tails.py`` tells what they do."""

    copy: Graph
    best: Graph
    ranked: Graph
    row: Graph

    def all(self) -> tuple[Graph, ...]:
        """Each of them."""
        return self.copy, self.best, self.ranked, self.row


@dataclass(frozen=True)
class GraphSet:
    """The graphs for one execution provider and precision, and the answers they must give.

    ``activations`` tells how those of a quantised product are scaled: ``float`` (not at all), ``static``, ``row`` or
    ``block``. A golden score may differ by ``score_tolerance`` x (1 + its size). ``quality`` holds figures of a test
    set, of these graphs and of PyTorch in fp32. ``device``: what those for a GPU need beside them.
    """

    provider: str
    precision: str
    opset: int
    activations: str
    batch_invariant: bool
    encoder: Graph
    decoder: Graph
    golden: str
    score_tolerance: float
    parity: dict[str, float]
    quality: dict[str, float | str]
    device: DeviceGraphs | None = None

    def all_graphs(self) -> tuple[Graph, ...]:
        """Each graph of the set."""
        return self.encoder, self.decoder, *(self.device.all() if self.device is not None else ())


@dataclass(frozen=True)
class Alignment:
    """The graph that aligns a finished answer with its source, whatever precision the answer came from, and its proof.

    Of what the encoder graph gives, it makes the cross-attention weights of decoder layer ``layer``: those of ``head``,
    or where that is None the mean of all heads. The weights of target token t are those of the step that produced it
    (``shift`` 0) or of the one that read it (1). ``score`` is why: on ``basis`` "copied", the share of ``num_tokens``
    copied tokens that it aligned with themselves; on "diagonal", 1 - the mean distance from the diagonal, of a line's
    length. ``agreement`` is the share of target tokens for which the graph and PyTorch look at the same source token
    most.
    """

    graph: Graph
    layer: int
    head: int | None
    shift: int
    basis: str
    score: float
    num_tokens: int
    max_weight_difference: float  # from PyTorch's
    agreement: float

    def __post_init__(self) -> None:
        if self.shift not in (0, 1):
            raise BundleError(f"alignment.shift is {self.shift}; it must be 0 or 1")
        if self.basis not in ("copied", "diagonal"):
            raise BundleError(f"alignment.basis is {self.basis!r}; it must be 'copied' or 'diagonal'")


@dataclass(frozen=True)
class Shortlist:
    """What restricts an answer to a few candidates, by its source, and its proof: an option of one graph set.

    ``table`` holds the candidates and the output projection: see ``engine/candidates.py``. ``decoder`` is the graph
    set's, but that it takes the projection's columns as inputs. A source token has at most ``num_per_token`` candidates
    of its own, and ``num_always`` are everyone's; ``mean_candidates`` is how many a source of the comparison had in
    all. ``quality`` holds figures of a test set, with the shortlist and without.
    """

    provider: str
    precision: str
    table: str
    decoder: Graph
    golden: str
    num_per_token: int
    num_always: int
    mean_candidates: float
    quality: dict[str, float | str]


@dataclass(frozen=True)
class FileEntry:
    """What a file must be, byte for byte."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class GoldenCase:
    """One line of a golden set: a text, its tokens, and the exact answer, as tokens and as text.

    Every step's best two logits are at least 0.1 apart.
    """

    text: str
    source: tuple[int, ...]
    tokens: tuple[int, ...]
    score: float
    answer: str


@dataclass(frozen=True)
class Manifest:
    """All that is known about a bundle before a graph is opened."""

    format_version: int
    name: str
    version: str
    created: str
    model: ModelShape
    special_ids: SpecialIds
    limits: Limits
    unknown_policy: str
    tokenizers: Tokenizers
    graphs: tuple[GraphSet, ...]
    quality: dict[str, float | str]
    provenance: dict[str, str | int | float]
    alignment: Alignment | None = None
    shortlist: Shortlist | None = None
    texts: TextRules | None = None  # of a manifest without it, there is nothing to tell
    files: dict[str, FileEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_label("name", self.name)
        check_label("version", self.version)
        ids, size = self.special_ids, self.model.target_vocab_size
        for index in (ids.eos, ids.decoder_start, *ids.never_generated):
            if not 0 <= index < size:
                raise BundleError(f"special_ids hold {index}, but the target vocabulary has {size} tokens")
        sides = (
            ("source", self.tokenizers.source.size, self.model.source_vocab_size),
            ("target", self.tokenizers.target.size, self.model.target_vocab_size),
        )
        for side, tokens, model_size in sides:
            if not 0 <= model_size - tokens < VOCABULARY_MULTIPLE:
                raise BundleError(
                    f"tokenizers.{side} has {tokens} tokens, the model {model_size}, of which at most "
                    f"{VOCABULARY_MULTIPLE - 1} may be padding: the tokenizer belongs to another model"
                )
        padding = set(range(self.tokenizers.target.size, self.model.target_vocab_size))
        if producible := sorted(padding - set(self.special_ids.never_generated)):
            raise BundleError(f"special_ids.never_generated lacks {producible}, which no token stands for")
        if self.shortlist is not None and self.shortlist.precision not in {
            graphs.precision for graphs in self.graphs if graphs.provider == self.shortlist.provider
        }:
            raise BundleError(
                f"shortlist is for {self.shortlist.provider}/{self.shortlist.precision}, of which there are no graphs"
            )

    @property
    def checksum(self) -> str:
        """SHA-256 over all fields, and so, through the files' hashes, over the whole bundle."""
        return _checksum(self._fields())

    def _fields(self) -> dict[str, Any]:
        """All there is to write: a bundle from before ``texts`` keeps its checksum."""
        fields = dataclasses.asdict(self)
        if self.texts is None:
            del fields["texts"]
        return fields

    def to_json(self) -> str:
        """Readable JSON with the checksum of everything else in it."""
        data = {**self._fields(), "checksum": self.checksum}
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises BundleError: not JSON, of another format version, altered, or with wrong fields."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"is not JSON: {error}") from error
        if not isinstance(data, dict) or "format_version" not in data:
            raise BundleError("has no format_version")
        if data["format_version"] != FORMAT_VERSION:
            raise BundleError(
                f"has format_version {data['format_version']!r}; this version of dragoman reads {FORMAT_VERSION}: "
                "export the checkpoint again"
            )
        checksum = data.pop("checksum", None)
        if checksum != _checksum(data):
            raise BundleError("does not match its own checksum: it was altered after the export")
        data.setdefault("texts", None)
        manifest: Manifest = _parse(cls, data, "manifest")
        return manifest


@dataclass(frozen=True)
class ModelBundle:
    """A bundle on disk whose every byte has been checked."""

    path: Path
    manifest: Manifest

    @classmethod
    def load(cls, path: Path) -> ModelBundle:
        """Read the manifest and check every file. Raises BundleError naming the file at fault; opens no graph."""
        manifest = load_manifest(path)
        for name, entry in manifest.files.items():
            check_file(path / name, entry)
        return cls(path, manifest)

    def file(self, name: str) -> Path:
        """The path of a declared file."""
        return self.path / name

    def read(self, name: str) -> bytes:
        """The content of a declared file."""
        return self.file(name).read_bytes()

    def graph_set(self, provider: str, precision: str | None = None) -> GraphSet:
        """The graphs for a provider and precision; without one, the provider's first.

        Raises BundleError listing those that exist.
        """
        for graphs in self.manifest.graphs:
            if graphs.provider == provider and precision in (None, graphs.precision):
                return graphs
        have = ", ".join(f"{g.provider}/{g.precision}" for g in self.manifest.graphs)
        asked = provider if precision is None else f"{provider}/{precision}"
        raise BundleError(f"bundle {self.manifest.name!r} has no graphs for {asked}; it has {have}")

    def golden(self, graphs: GraphSet | Shortlist) -> Iterator[GoldenCase]:
        """The golden set of a graph set, or of its shortlist."""
        for number, line in enumerate(self.read(graphs.golden).splitlines(), start=1):
            place = f"{graphs.golden}:{number}"
            try:
                case: GoldenCase = _parse(GoldenCase, json.loads(line), place)
            except ValueError as error:
                raise BundleError(f"{place} is not JSON: {error}") from error
            yield case


def check_label(what: str, text: str) -> None:
    """Raises BundleError unless the text can be a model's name or version: short, printable, no blank at an end."""
    if not text or len(text) > MAX_LABEL_CHARACTERS:
        raise BundleError(
            f"{what} has {len(text)} characters; it must have at least 1 and at most {MAX_LABEL_CHARACTERS}"
        )
    if not text.isprintable() or text != text.strip():
        raise BundleError(f"{what} is {text!r}: it may hold printable characters alone, and no blank at an end")


def count_of(kind: str, nodes: Mapping[str, int]) -> int:
    """How many nodes there are of a key of ``Graph.required_nodes``."""
    return sum(nodes.get(name, 0) for name in kind.split("+"))


def wrong_counts(required: Mapping[str, int], nodes: Mapping[str, int]) -> str:
    """The kinds of which there are not as many nodes as required, with both counts; empty if there is none."""
    counts = {kind: count_of(kind, nodes) for kind in required}
    return ", ".join(
        f"{counts[kind]} {kind} nodes instead of {number}"
        for kind, number in required.items()
        if counts[kind] != number
    )


def load_manifest(path: Path) -> Manifest:
    """Read a bundle's manifest alone. Raises BundleError naming the file."""
    file = path / MANIFEST_NAME
    if not file.exists():
        raise BundleError(f"{path} is no bundle, it has no {MANIFEST_NAME}: make one with dragoman export")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"cannot read {file}: {error}") from error
    try:
        manifest = Manifest.from_json(text)
        _check_references(manifest)
    except BundleError as error:
        raise BundleError(f"{file} {error}") from error
    return manifest


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raises BundleError where ``save_bundle`` would not write: something is there; with ``overwrite``, no bundle."""
    if not path.exists():
        return
    if not overwrite:
        raise BundleError(f"{path} exists already: choose another folder, or overwrite the bundle with --force")
    if not (path / MANIFEST_NAME).is_file():
        raise BundleError(
            f"{path} is no bundle, it has no {MANIFEST_NAME}: it is not overwritten, choose another folder"
        )


def save_bundle(
    manifest: Manifest, files: Mapping[str, bytes | Path], path: Path, *, overwrite: bool = False
) -> ModelBundle:
    """Write a bundle in one move: whoever looks at ``path`` sees nothing (or the bundle before it) or all of it.

    ``files`` are contents, or files to copy. ``manifest.files`` is filled in here. With ``overwrite``, a bundle at
    ``path`` gives way when the new one is whole, and stays as it was when writing fails. Raises BundleError when
    ``path`` exists otherwise, or a name is not a plain file name.
    """
    check_free(path, overwrite=overwrite)
    target = path.resolve()  # of a link, what it points to is replaced
    manifest = dataclasses.replace(manifest, files={name: _entry(files[name]) for name in sorted(files)})
    _check_references(manifest)
    with work_folder(target) as work:  # where the bundle before ends up, to be removed
        for name, content in {**files, MANIFEST_NAME: manifest.to_json().encode()}.items():
            with (work / name).open("wb") as out:
                if isinstance(content, Path):
                    with content.open("rb") as source:
                        shutil.copyfileobj(source, out)
                else:
                    out.write(content)
                out.flush()
                os.fsync(out.fileno())
        work.chmod(0o755)
        _flush_folder(work)
        _put(work, target)
        _flush_folder(target.parent)
    return ModelBundle.load(path)


def _entry(content: bytes | Path) -> FileEntry:
    if isinstance(content, bytes):
        return FileEntry(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    with content.open("rb") as file:
        return FileEntry(bytes=content.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _put(work: Path, target: Path) -> None:
    """Give ``work`` the name ``target``; a folder of that name is swapped into ``work``."""
    if not target.exists():
        work.rename(target)
    elif not _swap(work, target):
        # Between these two moves there is neither: what a file system that cannot swap has to offer. Not under the
        # name of a work folder, which the next export would remove after a kill just here.
        old = work.with_name(f".before-{work.name.removeprefix('.')}")
        target.rename(old)
        try:
            work.rename(target)
        except BaseException:
            old.rename(target)
            raise
        old.rename(work)


def _swap(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system cannot. See renameat2(2) of Linux."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    at_current_folder, exchange = -100, 2
    return renameat2 is not None and not renameat2(
        at_current_folder, os.fsencode(one), at_current_folder, os.fsencode(other), exchange
    )


def _flush_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_positive(name: str, counts: ModelShape | Limits) -> None:
    for key, value in dataclasses.asdict(counts).items():
        if value < 1:
            raise BundleError(f"{name}.{key} is {value}; it must be at least 1")


def check_size(path: Path, entry: FileEntry) -> None:
    """Raises BundleError unless the file is there, of the declared size. Reads nothing of it."""
    try:
        status = path.stat()
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
        raise BundleError(f"{path} is no regular file: copy the bundle again")
    if status.st_size != entry.bytes:
        raise BundleError(f"{path} has {status.st_size} bytes; its manifest says {entry.bytes}: copy the bundle again")


def check_file(path: Path, entry: FileEntry) -> None:
    """Raises BundleError unless the file is, byte for byte, the declared one."""
    check_size(path, entry)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror or error}") from error
    if digest != entry.sha256:
        raise BundleError(f"{path} is damaged: its SHA-256 differs from the manifest's: copy the bundle again")


def _check_references(manifest: Manifest) -> None:
    """Every file that is named is declared, and every declared name is a plain one inside the folder."""
    for name in manifest.files:
        if name != Path(name).name or name in ("", ".", "..", MANIFEST_NAME):
            raise BundleError(f"declares {name!r}, which is no plain file name")
    named = [manifest.tokenizers.source.file, manifest.tokenizers.target.file]
    for graphs in manifest.graphs:
        named += [graphs.golden, *(file for graph in graphs.all_graphs() for file in graph.files)]
    if manifest.alignment is not None:
        named += manifest.alignment.graph.files
    if manifest.shortlist is not None:
        named += [manifest.shortlist.table, *manifest.shortlist.decoder.files, manifest.shortlist.golden]
    missing = sorted(set(named) - set(manifest.files))
    if missing:
        raise BundleError(f"names files that it does not declare: {', '.join(missing)}")
    if not manifest.graphs:
        raise BundleError("declares no graphs")


def _checksum(data: Mapping[str, Any]) -> str:
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _parse(kind: Any, data: Any, where: str) -> Any:
    """JSON data as the annotated type, strictly. Raises BundleError naming the place."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise BundleError(f"{where} must be an object, not {data!r}")
        hints = typing.get_type_hints(kind)
        if problems := sorted(set(hints) ^ set(data)):
            raise BundleError(f"{where} has missing or unknown fields: {', '.join(problems)}")
        return kind(**{name: _parse(hint, data[name], f"{where}.{name}") for name, hint in hints.items()})  # type: ignore[operator]  # is_dataclass does not narrow a type to a callable
    if origin is tuple and isinstance(data, list):
        return tuple(_parse(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {key: _parse(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    choices = arguments if origin is types.UnionType else (kind,)
    if isinstance(data, dict) and (objects := [c for c in choices if dataclasses.is_dataclass(c)]):
        return _parse(objects[0], data, where)  # "or None": no field may be one object or another
    if type(data) in choices:
        return data
    if type(data) is int and float in choices:
        return float(data)
    raise BundleError(f"{where} is {data!r}; it must be {' or '.join(getattr(c, '__name__', str(c)) for c in choices)}")
