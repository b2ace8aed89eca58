"""Checkpoint to bundle: load -> trace -> verify -> save. Nothing is written unless every check has passed."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import onnx
import torch

import dragoman
from dragoman.bundle import (
    FORMAT_VERSION,
    GoldenCase,
    Graph,
    GraphSet,
    Limits,
    Manifest,
    ModelBundle,
    ModelShape,
    SpecialIds,
    TokenizerEntry,
    Tokenizers,
    check_free,
    save_bundle,
)
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.errors import InvalidRequestError
from dragoman.served_model import token_rules
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.vocabulary import Vocabulary, load_vocabulary
from dragoman_export.errors import ExportError
from dragoman_export.graphs import DecoderGraph, EncoderGraph
from dragoman_export.trace import OPSET, trace
from dragoman_export.verify import Parity, golden_set, verify
from dragoman_training.checkpoint import LoadedCheckpoint
from dragoman_training.data import encode_source
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import SpecialIds as TrainingSpecialIds
from dragoman_training.tokenizer import Tokenizer

ENCODER_FILE, DECODER_FILE = "encoder.cpu.fp32.onnx", "decoder.cpu.fp32.onnx"
GOLDEN_FILE = "golden.cpu.fp32.jsonl"
VERIFY_SLOTS = 32
VERIFY_KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class ExportResult:
    """The saved bundle and what its verification found."""

    bundle: ModelBundle
    parity: Parity
    num_golden_cases: int
    num_skipped_sources: int  # blank, over the limit, or with characters that the model does not know


def export(
    checkpoint: LoadedCheckpoint,
    texts: Sequence[str],
    out: Path,
    *,
    name: str,
    version: str,
    quality: Mapping[str, float | str] | None = None,
    notice: bytes | None = None,
    overwrite: bool = False,
) -> ExportResult:
    """Export for the CPU in fp32. ``texts`` (dev sources) are what the comparison with PyTorch runs on.

    Those that the model would refuse are left out and counted. The same checkpoint and texts give the same bundle, byte
    for byte, but for ``created`` and the manifest's checksum. Raises ExportError when a check fails, BundleError when
    ``out`` exists (with ``overwrite``: and is no bundle).
    """
    check_free(out, overwrite=overwrite)
    vocabularies = {
        side: load_vocabulary(tokenizer.kind, checkpoint.folder / checkpoint.tokenizer_files[side])
        for side, tokenizer in (("source", checkpoint.source_tokenizer), ("target", checkpoint.target_tokenizer))
    }
    check_special_ids(checkpoint.special, vocabularies["target"])
    target_tokenizer = TargetTokenizer(vocabularies["target"])
    check_pieces(checkpoint, target_tokenizer)
    tokenizer = SourceTokenizer(vocabularies["source"], (), (checkpoint.special.eos,))
    encoded = [(text, source) for text in texts if (source := _encode(checkpoint, tokenizer, text)) is not None]
    if not encoded:
        raise ExportError(f"the model accepts none of the {len(texts)} sources: give dev sources to compare on")
    sources = [source for _, source in encoded]
    model = checkpoint.model.eval()
    with tempfile.TemporaryDirectory() as folder:  # graphs wait on the disk: each is as large as its weights
        encoder = _trace_into(Path(folder), EncoderGraph(model), ENCODER_FILE)
        decoder = _trace_into(Path(folder), DecoderGraph(model), DECODER_FILE)
        graphs = GraphSet("cpu", "fp32", OPSET, encoder, decoder, GOLDEN_FILE, {})
        manifest = _manifest(checkpoint, vocabularies, graphs, name, version, quality)
        opened = OrtModel(
            manifest.model, graphs, lambda file: Path(folder, file).read_bytes(), num_threads=torch.get_num_threads()
        )
        runner = OrtRunner(opened, VERIFY_SLOTS, VERIFY_KV_CACHE_BYTES)
        rules = token_rules(manifest)
        parity, references = verify(model, runner, rules, sources, manifest.limits.max_new_tokens, checkpoint.special)
        answers = _decode(checkpoint, target_tokenizer, [tuple(r.tokens) for r in references])
        golden = golden_set(model, rules, [text for text, _ in encoded], sources, references, answers)
        files: dict[str, bytes | Path] = {
            **{file: Path(folder, file) for file in (ENCODER_FILE, DECODER_FILE)},
            **{file: checkpoint.folder / file for file in checkpoint.tokenizer_files.values()},
            GOLDEN_FILE: _golden_lines(golden),
        }
        if notice is not None:
            files["NOTICE"] = notice
        graphs = dataclasses.replace(graphs, parity=parity.figures())
        bundle = save_bundle(dataclasses.replace(manifest, graphs=(graphs,)), files, out, overwrite=overwrite)
    return ExportResult(bundle, parity, len(golden), len(texts) - len(encoded))


def _trace_into(folder: Path, module: EncoderGraph | DecoderGraph, file: str) -> Graph:
    traced = trace(module, file)
    (folder / file).write_bytes(traced.content)
    return traced.declaration


def _encode(checkpoint: LoadedCheckpoint, tokenizer: SourceTokenizer, text: str) -> tuple[int, ...] | None:
    """A text as the service will encode it; None where it would refuse it.

    Raises ExportError unless training encodes it just so.
    """
    try:
        source = tokenizer.encode(text)
    except InvalidRequestError:
        return None
    if list(source) != encode_source(checkpoint.source_tokenizer, text):
        raise ExportError(f"the service encodes {text!r} as {list(source)}, training does not: the tokenizers differ")
    return source if text.strip() and len(source) <= checkpoint.max_source_tokens else None


def _decode(checkpoint: LoadedCheckpoint, tokenizer: TargetTokenizer, answers: Sequence[tuple[int, ...]]) -> list[str]:
    """The texts of some answers. Raises ExportError unless the service makes the same of them as training."""
    texts = []
    for tokens in answers:
        served, trained = tokenizer.decode(tokens), checkpoint.target_tokenizer.decode(tokens)
        if served != trained:
            raise ExportError(f"the service decodes {list(tokens)} to {served!r}, training to {trained!r}")
        texts.append(served)
    return texts


def check_pieces(checkpoint: LoadedCheckpoint, tokenizer: TargetTokenizer) -> None:
    """Raises ExportError unless the service decodes every token that may be produced as training does.

    Each is decoded as a whole answer, and behind another token: at the start of an answer, blanks go away. The model's
    own answers to a few sources hold but a part of the vocabulary.
    """
    left_out = {checkpoint.special.eos, *checkpoint.special.never_produced}
    ids = [index for index in range(len(checkpoint.target_tokenizer)) if index not in left_out]
    alone = _decode(checkpoint, tokenizer, [(index,) for index in ids])
    _, first = max(zip(map(len, alone), ids, strict=True))  # the longest text: it surely starts the answer
    _decode(checkpoint, tokenizer, [(first, index) for index in ids])


def check_special_ids(special: TrainingSpecialIds, vocabulary: Vocabulary) -> None:
    """Raises ExportError unless each id is that of the token that it is named after: training knows no others.

    A comparison with PyTorch cannot tell, because both sides would start and end by the same wrong id.
    """
    names = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>", "decoder_start": "<s>"}
    for name, token in names.items():
        index, right = getattr(special, name), vocabulary.tokens.index(token)
        if index != right:
            raise ExportError(
                f"special_ids.{name} of the checkpoint is {index}; models are trained with {right}, the id of {token}"
            )


def weights_sha256(model: Transformer) -> str:
    """One hash of all parameters with their names and shapes: the same wherever the checkpoint lies."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().contiguous().numpy().data)
    return digest.hexdigest()


def _manifest(
    checkpoint: LoadedCheckpoint,
    vocabularies: Mapping[str, Vocabulary],
    graphs: GraphSet,
    name: str,
    version: str,
    quality: Mapping[str, float | str] | None,
) -> Manifest:
    config, special = checkpoint.model.config, checkpoint.special
    return Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        version=version,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        model=ModelShape(
            d_model=config.d_model,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            source_vocab_size=config.source_vocab_size,
            target_vocab_size=config.target_vocab_size,
        ),
        special_ids=SpecialIds(special.eos, special.decoder_start, special.never_produced),
        limits=Limits(checkpoint.max_source_tokens, checkpoint.max_target_tokens),
        unknown_policy=vocabularies["source"].unknown_policy,
        tokenizers=Tokenizers(
            source=_tokenizer_entry(checkpoint, "source", checkpoint.source_tokenizer, ()),
            target=_tokenizer_entry(checkpoint, "target", checkpoint.target_tokenizer, (special.decoder_start,)),
        ),
        graphs=(graphs,),
        quality=dict(quality) if quality else {"status": "unmeasured"},
        provenance={
            "weights_sha256": weights_sha256(checkpoint.model),
            "training": json.dumps(checkpoint.record["training"], sort_keys=True),
            "data": json.dumps(checkpoint.record["data"], sort_keys=True),
            "dragoman": dragoman.__version__,
            "torch": torch.__version__,
            "onnx": onnx.__version__,
            "onnxruntime": importlib.metadata.version("onnxruntime"),
            "num_parameters": sum(p.numel() for p in checkpoint.model.parameters()),
        },
    )


def _tokenizer_entry(
    checkpoint: LoadedCheckpoint, side: str, tokenizer: Tokenizer, start: tuple[int, ...]
) -> TokenizerEntry:
    return TokenizerEntry(
        kind=tokenizer.kind,
        file=checkpoint.tokenizer_files[side],
        size=len(tokenizer),
        start=start,
        end=(checkpoint.special.eos,),
        normalization=tokenizer.normalization,
    )


def _golden_lines(cases: Sequence[GoldenCase]) -> bytes:
    return "".join(json.dumps(dataclasses.asdict(case), ensure_ascii=False) + "\n" for case in cases).encode()
