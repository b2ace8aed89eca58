"""Which pairs are left out, and the reason given."""

from collections import Counter

import pytest

from dragoman_training.errors import ConfigError
from dragoman_training.filtering import PairFilter


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("a", "b", None),
        ("", "b", "blank source"),
        ("a", " \t", "blank target"),
        ("\u00a0", "", "blank source"),
        ("\u200b", "b", None),  # not white space
        ("a\nb", "c", "line break in a text"),
        ("a", "b\r", "line break in a text"),
        ("a\rb\u2028c\x85d", "b", None),
    ],
)
def test_blank_sides_and_line_breaks_go_always(source: str, target: str, reason: str | None) -> None:
    """Without any limit."""
    assert PairFilter().reason(source, target) == reason


def test_limits_apply_to_both_sides_and_hold_at_the_limit() -> None:
    """Exactly the limit stays, one more goes, whichever side it is."""
    for limit, at, over, reason in (
        (PairFilter(max_characters=4), "a  b", "a  bc", "over 4 characters"),
        (PairFilter(max_words=3), "a b\u3000c", "a b c d", "over 3 words"),
        (PairFilter(max_ratio=2.5), "abcde", "abcdef", "length ratio over 2.5"),
    ):
        assert limit.reason(at, "ab") is None and limit.reason("ab", at) is None
        assert limit.reason(over, "ab") == limit.reason("ab", over) == reason


def test_kept_pairs_stay_in_order_and_the_others_are_counted() -> None:
    """Every pair is either given back or counted."""
    dropped: Counter[str] = Counter()
    pairs = [("a", "1"), ("", "2"), ("b", ""), ("", ""), ("c", "3")]
    assert list(PairFilter().kept(pairs, dropped)) == [("a", "1"), ("c", "3")]
    assert dropped == {"blank source": 2, "blank target": 1}


@pytest.mark.parametrize("name", ["max_characters", "max_words", "max_ratio"])
def test_limits_below_one_or_without_end_are_refused(name: str) -> None:
    """They would leave nothing; and what is no finite number could not be written as JSON."""
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"{name} is .*at least 1"):
            PairFilter(**{name: value})  # type: ignore[arg-type]  # one of three names
