"""Plain vocabularies and SentencePiece models: ids, round trips and files."""

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dragoman_training import tokenizer
from dragoman_training.config import TokenizerConfig
from dragoman_training.errors import CheckpointError, DataError
from dragoman_training.protobuf import message_fields
from dragoman_training.tokenizer import (
    LONGEST_LINE,
    SPECIAL_IDS,
    PlainTokenizer,
    SentencePieceTokenizer,
    SpecialIds,
    drawn_lines,
    file_names,
    load_tokenizer,
    train_tokenizers,
)

KINDS = ("unigram", "bpe")
WORDS = ["".join(random.Random(n).choices("abcdefgh", k=2 + n % 5)) for n in range(80)]
LINES = [" ".join([*random.Random(n).choices(WORDS, k=6), str(n)]) for n in range(300)]
CONFIG = TokenizerConfig(kind="bpe", vocab_size=320, user_defined_symbols=("<name>", "%d,"))


@pytest.fixture(scope="module")
def pieces() -> Callable[..., SentencePieceTokenizer]:
    """Train a tokenizer on invented words, once for each configuration."""
    trained: dict[TokenizerConfig, SentencePieceTokenizer] = {}

    def train(**changes: object) -> SentencePieceTokenizer:
        config = replace(CONFIG, **changes)  # type: ignore[arg-type]  # a dict of mixed values
        if config not in trained:
            trained[config] = SentencePieceTokenizer.train(config, LINES, seed=1)
        return trained[config]

    return train


def test_specials_come_first_and_tokens_in_code_point_order() -> None:
    """The vocabulary is a pure function of the set of tokens."""
    assert PlainTokenizer.build("piece", ["S L", "AO  S"]).tokens == ("<pad>", "<s>", "</s>", "<unk>", "AO", "L", "S")


@given(st.text(max_size=20))
def test_characters_round_trip(text: str) -> None:
    """Any text comes back unchanged from a vocabulary that holds its characters: nothing is normalised."""
    tokenizer = PlainTokenizer.build("character", [text])
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.text(st.characters(exclude_characters=" "), min_size=1, max_size=5), max_size=6))
def test_pieces_round_trip(pieces: list[str]) -> None:
    """Pieces separated by one blank come back unchanged unless one looks like a special."""
    tokenizer = PlainTokenizer.build("piece", [" ".join(pieces)])
    if not set(pieces) & {"<pad>", "<s>", "</s>", "<unk>"}:
        assert tokenizer.decode(tokenizer.encode(" ".join(pieces))) == " ".join(pieces)


def test_text_that_looks_like_a_special_is_text() -> None:
    """``<s>`` in the data never becomes the id of ``<s>``."""
    characters = PlainTokenizer.build("character", ["<s>"])
    assert min(characters.encode("<s>")) > SPECIAL_IDS.unk
    pieces = PlainTokenizer.build("piece", ["A <s> </s> B"])
    assert len(pieces) == 6
    assert pieces.encode("A <s> </s> B") == [4, SPECIAL_IDS.unk, SPECIAL_IDS.unk, 5]


def test_unknown_tokens_become_unk() -> None:
    """What is outside the vocabulary encodes to ``<unk>`` and shows as U+FFFD."""
    tokenizer = PlainTokenizer.build("character", ["ab"])
    assert tokenizer.encode("axbx") == [4, 3, 5, 3]
    assert tokenizer.decode([1, 4, 3, 2, 0]) == "a\ufffd"


def test_the_file_holds_kind_unit_and_tokens(tmp_path: Path) -> None:
    """The format that the service reads, and back."""
    tokenizer = PlainTokenizer.build("character", ["né"])
    (tmp_path / "t.json").write_bytes(tokenizer.to_bytes())
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8")) == {
        "kind": "plain",
        "unit": "character",
        "tokens": ["<pad>", "<s>", "</s>", "<unk>", "n", "é"],
    }
    loaded = load_tokenizer(tmp_path / "t.json")
    assert isinstance(loaded, PlainTokenizer) and loaded.tokens == tokenizer.tokens
    assert (loaded.kind, loaded.normalization) == ("plain", "identity")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"kind": "plain", "unit": "piece"}',
        '{"kind": "sentencepiece", "unit": "piece", "tokens": ["<pad>", "<s>", "</s>", "<unk>"]}',
        '{"kind": "plain", "unit": "word", "tokens": ["<pad>", "<s>", "</s>", "<unk>"]}',
        '{"kind": "plain", "unit": "piece", "tokens": ["<s>", "<pad>", "</s>", "<unk>"]}',
        '{"kind": "plain", "unit": "piece", "tokens": ["<pad>", "<s>", "</s>", "<unk>", "A", "A"]}',
        '{"kind": "plain", "unit": "piece", "tokens": ["<pad>", "<s>", "</s>", "<unk>", "<s>"]}',
        '{"kind": "plain", "unit": "character", "tokens": ["<pad>", "<s>", "</s>", "<unk>", "ab"]}',
        '{"kind": "plain", "unit": "piece", "tokens": ["<pad>", "<s>", "</s>", "<unk>", "a b"]}',
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    """Anything but the format is an error that names the file."""
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"t\.json"):
        load_tokenizer(tmp_path / "t.json")


def test_special_ids_of_older_checkpoints_have_the_defaults_of_later_fields() -> None:
    """And all come back as they were written, which JSON has lists for."""
    old = {"pad": 0, "bos": 1, "eos": 2, "unk": 3, "decoder_start": 1, "unused": [6, 7]}
    assert SpecialIds.from_record(old) == SpecialIds(unused=(6, 7))
    assert SpecialIds(unused=(6, 7)).source([4, 5]) == [4, 5, 2]
    other = SpecialIds(pad=9, bos=9, eos=0, unk=1, decoder_start=9, producible=(1,), source_start=(5,), source_end=())
    assert SpecialIds.from_record(json.loads(json.dumps(other.as_dict()))) == other
    assert other.never_produced == (9,) and other.source([4]) == [5, 4]
    with pytest.raises(TypeError, match=r"lacks special_ids\.unk"):
        SpecialIds.from_record({name: ids for name, ids in old.items() if name != "unk"})


# -- SentencePiece ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_has_the_size_asked_for_and_the_specials_first(
    pieces: Callable[..., SentencePieceTokenizer], kind: str
) -> None:
    """The special ids are the same for all kinds of tokenizers."""
    tokenizer = pieces(kind=kind)
    assert len(tokenizer) == 320
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.to_bytes())
    assert [processor.id_to_piece(index) for index in range(4)] == ["<pad>", "<s>", "</s>", "<unk>"]
    assert (tokenizer.kind, tokenizer.normalization) == ("sentencepiece", "identity")


def without_superfluous_blanks(text: str) -> str:
    """What SentencePiece leaves of a text's blanks; U+2581 is its own mark of one."""
    return " ".join(part for part in text.replace("\u2581", " ").split(" ") if part)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=20))
@example(text="I ♥ 🦩 and ᚠ")
@example(text="Ⅳ … ﬁne ２０ m² ½ ™ e\u0301")
@example(text="a\rb\u2028c\x85d\x00\ufeff\u202e")
def test_any_text_round_trips_with_byte_fallback(
    pieces: Callable[..., SentencePieceTokenizer], kind: str, text: str
) -> None:
    """Nothing but superfluous blanks is lost, and nothing becomes ``<unk>``, whatever the vocabulary lacks."""
    tokenizer = pieces(kind=kind)
    ids = tokenizer.encode(text)
    assert min(ids, default=4) > SPECIAL_IDS.unk
    assert tokenizer.decode(ids) == without_superfluous_blanks(text)


def test_without_byte_fallback_the_unknown_shows_as_u_fffd(pieces: Callable[..., SentencePieceTokenizer]) -> None:
    """One sign for each unknown stretch; no text of the library's own."""
    tokenizer = pieces(byte_fallback=False, vocab_size=200)
    ids = tokenizer.encode("ab ♥ ba")
    assert ids.count(SPECIAL_IDS.unk) == 1
    assert tokenizer.decode(ids) == "ab \ufffd ba"


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_looks_like_a_special_or_a_byte_piece_is_text(
    pieces: Callable[..., SentencePieceTokenizer], kind: str
) -> None:
    """It neither ends a sequence nor changes."""
    text = "Please print </s> and <pad> <s> <unk> <0x0A> now"
    ids = pieces(kind=kind).encode(text)
    assert min(ids) > SPECIAL_IDS.unk
    assert pieces(kind=kind).decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_specials_leave_no_trace_in_decoded_text(pieces: Callable[..., SentencePieceTokenizer], kind: str) -> None:
    """Padding and the sequence's ends are no text; broken UTF-8 shows as U+FFFD."""
    tokenizer = pieces(kind=kind)
    ids = tokenizer.encode("ab ba")
    assert tokenizer.decode([1, *ids, 2, 0, 0]) == "ab ba"
    only_half = tokenizer.encode("é")[:-1]
    assert tokenizer.decode(only_half) == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_digits_are_split_unless_told_otherwise(kind: str) -> None:
    """A number that is seen all the time is still spelled digit by digit."""
    lines = [*LINES, *["2024 ab"] * 300]

    def digits(split: bool) -> list[str]:
        tokenizer = SentencePieceTokenizer.train(replace(CONFIG, kind=kind, split_digits=split), lines, seed=1)
        return [tokenizer.decode([index]) for index in tokenizer.encode("2024") if tokenizer.decode([index])]

    assert digits(split=True) == ["2", "0", "2", "4"]
    whole = digits(split=False)
    assert "".join(whole) == "2024" and len(whole) < 4


@pytest.mark.parametrize("kind", KINDS)
def test_user_defined_symbols_are_one_token_anywhere(pieces: Callable[..., SentencePieceTokenizer], kind: str) -> None:
    """At a word's start, inside it and twice in a row; one with a comma too."""
    tokenizer = pieces(kind=kind)
    names = [index for index in range(len(tokenizer)) if tokenizer.decode([index]) == "<name>"]
    numbers = [index for index in range(len(tokenizer)) if tokenizer.decode([index]) == "%d,"]
    (name,), (number,) = names, numbers
    for text, count in (("<name>", 1), ("ab<name>ba <name>", 2), ("<name><name>", 2)):
        assert tokenizer.encode(text).count(name) == count
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a%d,b").count(number) == 1


def test_the_normalisation_is_stored_in_the_model(
    pieces: Callable[..., SentencePieceTokenizer], tmp_path: Path
) -> None:
    """Identity is the default; another rule changes text, and the file tells which it is."""
    assert pieces().decode(pieces().encode("ﬁne ２０")) == "ﬁne ２０"
    (tmp_path / "t.model").write_bytes(pieces(normalization="nfkc").to_bytes())
    loaded = load_tokenizer(tmp_path / "t.model")
    assert loaded.normalization == "nfkc"
    assert loaded.decode(loaded.encode("ﬁne ２０")) == "fine 20"


def test_the_reader_of_model_files_skips_all_types_of_fields() -> None:
    """By hand: field 1 a number, 2 fixed 64 bits, 3 a text, 4 fixed 32 bits, 3 again, then 300 bytes in field 20."""
    message = b"\x08\x96\x01" + b"\x11" + bytes(8) + b"\x1a\x02ab" + b"\x25" + bytes(4) + b"\x1a\x01c"
    assert message_fields(message + b"\xa2\x01\xac\x02" + b"z" * 300) == {3: b"c", 20: b"z" * 300}
    with pytest.raises(IndexError):
        message_fields(b"\x08\x96")


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_repeats_with_its_seed_and_differs_between_seeds(
    pieces: Callable[..., SentencePieceTokenizer], kind: str
) -> None:
    """Every segmentation spells the same text; the best one is not touched."""
    tokenizer = pieces(kind=kind)
    best = [tokenizer.encode(text) for text in LINES]
    first = tokenizer.sample(LINES, 0.2, seed=7)
    assert first == tokenizer.sample(LINES, 0.2, seed=7)
    assert first != best
    assert first != tokenizer.sample(LINES, 0.2, seed=8)
    assert [tokenizer.decode(ids) for ids in first] == LINES
    assert [tokenizer.encode(text) for text in LINES] == best


def test_training_repeats_bit_for_bit(pieces: Callable[..., SentencePieceTokenizer]) -> None:
    """The same text and seed give the same file."""
    again = SentencePieceTokenizer.train(CONFIG, iter(LINES), seed=1)
    assert again.to_bytes() == pieces().to_bytes()


def test_a_sample_of_the_text_repeats_in_every_process() -> None:
    """More text than is looked at: two new processes learn the same from it, and another seed something else."""
    program = (
        "import hashlib, random\n"
        "from dragoman_training import tokenizer\n"
        "from dragoman_training.config import TokenizerConfig\n"
        "tokenizer.TRAINING_LINES = 150\n"
        "words = [''.join(random.Random(n).choices('abcdefgh', k=2 + n % 5)) for n in range(80)]\n"
        "lines = [' '.join(random.Random(n).choices(words, k=6)) for n in range(600)]\n"
        "for kind in ('unigram', 'bpe'):\n"
        "    for seed in (1, 2):\n"
        "        config = TokenizerConfig(kind=kind, vocab_size=320)\n"
        "        model = tokenizer.SentencePieceTokenizer.train(config, lines, seed).to_bytes()\n"
        "        print(hashlib.sha256(model).hexdigest())\n"
    )
    command = [sys.executable, "-c", program]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == second
    assert len(set(first.split())) == 4


@given(
    lengths=st.lists(st.integers(1, 9), max_size=40), most_lines=st.integers(1, 30), most_characters=st.integers(9, 99)
)
def test_a_sample_of_lines_keeps_their_order_and_both_limits(
    lengths: list[int], most_lines: int, most_characters: int
) -> None:
    """As large as the limits allow; all lines where they fit."""
    lines = [f"{place:02d}" * 5 for place, _ in enumerate(lengths)]
    lines = [line[:2] + line[2 : 1 + length] for line, length in zip(lines, lengths, strict=True)]
    found = drawn_lines(iter(lines), most_lines, most_characters, random.Random(1))
    assert found == sorted(found) and set(found) <= set(lines) and len(set(found)) == len(found)
    characters = len("".join(found))
    assert len(found) <= most_lines and characters <= most_characters
    assert found == lines or len(found) == most_lines or characters > most_characters - 11


@pytest.mark.parametrize("limits", [(40, 10_000), (1000, 220)])
def test_every_line_is_drawn_as_often_as_any_other(limits: tuple[int, int]) -> None:
    """By the number of lines and by that of characters: wherever it stands, and however long it is."""
    lines = [f"{place:02d}" + "x" * (place % 2 * 7) for place in range(80)]  # 440 characters
    counts = Counter(line for seed in range(1000) for line in drawn_lines(lines, *limits, random.Random(seed)))
    assert len(counts) == 80
    assert all(abs(count - 500) < 80 for count in counts.values())  # five standard deviations


def test_lines_that_are_not_looked_at_take_no_place_in_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank ones and those too long for the library: the vocabulary is that of the others."""
    monkeypatch.setitem(tokenizer.TRAINING_CHARACTERS, "bpe", sum(map(len, LINES)))
    lines = [text for line in LINES for text in (line, " ", "é" * (LONGEST_LINE // 2 + 1))]
    expected = SentencePieceTokenizer.train(CONFIG, LINES, seed=1)
    assert SentencePieceTokenizer.train(CONFIG, lines, seed=1).to_bytes() == expected.to_bytes()


def test_threads_share_a_tokenizer(pieces: Callable[..., SentencePieceTokenizer]) -> None:
    """Each thread gets what one alone gets."""
    tokenizer = pieces()
    alone = [tokenizer.encode(text) for text in LINES]
    with ThreadPoolExecutor(4) as pool:
        for together in pool.map(lambda _: [tokenizer.encode(text) for text in LINES], range(8)):
            assert together == alone


@pytest.mark.parametrize("kind", KINDS)
def test_too_little_text_is_refused_with_the_size_asked_for(kind: str) -> None:
    """The message names the setting."""
    with pytest.raises(DataError, match=r"tokenizer\.vocab_size = 320 tokens: lower it, or add text \(Vocabulary size"):
        SentencePieceTokenizer.train(replace(CONFIG, kind=kind), ["ab ba"], seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_too_many_characters_for_the_vocabulary_ask_for_a_larger_one(kind: str) -> None:
    """Four specials, 256 bytes, the mark of a blank and twelve letters are 273."""
    config = replace(CONFIG, kind=kind, vocab_size=264, user_defined_symbols=())
    with pytest.raises(DataError, match=r"vocab_size is 264: the characters .* are 273: raise it, or lower"):
        SentencePieceTokenizer.train(config, ["abcdef ghijkl"] * 5, seed=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lines", [[], [" ", ""], ["long " * 1000], ["\u2585 \u2585"]])
def test_text_without_a_line_to_learn_from_is_told_apart_from_too_little(kind: str, lines: list[str]) -> None:
    """Nothing, blank lines, lines longer than the library looks at."""
    with pytest.raises(DataError, match=r"no line to learn .*blank or over 4192 bytes: add text, or divide long lines"):
        SentencePieceTokenizer.train(replace(CONFIG, kind=kind), lines, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_lines_with_the_library_s_reserved_character_are_learned_from(kind: str) -> None:
    """Left to itself, it passes over them without a word: the vocabulary is that of the same text with blanks."""
    config = replace(CONFIG, kind=kind, vocab_size=264, user_defined_symbols=())
    marked, blank = (SentencePieceTokenizer.train(config, [f"ab{mark}ba", "cab cab"] * 5, seed=1) for mark in "\u2585 ")
    assert marked.to_bytes() == blank.to_bytes()
    assert marked.decode(marked.encode("a\u2585b")) == "a\u2585b"


def test_an_error_of_the_text_comes_through() -> None:
    """What reading raises comes through."""

    def broken() -> Iterator[str]:
        yield "ab"
        raise DataError("line 2 is not UTF-8")

    with pytest.raises(DataError, match=r"^line 2 is not UTF-8"):
        SentencePieceTokenizer.train(CONFIG, broken(), seed=1)


def test_joint_sides_share_one_tokenizer_and_one_file() -> None:
    """It knows the letters of both sides; separate ones know their own only, in two files."""
    pairs = [(line, line.upper()) for line in LINES]
    config = replace(CONFIG, byte_fallback=False, vocab_size=120, user_defined_symbols=())
    source_tokenizer, target_tokenizer = train_tokenizers(config, lambda: pairs, seed=1)
    assert source_tokenizer is target_tokenizer
    assert SPECIAL_IDS.unk not in source_tokenizer.encode("ab AB")
    assert set(file_names(source_tokenizer, target_tokenizer).values()) == {"tokenizer.model"}

    source_tokenizer, target_tokenizer = train_tokenizers(replace(config, joint=False), lambda: pairs, seed=1)
    assert SPECIAL_IDS.unk not in source_tokenizer.encode("ab") + target_tokenizer.encode("AB")
    assert SPECIAL_IDS.unk in source_tokenizer.encode("AB") and SPECIAL_IDS.unk in target_tokenizer.encode("ab")
    assert file_names(source_tokenizer, target_tokenizer) == {
        "source": "source.tokenizer.model",
        "target": "target.tokenizer.model",
    }


def test_damaged_models_and_other_special_ids_are_refused_by_name(
    pieces: Callable[..., SentencePieceTokenizer], tmp_path: Path
) -> None:
    """An empty, cut or foreign file, and a model whose specials stand elsewhere."""
    model = pieces().to_bytes()
    processor_default = model.replace(b"<pad>", b"<pas>")
    for content in (b"", b"no model", model[:-10], model[: len(model) // 2], processor_default):
        (tmp_path / "t.model").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"t\.model is no tokenizer file"):
            load_tokenizer(tmp_path / "t.model")
