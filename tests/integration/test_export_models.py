"""Whatever training can make is exported: norms, activations, head sizes, tied embeddings, tokenizers, padding."""

import argparse
import copy
import dataclasses
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sentencepiece import SentencePieceTrainer
from tests.integration.untrained import end_sometimes

from dragoman.bundle import ModelBundle
from dragoman.config import EngineConfig
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel
from dragoman.types import DecodingOptions
from dragoman_export import exporter, verify
from dragoman_export.cli import export
from dragoman_export.errors import ExportError
from dragoman_export.exporter import ExportOptions
from dragoman_export.exporter import export as export_checkpoint
from dragoman_export.targets import INT8
from dragoman_training.checkpoint import LoadedCheckpoint
from dragoman_training.config import ModelConfig, padded_vocab_size
from dragoman_training.data import encode_source
from dragoman_training.decode import greedy
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import PlainTokenizer, SentencePieceTokenizer, SpecialIds, Tokenizer, file_names

WORDS = [
    "the",
    "house",
    "garden",
    "dog",
    "runs",
    "over",
    "small",
    "green",
    "big",
    "tree",
    "play",
    "night",
    "über",
    "straße",
]


def texts(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 7))) for _ in range(count)]


def sentencepiece(kind, vocab_size, byte_fallback, normalization):
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts(300)),
        model_writer=model,
        model_type=kind,
        vocab_size=vocab_size,
        byte_fallback=byte_fallback,
        normalization_rule_name=normalization,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        num_threads=1,
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue())


def joint():
    both = sentencepiece("bpe", 331, True, "nfkc")
    return both, both


def apart():
    return sentencepiece("unigram", 36, False, "identity"), sentencepiece("bpe", 60, False, "nmt_nfkc")


def plain():
    return PlainTokenizer.build("character", texts(50)), PlainTokenizer.build("piece", texts(50))


@dataclass
class Case:
    """A kind of model, and what its export has to say of it."""

    tokenizers: Callable[[], tuple[Tokenizer, Tokenizer]]
    shape: dict[str, Any]
    printed: list[str]
    policy: str
    files: set[str]


CASES = {
    "post-norm, gelu, heads of 64, one matrix for all embeddings, joint SentencePiece with bytes": Case(
        joint,
        {"d_model": 64, "num_heads": 1, "norm_first": False, "activation": "gelu", "tied_embeddings": "all"},
        [
            "source: tokenizer.model, sentencepiece, 331 tokens, normalization nfkc",
            "target: tokenizer.model, sentencepiece, 331 tokens, normalization nfkc",
        ],
        "byte_fallback",
        {"tokenizer.model"},
    ),
    "pre-norm, silu, heads of 32, untied embeddings, two SentencePiece models": Case(
        apart,
        {"d_model": 64, "num_heads": 2, "norm_first": True, "activation": "silu", "tied_embeddings": "none"},
        [
            "source: source.tokenizer.model, sentencepiece, 36 tokens, normalization identity",
            "target: target.tokenizer.model, sentencepiece, 60 tokens, normalization nmt_nfkc",
        ],
        "refuse",
        {"source.tokenizer.model", "target.tokenizer.model"},
    ),
    "post-norm, relu, tied target embeddings, plain": Case(
        plain,
        {"d_model": 64, "num_heads": 2, "norm_first": False, "activation": "relu", "tied_embeddings": "target"},
        [
            "source: source.tokenizer.json, plain, 25 tokens, normalization identity",
            "target: target.tokenizer.json, plain, 18 tokens, normalization identity",
        ],
        "refuse",
        {"source.tokenizer.json", "target.tokenizer.json"},
    ),
}


def checkpoint_of(case, folder):
    """An untrained model that ends its answers, and would love to answer with padding."""
    folder.mkdir()
    source, target = case.tokenizers()
    files = file_names(source, target)
    for side, tokenizer in (("source", source), ("target", target)):
        (folder / files[side]).write_bytes(tokenizer.to_bytes())
    config = ModelConfig(
        ffn_dim=96,
        encoder_layers=1,
        decoder_layers=1,
        source_vocab_size=padded_vocab_size(len(source)),
        target_vocab_size=padded_vocab_size(len(target)),
        **case.shape,
    )
    special = SpecialIds(unused=tuple(range(len(target), config.target_vocab_size)))
    assert special.unused
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Transformer(config).eval()
        for parameter in model.parameters():  # untrained, but of strong opinions
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.projection.bias.data[list(special.never_produced)] = 50
    end_sometimes(model, special, [encode_source(source, text) for text in texts(20)], 1 / 8)
    return LoadedCheckpoint(folder, model, source, target, files, special, 64, 24, {"training": {}, "data": {}})


@torch.inference_mode()
def rounding(checkpoint, sources):
    """The largest error of PyTorch's own logits, against PyTorch in double precision, on the greedy paths."""
    model, exact, worst = checkpoint.model, copy.deepcopy(checkpoint.model).double(), 0.0
    for source, answer in zip(sources, greedy(model, sources, 24, checkpoint.special), strict=True):
        inputs = torch.tensor([[checkpoint.special.decoder_start, *answer.tokens[:-1]]])
        given = torch.tensor([source]), torch.tensor([len(source)], dtype=torch.int32), inputs
        worst = max(worst, float((model(*given) - exact(*given)).abs().max()))
    return worst


@pytest.mark.parametrize("name", CASES)
async def test_every_kind_of_model_is_exported_and_served_as_it_was_trained(name, tmp_path, monkeypatch, capsys):
    """The bundle proves itself against PyTorch; served, it gives the texts that training makes of PyTorch's tokens."""
    case = CASES[name]
    checkpoint = checkpoint_of(case, tmp_path / "checkpoint")
    monkeypatch.setattr("dragoman_training.checkpoint.load_model", lambda folder: checkpoint)
    lines = texts(80, seed=1)
    (tmp_path / "dev").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    arguments = [checkpoint.folder, "--sources", tmp_path / "dev", "--out", tmp_path / "bundle"]

    assert export.run(parser.parse_args([str(argument) for argument in arguments])) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [*case.printed, f"characters that the source vocabulary lacks: {case.policy}"]

    bundle = ModelBundle.load(tmp_path / "bundle")
    manifest, target = bundle.manifest, checkpoint.target_tokenizer
    graphs = manifest.graphs[0]
    assert graphs.parity["num_greedy_sources"] == 80
    assert manifest.unknown_policy == case.policy
    assert {file for file in manifest.files if "tokenizer" in file} == case.files
    assert manifest.model.target_vocab_size % 8 == 0
    assert set(range(len(target), manifest.model.target_vocab_size)) <= set(manifest.special_ids.never_generated)

    sources = [encode_source(checkpoint.source_tokenizer, line) for line in lines]
    assert graphs.parity["max_logit_difference"] < 4 * rounding(checkpoint, sources)
    expected = [target.decode(h.tokens) for h in greedy(checkpoint.model, sources, 24, checkpoint.special)]
    assert len(set(expected)) > 10
    served = ServedModel.load(bundle.path, EngineConfig(), TextLimits(10_000, 100))
    served.start()
    try:
        items = [item async for item in served.pipeline.stream("\n".join(lines), DecodingOptions())]
    finally:
        await served.close()
    assert [segment.hypotheses[0].text for segment in items[-1].segments] == expected
    for index, text in enumerate(expected):
        assert "".join(item.delta for item in items[:-1] if item.segment == index) == text


def test_a_model_whose_caches_are_large_is_compared_on_fewer_slots(tmp_path, monkeypatch):
    """Where not even one slot fits the usual memory: on as many as a beam takes."""
    monkeypatch.setattr(exporter, "VERIFY_KV_CACHE_BYTES", 1)
    checkpoint = checkpoint_of(list(CASES.values())[-1], tmp_path / "c")
    checkpoint = dataclasses.replace(checkpoint, max_source_tokens=64, max_target_tokens=64)
    sources = tuple(texts(20))
    result = export_checkpoint(checkpoint, ExportOptions("m", "1", sources=sources), tmp_path / "out")
    assert result.proofs["fp32"].parity.num_beam_sources == len(sources)


def test_int8_may_change_fewer_tokens_of_given_sources_than_of_generated_ones(tmp_path, monkeypatch):
    """One in ten: too many of a dev set's answers, not of answers to what no model was trained on."""
    monkeypatch.setattr(verify, "token_error_rate", lambda references, answers: 0.1)
    monkeypatch.setattr(exporter, "NUM_GENERATED", 8)
    checkpoint = checkpoint_of(list(CASES.values())[-1], tmp_path / "c")
    given = ExportOptions("m", "1", targets=(INT8,), sources=tuple(texts(20)))
    with pytest.raises(ExportError, match=r"greedy answers differ .* by 0\.1 edits a token; at most 0\.05 is allowed"):
        export_checkpoint(checkpoint, given, tmp_path / "out")
    export_checkpoint(checkpoint, dataclasses.replace(given, sources=None), tmp_path / "out")


class OneOtherPiece(SentencePieceTokenizer):
    """A tokenizer that spells one token otherwise, at one place of an answer."""

    def __init__(self, model: bytes, index: int, place: int) -> None:
        super().__init__(model)
        self.index, self.place = index, place

    def decode(self, ids):
        ids = list(ids)
        return super().decode(ids) + ("!" if ids[self.place : self.place + 1] == [self.index] else "")


@pytest.mark.parametrize("place", [0, 1])
def test_a_token_that_the_service_spells_otherwise_fails_the_export(tmp_path, place):
    """At the start of an answer or behind another token, also one that the model never says to the given sources."""
    checkpoint = checkpoint_of(
        CASES["pre-norm, silu, heads of 32, untied embeddings, two SentencePiece models"], tmp_path / "c"
    )
    index = 50
    checkpoint.model.projection.bias.data[index] = -1000
    other = OneOtherPiece(checkpoint.target_tokenizer.to_bytes(), index, place)
    with pytest.raises(ExportError, match=rf"the service decodes \[(\d+, )?{index}\] to"):
        export_checkpoint(
            dataclasses.replace(checkpoint, target_tokenizer=other),
            ExportOptions("m", "1", sources=tuple(texts(5))),
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()
