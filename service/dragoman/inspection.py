"""What a bundle says of itself, as lines for people, and whether its files are those that it declares.

Reads the manifest and, where asked, the files; opens no graph. Needs the standard library alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from dragoman.bundle import (
    Alignment,
    FileEntry,
    Graph,
    GraphSet,
    Manifest,
    Shortlist,
    TextRules,
    TokenizerEntry,
    check_file,
    check_size,
    count_of,
)
from dragoman.errors import BundleError

_MAX_BAR: Final = 40
_MAX_IDS: Final = 12
_STAGES: Final = ("required", "exported", "optimised")

Row = tuple[str | int, ...]
"""Of a table, the name of the row first."""


def file_problems(path: Path, manifest: Manifest, *, hashes: bool) -> dict[str, str]:
    """The files that are not what the manifest declares, each with what is wrong: size, or with ``hashes`` content."""
    check: Callable[[Path, FileEntry], None] = check_file if hashes else check_size
    problems = {}
    for name, entry in manifest.files.items():
        try:
            check(path / name, entry)
        except BundleError as error:
            problems[name] = str(error)
    return problems


def node_table(graph: Graph) -> list[str]:
    """A graph's required nodes beside those as exported and as ONNX Runtime optimised them, a line each.

    The last line counts the kinds that must not be there; where one is, it has a line of its own.
    """
    rows: list[Row] = [(graph.file, *_STAGES)]
    num_absent = 0
    for kind, number in graph.required_nodes.items():
        found = count_of(kind, graph.exported_nodes), count_of(kind, graph.optimized_nodes)
        if number or any(found):
            rows.append((f"  {kind}", number, *found))
        else:
            num_absent += len(kind.split("+"))
    absent = (
        f"  none of {num_absent} others: attention unfused, products of another kind, loops (manifest.json lists them)"
    )
    return [*_columns(rows), *([absent] if num_absent else [])]


def node_histogram(graph: Graph) -> list[str]:
    """All nodes of a graph by operator, the most frequent first, with a bar for each as exported."""
    exported, optimized = graph.exported_nodes, graph.optimized_nodes
    kinds = sorted({*exported, *optimized}, key=lambda kind: (-exported.get(kind, 0), kind))
    most = max(exported.values(), default=1)
    rows: list[Row] = [(graph.file, *_STAGES[1:])]
    rows += [(f"  {kind}", exported.get(kind, 0), optimized.get(kind, 0)) for kind in kinds]
    rows.append(("  all nodes", sum(exported.values()), sum(optimized.values())))
    bars = ["", *("#" * -(-exported.get(kind, 0) * min(most, _MAX_BAR) // most) for kind in kinds), ""]
    return [f"{line}  {bar}".rstrip() for line, bar in zip(_columns(rows), bars, strict=True)]


def describe(manifest: Manifest, problems: Mapping[str, str], *, histogram: bool = False) -> list[str]:
    """All that a manifest says, for people. ``problems`` marks the files at fault."""
    model, limits = manifest.model, manifest.limits
    facts = {
        "created": f"{manifest.created}, bundle format {manifest.format_version}",
        "checksum": manifest.checksum,
        "model": f"{model.encoder_layers} encoder and {model.decoder_layers} decoder layers, width {model.d_model}, "
        f"{model.num_heads} heads of {model.head_dim}",
        "vocabularies": f"{model.source_vocab_size} source and {model.target_vocab_size} target tokens with padding",
        "parameters": _number(manifest.provenance.get("num_parameters", "unknown")),
        "source": _tokenizer(manifest.tokenizers.source),
        "target": _tokenizer(manifest.tokenizers.target),
        "unknown": f"characters that the source vocabulary lacks: {manifest.unknown_policy}",
        "texts": "nothing said" if manifest.texts is None else describe_texts(manifest.texts),
        "limits": f"{limits.max_source_tokens} source tokens, {limits.max_new_tokens} new tokens",
        "special ids": f"end {manifest.special_ids.eos}, decoder start {manifest.special_ids.decoder_start}, never "
        f"generated {_ids(manifest.special_ids.never_generated)}",
        "quality": _figures(manifest.quality),
        "alignment": "none" if manifest.alignment is None else describe_alignment(manifest.alignment),
        "shortlist": "none" if manifest.shortlist is None else describe_shortlist(manifest.shortlist),
    }
    width = max(map(len, facts)) + 2
    lines = [f"{manifest.name} version {manifest.version}"]
    lines += [f"  {name:<{width}}{value}" for name, value in facts.items()]
    for graphs in manifest.graphs:
        lines += ["", *_graph_set(graphs, histogram=histogram)]
    if manifest.alignment is not None:
        lines += ["", "graph for alignment", "", *_graph(manifest.alignment.graph, histogram=histogram)]
    if (shortlist := manifest.shortlist) is not None:
        lines += [
            "",
            f"graph for the shortlist, {shortlist.provider}, {shortlist.precision}, golden set {shortlist.golden}",
            f"  on a test set: {_figures(shortlist.quality)}",
            "",
            *_graph(shortlist.decoder, histogram=histogram),
        ]
    lines += ["", "provenance", *_provenance(manifest.provenance)]
    rows: list[Row] = [("files", "bytes"), *((f"  {name}", entry.bytes) for name, entry in manifest.files.items())]
    rows.append(("  all files", sum(entry.bytes for entry in manifest.files.values())))
    marks = ["", *("  DOES NOT HOLD" if name in problems else "" for name in manifest.files), ""]
    return [*lines, "", *(f"{line}{mark}" for line, mark in zip(_columns(rows), marks, strict=True))]


def _graph_set(graphs: GraphSet, *, histogram: bool) -> list[str]:
    lines = [
        f"graphs for {graphs.provider}, {graphs.precision}, opset {graphs.opset}, golden set {graphs.golden}",
        f"  activations: {graphs.activations}; "
        + (
            "batch invariant"
            if graphs.batch_invariant
            else "NOT batch invariant: the last digits may depend on the batch"
        ),
        f"  against PyTorch: {_figures(graphs.parity)}",
        f"  on a test set: {_figures(graphs.quality)}",
    ]
    if graphs.device is not None:
        lines.append(f"  without weights, for a device: {', '.join(graph.file for graph in graphs.device.all())}")
    for graph in (graphs.encoder, graphs.decoder):
        lines += ["", *_graph(graph, histogram=histogram)]
    return lines


def _graph(graph: Graph, *, histogram: bool) -> list[str]:
    lines = [f"  {line}" for line in node_table(graph)]
    if graph.weights is not None:
        lines.append(f"    its larger weights are in {graph.weights}")
    if histogram:
        lines += ["", *(f"  {line}" for line in node_histogram(graph))]
    return lines


def describe_alignment(alignment: Alignment) -> str:
    """Which attention a bundle's alignment graph shows, and how well it aligns, in one line."""
    heads = "the mean of all heads" if alignment.head is None else f"head {alignment.head}"
    step = ("produces", "reads")[alignment.shift]
    quality = {
        "copied": f"{alignment.score:.1%} of {alignment.num_tokens} copied tokens aligned with themselves",
        "diagonal": f"{1 - alignment.score:.3f} of a line's length from the diagonal, mean of {alignment.num_tokens} "
        "tokens, as too few are copied",
    }[alignment.basis]
    return (
        f"decoder layer {alignment.layer}, {heads}, at the step that {step} a token: {quality}; the place "
        f"of {alignment.agreement:.1%} of all tokens is PyTorch's, weights are at most "
        f"{alignment.max_weight_difference:.2g} from its"
    )


def describe_texts(texts: TextRules) -> str:
    """What a bundle says of its texts, in one line."""
    split = "each sentence a segment" if texts.split_sentences else "each line a segment"
    target = texts.target_language or "several languages"
    return f"{texts.source_language} to {target}, {split}; protected text is read as {', '.join(texts.protect_with)}"


def describe_shortlist(shortlist: Shortlist) -> str:
    """What a bundle's shortlist is for, and how short it is, in one line."""
    return (
        f"for {shortlist.provider}/{shortlist.precision}, {shortlist.table}: at most {shortlist.num_per_token} "
        f"candidates a source token and {shortlist.num_always} for all; {shortlist.mean_candidates:,.0f} in the mean "
        "for a source"
    )


def _tokenizer(entry: TokenizerEntry) -> str:
    template = f"{_ids(entry.start)} TEXT {_ids(entry.end)}".strip()
    return f"{entry.file}: {entry.kind}, {entry.size} tokens, normalization {entry.normalization}, template {template}"


def _provenance(provenance: Mapping[str, str | int | float]) -> list[str]:
    """A value that is a JSON object, as training settings are, takes a line for each of its fields."""
    lines = []
    for name, value in provenance.items():
        try:
            fields = json.loads(value) if isinstance(value, str) else None
        except ValueError:
            fields = None
        if isinstance(fields, dict):
            lines.append(f"  {name}")
            lines += [f"    {key}: {_plain(field)}" for key, field in fields.items()]
        else:
            lines.append(f"  {name}: {value}")
    return lines


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(field)}" for key, field in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _figures(figures: Mapping[str, float | str]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in figures.items()) or "none"


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def _ids(ids: tuple[int, ...]) -> str:
    shown = " ".join(map(str, ids[:_MAX_IDS]))
    return f"{shown} and {len(ids) - _MAX_IDS} more" if len(ids) > _MAX_IDS else shown


def _columns(rows: list[Row]) -> list[str]:
    """Rows of equal length, the first column to the left, the others to the right; numbers with thousands apart."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
