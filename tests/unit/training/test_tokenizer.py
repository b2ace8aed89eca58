"""Plain tokenizers: ids, round trips and the file format."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_training.errors import CheckpointError
from dragoman_training.tokenizer import SPECIAL_IDS, PlainTokenizer


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
    tokenizer.save(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8")) == {
        "kind": "plain",
        "unit": "character",
        "tokens": ["<pad>", "<s>", "</s>", "<unk>", "n", "é"],
    }
    assert PlainTokenizer.load(tmp_path / "t.json").tokens == tokenizer.tokens


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
        PlainTokenizer.load(tmp_path / "t.json")
