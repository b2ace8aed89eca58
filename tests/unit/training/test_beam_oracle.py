"""Reference decoding against CTranslate2 itself, on a toy model with the same weights."""

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman_training.alternatives import alternatives
from dragoman_training.beam import BeamOptions, beam_search
from dragoman_training.decode import Hypothesis, greedy, score
from dragoman_training.model import Attention, FeedForward, Residual, Transformer, sinusoidal_positions
from dragoman_training.steering import Steering

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
        alignment_heads=0,  # all
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


def source_names(source: list[int]) -> list[str]:
    return [f"s{i}" if i > 3 else "</s>" for i in source]


def target_names(tokens: Iterable[int]) -> list[str]:
    return [f"t{i}" if i > 3 else "</s>" for i in tokens]


def their_hypotheses(translator: Any, source: list[int], prefix: tuple[int, ...] = (), **options: Any) -> Any:
    """What CTranslate2 finds for one source under our rules: no specials, the end whenever it comes."""
    suppressed = [["<pad>"], ["<s>"], *(target_names(tokens) for tokens in options.pop("suppressed", ()))]
    return translator.translate_batch(
        [source_names(source)],
        target_prefix=[target_names(prefix)] if prefix else None,
        **{"min_decoding_length": 0, "return_scores": True, **options},
        suppress_sequences=suppressed,
        disable_unk=True,
    )[0]


def same(ours: list[Hypothesis], theirs: Any) -> None:
    """Tokens, order and scores."""
    assert [target_names(h.tokens) for h in ours] == theirs.hypotheses
    assert [h.score for h in ours] == pytest.approx(theirs.scores, abs=1e-4)


@pytest.fixture
def model(make_model: Callable[..., Transformer]) -> Transformer:
    """The end is made likely, so that lengths vary."""
    model = make_model(d_model=16)
    model.projection.bias.data[2] += 2.0
    return model


@pytest.fixture
def translator(model: Transformer, tmp_path: Path) -> Any:
    """The same model there."""
    return convert(model, tmp_path / "ct2")


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("beam", [1, 2, 4, 5])
def test_hypotheses_and_scores_are_those_of_ctranslate2(
    model: Transformer, translator: Any, penalty: float, beam: int
) -> None:
    """Tokens, scores and order, for several sources, widths and penalties."""
    for most in (1, beam):
        options = BeamOptions(beam_size=beam, max_new_tokens=8, num_hypotheses=most, length_penalty=penalty)
        for source in SOURCES:
            ours = beam_search(model, source, options)
            theirs = their_hypotheses(
                translator,
                source,
                beam_size=beam,
                num_hypotheses=most,
                length_penalty=penalty,
                max_decoding_length=8,
            )
            same(ours, theirs)
            if beam == 1:
                one = greedy(model, [source], 8)[0]
                assert one.tokens == ours[0].tokens
                assert one.score / len(one.log_probs) ** penalty == pytest.approx(theirs.scores[0], abs=1e-4)


BAD_SEQUENCES = (*((a, b) for a in range(4, 10) for b in (a, 9)), (5, 6, 2), (4, 8, 6))
STEERED: dict[str, tuple[dict[str, Any], Steering]] = {
    "repetition penalty": ({"repetition_penalty": 1.7}, Steering(repetition_penalty=1.7)),
    "repetition reward": ({"repetition_penalty": 0.7}, Steering(repetition_penalty=0.7)),
    "no token twice": ({"no_repeat_ngram_size": 1}, Steering(no_repeat_ngram_size=1)),
    "no pair twice": ({"no_repeat_ngram_size": 2}, Steering(no_repeat_ngram_size=2)),
    "no three twice": ({"no_repeat_ngram_size": 3}, Steering(no_repeat_ngram_size=3)),
    "minimum": ({"min_decoding_length": 5}, Steering(min_new_tokens=5)),
    "minimum at the maximum": ({"min_decoding_length": 8}, Steering(min_new_tokens=8)),
    "tokens": ({"suppressed": ((5,), (8,))}, Steering(suppressed=(5, 8))),
    "one token as a sequence": ({"suppressed": ((5,),)}, Steering(suppressed_sequences=((5,),))),
    "sequences": (
        {"suppressed": BAD_SEQUENCES},
        Steering(suppressed_sequences=BAD_SEQUENCES),
    ),
    "much": (
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_decoding_length": 3, "suppressed": ((4, 5), (7,))},
        Steering(
            repetition_penalty=1.3,
            no_repeat_ngram_size=2,
            min_new_tokens=3,
            suppressed=(7,),
            suppressed_sequences=((4, 5),),
        ),
    ),
}


@pytest.mark.parametrize("name", STEERED)
def test_what_is_steered_is_that_of_ctranslate2(model: Transformer, translator: Any, name: str) -> None:
    """Greedy and in beams; each option changes something."""
    theirs, steering = STEERED[name]
    changed = False
    for beam, source in itertools.product((1, 2, 4), SOURCES):
        options = BeamOptions(beam_size=beam, max_new_tokens=8, num_hypotheses=beam, steering=steering)
        ours = beam_search(model, source, options)
        expected = their_hypotheses(
            translator, source, beam_size=beam, num_hypotheses=beam, max_decoding_length=8, **theirs
        )
        same(ours, expected)
        if beam == 1:
            assert greedy(model, [source], 8, steering=steering)[0].tokens == ours[0].tokens
        changed = changed or ours != beam_search(model, source, replace(options, steering=Steering()))
    assert changed


@pytest.mark.parametrize("penalty", [0.6, 1.0])
@pytest.mark.parametrize("patience", [0.5, 1.4, 2.0, 3.5])
def test_patience_is_that_of_ctranslate2(model: Transformer, translator: Any, patience: float, penalty: float) -> None:
    """Also where beam size x patience is no whole number."""
    for beam, source in itertools.product((2, 3, 5), SOURCES):
        options = BeamOptions(
            beam_size=beam, max_new_tokens=8, patience=patience, length_penalty=penalty, num_hypotheses=1
        )
        options = replace(options, num_hypotheses=min(beam, options.enough))
        theirs = their_hypotheses(
            translator,
            source,
            beam_size=beam,
            patience=patience,
            length_penalty=penalty,
            num_hypotheses=options.num_hypotheses,
            max_decoding_length=8,
        )
        same(beam_search(model, source, options), theirs)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("coverage_penalty", [0.3, 2.0, -0.5])
def test_the_coverage_penalty_is_that_of_ctranslate2(
    model: Transformer, translator: Any, coverage_penalty: float, length_penalty: float
) -> None:
    """With the mean of all heads of the last layer. Behind a prefix too, whose steps give attention like any other."""
    for beam, source, prefix in itertools.product((2, 4), SOURCES, ((), (5, 6))):
        if prefix and length_penalty:
            continue  # theirs counts the prefix in the length
        options = BeamOptions(
            beam_size=beam,
            max_new_tokens=4,
            num_hypotheses=beam,
            length_penalty=length_penalty,
            coverage_penalty=coverage_penalty,
            steering=Steering(min_new_tokens=1),
        )
        theirs = their_hypotheses(
            translator,
            source,
            prefix,
            beam_size=beam,
            num_hypotheses=beam,
            length_penalty=length_penalty,
            coverage_penalty=coverage_penalty,
            min_decoding_length=len(prefix) + 1,
            max_decoding_length=len(prefix) + 4,
        )
        same(beam_search(model, source, options, prefix=prefix), theirs)


@pytest.mark.parametrize("penalty", [0.0, 1e-9], ids=["ends early", "waits for all"])
@pytest.mark.parametrize("prefix", [(5,), (4, 6), (9, 9, 9, 8)], ids=str)
@pytest.mark.parametrize("name", ["nothing", "repetition penalty", "no token twice", "no pair twice", "sequences"])
def test_what_follows_a_prefix_is_that_of_ctranslate2(
    model: Transformer, translator: Any, prefix: tuple[int, ...], penalty: float, name: str
) -> None:
    """Theirs counts the prefix in lengths and limits, and suspects an end right behind it: the scores are compared as
    plain sums, the limits shifted, and one token asked for. The prefix steers what follows."""
    asked, steering = STEERED.get(name, ({}, Steering()))
    steering = replace(steering, min_new_tokens=1)
    for beam, source in itertools.product((1, 2, 4), SOURCES):
        options = BeamOptions(
            beam_size=beam, max_new_tokens=6, num_hypotheses=beam, length_penalty=penalty, steering=steering
        )
        ours = beam_search(model, source, options, prefix=prefix)
        theirs = their_hypotheses(
            translator,
            source,
            prefix,
            beam_size=beam,
            num_hypotheses=beam,
            length_penalty=penalty,
            max_decoding_length=len(prefix) + 6,
            min_decoding_length=len(prefix) + 1,
            **asked,
        )
        same(ours, theirs)
        if beam == 1:
            same(greedy(model, [source], 6, prefixes=[prefix], steering=steering), theirs)


@pytest.mark.parametrize("prefix", [(), (5,), (4, 6, 4)], ids=str)
@pytest.mark.parametrize("count", [1, 3, 5])
def test_alternatives_are_those_of_ctranslate2(
    model: Transformer, translator: Any, prefix: tuple[int, ...], count: int
) -> None:
    """In their order, each continued greedily; the score is the plain sum."""
    for source in SOURCES:
        theirs = their_hypotheses(
            translator,
            source,
            prefix,
            beam_size=1,
            return_alternatives=True,
            num_hypotheses=count,
            length_penalty=0,
            max_decoding_length=len(prefix) + 8,
        )
        same(alternatives(model, source, count, 8, prefix=prefix), theirs)


def test_scores_of_given_targets_are_those_of_ctranslate2(model: Transformer, tmp_path: Path) -> None:
    """The end token included. The specials that only we leave out are made impossible."""
    model.projection.bias.data[[0, 1, 3]] = -1e4
    translator = convert(model, tmp_path / "ct2")
    targets = [[5, 6, 7], [], [4, 4, 4, 4, 9, 8], [8], [5, 5]]
    results = translator.score_batch([source_names(s) for s in SOURCES], [target_names(t) for t in targets])
    for source, target, result in zip(SOURCES, targets, results, strict=True):
        assert score(model, source, target) == pytest.approx(result.log_probs, abs=1e-4)
