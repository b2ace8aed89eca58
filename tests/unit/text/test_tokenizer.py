"""Text to ids and back with plain vocabularies: exact, with a side, and never half a character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import BundleError, InvalidRequestError
from dragoman.tokenizer import IncrementalDetokenizer, SourceTokenizer, TargetTokenizer
from dragoman.vocabulary import BYTE_TOKENS, SPECIAL_TOKENS, PlainVocabulary, load_vocabulary

LETTERS = PlainVocabulary("character", (*SPECIAL_TOKENS, *"abc'<>/s"))
BYTES = PlainVocabulary("character", (*SPECIAL_TOKENS, *BYTE_TOKENS, *"abcn"))
PHONEMES = PlainVocabulary("piece", (*SPECIAL_TOKENS, "AO", "L", "S", "TH"))
EOS = (2,)


def byte_ids(text):
    return [4 + byte for byte in text.encode()]


def test_characters_become_ids_between_the_template():
    """Worked example: ids are positions in the vocabulary, the end token closes the source."""
    assert SourceTokenizer(LETTERS, (), EOS).encode("cab'") == (6, 4, 5, 7, 2)


def test_pieces_are_joined_with_blanks():
    """Worked example: phonemes come back as one blank-separated text; special tokens have no text."""
    target = TargetTokenizer(PHONEMES)
    assert target.decode([1, 6, 5, 4, 7, 2]) == "S L AO TH"
    assert target.tokens([6, 5]) == ["S", "L"]


def test_blanks_between_pieces_are_borders_and_no_pieces():
    """Two blanks in a row, or blanks at an end, add no empty piece."""
    assert SourceTokenizer(PHONEMES, (), EOS).encode(" S  L ") == (6, 5, 2)


def test_a_huge_unknown_piece_is_named_in_part():
    """The message stays short, whatever the piece."""
    with pytest.raises(InvalidRequestError) as caught:
        SourceTokenizer(PHONEMES, (), EOS).encode("🦥" * 15_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("special", SPECIAL_TOKENS)
def test_special_tokens_cannot_be_typed(special):
    """A control token written as text is plain characters, or refused as such; its id never appears."""
    vocabulary = PlainVocabulary("character", (*SPECIAL_TOKENS, *dict.fromkeys("".join(SPECIAL_TOKENS))))
    ids = SourceTokenizer(vocabulary, (), EOS).encode(special)
    assert all(index >= len(SPECIAL_TOKENS) for index in ids[:-1])
    with pytest.raises(InvalidRequestError):
        SourceTokenizer(PHONEMES, (), EOS).encode(special)


def test_unknown_characters_are_named_once_each():
    """The message names them, with their code points, and says what is known."""
    with pytest.raises(InvalidRequestError) as caught:
        SourceTokenizer(LETTERS, (), EOS).encode("aXé bXb")
    message = str(caught.value)
    assert "'X' (U+0058), 'é' (U+00E9), ' ' (U+0020)" in message
    assert message.count("U+0058") == 1
    assert "it knows [a b c" in message


def test_the_list_of_unknown_characters_is_bounded():
    """A text of a thousand unknown characters gives a short message."""
    text = "".join(chr(0x4E00 + i) for i in range(1000))
    with pytest.raises(InvalidRequestError, match="and 990 more") as caught:
        SourceTokenizer(LETTERS, (), EOS).encode(text)
    assert len(str(caught.value)) < 600


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_fallback_round_trips_every_text(text):
    """With byte tokens any Unicode text is encoded and decoded back unchanged."""
    ids = SourceTokenizer(BYTES, (), ()).encode(text)
    assert TargetTokenizer(BYTES).decode(ids) == text


@given(st.lists(st.integers(0, len(BYTES.tokens) - 1), max_size=40), st.data())
def test_joined_pieces_equal_the_whole_text(ids, data):
    """However the ids are cut into updates: the pieces joined are the text of all ids at once."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    detokenizer = IncrementalDetokenizer(TargetTokenizer(BYTES))
    pieces = [detokenizer.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    pieces.append(detokenizer.close())
    assert "".join(pieces) == TargetTokenizer(BYTES).decode(ids)


def test_no_half_character_is_given_out():
    """Byte by byte, each piece is whole characters: no replacement character appears."""
    text = "naïve 👩‍👩‍👧 日本 ď"
    detokenizer = IncrementalDetokenizer(TargetTokenizer(BYTES))
    pieces = [detokenizer.push([index]) for index in byte_ids(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.close() == ""


def test_a_tail_cut_short_is_replaced_at_the_end():
    """Two of four bytes, then the end: nothing until the close, then one U+FFFD for each, streamed or not."""
    ids = [*byte_ids("a"), *byte_ids("👩")[:2]]
    detokenizer = IncrementalDetokenizer(TargetTokenizer(BYTES))
    assert detokenizer.push(ids) == "a"
    assert detokenizer.close() == "\ufffd\ufffd"
    assert TargetTokenizer(BYTES).decode(ids) == "a\ufffd\ufffd"


def test_several_streams_do_not_share_state():
    """Two detokenizers of one tokenizer, fed in turns, each give their own text."""
    tokenizer = TargetTokenizer(BYTES)
    texts = ("日本", "ďábel")
    streams = [IncrementalDetokenizer(tokenizer) for _ in texts]
    out = ["", ""]
    for step in range(10):
        for i, text in enumerate(texts):
            out[i] += streams[i].push(byte_ids(text)[step : step + 1])
    assert out == list(texts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no plain vocabulary"),
        ('{"kind": "sentencepiece"}', "kind is 'sentencepiece'"),
        (json.dumps({"kind": "plain", "unit": "word", "tokens": list(SPECIAL_TOKENS)}), "unit is 'word'"),
        (json.dumps({"kind": "plain", "unit": "piece", "tokens": ["a", "b"]}), "must start with <pad>"),
        (json.dumps({"kind": "plain", "unit": "piece", "tokens": [*SPECIAL_TOKENS, "a", "a"]}), "twice"),
        (json.dumps({"kind": "plain", "unit": "piece", "tokens": [*SPECIAL_TOKENS, 7]}), "no text"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, content, message):
    """Each refusal names the file and the fault."""
    path = tmp_path / "source.json"
    path.write_text(content)
    with pytest.raises(BundleError, match=rf"source\.json: .*{message}"):
        load_vocabulary("plain", path)


def test_a_file_of_an_unknown_kind_is_refused(tmp_path):
    """The message says what could be read."""
    with pytest.raises(BundleError, match=r"a\.bin: tokenizer kind is 'wordpiece'; .* reads plain, sentencepiece"):
        load_vocabulary("wordpiece", tmp_path / "a.bin")


def test_a_missing_file_is_named(tmp_path):
    """With its folder."""
    with pytest.raises(BundleError, match=r"cannot read .*/gone\.json: No such file"):
        load_vocabulary("plain", tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("vocabulary", "policy"),
    [
        (LETTERS, "refuse"),
        (BYTES, "byte_fallback"),
        (PlainVocabulary("character", (*SPECIAL_TOKENS, *BYTE_TOKENS[1:])), "refuse"),
        (PlainVocabulary("piece", (*SPECIAL_TOKENS, *BYTE_TOKENS)), "refuse"),
    ],
)
def test_the_policy_for_unknown_characters_is_the_vocabularys(vocabulary, policy):
    """It falls back to bytes if it has them all, unless tokens are pieces, whose borders bytes would lose."""
    assert vocabulary.unknown_policy == policy


@pytest.mark.parametrize(
    ("vocabulary", "message"), [(LETTERS, r"U\+D800"), (BYTES, r"lone surrogate U\+D800 at character 1")]
)
def test_a_lone_surrogate_is_refused_by_name(vocabulary, message):
    """No UTF-8 text holds one; it never becomes an error of another kind."""
    with pytest.raises(InvalidRequestError, match=message):
        SourceTokenizer(vocabulary, (), EOS).encode("a\ud800b")
