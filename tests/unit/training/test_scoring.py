"""Figures about lines, against worked examples and definitions."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_training.errors import DataError
from dragoman_training.scoring import PLACEHOLDER, Scores, adds_numbers, edit_distance, loops, score, score_text
from dragoman_training.systems import Outputs, Task

PLAIN = Task(is_text=False)


def scored(outputs: list[str], sources: list[str], targets: list[str], task: Task = PLAIN) -> Scores:
    return score(Outputs(outputs, 0.0), sources, targets, task=task)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("abc", "abc", 0), ("ab", "ba", 2), ("abcd", "bcde", 2)],
)
def test_edit_distance(a: str, b: str, distance: int) -> None:
    """Worked examples."""
    assert edit_distance(a, b) == distance


@given(st.text("ab", max_size=6), st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_edit_distance_is_a_distance(a: str, b: str, c: str) -> None:
    """Symmetric, zero only for equals, and no detour is shorter."""
    assert edit_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


def table_distance(a: str, b: str) -> int:
    """By the definition: a cell is the least of its three neighbours and what the step costs."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


@given(st.text("abc", max_size=80), st.text("abc", max_size=80))
def test_edit_distance_is_that_of_the_table(a: str, b: str) -> None:
    """Beyond one machine word, too."""
    assert edit_distance(a, b) == table_distance(a, b)


def test_long_lines_are_scored_in_seconds() -> None:
    """In steps by the square of their length, these would take hours: no loop, many braces, zeros, edits."""
    draw = random.Random(0)
    characters = "".join(chr(0x4E00 + draw.randrange(2000)) for _ in range(60_000))
    words = " ".join(str(draw.randrange(2000)) for _ in range(60_000))
    assert not loops(characters) and not loops(words)
    assert loops(characters + "ab" * 4) and loops(words + " ab" * 4)
    assert PLACEHOLDER.findall("{" * 200_000 + "%" + "0" * 200_000) == []
    assert edit_distance(characters[:16_000], characters[1:16_001]) == 2


def test_a_worked_example() -> None:
    """Three lines: right; wrong but an accepted alternative; wrong for all. Two edits, nine tokens; 24 characters of
    26."""
    outputs = Outputs(["S L AO TH", "T UW", "K AE T"], 1.5, cut=frozenset({2}), refused=frozenset())
    targets = ["S L AO TH", "T AH", "K AE T S"]
    references = [["S L AO TH"], ["T AH", "T UW"], ["K AE T S", "K AA T"]]
    assert score(outputs, ["sloth", "to", "cats"], targets, references, PLAIN).summary() == {
        "lines": 3,
        "exact_match": pytest.approx(1 / 3),
        "word_error_rate": pytest.approx(2 / 3),
        "token_error_rate": pytest.approx(2 / 10),
        "any_match_error_rate": pytest.approx(1 / 3),
        "number_copy_rate": None,
        "lines_with_added_numbers": 0,
        "placeholder_copy_rate": None,
        "length_ratio": pytest.approx((9 + 4 + 6) / (9 + 4 + 8)),
        "empty_outputs": 0,
        "looping_outputs": 0,
        "cut_outputs": 1,
        "refused_sources": 0,
        "sentences_per_second": pytest.approx(2.0),
    }


def test_characters_may_be_the_tokens() -> None:
    """One of three letters is wrong, one of one piece."""
    assert scored(["abc"], ["x"], ["abd"], Task(False, "character")).summary()["token_error_rate"] == pytest.approx(
        1 / 3
    )
    assert scored(["abc"], ["x"], ["abd"]).summary()["token_error_rate"] == 1


def test_bleu_by_hand() -> None:
    """Precisions 4/5, 3/4, 2/3 and 1/2, equal lengths: the geometric mean is 0.2 ** (1/4)."""
    scores = score_text(["a b c d e"], ["a b c d f"], "none")
    assert scores.bleu == pytest.approx(100 * 0.2**0.25)
    assert scores.signatures["bleu"].startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:none|smooth:exp|version:")
    assert scores.signatures["chrf"].startswith("chrF2|nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")


def test_chrf_by_hand() -> None:
    """ "ab" for "ac": one of two letters, no pair of letters: F2 is 1/2 and 0, their mean 25."""
    assert score_text(["ab"], ["ac"]).chrf == pytest.approx(25.0)


def test_equal_text_scores_100_and_empty_output_0() -> None:
    """The ends of the scale."""
    lines = ["The cat sat on the mat.", "Another line, quite long."]
    assert (score_text(lines, lines).bleu, score_text(lines, lines).chrf) == pytest.approx((100, 100))
    nothing = score_text(["", ""], lines)
    assert (nothing.bleu, nothing.chrf) == (0, 0)


def test_text_that_looks_tokenized_brings_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Scoring tokenized files on purpose is common."""
    score_text(["a b ."] * 200, ["a b ."] * 200, "none")
    assert not caplog.records


def test_text_gets_bleu_and_plain_units_only_when_asked() -> None:
    """BLEU of phonemes means nothing."""
    outputs = Outputs(["a b"], 0.0)
    assert "bleu" in score(outputs, ["x"], ["a b"]).summary()
    assert "bleu" not in score(outputs, ["x"], ["a b"], task=PLAIN).summary()
    assert "bleu" in score(outputs, ["x"], ["a b"], task=PLAIN, bleu_tokenizer="none").summary()


def test_numbers_are_runs_of_digits_and_each_counts() -> None:
    """Of 0077004443, 12, 12 and 5, the identifier lost a digit and one 12 is missing."""
    scores = scored(["Rechnung XR007704443", "12 und 5"], ["Invoice XR0077004443", "12, 12 and 5"], ["", ""])
    assert (scores.numbers.total, scores.numbers.copied) == (4, 2)
    assert scores.summary()["number_copy_rate"] == 0.5


@pytest.mark.parametrize(
    ("source", "output", "target", "added"),
    [
        ("5", "5 5", "5", True),
        ("5", "5", "5", False),
        ("five", "5", "5", False),  # the target has it, too
        ("5 cats", "6 cats", "5 cats", True),
        ("5 cats", "cats", "5 cats", False),  # lost, not added
    ],
)
def test_doubled_numbers_are_flagged(source: str, output: str, target: str, added: bool) -> None:
    """More often than source and target have it."""
    assert adds_numbers(source, output, target) == added


def test_placeholders_of_all_kinds_arrive_unchanged_or_are_missed() -> None:
    """A variable, a printf field, a URL without the full stop behind it, tags; 100 % and 5 < 6 are none."""
    source = 'Hi {user_name}, <b class="x">%d</b> files, %1$s %(n)s at https://ex.test/a?b=1&c=2. 100 % of 5 < 6'
    assert scored([source], [source], [""]).placeholders.total == 7
    output = 'Hallo {Benutzer}, <b class="x">%d</b> %1$s %(n)s unter https://ex.test/a?b=1&c=2 !'
    assert scored([output], [source], [""]).placeholders.copied == 6


@pytest.mark.parametrize(
    "text", ["a a a a", "x the cat the cat the cat the cat y", "haha haha haha haha", "日本日本日本日本", "lalalala"]
)
def test_loops_are_found(text: str) -> None:
    """The same words, or letters within a word, four times in a row."""
    assert loops(text)


@pytest.mark.parametrize(
    "text", ["", "a a a", "the cat the cat the cat the dog", "no, no, no!", "banana", "mm...", "----"]
)
def test_language_is_no_loop(text: str) -> None:
    """Three times may be language."""
    assert not loops(text.replace("----", "---"))


WORD_LOOP = re.compile(r"(?<!\S)(\S+(?: +\S+)*?)(?: +\1){3}(?!\S)")
LETTER_LOOP = re.compile(r"(\S\S+?)\1{3}")


@given(st.builds(lambda a, n, b: a * n + b, st.text("ab  ", max_size=8), st.integers(1, 5), st.text("ab ", max_size=9)))
def test_loops_are_those_of_the_definition(text: str) -> None:
    """Against patterns that say it: four times the same words, or two or more letters within a word."""
    text = " ".join(text.split())
    assert loops(text) == bool(WORD_LOOP.search(text) or LETTER_LOOP.search(text))


PLAIN_PLACEHOLDER = re.compile(  # the definition, without what makes it fast
    r"https?://[^\s<>\"]*[^\s<>\".,;:!?)\]}]|</?[A-Za-z][^<>]*>|\{+[^{}]*\}+"
    r"|%(?:\(\w+\)|\d+\$)?[-+0#]*\d*(?:\.\d+)?[sdifxX@](?![A-Za-z])"
)


@given(st.lists(st.sampled_from([*"{}%01$sd.a()<>/ +-", "http://"]), max_size=14).map("".join))
def test_placeholders_are_those_of_the_plain_pattern(text: str) -> None:
    """What keeps long rows of braces and zeros fast changes no match."""
    assert PLACEHOLDER.findall(text) == PLAIN_PLACEHOLDER.findall(text)


def test_a_loop_that_the_target_has_too_is_none() -> None:
    """Only the model's own loops are counted."""
    assert scored(["ha ha ha ha", "ha ha ha ha"], ["x", "x"], ["ha ha ha ha", "ha"]).looping == 1


def test_empty_outputs_of_blank_sources_are_right() -> None:
    """Blank lines come back blank."""
    assert scored(["", " ", "a"], [" ", "b", "c"], ["", "b", "a"]).empty == 1


def test_figures_without_anything_to_count_are_absent() -> None:
    """Not 0, not 1."""
    summary = scored([""], ["a"], [""]).summary()
    names = [name for name, value in summary.items() if value is None]
    assert names == ["token_error_rate", "number_copy_rate", "placeholder_copy_rate", "length_ratio"]


def test_lines_that_do_not_match_are_refused() -> None:
    """With both counts; no lines at all, too."""
    with pytest.raises(DataError, match="1 outputs but 2 target lines"):
        scored(["a"], ["a"], ["a", "b"])
    with pytest.raises(DataError, match="1 outputs but 2 source lines"):
        scored(["a"], ["a", "b"], ["a"])
    with pytest.raises(DataError, match="no lines to score"):
        scored([], [], [])
