"""What the manifest says of a checkpoint, before any graph is measured."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from datetime import UTC, datetime

import onnx
import torch

import dragoman
from dragoman.bundle import (
    FORMAT_VERSION,
    GraphSet,
    Limits,
    Manifest,
    ModelShape,
    SpecialIds,
    TokenizerEntry,
    Tokenizers,
)
from dragoman.vocabulary import Vocabulary
from dragoman_export.errors import ExportError
from dragoman_export.heads import cached_head_dim
from dragoman_training.checkpoint import LoadedCheckpoint
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import Tokenizer


def weights_sha256(model: Transformer) -> str:
    """One hash of all parameters with their names and shapes: the same wherever the checkpoint lies."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().contiguous().numpy().data)
    return digest.hexdigest()


def describe(
    checkpoint: LoadedCheckpoint,
    vocabularies: Mapping[str, Vocabulary],
    graphs: tuple[GraphSet, ...],
    name: str,
    version: str,
    quality: Mapping[str, float | str] | None,
) -> Manifest:
    """The manifest of a bundle made of a checkpoint and graph sets, its files not yet listed. Raises ExportError."""
    config, special = checkpoint.model.config, checkpoint.special
    longest = max(checkpoint.max_source_tokens, checkpoint.max_target_tokens)
    if 0 < config.num_positions < longest:
        raise ExportError(
            f"the checkpoint's limit is {longest} tokens, and the model has {config.num_positions} positions: lower "
            "max_source_tokens and max_target_tokens in its config.json"
        )
    return Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        version=version,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        model=ModelShape(
            d_model=config.d_model,
            num_heads=config.num_heads,
            head_dim=cached_head_dim(config),
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            source_vocab_size=config.source_vocab_size,
            target_vocab_size=config.target_vocab_size,
        ),
        special_ids=SpecialIds(special.eos, special.decoder_start, special.never_produced),
        limits=Limits(checkpoint.max_source_tokens, checkpoint.max_target_tokens),
        unknown_policy=vocabularies["source"].unknown_policy,
        tokenizers=Tokenizers(
            source=_tokenizer_entry(
                checkpoint, "source", checkpoint.source_tokenizer, special.source_start, special.source_end
            ),
            target=_tokenizer_entry(
                checkpoint, "target", checkpoint.target_tokenizer, (special.decoder_start,), (special.eos,)
            ),
        ),
        graphs=graphs,
        quality=dict(quality) if quality else {"status": "unmeasured"},
        provenance={
            "weights_sha256": weights_sha256(checkpoint.model),
            # A model that was trained elsewhere has "import" instead of the first two.
            **{
                name: json.dumps(checkpoint.record[name], sort_keys=True)
                for name in ("training", "data", "import")
                if name in checkpoint.record
            },
            "dragoman": dragoman.__version__,
            "torch": torch.__version__,
            "onnx": onnx.__version__,
            "onnxruntime": importlib.metadata.version("onnxruntime"),
            "num_parameters": sum(p.numel() for p in checkpoint.model.parameters()),
        },
    )


def _tokenizer_entry(
    checkpoint: LoadedCheckpoint, side: str, tokenizer: Tokenizer, start: tuple[int, ...], end: tuple[int, ...]
) -> TokenizerEntry:
    return TokenizerEntry(
        kind=tokenizer.kind,
        file=checkpoint.tokenizer_files[side],
        size=len(tokenizer),
        start=start,
        end=end,
        normalization=tokenizer.normalization,
    )
