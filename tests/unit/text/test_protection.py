"""What must arrive unchanged: how it is found, what stands for it, and how it is put back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.bundle import PROTECTION_KINDS
from dragoman.errors import InvalidRequestError
from dragoman.protection import CLASSES, MAX_SPANS, Protector, Reading, vocabulary_of

CODES = vocabulary_of("code").split()


def found(text, *patterns):
    return [text[start:end] for start, end in Protector(patterns).find(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("urls", "See https://a.test/b?c=1&d=(2), or www.e.test.", ["https://a.test/b?c=1&d=(2", "www.e.test"]),
        ("emails", "Mail a.b+c@d-e.test.", ["a.b+c@d-e.test"]),
        (
            "numbers",
            "7 of $1,234.50, at 12:30 on 2024-05-06; 3rd A4 5%.",
            ["7", "$1,234.50", "12:30", "2024-05-06", "5%"],
        ),
        ("codes", "XR0077004443 v1.2-rc3 A4 4B 12 may 3rd", ["XR0077004443", "v1.2-rc3", "A4", "4B"]),
        ("placeholders", "{0} {{x}} ${y} {user_name} %s %-3d %(n)s %1$s 100% of", None),
        ("tags", "<b>a</b> &nbsp; <br/> 1 < 2 > 0 a&b", ["<b>", "</b>", "&nbsp;", "<br/>"]),
    ],
)
def test_named_patterns_match_what_they_say(name, text, expected):
    """Worked examples."""
    own = ["{0}", "{{x}}", "${y}", "{user_name}", "%s", "%-3d", "%(n)s", "%1$s"]
    assert found(text, name) == (own if expected is None else expected)


def test_matches_that_overlap_or_touch_are_one():
    """Blanks around one do not belong to it, and blanks alone are nothing."""
    assert found("<b>{x}</b> ab abc", "tags", "placeholders", "ab", "bc", r"\s+", r"\sz?") == [
        "<b>{x}</b>",
        "ab",
        "abc",
    ]


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1", "[b-a]", r"(\pL|\pN){1,250}"])
def test_what_the_engine_cannot_take_is_refused_by_name(pattern):
    """A broken expression, one that takes backtracking, one that is too large."""
    with pytest.raises(
        InvalidRequestError, match=r"protect\[1\] is '.*neither one of urls, .* nor a regular expression"
    ):
        Protector(["urls", pattern])


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|a)*b", "(.*)(.*)(.*)(.*)b", "((a?){50}){4}a{200}b"])
def test_patterns_that_hang_a_backtracking_engine_end(pattern):
    """Of a long line: Python's engine would take longer than anybody lives."""
    assert found("a" * 20_000, pattern) == []


@pytest.mark.parametrize("patterns", [["a[^b]*b|a"], ["numbers"], [r"\w"]])
def test_too_much_work_is_refused(patterns):
    """An expression that looks to the end of the text from each of its matches; more matches than any text has."""
    with pytest.raises(InvalidRequestError, match="protect takes too much work"):
        Protector(patterns).find("a 1 " * 5_000)


@pytest.mark.parametrize(("kind", "number"), [("braces", 10), ("code", 2 * MAX_SPANS), ("itself", 0)])
def test_substitutes_are_told_apart(kind, number):
    """In any case of their letters, and by where they are: none holds another. There is none for the span itself."""
    made = vocabulary_of(kind).lower().split()
    assert len(set(made)) == len(made) >= number
    assert all(one not in other for one in made for other in made if one != other)


def test_the_model_reads_words_in_the_place_of_spans():
    """Worked example: apart from letters and digits, with the span that each comes from."""
    text = "Hi {a}, you have %d in <b>x</b>."
    spans = Protector(["placeholders", "tags"]).find(text)
    reading = Reading.of(text, spans, "code")
    a, d, b, end = CODES[:4]
    assert reading.text == f"Hi {a}, you have {d} in {b} x {end}."
    assert reading.restored(f"{end}: {b} y {d}, {a}") == ("</b>: <b>y %d, {a}", ())
    place = reading.text.index(" x ") + 1
    assert reading.place((place, place + 1)) == (text.index("x"), text.index("x") + 1)
    assert reading.place((place - 3, place - 2)) == spans[2]
    assert reading.place((0, 2)) == (0, 2)


def test_a_substitute_that_the_text_has_already_is_left_out():
    """In whatever case it is written."""
    first, second, third = CODES[:3]
    assert (
        Reading.of(f"{first.lower()} is {{x}} {second}", [(7, 10)], "code").text
        == f"{first.lower()} is {third} {second}"
    )
    full = " ".join(CODES)
    assert Reading.of(full + " x", [(len(full) + 1, len(full) + 2)], "code").text == full + " x"


@pytest.mark.parametrize(
    ("answer", "expected", "lost"),
    [
        ("{1}-{0}", "<i>-<b>", 0),
        ("a {0} b", "a <b> b", 1),
        ("{0} and {0}", "<b> and <b>", 2),
        ("{0} {1} {1}", "<b> <i> <i>", 1),
        ("{1} {0} {0}s", "<i> <b> {0}s", 1),
        ("{1}{0}", "{1}{0}", 2),
        ("x", "x", 2),
    ],
)
def test_what_comes_not_at_all_or_twice_is_told(answer, expected, lost):
    """Each span once; what stands by itself is put back all the same."""
    reading = Reading.of("<b> <i>", [(0, 3), (4, 7)], "code")
    own = reading.text.split()
    text, missing = reading.restored(answer.format(*own))
    assert (text, len(missing)) == (expected.format(*own), lost)


def test_a_substitute_in_letters_that_are_equal_but_for_their_case_is_put_back():
    """The long s is an s to an expression that ignores case."""
    reading = Reading.of(" ".join("z" * len(CODES)), [(2 * i, 2 * i + 1) for i in range(len(CODES))], "code")
    substitute = next(one for one in reading.text.split() if "S" in one)
    text, _ = reading.restored(f"x {substitute.replace('S', 'ſ')} y")
    assert text == "x z y"


@pytest.mark.parametrize(
    ("text", "spans", "answer", "lost"),
    [
        ("5", [(0, 1)], "5", 0),
        ("5", [(0, 1)], "5 5", 1),
        ("5", [(0, 1)], "55", 1),
        ("5", [(0, 1)], "1.5", 1),
        ("5 of 5", [(0, 1), (5, 6)], "5 von 5.", 0),
        ("5 of 5", [(0, 1), (5, 6)], "5 von", 2),
        ("%s!", [(0, 2)], "Los, %s!", 0),
        ("a 12 b", [(2, 4)], "a 1 2", 1),
    ],
)
def test_spans_that_are_read_as_they_are_stand_by_themselves_in_the_answer(text, spans, answer, lost):
    """As often as in the text, and never as a part of a longer word or number."""
    got, missing = Reading.of(text, spans, "itself").restored(answer)
    assert (got, len(missing)) == (answer, lost)


@given(st.text(st.sampled_from("aA1 {}%s.<>X27{0}")), st.sampled_from(PROTECTION_KINDS))
def test_an_answer_that_is_what_was_read_gives_the_text_back(text, kind):
    """Whatever is protected in it; each place of what was read comes from one in the text."""
    spans = Protector(list(CLASSES)).find(text)[:MAX_SPANS]
    reading = Reading.of(text, spans, kind)
    restored, lost = reading.restored(reading.text)
    assert restored == text
    if reading.places:
        assert lost == ()
    for place in range(len(reading.text)):
        start, end = reading.place((place, place + 1))
        assert 0 <= start <= end <= len(text)
        assert (start, end) in spans or reading.text[place].isspace() or text[start:end] == reading.text[place]
