"""Which calls are made again, and when: by a clock of the test."""

from __future__ import annotations

import pytest

from dragoman import errors
from dragoman.errors import ConfigError, DragomanError, EngineDeadError, NotReadyError, OverloadedError, TooLateError
from dragoman.retries import NO_RETRIES, Attempts, RetryPolicy

POLICY = RetryPolicy(max_attempts=5, first_seconds=0.1, max_seconds=2.0)


class Clock:
    """Stands still, but for what is waited."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def waits(policy: RetryPolicy, timeout: float | None, failures: list[DragomanError], jitter: float) -> list[float]:
    """What is waited after each failure, until the last one is told."""
    clock = Clock()
    attempts = Attempts(policy, timeout, clock, lambda: jitter)
    delays = []
    for failure in failures:
        try:
            delays.append(attempts.delay_after(failure))
        except DragomanError as told:
            assert told is failure
            return delays
        clock.now += delays[-1]
    raise AssertionError("it would go on")


@pytest.mark.parametrize(("jitter", "share"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_each_wait_is_up_to_twice_the_last_and_the_attempts_are_counted(jitter: float, share: float) -> None:
    """A server that is not there, or that drains, or whose engine died: others may be there."""
    failures = [NotReadyError("draining"), EngineDeadError("dead"), *[NotReadyError("nobody")] * 9]
    assert waits(POLICY, None, failures, jitter) == pytest.approx([share * wait for wait in (0.1, 0.2, 0.4, 0.8)])


def test_no_wait_is_longer_than_the_longest() -> None:
    """However many there are."""
    policy = RetryPolicy(max_attempts=2000, first_seconds=0.5, max_seconds=2.0)
    found = waits(policy, None, [NotReadyError("nobody")] * 2000, 1.0)
    assert found == [0.5, 1.0, *[2.0] * 1997]


@pytest.mark.parametrize("kind", [OverloadedError, TooLateError])
def test_nobody_comes_back_before_the_server_asked_for(kind: type[OverloadedError]) -> None:
    """The hint, and a random share of the usual wait on top: whoever was refused together comes apart."""
    failures: list[DragomanError] = [kind("full", 1.5), kind("full", 0.0), kind("full", 2.5)]
    assert waits(POLICY, None, failures, 0.0) == pytest.approx([1.55, 0.1])  # 2.5 is more than the policy waits
    assert waits(POLICY, None, failures, 1.0) == pytest.approx([1.6, 0.2])


def test_nothing_is_waited_for_beyond_the_deadline() -> None:
    """The refusal is told at once, while there is time to do something else; each attempt has what is left."""
    assert waits(POLICY, 1.0, [OverloadedError("full", 1.0)], 0.0) == []
    assert waits(POLICY, 0.31, [NotReadyError("nobody")] * 4, 1.0) == pytest.approx([0.1, 0.2])
    clock = Clock()
    attempts = Attempts(POLICY, 3.0, clock)
    clock.now += 1.0
    assert attempts.remaining() == pytest.approx(2.0)
    clock.now += 2.0
    left = attempts.remaining()
    assert left is not None
    assert left < 0  # 0 would be no deadline at all
    assert Attempts(POLICY, None, clock).remaining() is None


OTHERS = [
    errors.InvalidRequestError("no"),
    errors.SourceTooLongError("no"),
    errors.ReplyTooLargeError("no"),  # RESOURCE_EXHAUSTED, too
    errors.ModelNotFoundError("no"),
    errors.ModelUnsupportedError("no"),
    errors.UnauthenticatedError("no"),
    errors.DeadlineError("no"),
    errors.RequestCancelledError("no"),
    DragomanError("internal error"),
]


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_what_would_fail_again_is_told_at_once(error: DragomanError) -> None:
    """Whoever asked has to change something."""
    assert waits(POLICY, None, [error], 0.0) == []


def test_without_retries_every_failure_is_told_at_once() -> None:
    """As one asks who looks at each."""
    for failure in (NotReadyError("nobody"), OverloadedError("full", 0.0)):
        assert waits(NO_RETRIES, None, [failure], 0.0) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_attempts": 0}, "max_attempts is 0; it must be at least 1"),
        ({"first_seconds": 0.0}, "first_seconds is 0.0"),
        ({"first_seconds": 20.0}, "first_seconds is 20.0 and max_seconds 10.0"),
        ({"max_seconds": float("inf")}, "max_seconds inf"),
        ({"max_seconds": float("nan")}, "max_seconds nan"),
    ],
)
def test_a_policy_that_is_none_is_refused(values: dict[str, float], message: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=message):
        RetryPolicy(**values)  # type: ignore[arg-type]  # of mixed types
