"""How many calls and bytes are let in, and whose."""

from __future__ import annotations

import pytest

from dragoman.admission import Admission
from dragoman.errors import OverloadedError


def test_calls_are_let_in_up_to_the_limit_and_again_as_others_leave():
    """The refusal names what is inside and the limit."""
    admission = Admission(max_calls=2, max_bytes=100)
    first, _ = admission.enter("a", 0.0), admission.enter("a", 0.0)
    with pytest.raises(OverloadedError, match="2 calls are being answered, the limit is 2"):
        admission.enter("a", 0.0)
    first.leave(1.0)
    admission.enter("a", 1.0)
    assert admission.num_calls == 2


def test_a_full_server_still_lets_in_who_has_less_than_an_even_share():
    """Of 4 places, one holds all; a second caller may have 2, a third 1, and nobody can go beyond twice the limit."""
    admission = Admission(max_calls=4, max_bytes=100)
    for _ in range(4):
        admission.enter("a", 0.0)
    for _ in range(2):
        admission.enter("b", 0.0)
    with pytest.raises(OverloadedError):
        admission.enter("b", 0.0)
    admission.enter("c", 0.0)
    admission.enter("d", 0.0)
    with pytest.raises(OverloadedError, match="8 calls"):
        admission.enter("e", 0.0)


def test_bytes_are_bounded_over_all_calls_and_given_back():
    """A refused request leaves nothing behind; one that alone is over the limit may come in alone."""
    admission = Admission(max_calls=10, max_bytes=100)
    first, second = admission.enter("a", 0.0), admission.enter("a", 0.0)
    first.hold(80)
    with pytest.raises(OverloadedError, match="have 80 bytes, this one 30, the limit is 100"):
        second.hold(30)
    assert admission.num_bytes == 80
    first.leave(0.0)
    second.hold(300)
    second.leave(0.0)
    assert (admission.num_bytes, admission.num_calls) == (0, 0)


def test_of_a_stream_of_requests_the_latest_counts():
    """A stream that lives long does not fill the server with what was answered long ago."""
    admission = Admission(max_calls=1, max_bytes=100)
    place = admission.enter("a", 0.0)
    for num_bytes in (90, 10, 60):
        place.hold(num_bytes)
        assert admission.num_bytes == num_bytes


def test_a_refused_caller_is_told_what_calls_take_of_late():
    """Those that were answered alone tell, within 0.1 to 60 seconds; before there are any it is one second."""
    admission = Admission(max_calls=1, max_bytes=100)

    def told() -> float:
        place = admission.enter("a", 0.0)
        with pytest.raises(OverloadedError) as caught:
            admission.enter("a", 0.0)
        place.leave(1000.0)  # unanswered: it tells nothing
        return caught.value.retry_after_seconds

    assert told() == 1.0
    for seconds, expected in ((8.0, 8.0), (0.001, 0.1), (500.0, 60.0)):
        for _ in range(300):
            place = admission.enter("a", 0.0)
            place.answered = True
            place.leave(seconds)
        assert told() == pytest.approx(expected, rel=0.01)
