"""What a load test says about the outcomes it saw."""

import json

import pytest

from dragoman.errors import ConfigError
from dragoman.loadtest.report import CANCELLED_HERE, CLIENT_LIMIT, OK, Outcome, Slo, percentile, summarize


def outcome(status: str = OK, intended: float = 0.0, lag: float = 0.0, seconds: float = 0.010) -> Outcome:
    """A request that was sent ``lag`` late and took ``seconds`` from then on."""
    return Outcome(intended, intended + lag, intended + lag + seconds, status)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([15, 20, 35, 40, 50], 5, 15),
        ([15, 20, 35, 40, 50], 30, 20),
        ([15, 20, 35, 40, 50], 40, 20),
        ([15, 20, 35, 40, 50], 50, 35),
        ([15, 20, 35, 40, 50], 100, 50),
        ([7], 50, 7),
        ([7], 99, 7),
        (range(1, 101), 99, 99),
        (range(1, 101), 95, 95),
        (range(1, 1001), 99, 990),
    ],
)
def test_percentile_is_the_nearest_rank(values, percent, expected):
    """The worked example of the nearest-rank method, and round numbers of values."""
    assert percentile(list(values), percent) == expected


def test_latency_counts_from_the_intended_time():
    """A request that this side sent 0.5 s late waited those 0.5 s too."""
    report = summarize([outcome(lag=0.5, seconds=0.010)], asked_rate=1.0)

    assert report.all.latency_ms is not None
    assert report.all.latency_ms.max == pytest.approx(510)
    assert report.max_send_lag_ms == pytest.approx(500)


def test_a_third_of_errors_is_reported_as_a_third():
    """Errors are counted by status, and the error rate is their part of all requests."""
    statuses = [OK, OK, "RESOURCE_EXHAUSTED", OK, OK, "UNAVAILABLE"] * 10
    report = summarize([outcome(status) for status in statuses], asked_rate=10.0).all

    assert (report.requests, report.ok) == (60, 40)
    assert report.errors == {"RESOURCE_EXHAUSTED": 10, "UNAVAILABLE": 10}
    assert report.error_rate == pytest.approx(1 / 3)


def test_errors_are_not_in_the_latency():
    """Errors that come at once, or after the deadline, move no percentile."""
    good = [outcome(seconds=0.020)] * 9
    bad = [outcome("UNAVAILABLE", seconds=0.0001), outcome("DEADLINE_EXCEEDED", seconds=10.0)] * 20

    assert summarize(good + bad, 1.0).all.latency_ms == summarize(good, 1.0).all.latency_ms


def test_requests_that_were_not_sent_are_errors():
    """What exceeds the bound on requests in flight is counted, never dropped in silence."""
    report = summarize([outcome(), outcome(CLIENT_LIMIT, seconds=0.0)], asked_rate=2.0).all

    assert report.errors == {CLIENT_LIMIT: 1}
    assert report.error_rate == 0.5


def test_achieved_rate_is_ok_answers_until_the_last_answer():
    """A server that answers 20 requests of 10 s in 40 s achieves 0.5 a second, whatever was asked."""
    outcomes = [outcome(intended=n / 2, seconds=2 * n - n / 2) for n in range(1, 21)]
    report = summarize(outcomes, asked_rate=2.0)

    assert report.asked_rate == 2.0
    assert report.duration_seconds == pytest.approx(40.0)
    assert report.all.achieved_rate == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ((None, None), []),
        ((0.25, 40.0), []),
        ((0.2, None), ["error rate"]),
        ((None, 39.0), ["p99"]),
        ((0.0, 1.0), ["error rate", "p99"]),
    ],
)
def test_a_limit_is_exceeded_only_above_it(limits, names):
    """Each broken limit gives a sentence that names what was measured; a figure equal to its limit is fine."""
    outcomes = [*[outcome(seconds=0.040)] * 3, outcome("UNAVAILABLE")]
    sentences = summarize(outcomes, 1.0, Slo(max_error_rate=limits[0], max_p99_ms=limits[1])).exceeded()

    assert len(sentences) == len(names)
    assert all(name in sentence for name, sentence in zip(names, sentences, strict=True))


def test_without_an_ok_answer_a_latency_limit_is_broken():
    """A server that answers nothing does not pass for a fast one."""
    report = summarize([outcome("UNAVAILABLE")], 1.0, Slo(max_p99_ms=100.0, max_p99_first_ms=50.0))

    assert report.all.latency_ms is None
    assert len(report.exceeded()) == 2
    assert "no request ended OK" in str(report)


def test_an_empty_load_has_no_errors():
    """No arrival in a short duration is a report of zeros, not a division by zero."""
    report = summarize([], asked_rate=0.1, slo=Slo(max_error_rate=0.0))

    assert (report.all.requests, report.all.error_rate, report.all.achieved_rate) == (0, 0.0, 0.0)
    assert report.exceeded() == []
    assert report.timeline == ()


def test_people_and_programs_read_the_same_figures():
    """The printed lines hold rate, counts and percentiles; the JSON holds them all."""
    report = summarize([outcome(seconds=n / 1000) for n in range(1, 101)] + [outcome("UNAVAILABLE")], 50.0)
    text, data = str(report), json.loads(report.to_json())

    assert "asked 50/s" in text
    assert "101: 100 OK, 1 errors (0.99%)" in text
    assert "1 UNAVAILABLE" in text
    assert "p50 50.0 ms, p95 95.0 ms, p99 99.0 ms, max 100.0 ms" in text
    assert data["latency_ms"] == pytest.approx({"p50": 50, "p95": 95, "p99": 99, "max": 100})
    assert data["errors"] == {"UNAVAILABLE": 1}
    assert data["error_rate"] == pytest.approx(1 / 101)


def test_goodput_counts_the_ok_answers_within_the_service_level():
    """Of ten requests in 10 s: four in time, three too late, one whose first piece was, and two errors."""
    good = [Outcome(n, n, n + 0.05, OK) for n in range(4)]
    late = [Outcome(n, n, n + 0.5, OK) for n in range(3)]
    slow_start = Outcome(9.0, 9.0, 9.09, OK, first_seconds=9.08)
    report = summarize([*good, *late, slow_start, Outcome(0.0, 0.0, 10.0, "DEADLINE_EXCEEDED"), outcome("UNAVAILABLE")],
                       1.0, Slo(max_p99_ms=100.0, max_p99_first_ms=20.0))  # fmt: skip

    assert report.all.achieved_rate == pytest.approx(0.8)
    assert report.all.goodput == pytest.approx(0.4)


def test_the_time_to_the_first_piece_is_apart_from_the_total():
    """Streams alone have one; it counts from the intended time, too."""
    streams = [Outcome(1.0, 1.2, 3.0, OK, first_seconds=1.5)] * 3
    report = summarize([*streams, outcome(seconds=0.010)], 1.0, Slo(max_p99_first_ms=400.0)).all

    assert report.first_ms is not None
    assert report.first_ms.p50 == pytest.approx(500)
    assert report.latency_ms is not None
    assert report.latency_ms.max == pytest.approx(2000)


def test_what_this_side_cancelled_is_neither_an_answer_nor_an_error():
    """Half of eight requests are cancelled on purpose: one error of the other four is a quarter."""
    report = summarize([outcome()] * 3 + [outcome("UNAVAILABLE")] + [outcome(CANCELLED_HERE)] * 4, 1.0).all

    assert (report.ok, report.num_errors, report.cancelled) == (3, 1, 4)
    assert report.error_rate == 0.25


def test_parts_of_a_mix_have_figures_of_their_own():
    """A slow part does not hide behind a fast one; the table and the JSON name both."""
    fast = [Outcome(0.0, 0.0, 0.010, OK, part="fast")] * 9
    slow = [Outcome(0.0, 0.0, 1.0, OK, part="slow"), Outcome(0.0, 0.0, 1.0, "UNAVAILABLE", part="slow")]
    report = summarize([*fast, *slow], 1.0)
    rows = [line.split() for line in str(report).splitlines() if line.startswith(("fast", "slow"))]

    assert [row[:5] for row in rows] == [["fast", "9", "9", "0", "0"], ["slow", "2", "1", "1", "0"]]
    assert json.loads(report.to_json())["parts"]["slow"]["error_rate"] == 0.5


def test_the_timeline_says_what_became_of_what_was_due_when():
    """Requests belong to the second in which they were due, whenever they were answered."""
    outcomes = [Outcome(0.1, 0.1, 0.2, OK), Outcome(0.9, 0.9, 5.0, "UNAVAILABLE"), Outcome(2.5, 2.5, 2.6, OK)]
    timeline = summarize(outcomes, 1.0).timeline

    assert [(m.seconds, m.due, m.ok, m.errors) for m in timeline] == [(0, 2, 1, 1), (1, 0, 0, 0), (2, 1, 1, 0)]
    assert timeline[0].p99_ms == pytest.approx(100)
    assert timeline[1].p99_ms is None


@pytest.mark.parametrize("wrong", [{"max_p99_ms": 0.0}, {"max_p99_first_ms": -1.0}, {"max_error_rate": 1.5}])
def test_a_limit_that_is_none_is_refused(wrong):
    """By its name."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Slo(**wrong)
