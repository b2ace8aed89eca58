"""When an answer goes round in circles, and when it only seems to."""

from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engine.repetition import loops, repeats


def stops(tokens, num_given=0):
    """After how many tokens the guard ends an answer that would be ``tokens``; None if it never does."""
    ends = (end for end in range(num_given + 1, len(tokens) + 1) if loops(tokens[:end], num_given))
    return next(ends, None)


def characters(text):
    return [ord(character) for character in text]


def test_a_scripted_decoder_that_cycles_three_tokens_is_stopped():
    """A decoder that says 7 8 9 for ever is stopped at the 64th token, not at its limit of thousands."""
    assert stops(list(islice(cycle([7, 8, 9]), 5000))) == 64


@pytest.mark.parametrize("cycle", [["(laughter)(applause)"], ["▁(", "laugh", "ter", ")(", "app", "la", "use", ")"]])
def test_laughter_and_applause_fifty_times_is_stopped(cycle):
    """Behind a sentence, as characters and as pieces: soon after the sixth round, not at the fiftieth."""
    pieces = [piece for text in cycle for piece in ([*text] if len(cycle) == 1 else [text])]
    ids = {piece: number for number, piece in enumerate([*pieces, *"What it s:"], start=4)}
    sentence = [ids[character] for character in "What it is:" if character in ids]
    tokens = sentence + [ids[piece] for piece in pieces] * 50
    needed = len(sentence) + max(64, 6 * len(pieces))
    assert stops(tokens) in range(needed - 1, needed + 8)  # the sentence may end like the cycle


@pytest.mark.parametrize("length", [1, 2, 5, 11, 12, 31, 32])
def test_a_cycle_is_found_within_eight_tokens_of_the_sixth_round(length):
    """The cycle is that long; 50 other tokens come before. Short cycles need 64 tokens."""
    tokens = [*range(100, 150), *list(range(length)) * 100]
    needed = 50 + max(64, 6 * length)
    assert stops(tokens) in range(needed, needed + 8)


def test_a_cycle_of_more_than_32_tokens_is_none():
    """A phrase of 33 tokens may come again and again."""
    assert stops(list(range(33)) * 100) is None


@pytest.mark.parametrize(
    "text",
    [
        "In den nächsten vier Jahren müssen 15.000.000.000 € eingespart werden.",
        "Mein Monatsgehalt beträgt 300000 Yen.",
        "Tom was my great-great-great-grandfather.",
        "Tom is a friend of a friend of a friend.",
        "Nein, nein, nein, nein, nein, nein, nein, nein, nein!",  # 54 characters
        "Come on now " + "." * 50,
        "ha" * 30,
    ],
)
def test_legitimate_repetition_is_none(text):
    """The most repetitive sentences of Tatoeba and Multi30k, and worse ones, as characters; also at their ends."""
    assert stops(characters(text)) is None


def test_a_loop_that_was_left_is_none():
    """Only the end counts: what went on in other words is no loop."""
    assert not loops([7] * 63 + [8])
    assert not loops([7] * 100 + [*range(20, 24)])
    assert loops([7] * 104)


def test_what_was_given_does_not_count():
    """A prefix of 200 equal tokens is the caller's: 64 more must follow."""
    assert stops([7] * 400, num_given=200) == 264
    assert stops([7] * 263, num_given=200) is None
    rounds = list(range(20)) * 30
    assert stops(rounds, num_given=200) == 200 + 6 * 20


def slow(tokens, num_given):
    """The definition, by counting backwards from the end."""
    tokens = tokens[num_given:]
    for length in range(1, 33):
        same = 0
        while same + length < len(tokens) and tokens[-1 - same] == tokens[-1 - same - length]:
            same += 1
        if same + length >= 64 and same + length >= 6 * length:
            return len(tokens) % 8 == 0
    return False


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.integers(0, 3), min_size=1, max_size=34),
    st.integers(0, 230),
    st.integers(0, 40),
)
def test_the_guard_is_what_its_definition_says(head, round_, length, num_given):
    """Some tokens, then a cycle to any length, of which some were given."""
    tokens = [*head, *islice(cycle(round_), length)]
    given_ = min(num_given, len(tokens))
    assert loops(tokens, given_) == slow(tokens, given_)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ([], False),
        ([4, 4, 4], False),
        ([4, 4, 4, 4], True),
        ([9, 4, 5, 4, 5, 4, 5, 4, 5, 2], True),
        ([9, 4, 5, 4, 5, 4, 5, 4, 2], False),
        ([*range(32)] * 4, True),
        ([*range(33)] * 4, False),
        (characters("Kapitel 1 ........................................ 5"), True),
        (characters("What It Is: Think of it like a smart trick."), False),
    ],
)
def test_a_source_repeats_itself_when_a_cycle_comes_four_times(source, expected):
    """Anywhere in it; for such a source an answer that repeats itself may be right."""
    assert repeats(source) is expected


@given(
    st.lists(st.integers(0, 2), max_size=8),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.integers(0, 20),
    st.lists(st.integers(0, 2), max_size=8),
)
def test_a_repeating_source_is_what_its_definition_says(head, round_, length, tail):
    """Equal to trying each place and each cycle."""
    source = [*head, *islice(cycle(round_), length), *tail]
    expected = any(
        source[place : place + 4 * size] == source[place : place + size] * 4
        for size in range(1, 33)
        for place in range(len(source) - 4 * size + 1)
    )
    assert repeats(source) == expected
