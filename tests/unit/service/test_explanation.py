"""Where a model looks: tokens merged into words, and what is shown of their weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import InvalidRequestError, ModelUnsupportedError
from dragoman.explanation import Heatmap, Side, TokenAttention, draw, heatmap, name_sources, shown
from dragoman.heatmap import write_png
from dragoman.testing import scripted_model
from dragoman.tokenizer import TargetTokenizer
from dragoman.vocabulary import PlainVocabulary, SentencePieceVocabulary


def weights(*rows):
    return np.array(rows, np.float32)


def side(text, *tokens, has_words=True):
    """A side whose tokens stand for their own characters, one after another; "_" begins with a blank."""
    spans, position = [], 0
    for token in tokens:
        start = position + token.startswith("_")
        position += len(token)
        spans.append((start, position))
    assert position == len(text)
    return Side(text, tokens, tuple(spans), has_words)


def test_tokens_become_words():
    """Worked example: a word takes what its tokens get together, and the mean of what they give; marks stand alone."""
    attention = TokenAttention(
        source=side("The sloth.", "The", "_slo", "th", "."),
        target=side("Faultier.", "Faul", "tier", "."),
        before=(),
        after=("</s>",),
        weights=weights([0.1, 0.4, 0.2, 0.0, 0.3], [0.0, 0.5, 0.3, 0.1, 0.1], [0.0, 0.0, 0.0, 0.75, 0.25]),
    )
    found = heatmap(attention)
    assert found.source == ("The", "sloth", ".", "</s>")
    assert found.target == ("Faultier", ".")
    assert found.source[found.own] == ("The", "sloth", ".")
    np.testing.assert_allclose(found.weights, [[0.05, 0.7, 0.05, 0.2], [0, 0, 0.75, 0.25]], atol=1e-6)
    by_token = heatmap(attention, tokens=True)
    assert (by_token.source, by_token.target) == (("The", "_slo", "th", ".", "</s>"), ("Faul", "tier", "."))
    np.testing.assert_array_equal(by_token.weights, attention.weights)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("don't stop-gap", ["don't", "stop-gap"]),
        ("(3.5 %) {name}!", ["(", "3.5", "%)", "{", "name", "}!"]),
        ("https://a.org/b?", ["https://a.org/b", "?"]),
        ("Ärger, ça", ["Ärger", ",", "ça"]),
    ],
)
def test_what_a_word_is(text, words):
    """From its first letter or digit to its last; the marks around it are words too."""
    tokens = list(text)
    found = heatmap(TokenAttention(side(text, *tokens), side("x", "x"), (), (), np.ones((1, len(tokens)), np.float32)))
    assert list(found.source) == words


def test_characters_and_pieces_are_shown_as_they_are():
    """A vocabulary without words has none to merge: letters of a spelling, phonemes."""
    attention = TokenAttention(
        side("ab", "a", "b", has_words=False), side("A B", "A", " B", has_words=False), (), (), weights([1, 0], [0, 1])
    )
    assert (heatmap(attention).source, heatmap(attention).target) == (("a", "b"), ("A", " B"))


@given(st.text("ab ,ñ日\u0301", min_size=1, max_size=12), st.data())
def test_nothing_of_the_attention_is_lost(text, data):
    """Whatever the tokens: rows still add up to 1, every word has a token, words are in the order of the text."""
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))) | {len(text)}) if len(text) > 1 else [1]
    spans = [(start, end) for start, end in zip([0, *cuts], cuts, strict=False)]
    tokens = tuple(text[start:end] for start, end in spans)
    own = Side(text, tokens, tuple(spans), True)
    shares = np.random.default_rng(0).dirichlet(np.ones(len(tokens) + 1), len(tokens)).astype(np.float32)
    found = heatmap(TokenAttention(own, own, (), ("</s>",), shares))
    np.testing.assert_allclose(found.weights.sum(axis=1), 1, atol=1e-5)
    assert found.weights.shape == (len(found.target), len(found.source))
    positions = [0]
    for word in found.target:
        positions.append(text.index(word, positions[-1]))
    assert list(found.target) == list(found.source[:-1])


def test_sentencepiece_answers_have_the_spans_of_their_words(sentencepiece_model):
    """Each token\'s characters in the decoded text; the bytes of a character go with its last one."""
    vocabulary = SentencePieceVocabulary(sentencepiece_model())
    tokenizer = TargetTokenizer(vocabulary)
    text = "the green garden ñ house"
    ids = tokenizer.encode(text, "text")
    spans = tokenizer.spans(ids)
    assert tokenizer.decode(ids) == text
    assert "".join(text[start:end] for start, end in spans) == text.replace(" ", "")
    assert any(isinstance(vocabulary.pieces[index], bytes) for index in ids)
    own = Side(text, tuple(tokenizer.tokens(ids)), tuple(spans), True)
    found = heatmap(TokenAttention(own, own, (), (), np.eye(len(ids), dtype=np.float32)))
    assert found.target == found.source == ("the", "green", "garden", "ñ", "house")


def test_plain_answers_have_the_spans_of_their_tokens():
    """Pieces with blanks between them, and characters."""
    pieces = TargetTokenizer(PlainVocabulary("piece", ("<pad>", "<s>", "</s>", "<unk>", "AH", "B")))
    assert pieces.spans((4, 5, 4)) == [(0, 2), (3, 4), (5, 7)]


# -- what is shown -----------------------------------------------------------------------------------------------------

EXAMPLE = Heatmap(
    source=("<s>", "it", "was", "it", "</s>"),
    target=("es", "war"),
    own=slice(1, 4),
    weights=weights([0.5, 0.11, 0.01, 0.3, 0.08], [0.0, 0.05, 0.72, 0.09, 0.14]),
)


def test_the_heaviest_words_are_named():
    """At most three, below a tenth none but the first; equal words are told apart; the template has no part in it."""
    assert name_sources(EXAMPLE) == ["es   it[2] 30%, it[1] 11%", "war  was 72%"]
    light = Heatmap(("a", "b"), ("x",), slice(0, 2), weights([0.02, 0.01]))
    assert name_sources(light) == ["x  a 2%"]


def test_shades_stand_below_their_words():
    """A block of a shade as wide as the word; the legend tells what it means; no blanks at the ends of lines."""
    assert draw(EXAMPLE, 80) == [
        "    <s> it was it </s>",
        "es  ▓▓▓ ░░     ▒▒ ░░░░",
        "war     ░░ ███ ░░ ░░░░",
        "",
        "░ from 5%  ▒ from 20%  ▓ from 45%  █ from 70%",
    ]


def test_a_narrow_terminal_gets_several_blocks():
    """No line is wider, unless one word is; every word comes once."""
    lines = draw(EXAMPLE, 14)[:-1]
    assert lines == [
        "    <s> it was",
        "es  ▓▓▓ ░░",
        "war     ░░ ███",
        "",
        "    it </s>",
        "es  ▒▒ ░░░░",
        "war ░░ ░░░░",
        "",
    ]
    assert sum(line.startswith("es") for line in draw(EXAMPLE, 1)) == 5


def test_wide_characters_take_two_columns_and_marks_none():
    """So that columns stand below each other in a terminal."""
    found = Heatmap(("日本", "e\u0301", "z"), ("日", "ab c"), slice(0, 3), weights([1, 0, 1], [0, 1, 0]))
    assert draw(found, 80)[:3] == ["     日本 e\u0301 z", "日   ████   █", "ab c      █"]
    assert name_sources(found) == ["日    日本 100%, z 100%", "ab c  e\u0301 100%"]


def test_long_words_are_cut_and_control_characters_never_reach_the_terminal():
    """A word of hundreds of characters keeps a line readable; an escape sequence moves nothing."""
    found = Heatmap(("x" * 100, "\x1b[2J\u202e"), ("y" * 30,), slice(0, 2), weights([0.5, 0.5]))
    text = "\n".join([*draw(found, 200), *name_sources(found)])
    assert "x" * 23 + "…" in text and "y" * 23 + "…" in text
    assert "\x1b" not in text and "\u202e" not in text
    assert shown("a\x1bb\tc\u202e") == "a\ufffdb\ufffdc\ufffd"


@pytest.mark.parametrize(("word", "complete"), [("$x_1$ {a} \\frac", True), ("\U00013000", False)])
def test_the_picture_takes_any_word(tmp_path, word, complete):
    """Dollar signs are no formula; characters that the font lacks are told instead of warned of."""
    pytest.importorskip("matplotlib")
    found = Heatmap((word, "b"), ("c", word), slice(0, 2), weights([0.9, 0.1], [0.2, 0.8]))
    assert write_png(found, "$title$", tmp_path / "out.png") is complete
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# -- the pass ----------------------------------------------------------------------------------------------------------


def backwards(source, tokens):
    """Token t of an answer looks at the last letter but t, and a little at the end token."""
    found = np.zeros((len(tokens), len(source)), np.float32)
    found[:, -1] = 0.25
    for row in range(len(tokens)):
        found[row, len(source) - 2 - row] = 0.75
    return found


async def attend(*arguments, forced_pass=backwards):
    model = scripted_model(forced_pass=forced_pass)
    model.start()
    try:
        return await model.pipeline.attend(*arguments)
    finally:
        await model.close()


async def test_the_own_answer_is_explained():
    """Tokens and weights of the line, blanks around it left out; the end token stands behind them."""
    attention = await attend(" abc\n")
    assert (attention.source.text, attention.target.text) == ("abc", "abc")
    assert (attention.source.tokens, attention.before, attention.after) == (("a", "b", "c"), (), ("</s>",))
    np.testing.assert_array_equal(attention.weights, [[0, 0, 0.75, 0.25], [0, 0.75, 0, 0.25], [0.75, 0, 0, 0.25]])


async def test_a_given_answer_is_explained_instead():
    """Whatever the model would have said."""
    attention = await attend("abc", "zy")
    assert (attention.target.text, attention.target.tokens) == ("zy", ("z", "y"))
    assert attention.weights.shape == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((" ",), "text is blank: give one"),
        (("a\nb",), "text has more than one line, where one is wanted"),
        (("ab", " "), "the answer is empty"),
        (("ab", "a\nb"), "answer has more than one line"),
        (("a!b",), r"text holds \'!\'"),
        (("ab", "a!"), r"target holds \'!\'"),
        (("ab", "a" * 64), "target has 65 tokens"),
        (("\ud800",), "lone surrogate"),
    ],
)
async def test_what_cannot_be_explained_is_refused(arguments, message):
    """As a request would be."""
    with pytest.raises(InvalidRequestError, match=message):
        await attend(*arguments)


async def test_a_model_without_an_alignment_graph_names_the_remedy():
    with pytest.raises(ModelUnsupportedError, match="dragoman export --alignment"):
        await attend("abc", forced_pass=None)
