"""SentencePiece models: text to ids and back, streamed or not, as the library itself has it."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from dragoman.errors import BundleError, InvalidRequestError
from dragoman.tokenizer import IncrementalDetokenizer, SourceTokenizer, TargetTokenizer
from dragoman.vocabulary import SPECIAL_TOKENS, UNK_ID, SentencePieceVocabulary, load_vocabulary

EOS = (2,)
KINDS = pytest.mark.parametrize("kind", ["unigram", "bpe"])
unchanged = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the models are never changed


@pytest.fixture
def vocabulary(sentencepiece_model):
    return lru_cache(lambda *options, **more: SentencePieceVocabulary(sentencepiece_model(*options, **more)))


def streamed(target, ids, cuts=()):
    """The text of the ids, given out piece by piece."""
    detokenizer = IncrementalDetokenizer(target)
    pieces = [detokenizer.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    return "".join([*pieces, detokenizer.close()])


@KINDS
def test_encoding_is_the_librarys_own_between_the_template(sentencepiece_model, kind):
    """The same ids as SentencePiece gives, closed by the end token, time after time: nothing is sampled."""
    model = sentencepiece_model(kind)
    expected = SentencePieceProcessor(model_proto=model).encode("the green garden über 12 {name}!")
    source = SourceTokenizer(SentencePieceVocabulary(model), (1,), EOS)
    for _ in range(3):
        assert source.encode("the green garden über 12 {name}!") == (1, *expected, 2)


@KINDS
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
@unchanged
def test_byte_fallback_round_trips_every_text(vocabulary, kind, text):
    """Whatever the characters, they come back; of blanks, one between words is left."""
    model = vocabulary(kind)
    ids = SourceTokenizer(model, (), ()).encode(text)
    words = [word for word in text.split(" ") if word]
    assert TargetTokenizer(model).decode(ids) == " ".join(words)


@KINDS
def test_text_that_looks_like_a_token_is_plain_text(vocabulary, kind):
    """Special, control and byte tokens cannot be typed: the characters come back, their ids never appear."""
    model = vocabulary(kind, control_symbols=("<2de>",))
    assert model.tokens.index("<2de>") > UNK_ID
    text = "Please print </s> and <pad> <2de> <s> <unk> <0x0A> now"
    ids = SourceTokenizer(model, (), ()).encode(text)
    assert TargetTokenizer(model).decode(ids) == text
    forbidden = [*range(len(SPECIAL_TOKENS)), model.tokens.index("<2de>"), model.tokens.index("<0x0A>")]
    assert set(ids).isdisjoint(forbidden)


def test_the_mark_for_a_blank_becomes_a_blank(vocabulary):
    """U+2581 typed by a caller is neither kept nor a fault: the text around it stays."""
    source = SourceTokenizer(vocabulary(), (), EOS)
    assert source.encode("dog\u2581tree") == source.encode("dog tree")
    assert source.encode("\u2581") == EOS


@KINDS
@pytest.mark.parametrize("normalization", ["identity", "nfkc"])
def test_characters_without_a_token_are_refused_as_they_were_typed(vocabulary, kind, normalization):
    """Without byte tokens the message names each unknown character once, before normalisation; no mark is left."""
    source = SourceTokenizer(vocabulary(kind, False, normalization), (), EOS)
    with pytest.raises(InvalidRequestError) as caught:
        source.encode("the ♥🦩 and Ⅷ ♥ ᚠ")
    message = str(caught.value)
    assert message.startswith("text holds '♥' (U+2665), '🦩' (U+1F9A9), 'Ⅷ' (U+2167), 'ᚠ' (U+16A0), which this model")
    assert "<unk>" not in message and "\u2047" not in message
    assert UNK_ID not in source.encode("the house")


def test_the_policy_for_unknown_characters_is_the_models(vocabulary):
    """A model with byte tokens falls back to them, one without refuses."""
    assert vocabulary("bpe", True).unknown_policy == "byte_fallback"
    assert vocabulary("bpe", False).unknown_policy == "refuse"


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_a_lone_surrogate_is_refused_by_name(vocabulary, byte_fallback):
    """No UTF-8 text holds one, and the library would fail without saying why."""
    source = SourceTokenizer(vocabulary("bpe", byte_fallback), (), EOS)
    with pytest.raises(InvalidRequestError, match=r"lone surrogate U\+D800 at character 2"):
        source.encode("ok\ud800end")


@pytest.mark.parametrize(
    ("normalization", "text"),
    [
        ("identity", "Ⅳ … ﬁne ２０ m² ½ ™"),
        ("nfkc", "IV ... fine 20 m2 1⁄2 TM"),
        ("nmt_nfkc_cf", "iv ... fine 20 m2 1⁄2 tm"),
    ],
)
def test_the_normalisation_is_known_by_name(vocabulary, normalization, text):
    """The model tells its rule, and the rule is what happens to a text."""
    model = vocabulary("bpe", True, normalization)
    assert model.normalization == normalization
    assert TargetTokenizer(model).decode(SourceTokenizer(model, (), ()).encode("Ⅳ … ﬁne ２０ m² ½ ™")) == text


@KINDS
@pytest.mark.parametrize("byte_fallback", [True, False])
@given(data=st.data())
@unchanged
def test_streamed_text_is_the_librarys_decode(sentencepiece_model, vocabulary, kind, byte_fallback, data):
    """Any ids, cut anywhere: the pieces joined are what SentencePiece makes of all ids at once."""
    library = SentencePieceProcessor(model_proto=sentencepiece_model(kind, byte_fallback))
    target = TargetTokenizer(vocabulary(kind, byte_fallback))
    blank = library.piece_to_id("\u2581")
    likely = [blank, *(library.piece_to_id(f"<0x{byte:02X}>") for byte in (0xC3, 0xA9, 0xE2, 0x99))]
    some_id = st.integers(0, len(library) - 1) | st.sampled_from(likely)  # blanks and parts of characters more often
    ids = data.draw(st.lists(some_id.filter(lambda index: index != UNK_ID), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    assert streamed(target, ids, cuts) == target.decode(ids) == library.decode(ids)


def test_only_the_blank_before_the_first_word_goes(vocabulary):
    """Worked example: each word brings its blank; the first one's is dropped, however late it comes."""
    model = vocabulary()
    target, blank = TargetTokenizer(model), model.tokens.index("\u2581")
    the, dog = model.tokens.index("\u2581the"), model.tokens.index("\u2581dog")
    detokenizer = IncrementalDetokenizer(target)
    assert [detokenizer.push([index]) for index in (1, blank, the, dog, blank)] == ["", "", "the", " dog", " "]
    assert detokenizer.close() == ""


def test_bytes_form_characters_across_tokens_and_others_are_replaced(vocabulary):
    """No half character is given out; each byte that is part of none is one U+FFFD; the word after them stays."""
    model = vocabulary()
    target = TargetTokenizer(model)
    ids = {byte: model.tokens.index(f"<0x{byte:02X}>") for byte in (0xF0, 0x9F, 0xA6, 0xA9, 0xC3)}
    detokenizer = IncrementalDetokenizer(target)
    pushed = [detokenizer.push([ids[byte]]) for byte in (0xF0, 0x9F, 0xA6, 0xA9, 0xC3)]
    assert pushed == ["", "", "", "🦩", ""]
    assert detokenizer.push([model.tokens.index("\u2581dog"), ids[0xF0], ids[0x9F]]) == "\ufffd dog"
    assert detokenizer.close() == "\ufffd\ufffd"


def test_the_unknown_token_has_no_text(vocabulary):
    """Neither its name nor U+2047 ever reaches an answer."""
    model = vocabulary("unigram", False)
    assert streamed(TargetTokenizer(model), [UNK_ID, model.tokens.index("\u2581the"), UNK_ID]) == "the"


def test_sixteen_threads_share_one_tokenizer(vocabulary):
    """500 encodings each, of texts of all lengths: every result is what one thread alone gets."""
    source = SourceTokenizer(vocabulary("unigram"), (), EOS)
    rng = random.Random(4)
    texts = [
        " ".join(rng.choices(["the", "house", "♥", "garden", "日本", "xyz"], k=rng.randint(1, 60))) for _ in range(500)
    ]
    expected = [source.encode(text) for text in texts]
    with ThreadPoolExecutor(16) as pool:
        orders = [rng.sample(range(500), 500) for _ in range(16)]
        outcomes = pool.map(lambda order: all(source.encode(texts[i]) == expected[i] for i in order), orders)
    assert all(outcomes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_id": 3, "unk_id": 0}, "must start with <pad> <s> </s> <unk>"),
        ({"pad_id": -1, "bos_id": 1, "unk_id": 0}, "must start with <pad>"),
        ({"user_defined_symbols": ("<s>",)}, "must be control tokens"),
        ({"add_dummy_prefix": False}, "add_dummy_prefix"),
        ({"remove_extra_whitespaces": False}, "remove_extra_whitespaces"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ],
)
def test_a_model_that_would_be_read_wrongly_is_refused(sentencepiece_model, tmp_path, options, message):
    """Other special ids, or options that give pieces another meaning: the file and the option are named."""
    (tmp_path / "target.model").write_bytes(sentencepiece_model(**options))
    with pytest.raises(BundleError, match=rf"target\.model: .*{message}"):
        load_vocabulary("sentencepiece", tmp_path / "target.model")


@pytest.mark.parametrize(
    "damage", [lambda m: b"", lambda m: b'{"kind": "plain"}', lambda m: m[:1000], lambda m: m[:-1]]
)
def test_a_file_that_is_no_model_is_refused(sentencepiece_model, tmp_path, damage):
    """Empty, of another kind, or cut short: the file is named, and nothing else breaks."""
    (tmp_path / "source.model").write_bytes(damage(sentencepiece_model()))
    with pytest.raises(BundleError, match=r"source\.model: "):
        load_vocabulary("sentencepiece", tmp_path / "source.model")
