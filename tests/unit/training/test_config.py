"""Configurations: what is read, and how wrong ones are refused."""

import re
from pathlib import Path

import pytest

from dragoman_training.config import ModelConfig
from dragoman_training.configfile import load_config, parse_config, preset_names
from dragoman_training.errors import ConfigError


def toy_text(toy: Path, old: str = "", new: str = "") -> str:
    text = (toy / "toy.toml").read_text()
    assert old in text
    return text.replace(old, new)


def test_a_file_is_read(toy: Path) -> None:
    """Values of the file and defaults come together; an integer is good for a float."""
    config = parse_config(toy_text(toy, "learning_rate = 1e-2", "learning_rate = 1"), "toy")
    assert (config.optimizer.learning_rate, config.optimizer.beta2, config.loop.workers) == (1.0, 0.98, 2)
    assert config.model.head_dim == 4


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("d_model = 8", "d_modell = 8", ["model.d_modell", "unknown", "d_model,"]),
        ("d_model = 8", "", ["model.d_model is missing"]),
        ("d_model = 8", 'd_model = "8"', ["model.d_model", "'8'", "int"]),
        ("d_model = 8", "d_model = true", ["model.d_model", "True", "int"]),
        ("d_model = 8", "d_model = 9", ["model.d_model is 9", "num_heads (2)"]),
        ("d_model = 8", "d_model = 8\ndropout = 1.0", ["model.dropout is 1.0", "below 1"]),
        ("d_model = 8", 'd_model = 8\nactivation = "tanh"', ["model.activation", "'tanh'", "relu, gelu, silu"]),
        ("d_model = 8", 'd_model = 8\ntied_embeddings = "both"', ["tied_embeddings", "none, target, all"]),
        ('"piece"', '"word"', ["data.target_unit", "'word'", "character, piece"]),
        ("batch_tokens = 64", "batch_tokens = 15", ["data.batch_tokens is 15", "8 tokens", "at least 16"]),
        ("batch_tokens = 64", "batch_tokens = 64\nlength_spread = -1.0", ["data.length_spread is -1.0"]),
        ("learning_rate = 1e-2", 'learning_rate = 1e-2\nkind = "sgd"', ["optimizer.kind", "adamw, muon"]),
        ("steps = 12", "steps = 7", ["schedule.steps is 7", "(8)"]),
        ("learning_rate = 1e-2", "learning_rate = nan", ["optimizer.learning_rate is nan", "above 0"]),
        ("[loop]", "[lop]", ["lop", "loop"]),
        ("[loop]", "loop = 1\n[extra]", ["loop"]),
        ("[loop]", "[loop", ["no valid TOML"]),
    ],
)
def test_a_wrong_value_is_refused_by_name(toy: Path, old: str, new: str, words: list[str]) -> None:
    """The message holds the file, the key, the value and what would be valid."""
    with pytest.raises(ConfigError) as caught:
        parse_config(toy_text(toy, old, new), "toy.toml")
    assert all(word in str(caught.value) for word in ["toy.toml", *words]), str(caught.value)


def test_embeddings_of_unequal_vocabularies_cannot_be_tied() -> None:
    """Tying all embeddings needs one size for both sides."""
    shape = {"d_model": 8, "num_heads": 2, "ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}
    with pytest.raises(ConfigError, match=re.escape("5 and 6 differ")):
        ModelConfig(**shape, tied_embeddings="all", source_vocab_size=5, target_vocab_size=6)  # type: ignore[arg-type]  # mixed values


def test_every_preset_loads_by_name() -> None:
    """A preset is found without a path and passes all checks."""
    assert "g2p-en" in preset_names()
    for name in preset_names():
        assert load_config(name).schedule.steps > 0


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    """Neither file nor preset: the message lists the presets."""
    with pytest.raises(ConfigError, match="g2p-en"):
        load_config("g2p-xx")
