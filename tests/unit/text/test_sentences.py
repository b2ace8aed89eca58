"""Where lines are split into sentences, and sentences that are too long into pieces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dragoman import sentences
from dragoman.sentences import SentenceSplitter, pieces

HARD = "ab AZ.!?,;:\"'()[]-…01%\\\t\u00a0\u2003\u200b“”„。！？、한日🎉\u0301\u202e\x00।؟"


def cut(text, spans):
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("language", "line", "expected"),
    [
        ("en", "Dr. Smith paid $3.50.  He left! Why?", ["Dr. Smith paid $3.50.", "He left!", "Why?"]),
        ("en", "See https://a.test/b.c?d=e.f now.\tOk.", ["See https://a.test/b.c?d=e.f now.", "Ok."]),
        ("de", "Am 5. Mai kam z. B. Herr Dr. Roth. Er ging.", ["Am 5. Mai kam z. B. Herr Dr. Roth.", "Er ging."]),
        ("ja", "これはペンです。あれは本です。", ["これはペンです。", "あれは本です。"]),
        ("tlh", "One. Two.", ["One.", "Two."]),
        ("en", "no mark", ["no mark"]),
    ],
)
def test_sentences_end_by_the_rules_of_their_language(language, line, expected):
    """Worked examples: abbreviations, numbers and addresses end nothing; a language without rules has English ones."""
    assert cut(line, SentenceSplitter(language).split(line)) == expected


def test_nothing_that_is_protected_is_split():
    """A sentence goes on over the end that is inside."""
    line = "He said {Stop. Now} twice. Then he left."
    start = line.index("{")
    spans = [(start, line.index("}") + 1)]
    assert cut(line, SentenceSplitter("en").split(line, spans)) == ["He said {Stop. Now} twice.", "Then he left."]


@given(st.text(st.sampled_from(HARD)), st.sampled_from(["en", "de", "ja", "ar"]))
@example("i.A\t\u00a0.", "ja")
@example("J.\u00a0R.\u00a0R. Tolkien", "en")
def test_every_character_but_blanks_is_in_one_sentence(line, language):
    """In order; also where the initial of a name has a wide blank beside it, at which the library panics."""
    spans = SentenceSplitter(language).split(line)
    assert all(line[start:end] == line[start:end].strip() != "" for start, end in spans)
    ends = [0, *(place for span in spans for place in span), len(line)]
    assert ends == sorted(ends)
    assert all(not line[end:start].strip() for end, start in zip(ends[::2], ends[1::2], strict=True))


def test_a_line_at_which_the_library_panics_stays_whole(monkeypatch):
    """A panic is none of Exception's; anything else is raised."""
    splitter = SentenceSplitter("en")

    def fail(language, line):
        raise {"Panic": type("PanicException", (BaseException,), {})}.get(line.split()[0], KeyboardInterrupt)

    monkeypatch.setattr(splitter, "_segment", fail)
    assert splitter.split("Panic b. C") == [(0, 10)]
    with pytest.raises(KeyboardInterrupt):
        splitter.split("Other b. C")


def words(text):
    """A token a word."""
    spans, position = [], 0
    for word in text.split(" "):
        spans.append((position, position + len(word)))
        position += len(word) + 1
    return spans


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("a b c d e f", 6, ["a b c d e f"]),
        ("a b c d e f", 4, ["a b c d", "e f"]),
        ("a b c, d e f g", 4, ["a b c,", "d e f g"]),
        ("a, b c d e f", 4, ["a, b c d", "e f"]),
        ("a b; c d: e f", 2, ["a b;", "c d:", "e f"]),
        ("abcdef", 1, ["abcdef"]),
    ],
)
def test_a_sentence_is_cut_behind_a_clause_else_at_a_blank(text, most, expected):
    """Worked examples: the last clause mark counts where it is in the second half of what fits."""
    assert cut(text, pieces(text, words(text), most)) == expected


def test_a_text_without_blanks_is_cut_behind_its_own_marks():
    """Of Chinese and Japanese, say, each character a token."""
    text = "今天天气很好，我们去公园，然后回家"
    tokens = [(place, place + 1) for place in range(len(text))]
    assert cut(text, pieces(text, tokens, 8)) == ["今天天气很好，", "我们去公园，", "然后回家"]


def test_what_is_protected_is_in_one_piece():
    """Even where it holds the only blank that would do."""
    text = "aa bb cc dd"
    assert cut(text, pieces(text, words(text), 2, [(3, 8)])) == ["aa", "bb cc", "dd"]


@given(st.lists(st.sampled_from(["a", "b,", "c;", "dd"]), min_size=1, max_size=30), st.integers(1, 6))
def test_pieces_fit_and_lose_nothing(parts, most):
    """Each word is a token: none is lost, doubled or moved, and no piece has too many."""
    text = " ".join(parts)
    found = cut(text, pieces(text, words(text), most))
    assert " ".join(found) == text
    assert all(len(piece.split()) <= most for piece in found)


def test_the_library_is_asked_for_the_text_as_it_is_but_for_blanks(monkeypatch):
    """Where its answer is not the text again, the line stays whole."""
    splitter = SentenceSplitter("en")
    monkeypatch.setattr(splitter, "_segment", lambda language, line: ["other"])
    assert splitter.split("A b. C d.") == [(0, 9)]
    assert sentences.stripped("  a ", (0, 4)) == (2, 3)
