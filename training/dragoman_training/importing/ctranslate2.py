"""Transformer models in CTranslate2's format: a folder with model.bin, config.json and vocabularies.

The names of the variables, and which settings are recorded among them, are described by CTranslate2's
python/ctranslate2/specs/transformer_spec.py; older files lack some, and then have the values that its models of that
age had. What the engine does with them, by its documentation and its answers: sinusoidal positions count from 1; the
decoder begins with ``<s>`` unless the configuration says otherwise; any token may be produced, specials too; ``<unk>``
is added to a vocabulary without it.

A folder has no tokenizer of its own. A SentencePiece model beside model.bin is used: ``source.spm`` and ``target.spm``,
or ``sentencepiece.model`` for both. Without one, tokens stand between blanks.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from dragoman_training.errors import ModelImportError
from dragoman_training.importing.ct2_file import Floats, ModelFile, read_model_file
from dragoman_training.importing.ct2_variables import Variables
from dragoman_training.importing.ct2_words import Words, read_words
from dragoman_training.importing.imported import (
    MOST_TOKENS,
    PADDING_TOKENS,
    Imported,
    model_config,
    padding_id,
    padding_ids,
    refuse,
    tied_embeddings,
    with_rows,
)
from dragoman_training.listed import BLANK_MARK, ListedSentencePieceTokenizer
from dragoman_training.tokenizer import PlainTokenizer, SpecialIds, Tokenizer

SPECIFICATIONS = {"TransformerSpec": 8, "TransformerBase": 8, "TransformerBig": 16, "": 8}
"""The names of models of this kind, and their number of heads where a file does not tell it."""
LATEST_REVISION = 7
ACTIVATIONS = {0: "relu", 1: "gelu_tanh", 2: "silu", 3: "gelu"}
FIRST_POSITION = 1
SIDES = ("encoder", "decoder")
START_TOKEN = "<start>"
PROJECTIONS = ("query", "key", "value", "output")


def read_ctranslate2(folder: Path, tokenizer: Path | None = None) -> Imported:
    """Read a folder in CTranslate2's format. ``tokenizer`` is a SentencePiece model that lies elsewhere, of both sides.

    Raises ``ModelImportError`` naming the file that is missing, damaged or too new, or all that is not supported.
    """
    path = folder / "model.bin"
    file = read_model_file(path)
    try:
        return _imported(file, folder, tokenizer)
    except ModelImportError as error:
        raise ModelImportError(f"{path}: {error}") from error


def _imported(file: ModelFile, folder: Path, tokenizer: Path | None) -> Imported:
    variables = Variables(file)
    settings = _read_config(folder / "config.json")
    refuse(_reasons(file, variables, settings))
    words = read_words(folder, variables, settings)
    weights, shape = _weights(file, variables, settings)
    if left := variables.left():
        raise ModelImportError(f"it has variables that no transformer of this kind has: {', '.join(left[:10])}")
    source, target = list(words.source), list(words.target)
    for side, tokens in (("source", source), ("target", target)):
        rows = len(weights[f"{side}_embedding.weight"])
        if rows != len(tokens):
            raise ModelImportError(f"the model has {rows} {side} tokens, the vocabulary {len(tokens)}")
    start = words.decoder_start
    if zero_start := variables.setting("decoder/start_from_zero_embedding", 0) != 0:
        start = START_TOKEN
        while start in {*source, *target}:
            start += ">"
        target.append(start)
        if shape["tied_embeddings"] == "all":
            source.append(start)
    assert start is not None  # a reason to refuse the model
    config = model_config(shape, len(source), len(target))
    appended = {"source": 0, "target": 0}
    if zero_start:
        appended = {"source": int(shape["tied_embeddings"] == "all"), "target": 1}
    for name, side, tokens in (
        ("source_embedding.weight", "source", source),
        *((name, "target", target) for name in ("target_embedding.weight", "projection.weight", "projection.bias")),
    ):
        weights[name] = with_rows(weights[name], len(tokens), name, appended[side])
    named = {words.unknown, words.start, words.end, start, *PADDING_TOKENS}
    specials = [[i for i, token in enumerate(tokens) if token in named] for tokens in (source, target)]
    tokenizers, notes = _tokenizers(folder, tokenizer, words, (source, target), specials)
    return Imported(
        config=config,
        weights=weights,
        tokenizers=tokenizers,
        special=_special_ids(words, source, target, start, zero_start),
        max_tokens=min(MOST_TOKENS, config.num_positions or MOST_TOKENS),
        alignment=_alignment(variables, config.decoder_layers, config.num_heads),
        origin={
            "format": "ctranslate2",
            "specification": file.specification,
            "revision": file.revision,
            "binary_version": file.version,
            "types": sorted({variable.kind for name, variable in file.variables.items() if name.endswith("/weight")}),
            "sha256": hashlib.sha256((folder / "model.bin").read_bytes()).hexdigest(),
        },
        notes=notes,
    )


def _read_config(path: Path) -> dict[str, Any]:
    """config.json, which older folders lack."""
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelImportError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ModelImportError(f"{path} holds no settings")
    return settings


def _reasons(file: ModelFile, variables: Variables, settings: dict[str, Any]) -> list[str]:
    """All that this package's model lacks."""
    if file.specification not in SPECIFICATIONS:
        return [f"the specification {file.specification} (known: {', '.join(filter(None, SPECIFICATIONS))})"]
    reasons = variables.unsupported()
    if file.revision > LATEST_REVISION or file.revision < 2:
        reasons.append(f"revision {file.revision} of {file.specification} (known: 2 to {LATEST_REVISION})")
    if variables.count("encoder/embeddings_") > 1:
        reasons.append("source factors")
    pre_norm = [variables.setting(f"{side}/pre_norm", 1) != 0 for side in SIDES]
    heads = [variables.setting(f"{side}/num_heads", SPECIFICATIONS[file.specification]) for side in SIDES]
    activations = [variables.setting(f"{side}/activation", 0) for side in SIDES]
    norms = [f"{side}/layernorm_embedding/gamma" in variables for side in SIDES]
    closing = [f"{side}/layer_norm/gamma" in variables for side in SIDES]
    tables = [f"{side}/position_encodings/encodings" in variables for side in SIDES]
    for name, values in (
        ("heads", heads),
        ("activations", activations),
        ("places of norms", pre_norm),
        ("norms of embeddings", norms),
        ("positions", tables),
    ):
        if values[0] != values[1]:
            reasons.append(f"other {name} in the encoder than in the decoder")
    if unknown := {*activations} - ACTIVATIONS.keys():
        reasons.append(f"the activation {int(min(unknown))} (known: {ACTIVATIONS})")
    if pre_norm[0] == pre_norm[1] and closing != pre_norm:
        reasons.append("a closing norm behind norms of the sums, or none behind norms before the sublayers")
    if settings.get("decoder_start_token", "") is None:
        reasons.append("a first token that the caller must choose (decoder_start_token is null)")
    if settings.get("quantization_type"):
        reasons.append(f"the quantization {settings['quantization_type']}")
    return reasons


def _weights(
    file: ModelFile, variables: Variables, settings: dict[str, Any]
) -> tuple[dict[str, Floats], dict[str, Any]]:
    """The weights by this package's names, without added rows, and the shape as ``ModelShape`` names it."""
    weights: dict[str, Floats] = {}
    heads = int(variables.setting("encoder/num_heads", SPECIFICATIONS[file.specification]))
    prefix = "encoder/embeddings_0" if "encoder/embeddings_0/weight" in variables else "encoder/embeddings"
    source, target = (variables.floats(f"{name}/weight") for name in (prefix, "decoder/embeddings"))
    d_model = source.shape[-1]
    projection = variables.floats("decoder/projection/weight")
    tied = tied_embeddings(source, target, projection)
    # One flag for both sides: another factor than sqrt(d_model) or 1 goes into the weights, which then are no longer
    # those of the projection.
    factors = [
        _factor(variables, side, embeddings, d_model)
        for side, embeddings in zip(SIDES, (prefix, "decoder/embeddings"), strict=True)
    ]
    scaled = bool(np.allclose(factors, d_model**0.5, rtol=1e-6, atol=0))
    if not scaled and factors != [1.0, 1.0]:
        source, target, tied = source * np.float32(factors[0]), target * np.float32(factors[1]), "none"
    weights |= {"source_embedding.weight": source, "target_embedding.weight": target, "projection.weight": projection}
    weights["projection.bias"] = _bias(variables, "decoder/projection", len(projection))
    layers = [variables.count(f"{side}/layer_") for side in SIDES]
    pre_norm, epsilon = variables.setting("encoder/pre_norm", 1) != 0, settings.get("layer_norm_epsilon")
    shape: dict[str, Any] = {
        "d_model": d_model,
        "num_heads": heads,
        "encoder_layers": layers[0],
        "decoder_layers": layers[1],
        "activation": ACTIVATIONS[int(variables.setting("encoder/activation", 0))],
        "norm_first": pre_norm,
        "tied_embeddings": tied,
        "scaled_embeddings": scaled,
        "embedding_norm": "encoder/layernorm_embedding/gamma" in variables,
        "layer_norm_epsilon": 1e-5 if epsilon is None else epsilon,
    }
    for side, ours in zip(SIDES, ("source", "target"), strict=True):
        if pre_norm:
            _norm(variables, f"{side}/layer_norm", f"{side}_norm", weights)
        if shape["embedding_norm"]:
            _norm(variables, f"{side}/layernorm_embedding", f"{ours}_norm", weights)
    tables = [f"{side}/position_encodings/encodings" for side in SIDES]
    if tables[0] in variables:
        places = [variables.floats(table) for table in tables]
        shape["num_positions"] = min(MOST_TOKENS, *(len(table) for table in places))
        for ours, table in zip(("source", "target"), places, strict=True):
            weights[f"{ours}_positions.weight"] = table.reshape(-1, d_model)[: shape["num_positions"]]
    else:
        shape["first_position"] = FIRST_POSITION
    for side, number in zip(SIDES, layers, strict=True):
        for layer in range(number):
            inner = _layer(variables, f"{side}/layer_{layer}", f"{side}.{layer}", d_model, heads, weights)
            if shape.setdefault("ffn_dim", inner) != inner:
                raise ModelImportError("it has what is not supported here: feed-forwards of different widths")
    if 0 in layers:
        raise ModelImportError(f"it has {layers[0]} encoder and {layers[1]} decoder layers: each needs at least one")
    return weights, shape


def _factor(variables: Variables, side: str, embeddings: str, d_model: int) -> float:
    """What embeddings are multiplied by: the setting is a switch for sqrt(d_model), on by default, or the factor."""
    for name in (f"{side}/scale_embeddings", f"{embeddings}/multiply_by_sqrt_depth"):
        if name in variables:
            value = variables.setting(name, 1)
            if not variables.is_switch(name):
                return value
            return math.sqrt(d_model) if value else 1.0
    return math.sqrt(d_model)


def _layer(variables: Variables, theirs: str, ours: str, d_model: int, heads: int, weights: dict[str, Floats]) -> int:
    """One layer's weights; returns the width of its feed-forward. Attention's projections are stored in one piece."""
    attentions: list[tuple[str, str, tuple[int, ...]]] = [("self_attention", "self", (3, 1))]
    if ours.startswith("decoder"):
        attentions.append(("attention", "cross", (1, 2, 1)))
    for name, kind, groups in attentions:
        matrices, biases = [], []
        for number, count in enumerate(groups):
            weight = variables.floats(f"{theirs}/{name}/linear_{number}/weight")
            if weight.shape != (count * d_model, d_model):
                raise ModelImportError(
                    f"{theirs}/{name}/linear_{number}/weight has the shape {weight.shape}: it must have"
                    f" {(count * d_model, d_model)} (fewer heads of keys than of queries are not supported)"
                )
            matrices += np.split(weight, count)
            biases += np.split(_bias(variables, f"{theirs}/{name}/linear_{number}", count * d_model), count)
        # The scale of the queries' products, if it is not the usual one, goes into their weights.
        scale = variables.setting(f"{theirs}/{name}/queries_scale", (d_model / heads) ** -0.5)
        factor = np.float32(scale * (d_model / heads) ** 0.5)
        matrices[0], biases[0] = matrices[0] * factor, biases[0] * factor
        for part, matrix, bias in zip(PROJECTIONS, matrices, biases, strict=True):
            weights[f"{ours}.{kind}_attention.{part}.weight"] = matrix
            weights[f"{ours}.{kind}_attention.{part}.bias"] = bias
        _norm(variables, f"{theirs}/{name}/layer_norm", f"{ours}.{kind}_residual.norm", weights)
    for number, part in enumerate(("inner", "outer")):
        weight = variables.floats(f"{theirs}/ffn/linear_{number}/weight")
        weights[f"{ours}.feed_forward.{part}.weight"] = weight
        weights[f"{ours}.feed_forward.{part}.bias"] = _bias(variables, f"{theirs}/ffn/linear_{number}", len(weight))
    _norm(variables, f"{theirs}/ffn/layer_norm", f"{ours}.feed_forward_residual.norm", weights)
    return len(weights[f"{ours}.feed_forward.inner.weight"])


def _bias(variables: Variables, linear: str, size: int) -> Floats:
    """A linear layer's bias; zeros where it has none."""
    name = f"{linear}/bias"
    return variables.floats(name) if name in variables else np.zeros(size, np.float32)


def _norm(variables: Variables, theirs: str, ours: str, weights: dict[str, Floats]) -> None:
    weights[f"{ours}.weight"] = variables.floats(f"{theirs}/gamma")
    weights[f"{ours}.bias"] = variables.floats(f"{theirs}/beta")


def _alignment(variables: Variables, layers: int, heads: int) -> dict[str, int | None] | None:
    """The layer and head that were trained to align. Without such a training, the settings have their defaults."""
    layer = int(variables.setting("decoder/alignment_layer", -1))
    count = int(variables.setting("decoder/alignment_heads", 1))
    if (layer, count) == (-1, 1) or count not in (0, 1, heads) or not -layers <= layer < layers:
        return None
    return {"layer": layer % layers, "head": 0 if count == 1 and heads > 1 else None}


def _special_ids(words: Words, source: list[str], target: list[str], start: str, zero_start: bool) -> SpecialIds:
    """Ids of both sides. Any token may be produced, but for the start that was added."""
    decoder_start = target.index(start)
    pad, unknown = padding_id(source, target), target.index(words.unknown)
    begin = target.index(words.start) if words.start in target else decoder_start
    named = {pad, unknown, begin, decoder_start}
    return SpecialIds(
        pad=pad,
        bos=begin,
        eos=target.index(words.end),
        unk=unknown,
        decoder_start=decoder_start,
        unused=padding_ids(len(target)),
        producible=tuple(sorted(named - {decoder_start} if zero_start else named)),
        source_start=(source.index(words.start),) if words.source_start else (),
        source_end=(source.index(words.end),) if words.source_end else (),
    )


def _tokenizers(
    folder: Path,
    tokenizer: Path | None,
    words: Words,
    vocabularies: tuple[list[str], list[str]],
    specials: list[list[int]],
) -> tuple[tuple[Tokenizer, Tokenizer], tuple[str, ...]]:
    """Both sides' tokenizers, and what a person should know about them."""
    files = [folder / "source.spm", folder / "target.spm"]
    if tokenizer is not None or (folder / "sentencepiece.model").is_file():
        files = [tokenizer or folder / "sentencepiece.model"] * 2
    unknowns = [tokens.index(words.unknown) for tokens in vocabularies]
    sides = list(zip(vocabularies, specials, unknowns, strict=True))
    if not all(file.is_file() for file in files):
        notes = []
        if sum(token.startswith(BLANK_MARK) for token in words.source) > len(words.source) // 10:
            notes.append(
                "the vocabulary has SentencePiece's pieces, but the folder no SentencePiece model: texts must come as"
                " pieces between blanks, or put source.spm and target.spm beside model.bin and import again"
            )
        source, target = (PlainTokenizer("piece", *side) for side in sides)
        return (source, target), tuple(notes)
    models = [file.read_bytes() for file in files]
    pair = [ListedSentencePieceTokenizer(model, *side) for model, side in zip(models, sides, strict=True)]
    return (pair[0], pair[0] if pair[0].to_bytes() == pair[1].to_bytes() else pair[1]), ()
