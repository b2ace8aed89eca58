"""Random segmentation: what is drawn, and that a seed decides it in every process."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dragoman_training.config import TokenizerConfig
from dragoman_training.tokenizer import SentencePieceTokenizer

SYMBOLS = ("<name>", "{0}")


def texts() -> list[str]:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcde12é", k=rng.randint(1, 7))) for _ in range(60)]
    return [" ".join(rng.choices([*words, *SYMBOLS, "x<name>y"], k=6)) for _ in range(80)]


@pytest.fixture(params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> SentencePieceTokenizer:
    """A small model with placeholders and byte pieces."""
    config = TokenizerConfig(kind=request.param, vocab_size=304, user_defined_symbols=SYMBOLS)
    return SentencePieceTokenizer.train(config, texts(), seed=1)


def test_a_seed_decides_in_every_process(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    """Two new processes draw what this one does; another seed draws something else."""
    (tmp_path / "model").write_bytes(tokenizer.to_bytes())
    program = (
        "import sys; from pathlib import Path; from dragoman_training.tokenizer import SentencePieceTokenizer as T;"
    )
    program += "print(T(Path(sys.argv[1]).read_bytes()).sample(sys.argv[2:], 0.5, 7))"
    command = [sys.executable, "-c", program, str(tmp_path / "model"), *texts()]
    found = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert found == {f"{tokenizer.sample(texts(), 0.5, 7)}\n"}
    assert tokenizer.sample(texts(), 0.5, 8) != tokenizer.sample(texts(), 0.5, 7)


def test_every_segmentation_spells_the_same_text(tokenizer: SentencePieceTokenizer) -> None:
    """Characters outside the vocabulary and placeholders come back too; a placeholder always is one token."""
    lines = [*texts(), "", "ünïcode 漢字 a", "a<name>b{0}"]
    for seed in range(3):
        for line, ids in zip(lines, tokenizer.sample(lines, 0.4, seed), strict=True):
            assert tokenizer.decode(ids) == line
            for symbol in SYMBOLS:
                (index,) = [i for i in tokenizer.encode(symbol) if tokenizer.decode([i]) == symbol]
                assert ids.count(index) == line.count(symbol)


def test_marks_of_blanks_in_a_text_do_no_harm(tokenizer: SentencePieceTokenizer) -> None:
    """They are the library's own; it reads them as blanks."""
    for text in ("a \u2581 b", "\u2581", "a\u2581"):
        tokenizer.sample([text], 0.3, 1)


def test_without_dropout_bpe_merges_as_the_library_does() -> None:
    """The library's own segmentation is the oracle where nothing is left out."""
    config = TokenizerConfig(kind="bpe", vocab_size=304, user_defined_symbols=SYMBOLS)
    tokenizer = SentencePieceTokenizer.train(config, texts(), seed=1)
    lines = [*texts(), "ünïcode 漢字 a"]
    assert tokenizer.sample(lines, 0.0, 1) == [tokenizer.encode(line) for line in lines]


def test_unigram_draws_each_segmentation_as_often_as_it_should() -> None:
    """The library's best segmentation is the most frequent one with a high power; with 0 all are alike."""
    config = TokenizerConfig(kind="unigram", vocab_size=304)
    tokenizer = SentencePieceTokenizer.train(config, [line.replace("<name>", "ab") for line in texts()], seed=1)
    drawn = Counter(map(tuple, tokenizer.sample(["abc"] * 2000, 0.99, 1)))
    assert drawn.most_common(1)[0][0] == tuple(tokenizer.encode("abc"))
    alike = Counter(map(tuple, tokenizer.sample(["abc"] * 2000, 0.0, 1)))
    assert min(alike.values()) > 0.5 * 2000 / len(alike)
