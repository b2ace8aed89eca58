"""A real model at toy size: trained and exported once for all tests, by the commands a user would run."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
[model]
d_model = 64
num_heads = 2
ffn_dim = 128
encoder_layers = 1
decoder_layers = 1
dropout = 0.0

[data]
train_source = "train.source"
train_target = "train.target"
dev_source = "dev.source"
dev_target = "dev.target"
max_source_tokens = 32
max_target_tokens = 32
batch_tokens = 512

[tokenizer]
kind = "plain"
source_unit = "character"
target_unit = "piece"

[optimizer]
learning_rate = 4e-3

[schedule]
steps = 600
warmup_steps = 100
cooldown_steps = 200

[loop]
validate_every = 300
"""


def dragoman(*arguments: object, cwd: Path) -> str:
    """Run the command line in a process of its own; returns what it printed."""
    command = [sys.executable, "-m", "dragoman.cli.main", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def reverse_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a toy task: words of a-h, answered with their capitals in reverse."""
    folder = tmp_path_factory.mktemp("reverse")
    rng = random.Random(1)
    words = sorted({"".join(rng.choices("abcdefgh", k=rng.randint(1, 8))) for _ in range(5000)})
    rng.shuffle(words)
    for name, part in (("dev", words[:300]), ("train", words[300:])):
        (folder / f"{name}.source").write_text("".join(f"{word}\n" for word in part))
        (folder / f"{name}.target").write_text("".join(f"{' '.join(reversed(word.upper()))}\n" for word in part))
    (folder / "reverse.toml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="session")
def reverse_run(reverse_data: Path) -> Path:
    """The trained run."""
    dragoman("train", "reverse.toml", "--out", "run", cwd=reverse_data)
    return reverse_data / "run"


@pytest.fixture(scope="session")
def reverse_bundle(reverse_data: Path, reverse_run: Path) -> Path:
    """The exported bundle, in every precision of the CPU."""
    arguments = ["--precision", "fp32,int8,w8", "--sources", "dev.source", "--test", "dev.source", "dev.target"]
    dragoman("export", "run", *arguments, "--out", "reverse", cwd=reverse_data)
    return reverse_data / "reverse"
