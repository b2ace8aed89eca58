"""Configurations: what is read, and how wrong ones are refused."""

import re
from pathlib import Path

import pytest

from dragoman_training.config import MOST_SEED, ModelConfig
from dragoman_training.configfile import load_config, parse_config, preset_names, preset_summary
from dragoman_training.errors import ConfigError

PLAIN = 'kind = "plain"\nsource_unit = "character"\ntarget_unit = "piece"'


def toy_text(toy: Path, old: str = "", new: str = "") -> str:
    text = (toy / "toy.toml").read_text()
    assert old in text
    return text.replace(old, new)


def bpe(more: str) -> str:
    """A tokenizer section of kind bpe."""
    return f'kind = "bpe"\n{more}'


def test_a_file_is_read(toy: Path) -> None:
    """Values of the file and defaults come together; an integer is good for a float."""
    config = parse_config(toy_text(toy, "learning_rate = 1e-2", "learning_rate = 1"), "toy")
    assert (config.optimizer.learning_rate, config.optimizer.beta2, config.loop.workers) == (1.0, 0.98, 2)
    assert config.model.head_dim == 4
    pieces = parse_config(toy_text(toy, PLAIN, bpe('vocab_size = 264\nuser_defined_symbols = ["<a>", "<b>"]')), "toy")
    assert pieces.tokenizer.user_defined_symbols == ("<a>", "<b>")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        # keys and types
        ("d_model = 8", "d_modell = 8", ["model.d_modell", "unknown", "d_model,"]),
        ("d_model = 8", "", ["model.d_model is missing"]),
        ("d_model = 8", 'd_model = "8"', ["model.d_model", "'8'", "int"]),
        ("d_model = 8", "d_model = true", ["model.d_model", "True", "int"]),
        ("d_model = 8", "d_model = 8\nnorm_first = 1", ["model.norm_first is 1", "true or false"]),
        ("seed = 3", "seed = 3.0", ["loop.seed is 3.0", "int, not float"]),
        ("[loop]", "[lop]", ["lop", "loop"]),
        ("[loop]", "loop = 1\n[extra]", ["loop"]),
        ("[loop]", "[loop", ["no valid TOML"]),
        ("[model]", "[[model]]", ["model", "must be a table"]),
        # choices
        (
            "d_model = 8",
            'd_model = 8\nactivation = "tanh"',
            ["model.activation", "'tanh'", "relu, gelu, gelu_tanh, silu"],
        ),
        ("d_model = 8", 'd_model = 8\ntied_embeddings = "both"', ["tied_embeddings", "none, target, all"]),
        ('"piece"', '"word"', ["tokenizer.target_unit", "'word'", "character, piece"]),
        ('"plain"', '"wordpiece"', ["tokenizer.kind", "'wordpiece'", "unigram, bpe, plain"]),
        ("learning_rate = 1e-2", 'learning_rate = 1e-2\nkind = "lion"', ["optimizer.kind", "adamw, muon, sgd"]),
        ("steps = 12", 'steps = 12\nkind = "linear"', ["schedule.kind", "inverse_sqrt, cosine"]),
        ("seed = 3", 'metric = "accuracy"', ["loop.metric", "'accuracy'", "loss, exact_match, bleu, chrf"]),
        ("seed = 3", 'bleu_tokenizer = "moses"', ["loop.bleu_tokenizer", "13a, none, intl, char, zh"]),
        ("seed = 3", 'device = "tpu"', ["loop.device", "'tpu'", "auto, cpu, cuda"]),
        ("seed = 3", 'precision = "int8"', ["loop.precision", "'int8'", "fp32, bf16, fp16"]),
        # values
        ("d_model = 8", "d_model = 9", ["model.d_model is 9", "num_heads (2)"]),
        ("d_model = 8", "d_model = 8\ndropout = 1.0", ["model.dropout is 1.0", "below 1"]),
        ("d_model = 8", "d_model = 8\nattention_dropout = -0.1", ["model.attention_dropout is -0.1", "at least 0"]),
        ("d_model = 8", "d_model = 8\nactivation_dropout = nan", ["model.activation_dropout is nan"]),
        ("d_model = 8", "d_model = 8\nposition_base = 1.0", ["model.position_base is 1.0", "above 1"]),
        ("d_model = 8", "d_model = 8\nfirst_position = -1", ["model.first_position is -1", "from 0 to 16384"]),
        ("d_model = 8", "d_model = 8\nnum_positions = 7", ["model.num_positions is 7", "8 tokens"]),
        ("d_model = 8", "d_model = 8\nnum_positions = 8\nfirst_position = 1", ["model.first_position is 1", "leave"]),
        ("d_model = 8", "d_model = 8\nlayer_norm_epsilon = 0.0", ["model.layer_norm_epsilon is 0.0", "above 0"]),
        ("batch_tokens = 64", "batch_tokens = 15", ["data.batch_tokens is 15", "8 tokens", "at least 16"]),
        ("batch_tokens = 64", "batch_tokens = 64\nlength_spread = -1.0", ["data.length_spread is -1.0"]),
        ('"dev.source"', '""', ["data.dev_source is ''", "name a file"]),
        ("learning_rate = 1e-2", "learning_rate = nan", ["optimizer.learning_rate is nan", "above 0"]),
        ("learning_rate = 1e-2", "learning_rate = 1e-2\nema_decay = 1.0", ["optimizer.ema_decay is 1.0", "below 1"]),
        ("learning_rate = 1e-2", "learning_rate = 1e-2\nweight_decay = -1.0", ["optimizer.weight_decay is -1.0"]),
        ("steps = 12", "steps = 7", ["schedule.steps is 7", "(8)"]),
        ("steps = 12", "steps = 12\nundropped_steps = 13", ["schedule.undropped_steps is 13", "(12)"]),
        ("validate_every = 4", "validate_every = 0", ["loop.validate_every is 0", "above 0"]),
        ("seed = 3", "patience = -1", ["loop.patience is -1", "0: never"]),
        ("seed = 3", "seed = -1", ["loop.seed is -1", str(MOST_SEED)]),
        # absurd values
        ("d_model = 8", "d_model = 1_000_000", ["model.d_model is 1000000", "at most 16384"]),
        ("encoder_layers = 1", "encoder_layers = 5000", ["model.encoder_layers is 5000", "at most 256"]),
        ("max_source_tokens = 8", "max_source_tokens = 99999", ["data.max_source_tokens is 99999", "at most 16384"]),
        ("batch_tokens = 64", "batch_tokens = 64_000_000", ["data.batch_tokens is 64000000", "at most 10000000"]),
        ("seed = 3", "workers = 10000", ["loop.workers is 10000", "at most 256"]),
        ("learning_rate = 1e-2", "learning_rate = 1e6", ["optimizer.learning_rate is 1000000.0", "at most 1000"]),
        # combinations
        ("d_model = 8", 'd_model = 8\ntied_embeddings = "all"', ["model.tied_embeddings", "tokenizer.joint"]),
        ('"plain"', '"plain"\nvocab_size = 264', ["tokenizer.vocab_size is 264", "plain has no such setting"]),
        ('"plain"', '"plain"\nsampling = 0.1', ["tokenizer.sampling is 0.1", "plain has no such setting"]),
        (PLAIN, bpe('vocab_size = 264\nsource_unit = "piece"'), ["tokenizer.source_unit", "bpe has no such setting"]),
        (PLAIN, bpe(""), ["tokenizer.vocab_size is None", "multiple of 8"]),
        (PLAIN, bpe("vocab_size = 1001"), ["tokenizer.vocab_size is 1001", "multiple of 8"]),
        (PLAIN, bpe("vocab_size = 256"), ["tokenizer.vocab_size is 256", "from 264", "byte_fallback"]),
        (PLAIN, bpe("vocab_size = 8_000_000"), ["tokenizer.vocab_size is 8000000", "to 1000000"]),
        (PLAIN, bpe('vocab_size = 264\nnormalization = "nfd"'), ["tokenizer.normalization", "identity, nfkc,"]),
        (PLAIN, bpe("vocab_size = 264\nsampling = 1.0"), ["tokenizer.sampling is 1.0", "below 1"]),
        (PLAIN, bpe("vocab_size = 264\ncharacter_coverage = 0.0"), ["tokenizer.character_coverage is 0.0"]),
        (PLAIN, bpe('vocab_size = 264\nuser_defined_symbols = "<a>"'), ["user_defined_symbols", "must be a list"]),
        (PLAIN, bpe("vocab_size = 264\nuser_defined_symbols = [1]"), ["user_defined_symbols[0] is 1", "str"]),
        (PLAIN, bpe('vocab_size = 264\nuser_defined_symbols = ["a", "a"]'), ["user_defined_symbols", "there once"]),
        (PLAIN, bpe('vocab_size = 264\nuser_defined_symbols = ["{x}", "a b"]'), ["symbols is 'a b'", "no white space"]),
        (PLAIN, bpe('vocab_size = 264\nuser_defined_symbols = ["\u00a0"]'), ["symbols is '\\xa0'", "no white space"]),
        (PLAIN, bpe('vocab_size = 264\nuser_defined_symbols = ["\u2581a"]'), ["symbols is '\u2581a'", "U+2581"]),
        (PLAIN, bpe('vocab_size = 264\nuser_defined_symbols = ["a\\u0001"]'), ["symbols is 'a\\x01'", "control"]),
        (PLAIN, bpe('vocab_size = 264\nuser_defined_symbols = ["<s>"]'), ["symbols is '<s>'", "special or byte"]),
        (PLAIN, bpe('vocab_size = 264\nuser_defined_symbols = ["<0x4A>"]'), ["symbols is '<0x4A>'", "special or byte"]),
        ("cooldown_steps = 4", 'cooldown_steps = 4\nkind = "cosine"', ["schedule.cooldown_steps is 4", "cosine"]),
        ("seed = 3", 'device = "cpu"\nprecision = "fp16"', ["loop.precision is 'fp16'", "fp32 or bf16"]),
    ],
)
def test_a_wrong_value_is_refused_by_name(toy: Path, old: str, new: str, words: list[str]) -> None:
    """The message holds the file, the key, the value and what would be valid."""
    with pytest.raises(ConfigError) as caught:
        parse_config(toy_text(toy, old, new), "toy.toml")
    assert all(word in str(caught.value) for word in ["toy.toml", *words]), str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "section", "name", "value"),
    [
        ("loop.seed=7", "loop", "seed", 7),
        ("optimizer.learning_rate=2e-3", "optimizer", "learning_rate", 0.002),
        ("optimizer.learning_rate=1", "optimizer", "learning_rate", 1.0),
        ("model.norm_first=false", "model", "norm_first", False),
        ("data.train_source=my data/train=1.gz", "data", "train_source", "my data/train=1.gz"),
        ("data.train_source='quoted.txt'", "data", "train_source", "quoted.txt"),
        ("data.train_source=2024", "data", "train_source", "2024"),
        ("loop.metric=exact_match", "loop", "metric", "exact_match"),
    ],
)
def test_the_command_line_wins_over_the_file(
    toy: Path, assignment: str, section: str, name: str, value: object
) -> None:
    """Values are typed as in a file; text needs no quotes."""
    found = getattr(getattr(load_config("toy.toml", [assignment]), section), name)
    assert (found, type(found)) == (value, type(value))


def test_a_section_that_the_file_lacks_can_be_set(toy: Path) -> None:
    """And later values win over earlier ones; a list is written as in TOML."""
    text = toy_text(toy, f"[tokenizer]\n{PLAIN}\n")
    values = ["tokenizer.kind=plain", "tokenizer.kind=bpe", "tokenizer.vocab_size=264"]
    config = parse_config(text, "toy", [*values, 'tokenizer.user_defined_symbols=["<a>"]'])
    assert (config.tokenizer.kind, config.tokenizer.user_defined_symbols) == ("bpe", ("<a>",))


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("loop.sed=7", ["loop.sed", "'7'", "unknown", "seed"]),
        ("lop.seed=7", ["lop.seed", "unknown", "sections", "loop"]),
        ("loop.seed", ["--set is 'loop.seed'", "section.key=value"]),
        ("seed=7", ["--set is 'seed=7'", "section.key=value"]),
        ("loop.seed=many", ["loop.seed is 'many'", "int, not str"]),
        ("loop.seed=1e3", ["loop.seed is 1000.0", "int, not float"]),
        ("model.norm_first=True", ["model.norm_first is 'True'", "true or false"]),
        ("model.dropout=2", ["model.dropout is 2.0", "below 1"]),
    ],
)
def test_a_wrong_value_on_the_command_line_is_refused_like_one_in_a_file(
    toy: Path, assignment: str, words: list[str]
) -> None:
    """Same checks, same messages."""
    with pytest.raises(ConfigError) as caught:
        load_config("toy.toml", [assignment])
    assert all(word in str(caught.value) for word in ["toy.toml", *words]), str(caught.value)


def test_embeddings_of_unequal_vocabularies_cannot_be_tied() -> None:
    """Tying all embeddings needs one size for both sides."""
    shape = {"d_model": 8, "num_heads": 2, "ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}
    with pytest.raises(ConfigError, match=re.escape("5 and 6 differ")):
        ModelConfig(**shape, tied_embeddings="all", source_vocab_size=5, target_vocab_size=6)  # type: ignore[arg-type]  # mixed values


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("tiny", (4, 4, 128, 256, 4)),
        ("small", (6, 2, 256, 1024, 4)),
        ("base", (6, 6, 512, 2048, 8)),
        ("deep_shallow", (12, 1, 512, 2048, 8)),
    ],
)
def test_a_preset_has_its_documented_shape(name: str, shape: tuple[int, ...]) -> None:
    """Layers, widths and heads; heads of 32 or 64; data where prepare writes it; one vocabulary for all embeddings."""
    config = load_config(name)
    model = config.model
    found = (model.encoder_layers, model.decoder_layers, model.d_model, model.ffn_dim, model.num_heads)
    assert found == shape
    assert model.head_dim in (32, 64)
    assert (config.data.train_source, config.data.dev_target) == ("data/train.source", "data/dev.target")
    assert (model.tied_embeddings, config.tokenizer.joint) == ("all", True)


def test_every_preset_loads_by_name_and_says_what_it_is_for() -> None:
    """A preset is found without a path and passes all checks; its first line is its description."""
    assert set(preset_names()) == {"tiny", "small", "base", "deep_shallow", "en-de", "g2p-en"}
    for name in preset_names():
        assert load_config(name).schedule.steps > 0
        assert len(preset_summary(name)) > 20


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    """Neither file nor preset: the message lists the presets."""
    with pytest.raises(ConfigError, match="g2p-en"):
        load_config("g2p-xx")
