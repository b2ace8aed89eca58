"""Vocabularies from elsewhere: pieces with ids from a list, special tokens at any place, tokens of languages."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from dragoman.errors import BundleError, InvalidRequestError
from dragoman.tokenizer import IncrementalDetokenizer, SourceTokenizer, TargetTokenizer
from dragoman.types import UnknownWords
from dragoman.vocabulary import BYTE_TOKENS, ListedVocabulary, PlainVocabulary, load_vocabulary
from dragoman_training.listed import ListedSentencePieceTokenizer
from dragoman_training.tokenizer import PlainTokenizer, load_tokenizer

WORDS = ["the", "dog", "runs", "small", "house", "日", ">>deu<<", "</s>"]
LIBRARY_IDS = {"pad_id": -1, "unk_id": 0, "bos_id": 1, "eos_id": 2}  # those of the library itself, as Marian's are
STRANGE = "\u2627\u2626"  # a special token of characters that the model does not know


def listed(model, *, without=()):
    """A vocabulary of a model's pieces in another order, two languages, and special tokens at both ends."""
    library = SentencePieceProcessor(model_proto=model)
    pieces = [library.id_to_piece(i) for i in range(library.get_piece_size())][3:]
    tokens = ["</s>", "<unk>", *sorted(set(pieces) - {*without}, reverse=True), ">>deu<<", ">>nld<<", STRANGE, "<pad>"]
    return tokens, [0, 1, len(tokens) - 2, len(tokens) - 1]


def vocabulary_of(model, **changes):
    tokens, special = listed(model, **changes)
    return ListedVocabulary(model, tokens, special, 1)


@pytest.fixture(scope="module")
def model(sentencepiece_model):
    return sentencepiece_model("unigram", False, **LIBRARY_IDS)


@pytest.fixture(scope="module")
def vocabulary(model):
    return vocabulary_of(model)


@pytest.fixture(scope="module")
def source(vocabulary):
    return SourceTokenizer(vocabulary, (), (0,))


def test_a_piece_has_the_id_of_its_place_in_the_list(model, source, vocabulary):
    """The library splits, the list counts; the template is the bundle's."""
    pieces = SentencePieceProcessor(model_proto=model).encode("the small dog runs", out_type=str)
    assert source.encode("the small dog runs") == (*map(vocabulary.tokens.index, pieces), 0)
    assert (vocabulary.normalization, vocabulary.unknown_policy) == ("identity", "refuse")


def test_what_the_list_lacks_is_unknown_and_named(model):
    """A piece that the model alone knows, as a whole; a character that neither knows."""
    lacking = vocabulary_of(model, without=["\u2581dog"])
    source = SourceTokenizer(lacking, (), (0,))
    with pytest.raises(InvalidRequestError, match=r"text holds 'dog', '日' \(U\+65E5\), which this model's source"):
        source.encode("the dog 日")
    ids = source.encode("the dog 日", UnknownWords.COPY)
    assert ids.count(1) == 2
    spans = source.spans("the dog 日")
    assert ["the dog 日"[a:b] for (a, b), index in zip(spans, ids, strict=False) if index == 1] == ["dog", "日"]


def test_a_character_that_only_the_list_knows_has_its_id(model):
    """The model leaves it in one piece; the list has a token of that name, as one joint list of two models may."""
    tokens, special = listed(model)
    vocabulary = ListedVocabulary(model, [*tokens, "日"], special, 1)
    assert vocabulary.encode("the日")[-1] == len(tokens)


def test_special_tokens_cannot_be_typed(source, vocabulary):
    """Also not by a run of unknown characters, which the model gives back as one piece of that name."""
    for text in (STRANGE, "</s>", "<pad>", "dog >>deu<<"):
        with pytest.raises(InvalidRequestError, match="text holds"):
            source.encode(text)
        ids = source.encode(text, UnknownWords.SUPPRESS)[:-1]
        assert 1 in ids and not {0, *range(vocabulary.tokens.index(">>deu<<"), len(vocabulary.tokens))} & {*ids}


def test_a_language_is_typed_or_named(source, vocabulary):
    """Either way its token comes first and is none of the text's own; a text of nothing else has none."""
    assert source.languages == ("deu", "nld")
    text = "the dog"
    (*own, end) = source.encode(text)
    expected = (vocabulary.tokens.index(">>deu<<"), *own, end)
    for given_text, language in ((text, "deu"), (f">>deu<< {text}", ""), (f">>deu<<{text}", "deu")):
        ids = source.encode(given_text, language=language)
        assert ids == expected
        assert list(ids[source.own(ids)]) == own
        assert [given_text[a:b] for a, b in source.spans(given_text)] == [text[a:b] for a, b in source.spans(text)]
    behind_a_start = SourceTokenizer(vocabulary, (1,), (0,))
    assert (ids := behind_a_start.encode(text, language="deu")) == (1, *expected) and list(
        ids[behind_a_start.own(ids)]
    ) == own
    nothing = source.encode(">>deu<<")
    assert source.own(nothing).start == source.own(nothing).stop


def test_a_language_that_there_is_not_is_refused_with_those_there_are(source):
    """Named or typed; and two at once are."""
    for text, language in (("dog", "fra"), (">>fra<< dog", "")):
        with pytest.raises(InvalidRequestError, match=r"'fra', which this model does not know: it has deu, nld$"):
            source.encode(text, language=language)
    with pytest.raises(InvalidRequestError, match="target_language is 'nld' and the text begins with >>deu<<"):
        source.encode(">>deu<< dog", language="nld")


def test_languages_of_pieces_between_blanks():
    """A plain vocabulary has them too; there, text was always able to begin with them."""
    vocabulary = PlainVocabulary("piece", ("</s>", "<unk>", ">>deu<<", "dog"), (0, 1), 1)
    source = SourceTokenizer(vocabulary, (), (0,))
    assert source.encode("dog", language="deu") == source.encode(">>deu<< dog") == (2, 3, 0)


@given(data=st.data())
def test_streamed_pieces_are_the_text_that_the_library_makes(vocabulary, model, data):
    """Special tokens and languages have none."""
    ids = data.draw(st.lists(st.integers(0, len(vocabulary.tokens) - 1), max_size=12))
    pieces = [vocabulary.tokens[i] for i in ids if vocabulary.pieces[i] is not None]
    detokenizer = IncrementalDetokenizer(TargetTokenizer(vocabulary))
    cut = data.draw(st.integers(0, len(ids)))
    streamed = detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.close()
    assert streamed == SentencePieceProcessor(model_proto=model).decode(pieces)


def test_bytes_are_bytes_where_the_list_has_them_all(sentencepiece_model):
    """A model with byte fallback, and a list with its byte tokens; with one byte less, the policy is to refuse."""
    model = sentencepiece_model("bpe", True, **LIBRARY_IDS)
    whole, lacking = vocabulary_of(model), vocabulary_of(model, without=[BYTE_TOKENS[0x9F]])
    text = "the dog 🦩"
    assert (whole.unknown_policy, lacking.unknown_policy) == ("byte_fallback", "refuse")
    assert TargetTokenizer(whole).decode(SourceTokenizer(whole, (), (0,)).encode(text)) == text
    assert whole.unknown_units(text) == ["🦩"]
    assert len(whole.spans(text)) == len(whole.encode(text)) and whole.spans(text)[-1] == (8, 9)
    with pytest.raises(InvalidRequestError, match="text holds '🦩'"):
        SourceTokenizer(lacking, (), (0,)).encode(text)


@given(text=st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join))
def test_training_reads_the_file_as_the_service_does(model, vocabulary, text):
    """The ids of any text that the service takes, and the text of these ids."""
    trained = ListedSentencePieceTokenizer(model, *listed(model), 1)
    try:
        served = SourceTokenizer(vocabulary, (), ()).encode(text, UnknownWords.SUPPRESS)
    except InvalidRequestError:
        return
    assert trained.encode(text) == list(served)
    known = [index for index in served if index != 1]
    assert trained.decode(known) == TargetTokenizer(vocabulary).decode(known)


def content(file, changes):
    tokens, special = listed(file)
    fields = {"kind": "sentencepiece+vocab", "model": base64.b64encode(file).decode(), "tokens": tokens}
    return json.dumps({**fields, "special": special, "unknown": 1, **changes})


def test_a_file_is_read_and_written_alike_by_both_sides(model, vocabulary, tmp_path):
    """What training wrote, with its own reader and with the service's."""
    path = tmp_path / "t.json"
    path.write_bytes(ListedSentencePieceTokenizer(model, *listed(model), 1).to_bytes())
    assert json.loads(path.read_bytes()) == json.loads(content(model, {}))
    assert load_tokenizer(path).to_bytes() == path.read_bytes()
    loaded = load_vocabulary("sentencepiece+vocab", path)
    assert (loaded.tokens, loaded.pieces, loaded.unknown_id) == (vocabulary.tokens, vocabulary.pieces, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "plain"}, "kind is 'plain'"),
        ({"model": "AAAA"}, "no SentencePiece model"),
        ({"model": "no base64"}, "no SentencePiece model with a vocabulary"),
        ({"tokens": ["</s>", "<unk>", "a", "a"], "special": [0, 1]}, "same token twice"),
        ({"tokens": ["</s>", "<unk>"]}, r"special ids \[\d+, \d+\], and 2 tokens"),
        ({"tokens": ["</s>", 7], "special": [0, 1]}, "token that is no text"),
        ({"unknown": 2}, "reads what it lacks as 2, which is none of its special ids"),
    ],
)
def test_a_bad_file_is_refused_by_name(model, tmp_path, changes, message):
    """Each refusal names the file and the fault."""
    path = tmp_path / "t.json"
    path.write_text(content(model, changes))
    with pytest.raises(BundleError, match=rf"t\.json: .*{message}"):
        load_vocabulary("sentencepiece+vocab", path)


# --- plain vocabularies with other special tokens


OTHER = PlainVocabulary("piece", ("<blank>", "<s>", "</s>", "the", "dog", "<unk>"), (0, 1, 2, 5), 5)


def test_special_tokens_of_a_plain_vocabulary_may_stand_anywhere():
    """They have no text, and no text becomes them; the last of these is what stands for the unknown."""
    source, target = SourceTokenizer(OTHER, (), ()), TargetTokenizer(OTHER)
    assert source.encode("dog the") == (4, 3)
    assert source.encode("dog </s> <unk> cat", UnknownWords.SUPPRESS) == (4, 5, 5, 5)
    with pytest.raises(InvalidRequestError, match="text holds '</s>', 'cat', which"):
        source.encode("dog </s> cat")
    assert target.decode([1, 3, 0, 5, 4, 2]) == "the dog"
    assert source.encode("") == ()


def test_training_writes_where_they_stand(tmp_path):
    """And nothing of it where they are the four that come first: such files are as ever."""
    path = tmp_path / "t.json"
    trained = PlainTokenizer("piece", OTHER.tokens, OTHER.special, OTHER.unknown_id)
    path.write_bytes(trained.to_bytes())
    assert load_vocabulary("plain", path) == OTHER
    loaded = load_tokenizer(path)
    assert loaded.encode("dog </s> cat the") == [4, 5, 5, 3] and loaded.decode([1, 3, 5, 4, 2]) == "the \ufffd dog"
    assert set(json.loads(PlainTokenizer.build("piece", ["a b"]).to_bytes())) == {"kind", "unit", "tokens"}
