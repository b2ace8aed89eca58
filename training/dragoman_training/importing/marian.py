"""Marian models in Hugging Face's format, as OPUS-MT's are: a folder with these files.

    config.json                 the shape and the special ids; generation_config.json wins over it, where it is there
    model.safetensors           the weights, or else pytorch_model.bin, of which only tensors are read
    source.spm, target.spm      SentencePiece models
    vocab.json                  the id of each piece, for both sides; or target_vocab.json for the target's

The names are those of the library's documentation of its MarianMT model. Its layers have the norm behind the sum. The
positions are sines and cosines whose wavelengths end one step before 20000 pi: ``position_base`` below.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dragoman_training.errors import CheckpointError, ModelImportError
from dragoman_training.importing.ct2_file import Floats
from dragoman_training.importing.imported import (
    MOST_TOKENS,
    Imported,
    model_config,
    padding_id,
    padding_ids,
    refuse,
    tied_embeddings,
    with_rows,
)
from dragoman_training.listed import ListedSentencePieceTokenizer
from dragoman_training.tokenizer import SpecialIds

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "swish": "silu",
    "silu": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
SIDES = ("encoder", "decoder")
SIZES = ("d_model", "encoder_layers", "decoder_layers", "vocab_size", "pad_token_id", "eos_token_id")
UNKNOWN = "<unk>"
END = "</s>"
LINEARS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
PARTS = {
    "self_attn": "self_attention",
    "encoder_attn": "cross_attention",
    "self_attn_layer_norm": "self_residual.norm",
    "encoder_attn_layer_norm": "cross_residual.norm",
    "final_layer_norm": "feed_forward_residual.norm",
    "fc1": "feed_forward.inner",
    "fc2": "feed_forward.outer",
}


def read_marian(folder: Path) -> Imported:
    """Read a folder. Raises ``ModelImportError`` naming what is missing or damaged, or all that is not supported."""
    config = _read_object(folder / "config.json")
    generation_path = folder / "generation_config.json"
    settings = {**config, **(_read_object(generation_path) if generation_path.exists() else {})}
    try:
        refuse(_reasons(config, settings))
        return _imported(folder, config, settings)
    except (ModelImportError, CheckpointError) as error:
        raise ModelImportError(f"{folder}: {error}") from error


def position_base(width: int) -> float:
    """The base of sinusoids with these wavelengths: rates of 10000 ** (-i / half), where ours have half - 1 instead."""
    half = width // 2
    return float(10000.0 ** ((half - 1) / half))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelImportError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelImportError(f"{path} holds no JSON object")
    return content


def _reasons(config: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """All that this package's model and search lack."""
    if missing := [name for name in SIZES if not isinstance(config.get(name), int)]:
        raise ModelImportError(f"config.json lacks the numbers {', '.join(missing)}")
    reasons = []
    for name in ("attention_heads", "ffn_dim"):
        values = [config.get(f"{side}_{name}") for side in SIDES]
        if values[0] != values[1] or not isinstance(values[0], int):
            reasons.append(f"encoder_{name} {values[0]} and decoder_{name} {values[1]}, which must be one number")
    if config.get("activation_function") not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        reasons.append(f"the activation {config.get('activation_function')} (known: {known})")
    if config.get("normalize_before") or config.get("normalize_embedding"):
        reasons.append("normalize_before or normalize_embedding")
    if config.get("static_position_embeddings") is False:
        reasons.append("learned positions (static_position_embeddings is false)")
    if settings.get("forced_bos_token_id") is not None:
        reasons.append(f"a first token that is always the same (forced_bos_token_id {settings['forced_bos_token_id']})")
    if settings.get("begin_suppress_tokens"):
        reasons.append("tokens that may not come first (begin_suppress_tokens)")
    if any(len(word) > 1 for word in settings.get("bad_words_ids") or ()):
        reasons.append("forbidden sequences of several tokens (bad_words_ids)")
    return reasons


def _imported(folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Imported:
    path, tensors = _read_tensors(folder)
    weights, tied = _weights(tensors)
    source = _read_vocabulary(folder / "vocab.json", len(weights["source_embedding.weight"]))
    target_path = folder / "target_vocab.json"
    rows = len(weights["target_embedding.weight"])
    target = _read_vocabulary(target_path if target_path.exists() else folder / "vocab.json", rows)
    shape = {
        "d_model": config["d_model"],
        "num_heads": config["encoder_attention_heads"],
        "ffn_dim": config["encoder_ffn_dim"],
        "encoder_layers": config["encoder_layers"],
        "decoder_layers": config["decoder_layers"],
        "activation": ACTIVATIONS[config["activation_function"]],
        "norm_first": False,
        "tied_embeddings": tied,
        "scaled_embeddings": bool(config.get("scale_embedding", False)),
        "position_base": position_base(config["d_model"]),
    }
    shape_config = model_config(shape, len(source), len(target))
    for name, tokens in (
        ("source_embedding.weight", source),
        ("target_embedding.weight", target),
        ("projection.weight", target),
        ("projection.bias", target),
    ):
        weights[name] = with_rows(weights[name], len(tokens), name)
    special = _special_ids(config, settings, source, target)
    models = [_read_bytes(folder / f"{side}.spm") for side in ("source", "target")]
    # By their names: two vocabularies may have them in different places.
    silent = {UNKNOWN, END, *(target[i] for i in (special.pad, special.decoder_start) if i < len(target))}
    pair = [
        ListedSentencePieceTokenizer(
            model, tokens, [i for i, token in enumerate(tokens) if token in silent], tokens.index(UNKNOWN)
        )
        for model, tokens in zip(models, (source, target), strict=True)
    ]
    most = config.get("max_position_embeddings")
    return Imported(
        config=shape_config,
        weights=weights,
        tokenizers=(pair[0], pair[0] if pair[0].to_bytes() == pair[1].to_bytes() else pair[1]),
        special=special,
        max_tokens=min(MOST_TOKENS, most if isinstance(most, int) and most > 0 else MOST_TOKENS),
        origin={
            "format": "marian",
            "name": config.get("_name_or_path", ""),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        },
    )


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelImportError(f"{path} cannot be read: {error.strerror}") from error


def _read_tensors(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The weights by their names there. A pickle is read for its tensors alone: what else it asks for is refused."""
    path, pickle = folder / "model.safetensors", folder / "pytorch_model.bin"
    if not path.is_file() and not pickle.is_file():
        raise ModelImportError(f"it has neither {path.name} nor {pickle.name} (weights in several files are not read)")
    try:
        if path.is_file():
            return path, safetensors.torch.load_file(path)
        tensors = torch.load(pickle, weights_only=True, map_location="cpu")
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelImportError(f"{path.name} is damaged: {error}") from error
    except Exception as error:  # torch raises many kinds for a damaged file, and its words lead astray
        raise ModelImportError(f"{pickle.name} is damaged, or holds more than tensors: fetch it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelImportError(f"{pickle.name} holds more than tensors: fetch it again")
    return pickle, tensors


def _weights(tensors: dict[str, Tensor]) -> tuple[dict[str, Floats], str]:
    """The weights by this package's names, and which embeddings are tied."""
    theirs = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    shared = theirs.pop("model.shared.weight", None)
    embeddings = [theirs.pop(f"model.{side}.embed_tokens.weight", shared) for side in SIDES]
    source, target = embeddings
    if source is None or target is None:
        raise ModelImportError("the weights lack model.shared.weight, the embeddings")
    projection = theirs.pop("lm_head.weight", target)
    bias = theirs.pop("final_logits_bias", np.zeros(len(projection), np.float32)).reshape(-1)
    weights: dict[str, Floats] = {
        "source_embedding.weight": source,
        "target_embedding.weight": target,
        "projection.weight": projection,
        "projection.bias": bias,
    }
    unknown = []
    for name, values in theirs.items():
        ours = _our_name(name)
        if ours is None:
            unknown.append(name)
        elif ours:
            weights[ours] = values
    if unknown:
        raise ModelImportError(f"it has weights that no Marian model has: {', '.join(sorted(unknown)[:10])}")
    return weights, tied_embeddings(source, target, projection)


def _our_name(name: str) -> str | None:
    """Our name of a layer's weight: "" for one that is computed here (positions), None for an unknown one."""
    match name.split("."):
        case ["model", side, "embed_positions", "weight"] if side in SIDES:
            return ""
        case ["model", side, "layers", number, ("self_attn" | "encoder_attn") as part, linear, kind] if (
            side in SIDES and linear in LINEARS
        ):
            return f"{side}.{number}.{PARTS[part]}.{LINEARS[linear]}.{kind}"
        case ["model", side, "layers", number, part, kind] if side in SIDES and part in PARTS:
            return f"{side}.{number}.{PARTS[part]}.{kind}"
    return None


def _read_vocabulary(path: Path, rows: int) -> list[str]:
    """The tokens by their ids. Ids without a token get a name of their own."""
    ids = _read_object(path)
    tokens = {index: token for token, index in ids.items() if isinstance(index, int) and 0 <= index < rows}
    if len(tokens) != len(ids):
        raise ModelImportError(f"{path.name} has {len(ids)} tokens: their ids must be different and below {rows}")
    for needed in (UNKNOWN, END):
        if needed not in ids:
            raise ModelImportError(f"{path.name} lacks the token {needed}")
    return [tokens.get(index, f"<unused {index}>") for index in range(rows)]


def _special_ids(
    config: Mapping[str, Any], settings: Mapping[str, Any], source: list[str], target: list[str]
) -> SpecialIds:
    """Ids of both sides. What is forbidden there is so here; of the others any may be produced."""
    start = settings.get("decoder_start_token_id")
    start = config["pad_token_id"] if start is None else start
    end, unknown = config["eos_token_id"], target.index(UNKNOWN)
    if not isinstance(start, int) or not 0 <= start < len(target) or target[end : end + 1] != [END]:
        raise ModelImportError(f"it has no decoder_start_token_id {start}, or {END} is not the eos_token_id {end}")
    words = [word for word in settings.get("bad_words_ids") or () if word]
    forbidden = {word[0] for word in words} | {*(settings.get("suppress_tokens") or ())}
    unnamed = {index for index, token in enumerate(target) if token == f"<unused {index}>"}
    pad = padding_id(source, target)
    return SpecialIds(
        pad=pad,
        bos=start,
        eos=end,
        unk=unknown,
        decoder_start=start,
        unused=tuple(sorted((forbidden | unnamed | {*padding_ids(len(target))}) - {end})),
        producible=tuple(sorted({pad, unknown, start} - forbidden)),
        source_end=(source.index(END),),
    )
