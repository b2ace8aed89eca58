"""A real model at toy size: trained and exported once for all tests, by the commands a user would run."""

import fcntl
import gc
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import dragoman

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


gc.set_threshold(100_000, 50, 100)  # what torch and onnx make is much, and little of it garbage


def pytest_collection_finish() -> None:
    """What was imported stays: the collector, which the export calls for each graph, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes of this run: see ``made_once``."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def made_once(shared_folder: Path) -> Callable[[str, Callable[[], object]], None]:
    """Calls a function in the first process that comes with its name; who comes meanwhile waits until that is done."""

    def make(name: str, function: Callable[[], object]) -> None:
        with (shared_folder / f"{name}.made").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_size == 0:
                function()
                file.write("made")

    return make


@pytest.fixture(scope="session")
def reverse_data(shared_folder: Path, made_once: Callable[[str, Callable[[], object]], None]) -> Path:
    """A folder with a toy task: words of a-h, answered with their capitals in reverse."""
    folder = shared_folder / "reverse"

    def write() -> None:
        folder.mkdir()
        rng = random.Random(1)
        words = sorted({"".join(rng.choices("abcdefgh", k=rng.randint(1, 8))) for _ in range(5000)})
        rng.shuffle(words)
        for name, part in (("dev", words[:300]), ("train", words[300:])):
            (folder / f"{name}.source").write_text("".join(f"{word}\n" for word in part))
            (folder / f"{name}.target").write_text("".join(f"{' '.join(reversed(word.upper()))}\n" for word in part))
        (folder / "reverse.toml").write_text(CONFIG)

    made_once("reverse data", write)
    return folder


@pytest.fixture(scope="session")
def reverse_run(reverse_data: Path, made_once: Callable[[str, Callable[[], object]], None]) -> Path:
    """The trained run."""
    made_once("reverse run", lambda: dragoman("train", "reverse.toml", "--out", "run", cwd=reverse_data))
    return reverse_data / "run"


@pytest.fixture(scope="session")
def reverse_bundle(
    reverse_data: Path, reverse_run: Path, made_once: Callable[[str, Callable[[], object]], None]
) -> Path:
    """The exported bundle, in every precision of the CPU."""
    arguments = ["--precision", "fp32,int8,w8", "--sources", "dev.source", "--test", "dev.source", "dev.target"]
    made_once("reverse bundle", lambda: dragoman("export", "run", *arguments, "--out", "reverse", cwd=reverse_data))
    return reverse_data / "reverse"
