"""The configuration of a training run: frozen dataclasses, checked when they are made (``configfile.py`` reads TOML).

Vocabulary sizes are not configured: they come from the tokenizers. Every refusal is a ``ConfigError`` that names the
key, the value and what would be valid. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

from dragoman_training.errors import ConfigError

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
TIED_EMBEDDINGS = ("none", "target", "all")
TOKENIZER_KINDS = ("unigram", "bpe", "plain")
TOKENIZER_UNITS = ("character", "piece")
NORMALIZATIONS = ("identity", "nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf")
OPTIMIZERS = ("adamw", "muon", "sgd")
SCHEDULES = ("inverse_sqrt", "cosine")
PRECISIONS = ("fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
METRICS = ("loss", "exact_match", "bleu", "chrf")
BLEU_TOKENIZERS = ("13a", "none", "intl", "char", "zh")
VOCABULARY_MULTIPLE = 8  # sizes of embeddings are rounded up to it: matrix products like even sizes
RESERVED_PIECE = re.compile("<(pad|s|/s|unk|0x[0-9A-F]{2})>")  # special and byte pieces
LEAST_WITH_BYTES = 264  # four specials, 256 bytes, at least one piece; a multiple of 8
# Far beyond what this package is for: a slip of the pen is refused before it fills the memory.
MOST_WIDTH = 16_384
MOST_LAYERS = 256
MOST_VOCABULARY = 1_000_000
MOST_TEXT_TOKENS = 16_384  # attention grows with the square
MOST_BATCH_TOKENS = 10_000_000
MOST_WORKERS = 256
MOST_STEPS = 1_000_000_000
MOST_RATE = 1_000.0
MOST_SEED = 2**31 - 1


def require(valid: bool, key: str, value: object, remedy: str) -> None:
    """Raise ``ConfigError`` naming key, value and remedy unless ``valid``."""
    if not valid:
        raise ConfigError(f"{key} is {value!r}: {remedy}")


def splits_words(character: str) -> bool:
    """Whether SentencePiece may take it for a blank, or its own mark of one, or not at all."""
    return character.isspace() or character == "\u2581" or unicodedata.category(character) in ("Cc", "Cs")


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of ``choices``."""
    require(value in choices, key, value, f"choose one of {', '.join(choices)}")


def require_positive(section: str, config: object, *names: str, most: float = MOST_STEPS) -> None:
    """Raise ``ConfigError`` unless every named field is a number above 0 and at most ``most``."""
    for name in names:
        value = getattr(config, name)
        require(0 < value <= most, f"{section}.{name}", value, f"it must be above 0 and at most {most}")


def require_share(key: str, value: float) -> None:
    """Raise ``ConfigError`` unless ``value`` is at least 0 and below 1."""
    require(0 <= value < 1, key, value, "it must be at least 0 and below 1")


def padded_vocab_size(num_tokens: int) -> int:
    """The size of an embedding for so many tokens."""
    return -(-num_tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Everything about the model but its vocabularies.

    Three kinds of dropout: ``dropout`` of embeddings and of each sublayer's output, ``attention_dropout`` of attention
    weights, ``activation_dropout`` behind the activation of the feed-forward.
    """

    d_model: int
    num_heads: int
    ffn_dim: int
    encoder_layers: int
    decoder_layers: int
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "relu"
    norm_first: bool = True
    tied_embeddings: str = "target"  # "target": target embedding = projection; "all": source embedding too
    position_base: float = 10000.0  # the longest wavelength of the positions / 2 pi: fit it to the texts' length
    first_position: int = 0  # what the first token's position is called
    num_positions: int = 0  # above 0: so many positions are learned on each side, instead of waves without a limit
    scaled_embeddings: bool = True  # embeddings are multiplied by sqrt(d_model)
    embedding_norm: bool = False  # a norm behind the sum of embedding and position, on each side
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        require_positive("model", self, "d_model", "num_heads", "ffn_dim", most=MOST_WIDTH)
        require_positive("model", self, "encoder_layers", "decoder_layers", most=MOST_LAYERS)
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            require_share(f"model.{name}", getattr(self, name))
        require_choice("model.activation", self.activation, ACTIVATIONS)
        base = self.position_base
        require(math.isfinite(base) and base > 1, "model.position_base", base, "it must be above 1")
        for name in ("first_position", "num_positions"):
            value = getattr(self, name)
            require(0 <= value <= MOST_TEXT_TOKENS, f"model.{name}", value, f"it must be from 0 to {MOST_TEXT_TOKENS}")
        learned = self.num_positions > 0 and self.first_position > 0
        require(
            not learned, "model.first_position", self.first_position, "learned positions count from 0: leave it out"
        )
        epsilon = self.layer_norm_epsilon
        require(0 < epsilon < 1, "model.layer_norm_epsilon", epsilon, "it must be above 0 and below 1")
        require_choice("model.tied_embeddings", self.tied_embeddings, TIED_EMBEDDINGS)
        multiple = self.d_model % self.num_heads == 0
        require(multiple, "model.d_model", self.d_model, f"it must be a multiple of num_heads ({self.num_heads})")
        require(self.d_model % 2 == 0, "model.d_model", self.d_model, "it must be even: positions are sine and cosine")

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.d_model // self.num_heads

    def with_vocabularies(self, source_vocab_size: int, target_vocab_size: int) -> ModelConfig:
        """The whole model's configuration, for tokenizers of so many tokens: sizes are rounded up."""
        own: dict[str, Any] = dataclasses.asdict(self)
        return ModelConfig(
            **own,
            source_vocab_size=padded_vocab_size(source_vocab_size),
            target_vocab_size=padded_vocab_size(target_vocab_size),
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """A whole model: its shape and the sizes of its vocabularies."""

    source_vocab_size: int
    target_vocab_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("model", self, "source_vocab_size", "target_vocab_size", most=MOST_VOCABULARY)
        if self.tied_embeddings == "all":
            sizes = f"source and target vocabulary sizes {self.source_vocab_size} and {self.target_vocab_size} differ"
            require(
                self.source_vocab_size == self.target_vocab_size,
                "model.tied_embeddings",
                "all",
                f"{sizes}; choose target or none, or one tokenizer for both sides",
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Aligned text files (one line a pair, relative to the current directory; ``.gz`` is unpacked), limits and batches.

    The limits count tokens including the closing ``</s>``; longer training pairs are dropped and counted. They travel
    with the checkpoint: a served model promises no more than it was trained on.
    """

    train_source: str
    train_target: str
    dev_source: str
    dev_target: str
    max_source_tokens: int
    max_target_tokens: int
    batch_tokens: int  # the limit for rows x longest side; each worker of each process has an equal share of it
    length_spread: float = 0.0  # tokens by which lengths of one batch may differ: padding buys more varied batches

    def __post_init__(self) -> None:
        for name in ("train_source", "train_target", "dev_source", "dev_target"):
            require(getattr(self, name) != "", f"data.{name}", "", "it must name a file")
        require_positive("data", self, "max_source_tokens", "max_target_tokens", most=MOST_TEXT_TOKENS)
        require_positive("data", self, "batch_tokens", most=MOST_BATCH_TOKENS)
        spread = self.length_spread
        require(math.isfinite(spread) and spread >= 0, "data.length_spread", spread, "it must be at least 0")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Kind ``unigram`` or ``bpe``: SentencePiece models of the training text. Kind ``plain``: units as they are.

    A setting of the other kind is refused. ``joint`` means one vocabulary, learned from both sides.
    """

    kind: str
    source_unit: str | None = None  # plain: a token is a character, or a piece between blanks
    target_unit: str | None = None
    vocab_size: int | None = None  # unigram, bpe: tokens of each vocabulary, specials and byte pieces included
    joint: bool = True
    byte_fallback: bool = True  # what the vocabulary lacks is spelled in UTF-8 bytes, not lost
    split_digits: bool = True
    user_defined_symbols: tuple[str, ...] = ()  # strings without blanks that always are one token: placeholders
    normalization: str = "identity"  # SentencePiece's rule; identity keeps all characters but superfluous blanks
    character_coverage: float = 1.0
    sampling: float = 0.0  # chance of leaving out a merge (BPE dropout) or temperature (unigram), in training only

    def __post_init__(self) -> None:
        require_choice("tokenizer.kind", self.kind, TOKENIZER_KINDS)
        plain = self.kind == "plain"
        for item in dataclasses.fields(self)[1:]:
            value, of_plain = getattr(self, item.name), item.name in ("source_unit", "target_unit")
            if of_plain and plain:
                require_choice(f"tokenizer.{item.name}", value, TOKENIZER_UNITS)
            elif of_plain or plain:
                require(value == item.default, f"tokenizer.{item.name}", value, f"kind {self.kind} has no such setting")
        if plain:
            return
        size = self.vocab_size
        least = LEAST_WITH_BYTES if self.byte_fallback else VOCABULARY_MULTIPLE
        fits = size is not None and least <= size <= MOST_VOCABULARY and size % VOCABULARY_MULTIPLE == 0
        remedy = f"it must be a multiple of {VOCABULARY_MULTIPLE} from {least}"
        if self.byte_fallback:
            remedy += " (byte_fallback takes 256 of them)"
        require(fits, "tokenizer.vocab_size", size, f"{remedy} to {MOST_VOCABULARY}")
        symbols = self.user_defined_symbols
        distinct = len(set(symbols)) == len(symbols) and "" not in symbols
        require(distinct, "tokenizer.user_defined_symbols", list(symbols), "each must be there once, and none be empty")
        for symbol in symbols:
            usable = not any(map(splits_words, symbol)) and not RESERVED_PIECE.fullmatch(symbol)
            remedy = "it must have no white space, U+2581 or control character, and not be a special or byte piece"
            require(usable, "tokenizer.user_defined_symbols", symbol, remedy)
        require_choice("tokenizer.normalization", self.normalization, NORMALIZATIONS)
        coverage = self.character_coverage
        require(0 < coverage <= 1, "tokenizer.character_coverage", coverage, "it must be above 0 and at most 1")
        require_share("tokenizer.sampling", self.sampling)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019), Muon for the matrices beside it, or SGD; label smoothing, gradient clipping.

    With ``ema_decay``, an exponential moving average of the weights is what is validated, saved and exported.
    """

    learning_rate: float  # the peak
    kind: str = "adamw"  # or "muon" (see muon.py), or "sgd"
    matrix_rate: float = 1.0  # muon: multiplies the learning rate of the matrices
    momentum: float = 0.95  # muon, sgd
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.01
    label_smoothing: float = 0.1
    max_gradient_norm: float = 1.0
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        require_choice("optimizer.kind", self.kind, OPTIMIZERS)
        require_positive("optimizer", self, "learning_rate", "matrix_rate", "epsilon", most=MOST_RATE)
        require_positive("optimizer", self, "max_gradient_norm")
        for name in ("beta1", "beta2", "momentum", "label_smoothing", "ema_decay"):
            require_share(f"optimizer.{name}", getattr(self, name))
        decay = self.weight_decay
        require(math.isfinite(decay) and decay >= 0, "optimizer.weight_decay", decay, "it must be at least 0")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up, then the decay of ``kind``, then a linear cool-down to 0 over the last steps.

    ``cosine`` falls to 0 at the last step by itself and takes no cool-down. In the last ``undropped_steps`` steps
    dropout is off: a model too small to overfit fits better so.
    """

    steps: int
    warmup_steps: int
    kind: str = "inverse_sqrt"  # or "cosine"
    cooldown_steps: int = 0
    undropped_steps: int = 0

    def __post_init__(self) -> None:
        require_positive("schedule", self, "steps", "warmup_steps")
        require_choice("schedule.kind", self.kind, SCHEDULES)
        if self.kind == "cosine":
            require(
                self.cooldown_steps == 0,
                "schedule.cooldown_steps",
                self.cooldown_steps,
                "kind cosine falls to 0 by itself: leave it out",
            )
        require(self.cooldown_steps >= 0, "schedule.cooldown_steps", self.cooldown_steps, "it must be at least 0")
        within = 0 <= self.undropped_steps <= self.steps
        require(within, "schedule.undropped_steps", self.undropped_steps, f"it must be from 0 to steps ({self.steps})")
        together = self.warmup_steps + self.cooldown_steps
        require(
            together <= self.steps,
            "schedule.steps",
            self.steps,
            f"it must be at least warmup_steps + cooldown_steps ({together})",
        )


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The training loop: where it runs, how often to validate (each validation also writes a checkpoint), when to stop.

    Each worker thread (or, started by ``torchrun``, each process) computes the gradient of its share of a batch, an
    equal part of ``data.batch_tokens``; the shares belong to the arithmetic, so that a run is repeated with the same
    number on any machine. A step sums the gradient of ``accumulate`` batches.
    """

    validate_every: int
    metric: str = "loss"  # of the dev set: decides which checkpoint is the best
    patience: int = 0  # validations in a row without a better metric that end the run; 0: never
    bleu_tokenizer: str = "13a"
    seed: int = 1
    workers: int = 2
    accumulate: int = 1
    keep_checkpoints: int = 3
    device: str = "auto"
    precision: str = "fp32"
    compile: bool = False

    def __post_init__(self) -> None:
        require_positive("loop", self, "validate_every", "accumulate", "keep_checkpoints")
        require_positive("loop", self, "workers", most=MOST_WORKERS)
        require(0 <= self.seed <= MOST_SEED, "loop.seed", self.seed, f"it must be from 0 to {MOST_SEED}")
        require(self.patience >= 0, "loop.patience", self.patience, "it must be at least 0 (0: never stop early)")
        require_choice("loop.metric", self.metric, METRICS)
        require_choice("loop.bleu_tokenizer", self.bleu_tokenizer, BLEU_TOKENIZERS)
        require_choice("loop.device", self.device, DEVICES)
        require_choice("loop.precision", self.precision, PRECISIONS)
        gpu_only = self.precision == "fp16" and self.device == "cpu"
        require(not gpu_only, "loop.precision", "fp16", "a CPU has bf16 at best: choose fp32 or bf16")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run, section by section as in its TOML file."""

    model: ModelShape
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(validate_every=1000))

    def __post_init__(self) -> None:
        longest = max(self.data.max_source_tokens, self.data.max_target_tokens)
        least = longest * self.loop.workers
        require(
            self.data.batch_tokens >= least,
            "data.batch_tokens",
            self.data.batch_tokens,
            f"it must hold a longest row ({longest} tokens) for each worker: at least {least}",
        )
        positions = self.model.num_positions
        remedy = f"the longest text has {longest} tokens: raise it to that, or leave it out"
        require(positions == 0 or positions >= longest, "model.num_positions", positions, remedy)
        if self.model.tied_embeddings == "all":
            one_vocabulary = self.tokenizer.kind != "plain" and self.tokenizer.joint
            remedy = "source and target need one vocabulary: set tokenizer.joint, or choose target or none"
            require(one_vocabulary, "model.tied_embeddings", "all", remedy)
