"""Weights and shape of an imported model have to fit, both ways, before anything is made of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dragoman_training.errors import ModelImportError
from dragoman_training.importing.imported import Imported, model_config, with_rows, write_checkpoint_of
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import PlainTokenizer, SpecialIds

SHAPE = {"d_model": 8, "num_heads": 2, "ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}


def imported() -> Imported:
    tokenizer = PlainTokenizer.build("character", ["abcd"])
    config = model_config(SHAPE, len(tokenizer), len(tokenizer))
    named = Transformer(config).named_parameters(remove_duplicate=False)
    weights = {name: parameter.detach().numpy() for name, parameter in named}
    pair = (tokenizer, tokenizer)
    return Imported(
        config=config, weights=weights, tokenizers=pair, special=SpecialIds(), max_tokens=8, origin={"format": "test"}
    )


def test_weights_that_the_shape_has_no_place_for_are_refused(tmp_path: Path) -> None:
    """A second layer in the file of a model of one would be lost in silence, and be another model."""
    model = imported()
    write_checkpoint_of(model, tmp_path / "whole")
    more = {**model.weights, "encoder.1.feed_forward.inner.bias": np.zeros(8, np.float32)}
    with pytest.raises(ModelImportError, match=r"encoder\.1\.feed_forward\.inner\.bias"):
        write_checkpoint_of(replace(model, weights=more), tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_a_shape_far_beyond_the_weights_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    """Terabytes, if they were allocated."""
    model = imported()
    shape = {**SHAPE, "d_model": 16_384, "ffn_dim": 16_384, "encoder_layers": 256, "decoder_layers": 256}
    config = model_config(shape, len(model.tokenizers[0]), len(model.tokenizers[1]))
    with pytest.raises(ModelImportError, match="the model's shape wants"):
        write_checkpoint_of(replace(model, config=config), tmp_path / "large")


@pytest.mark.parametrize("rows", [4, 6])
def test_a_vocabulary_has_a_row_for_each_of_its_tokens(rows: int) -> None:
    """Fewer would be filled up with zeros, which are scores like others."""
    assert with_rows(np.ones((5, 2), np.float32), 5, "x").shape == (8, 2)
    with pytest.raises(ModelImportError, match=f"x has {rows} rows for a vocabulary of 5 tokens"):
        with_rows(np.ones((rows, 2), np.float32), 5, "x")
