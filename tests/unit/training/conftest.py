"""A toy task (reverse a string of four letters) and toy models, small enough for milliseconds."""

import random
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dragoman_training.config import ModelConfig
from dragoman_training.model import KeyValue, Transformer

torch.set_num_threads(1)  # two threads that share a toy-sized product mostly wait for each other

TOY = """
[data]
train_source = "train.source"
train_target = "train.target"
dev_source = "dev.source"
dev_target = "dev.target"
max_source_tokens = 8
max_target_tokens = 8
batch_tokens = 64

[tokenizer]
kind = "plain"
source_unit = "character"
target_unit = "piece"

[model]
d_model = 8
num_heads = 2
ffn_dim = 16
encoder_layers = 1
decoder_layers = 1

[optimizer]
learning_rate = 1e-2

[schedule]
steps = 12
warmup_steps = 4
cooldown_steps = 4

[loop]
validate_every = 4
seed = 3
keep_checkpoints = 2
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``toy.toml`` and its data, as the current directory."""
    rng = random.Random(0)
    for name, count in (("train", 60), ("dev", 10)):
        words = ["".join(rng.choice("abcd") for _ in range(rng.randint(1, 6))) for _ in range(count)]
        (tmp_path / f"{name}.source").write_text("".join(f"{word}\n" for word in words))
        (tmp_path / f"{name}.target").write_text("".join(f"{' '.join(reversed(word.upper()))}\n" for word in words))
    (tmp_path / "toy.toml").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def toy_with_everything(toy: Path) -> Path:
    """The same with all that is random or has a memory: BPE dropout, dropout, accumulation, a moving average."""
    plain = 'kind = "plain"\nsource_unit = "character"\ntarget_unit = "piece"'
    pieces = 'kind = "bpe"\nvocab_size = 24\nbyte_fallback = false\nsampling = 0.3'
    changes = {
        plain: pieces,
        "[model]": '[model]\ntied_embeddings = "all"\nattention_dropout = 0.1\nactivation_dropout = 0.1',
        "[optimizer]": "[optimizer]\nema_decay = 0.9",
        "[loop]": "[loop]\naccumulate = 2",
        "max_source_tokens = 8": "max_source_tokens = 16",
        "max_target_tokens = 8": "max_target_tokens = 16",
    }
    text = (toy / "toy.toml").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (toy / "toy.toml").write_text(text)
    return toy


@pytest.fixture
def small_files_only() -> Callable[[int], AbstractContextManager[None]]:
    """No file of this process may grow beyond a number of bytes: a real write error in the middle of a file."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture
def make_model() -> Callable[..., Transformer]:
    """Make an untrained toy model in evaluation mode; keywords change its configuration."""

    def make(**changes: object) -> Transformer:
        values: dict[str, object] = {
            "d_model": 16,
            "num_heads": 2,
            "ffn_dim": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "source_vocab_size": 12,
            "target_vocab_size": 10,
        }
        values.update(changes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = Transformer(ModelConfig(**values))  # type: ignore[arg-type]  # a dict of mixed values
            for parameter in model.parameters():  # untrained logits would be too flat to tell mistakes apart
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
        return model.eval()

    return make


Script = Callable[[tuple[int, ...]], list[float]]
SCRIPTED_VOCABULARY = 7  # the four specials and three more


class Scripted(Transformer):
    """Logits are a function of the tokens read so far, which the self-attention cache carries, as in earnest."""

    script: Script

    def step(
        self, tokens: Tensor, cached: Tensor, past: list[KeyValue], memory: list[KeyValue], lengths: Tensor
    ) -> tuple[Tensor, list[KeyValue]]:
        for row, (token, position) in enumerate(zip(tokens.tolist(), cached.tolist(), strict=True)):
            past[0].key[row, 0, position, 0] = token
        read = [past[0].key[row, 0, : position + 1, 0].int().tolist() for row, position in enumerate(cached.tolist())]
        return torch.tensor([self.script(tuple(tokens)) for tokens in read]), past


@pytest.fixture
def scripted(make_model: Callable[..., Transformer]) -> Callable[[Script], Scripted]:
    """Make a model from a script."""

    def make(script: Script) -> Scripted:
        model = Scripted(make_model(target_vocab_size=SCRIPTED_VOCABULARY, num_heads=1).config)
        model.script = script
        return model.eval()

    return make


def noise(tokens: Sequence[int]) -> list[float]:
    """Arbitrary logits that depend on every token read."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    return [float(x) for x in torch.randn(SCRIPTED_VOCABULARY, generator=generator) * 2]
