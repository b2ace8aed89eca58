"""Beam search against CTranslate2 itself, on a toy model with the same weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman_training.decode import BeamOptions, beam_search, greedy
from dragoman_training.model import Attention, FeedForward, Residual, Transformer, sinusoidal_positions

ctranslate2 = pytest.importorskip("ctranslate2", reason="the oracle is not installed")

SOURCES = [[4, 5, 6, 2], [7, 2], [11, 10, 9, 8, 7, 6, 5, 2], [4, 4, 4, 2], [9, 5, 2]]


def fill_linear(spec: Any, *modules: torch.nn.Linear) -> None:
    spec.weight = np.concatenate([m.weight.detach().numpy() for m in modules])
    spec.bias = np.concatenate([m.bias.detach().numpy() for m in modules])


def fill_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = norm.weight.detach().numpy(), norm.bias.detach().numpy()


def fill_attention(spec: Any, attention: Attention, residual: Residual, cross: bool) -> None:
    fill_norm(spec.layer_norm, residual.norm)
    groups = (
        [[attention.query], [attention.key, attention.value]]
        if cross
        else [[attention.query, attention.key, attention.value]]
    )
    for target, group in zip(spec.linear, [*groups, [attention.output]], strict=True):
        fill_linear(target, *group)


def fill_feed_forward(spec: Any, feed_forward: FeedForward, residual: Residual) -> None:
    fill_norm(spec.layer_norm, residual.norm)
    fill_linear(spec.linear_0, feed_forward.inner)
    fill_linear(spec.linear_1, feed_forward.outer)


def convert(model: Transformer, folder: Path) -> Any:
    """Write the model in CTranslate2's format and load it there."""
    config = model.config
    spec = ctranslate2.specs.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.num_heads,
        pre_norm=True,
        activation=ctranslate2.specs.Activation.RELU,
    )
    table = sinusoidal_positions(torch.arange(64), config.d_model).numpy()
    spec.encoder.position_encodings.encodings = spec.decoder.position_encodings.encodings = table
    spec.encoder.embeddings[0].weight = model.source_embedding.weight.detach().numpy()
    spec.decoder.embeddings.weight = model.target_embedding.weight.detach().numpy()
    fill_norm(spec.encoder.layer_norm, model.encoder_norm)
    fill_norm(spec.decoder.layer_norm, model.decoder_norm)
    fill_linear(spec.decoder.projection, model.projection)
    layers: list[tuple[Any, Any]] = [
        *zip(spec.encoder.layer, model.encoder, strict=True),
        *zip(spec.decoder.layer, model.decoder, strict=True),
    ]
    for target, layer in layers:
        fill_attention(target.self_attention, layer.self_attention, layer.self_residual, cross=False)
        if hasattr(layer, "cross_attention"):
            fill_attention(target.attention, layer.cross_attention, layer.cross_residual, cross=True)
        fill_feed_forward(target.ffn, layer.feed_forward, layer.feed_forward_residual)
    specials = ["<pad>", "<s>", "</s>", "<unk>"]
    spec.register_source_vocabulary([*specials, *(f"s{i}" for i in range(4, config.source_vocab_size))])
    spec.register_target_vocabulary([*specials, *(f"t{i}" for i in range(4, config.target_vocab_size))])
    spec.validate()
    folder.mkdir()
    spec.save(str(folder))
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "add_source_bos": False, "add_source_eos": False}))
    return ctranslate2.Translator(str(folder), device="cpu", inter_threads=1, intra_threads=1)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("beam", [1, 2, 4, 5])
def test_hypotheses_and_scores_are_those_of_ctranslate2(
    make_model: Callable[..., Transformer], tmp_path: Path, penalty: float, beam: int
) -> None:
    """Tokens, scores and order, for several sources, widths and penalties; </s> made likely, so that lengths vary."""
    model = make_model(d_model=16)
    model.projection.bias.data[2] += 2.0
    translator = convert(model, tmp_path / "ct2")
    for most in (1, beam):
        results = translator.translate_batch(
            [[f"s{i}" if i > 3 else "</s>" for i in source] for source in SOURCES],
            beam_size=beam,
            num_hypotheses=most,
            length_penalty=penalty,
            min_decoding_length=0,
            max_decoding_length=8,
            return_scores=True,
            disable_unk=True,
            suppress_sequences=[["<pad>"], ["<s>"]],
        )
        options = BeamOptions(beam_size=beam, max_new_tokens=8, num_hypotheses=most, length_penalty=penalty)
        for source, result in zip(SOURCES, results, strict=True):
            ours = beam_search(model, source, options)
            assert [[f"t{i}" for i in h.tokens] for h in ours] == result.hypotheses
            assert [h.score for h in ours] == pytest.approx(result.scores, abs=1e-4)
            if beam == 1:
                one = greedy(model, [source], 8)[0]
                assert one.tokens == ours[0].tokens
                assert one.score / len(one.log_probs) ** penalty == pytest.approx(result.scores[0], abs=1e-4)
