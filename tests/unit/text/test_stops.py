"""Stop strings: nothing of one, nor of what may become one, is ever given out; and where the tokens are cut."""

from hypothesis import given
from hypothesis import strategies as st

from dragoman.stops import AnswerReader, StopFinder
from dragoman.tokenizer import IncrementalDetokenizer, TargetTokenizer
from dragoman.vocabulary import BYTE_TOKENS, SPECIAL_TOKENS, PlainVocabulary

BYTES = TargetTokenizer(PlainVocabulary("character", (*SPECIAL_TOKENS, *BYTE_TOKENS, *"ab.")))
PIECES = TargetTokenizer(PlainVocabulary("piece", (*SPECIAL_TOKENS, "E", "ND", ".", "LESS", "END.")))

words = st.text("ab", max_size=30)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def cut(text, stops):
    """Independent of the code: read letter by letter until some stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - len(max(complete, key=len))], True
    return text, False


def chunks(items, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=6)))
    return [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@given(words, stop_strings, st.data())
def test_the_first_complete_stop_string_ends_a_text_however_it_comes(text, stops, data):
    """The pieces joined are the text before it, and what was given out at any time is the beginning of that."""
    expected, found = cut(text, stops)
    finder, out = StopFinder(stops), ""
    for chunk in chunks(text, data):
        out += finder.push(chunk)
        assert expected.startswith(out)
    assert (out + finder.close(), finder.found) == (expected, found)


@given(words, stop_strings)
def test_no_more_is_held_back_than_may_become_a_stop_string(text, stops):
    """What is kept back is the beginning of one."""
    finder = StopFinder(stops)
    out = finder.push(text)
    held = text[len(out) :]
    assert finder.found or held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_across_tokens_is_never_begun():
    """Worked example: E ND . end before the stop string; E ND LESS are given out in full once they cannot be one."""
    reader = AnswerReader(PIECES, 0, ["E ND ."])
    assert [reader.push([token]) for token in (4, 5, 6)] == ["", "", ""]
    assert reader.stopped and (reader.close(), reader.num_tokens) == ("", 0)
    reader = AnswerReader(PIECES, 0, ["E ND ."])
    assert [reader.push([token]) for token in (4, 5, 7)] == ["", "", "E ND LESS"]
    assert not reader.stopped and (reader.close(), reader.num_tokens) == ("", 3)


def test_a_token_that_is_cut_in_two_is_kept():
    """Its text begins before the stop string; of END., cut before the dot, the token stays."""
    reader = AnswerReader(PIECES, 0, ["."])
    assert reader.push([4, 8, 7]) == "E END"
    assert reader.stopped and reader.num_tokens == 2


def test_a_stop_string_of_the_prefix_ends_nothing():
    """Also one that begins in the prefix and ends behind it: the answer has the whole prefix in any case."""
    reader = AnswerReader(PIECES, 2, [" END.", "END. ND", "ND LESS"])
    assert reader.push([8, 5]) == "END. ND"
    assert reader.push([7, 4, 8]) == " LESS E"
    assert reader.stopped and reader.num_tokens == 4


def test_a_stop_string_right_behind_the_prefix_leaves_the_prefix():
    """All of its tokens and its text."""
    reader = AnswerReader(PIECES, 2, [" ."])
    assert reader.push([4, 5, 6]) == "E ND"
    assert reader.stopped and reader.num_tokens == 2


@given(
    st.lists(st.integers(0, len(BYTES.vocabulary.tokens) - 1), max_size=30), st.integers(0, 5), stop_strings, st.data()
)
def test_an_answer_is_cut_at_the_same_place_however_its_tokens_come(tokens, num_prefix, stops, data):
    """Any bytes among them: the text is that of all tokens, cut behind the prefix; the tokens are the fewest for it."""
    num_prefix = min(num_prefix, len(tokens))
    # A prefix is text that was encoded: it holds whole characters.
    tokens = [260 + token % 3 for token in tokens[:num_prefix]] + tokens[num_prefix:]
    stops = [*stops, "\ufffd."]
    prefix = BYTES.decode(tokens[:num_prefix])
    kept, found = cut(BYTES.decode(tokens)[len(prefix) :], stops)
    reader, out = AnswerReader(BYTES, num_prefix, stops), ""
    for chunk in chunks(tokens, data):
        out += reader.push(chunk)
        assert (prefix + kept).startswith(out)
    out += reader.close()
    assert (out, reader.stopped) == (prefix + kept, found)
    if not found:
        assert reader.num_tokens == len(tokens)
        return

    def length(count):
        detokenizer = IncrementalDetokenizer(BYTES)
        return len(detokenizer.push(tokens[:count]) + (detokenizer.close() if count == len(tokens) else ""))

    assert reader.num_tokens == next(n for n in range(num_prefix, len(tokens) + 1) if length(n) >= len(out))
