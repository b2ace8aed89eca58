"""Which characters of a text each of its tokens stands for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.tokenizer import SourceTokenizer
from dragoman.vocabulary import BYTE_TOKENS, SPECIAL_TOKENS, PlainVocabulary, SentencePieceVocabulary

LETTERS = PlainVocabulary("character", (*SPECIAL_TOKENS, *"abc"))
BYTES = PlainVocabulary("character", (*SPECIAL_TOKENS, *BYTE_TOKENS, *"abc"))
PHONEMES = PlainVocabulary("piece", (*SPECIAL_TOKENS, "AO", "L", "S", "TH"))


@pytest.mark.parametrize(
    ("vocabulary", "text", "spans"),
    [
        (LETTERS, "cab", [(0, 1), (1, 2), (2, 3)]),
        (BYTES, "aéb", [(0, 1), (1, 2), (1, 2), (2, 3)]),
        (PHONEMES, " S  AO TH", [(1, 2), (4, 6), (7, 9)]),
    ],
)
def test_a_plain_token_stands_for_its_character_or_piece(vocabulary, text, spans):
    """Worked examples: the bytes of a character all stand for it; blanks between pieces belong to none."""
    assert vocabulary.spans(text) == spans
    assert len(vocabulary.encode(text)) == len(spans)


def test_an_encoded_text_knows_its_own_tokens():
    """Without those of the template."""
    tokenizer = SourceTokenizer(LETTERS, (1,), (2, 2))
    source = tokenizer.encode("ab")
    own = source[tokenizer.own(source)]
    assert tokenizer.tokens(own) == ["a", "b"] and tokenizer.spans("ab") == [(0, 1), (1, 2)]


@pytest.fixture
def vocabulary_of(sentencepiece_model):
    return lambda *options: SentencePieceVocabulary(sentencepiece_model(*options))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@given(words=st.lists(st.sampled_from(["the", "green", "dog", "straße", "12", "🦩", "日本", " "]), max_size=8))
def test_a_subword_stands_for_its_own_text(sentencepiece_model, kind, words):
    """Without a rule that changes the text, the characters of a span are its token's text, however many blanks
    there are; and all that is not blank is in some span."""
    vocabulary = SentencePieceVocabulary(sentencepiece_model(kind))
    text = " ".join(words)
    spans = vocabulary.spans(text)
    covered = set()
    for index, (start, end) in zip(vocabulary.encode(text), spans, strict=True):
        piece = vocabulary.pieces[index]
        if isinstance(piece, bytes):
            assert piece in text[start:end].encode() and end - start == 1
        else:
            assert text[start:end] == piece.strip()
        covered.update(range(start, end))
    assert covered == {position for position, character in enumerate(text) if character != " "}


def test_spans_are_of_the_text_before_a_rule_changed_it(vocabulary_of):
    """One character became two letters, and three dots: their tokens stand for the character that was typed."""
    vocabulary = vocabulary_of("bpe", True, "nfkc")
    names = [vocabulary.tokens[index] for index in vocabulary.encode("Ⅳ …")]
    assert list(zip(names, vocabulary.spans("Ⅳ …"), strict=True)) == [
        ("\u2581", (0, 0)),
        ("<0x49>", (0, 1)),
        ("<0x56>", (0, 1)),
        ("\u2581", (2, 2)),
        ("<0x2E>", (2, 3)),
        ("<0x2E>", (2, 3)),
        ("<0x2E>", (2, 3)),
    ]
