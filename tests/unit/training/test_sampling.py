"""Random segmentation: what is drawn, and that a seed decides it in every process."""

import math
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sentencepiece

from dragoman_training.config import TokenizerConfig
from dragoman_training.tokenizer import SPECIAL_IDS, SentencePieceTokenizer

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
    """They are the library's own; what is drawn spells what its best segmentation spells."""
    for text in ("a \u2581 b", "\u2581", "a\u2581"):
        (ids,) = tokenizer.sample([text], 0.3, 1)
        assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_without_dropout_bpe_merges_as_the_library_does(byte_fallback: bool) -> None:
    """The library's own segmentation is the oracle where nothing is left out; one ``<unk>`` for an unknown stretch."""
    vocab_size = 304 if byte_fallback else 48
    config = TokenizerConfig(
        kind="bpe", vocab_size=vocab_size, byte_fallback=byte_fallback, user_defined_symbols=SYMBOLS
    )
    tokenizer = SentencePieceTokenizer.train(config, texts(), seed=1)
    lines = [*texts(), "ünïcode 漢字 a", "漢字漢 字", "a漢字b漢", "漢<name>字字"]
    assert tokenizer.sample(lines, 0.0, 1) == [tokenizer.encode(line) for line in lines]


def test_an_unknown_stretch_is_one_token_in_any_segmentation() -> None:
    """Training must not see rows of ``<unk>`` that neither validation nor use ever shows."""
    for kind in ("bpe", "unigram"):
        config = TokenizerConfig(kind=kind, vocab_size=40, byte_fallback=False)
        tokenizer = SentencePieceTokenizer.train(config, [line.replace("<name>", "ab") for line in texts()], seed=1)
        for seed in range(5):
            (ids,) = tokenizer.sample(["ab漢字漢ab"], 0.5, seed)
            assert ids.count(SPECIAL_IDS.unk) == 1


@pytest.mark.parametrize("sampling", [0.3, 0.6])
def test_bpe_leaves_out_merges_as_often_as_it_should(sampling: float) -> None:
    """Oracle: the chances of all segmentations of a word, added up over every possible course of events."""
    tokenizer = SentencePieceTokenizer.train(TokenizerConfig(kind="bpe", vocab_size=304), texts(), seed=1)
    library = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.to_bytes())
    ranks = {library.id_to_piece(i): -library.get_score(i) for i in range(260, len(tokenizer))}

    def chances(symbols: tuple[str, ...]) -> dict[tuple[str, ...], float]:
        places = [i for i in range(len(symbols) - 1) if symbols[i] + symbols[i + 1] in ranks]
        places.sort(key=lambda i: (ranks[symbols[i] + symbols[i + 1]], i))
        found: dict[tuple[str, ...], float] = {}
        left = 1.0
        for i in places:  # the best one that is not left out
            merged = (*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :])
            for end, chance in chances(merged).items():
                found[end] = found.get(end, 0.0) + left * (1 - sampling) * chance
            left *= sampling
        found[symbols] = left
        return found

    words = sorted({word for line in texts() for word in line.split() if len(word) == 5 and word.isalnum()})
    word = max(words, key=lambda word: len(chances(("\u2581", *word))))
    expected = {ids_of(library, end): chance for end, chance in chances(("\u2581", *word)).items()}
    assert len(expected) > 3
    assert_drawn_in_proportion(tokenizer.sample([word] * 3000, sampling, 1), expected)


def ids_of(library: sentencepiece.SentencePieceProcessor, pieces: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(library.piece_to_id(piece) for piece in pieces)


def assert_drawn_in_proportion(drawn: list[list[int]], expected: dict[tuple[int, ...], float]) -> None:
    """Nothing but what is expected, each within five standard deviations of its chance."""
    counts = Counter(map(tuple, drawn))
    assert counts.keys() <= expected.keys()
    for ids, chance in expected.items():
        assert abs(counts[ids] / len(drawn) - chance) <= 5 * math.sqrt(chance * (1 - chance) / len(drawn)) + 1e-9


def test_unigram_draws_each_segmentation_as_often_as_it_should() -> None:
    """In proportion to its probability, as the library tells it, to the power ``sampling``; with 0 all are alike."""
    config = TokenizerConfig(kind="unigram", vocab_size=304)
    tokenizer = SentencePieceTokenizer.train(config, [line.replace("<name>", "ab") for line in texts()], seed=1)
    library = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.to_bytes())
    candidates = [tuple(ids) for ids in library.nbest_encode("abcd", nbest_size=64)]
    assert len(candidates) > 3
    for sampling in (0.0, 0.5, 0.9):
        weights = [math.exp(sampling * sum(map(library.get_score, ids))) for ids in candidates]
        expected = {ids: weight / sum(weights) for ids, weight in zip(candidates, weights, strict=True)}
        assert_drawn_in_proportion(tokenizer.sample(["abcd"] * 3000, sampling, 1), expected)
