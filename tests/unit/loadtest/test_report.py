"""What a load test says about the outcomes it saw."""

import json

import pytest

from dragoman.loadtest.report import CLIENT_LIMIT, OK, Outcome, percentile, summarize


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

    assert report.latency_ms is not None
    assert report.latency_ms.max == pytest.approx(510)
    assert report.max_send_lag_ms == pytest.approx(500)


def test_a_third_of_errors_is_reported_as_a_third():
    """Errors are counted by status, and the error rate is their part of all requests."""
    statuses = [OK, OK, "RESOURCE_EXHAUSTED", OK, OK, "UNAVAILABLE"] * 10
    report = summarize([outcome(status) for status in statuses], asked_rate=10.0)

    assert (report.requests, report.ok) == (60, 40)
    assert report.errors == {"RESOURCE_EXHAUSTED": 10, "UNAVAILABLE": 10}
    assert report.error_rate == pytest.approx(1 / 3)


def test_errors_are_not_in_the_latency():
    """Errors that come at once, or after the deadline, move no percentile."""
    good = [outcome(seconds=0.020)] * 9
    bad = [outcome("UNAVAILABLE", seconds=0.0001), outcome("DEADLINE_EXCEEDED", seconds=10.0)] * 20

    assert summarize(good + bad, 1.0).latency_ms == summarize(good, 1.0).latency_ms


def test_requests_that_were_not_sent_are_errors():
    """What exceeds the bound on requests in flight is counted, never dropped in silence."""
    report = summarize([outcome(), outcome(CLIENT_LIMIT, seconds=0.0)], asked_rate=2.0)

    assert report.errors == {CLIENT_LIMIT: 1}
    assert report.error_rate == 0.5


def test_achieved_rate_is_ok_answers_until_the_last_answer():
    """A server that answers 20 requests of 10 s in 40 s achieves 0.5 a second, whatever was asked."""
    outcomes = [outcome(intended=n / 2, seconds=2 * n - n / 2) for n in range(1, 21)]
    report = summarize(outcomes, asked_rate=2.0)

    assert report.asked_rate == 2.0
    assert report.duration_seconds == pytest.approx(40.0)
    assert report.achieved_rate == pytest.approx(0.5)


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
    sentences = summarize(outcomes, 1.0).exceeded(*limits)

    assert len(sentences) == len(names)
    assert all(name in sentence for name, sentence in zip(names, sentences, strict=True))


def test_without_an_ok_answer_a_latency_limit_is_broken():
    """A server that answers nothing does not pass for a fast one."""
    report = summarize([outcome("UNAVAILABLE")], 1.0)

    assert report.latency_ms is None
    assert len(report.exceeded(None, 100.0)) == 1
    assert "no request ended OK" in str(report)


def test_an_empty_load_has_no_errors():
    """No arrival in a short duration is a report of zeros, not a division by zero."""
    report = summarize([], asked_rate=0.1)

    assert (report.requests, report.error_rate, report.achieved_rate) == (0, 0.0, 0.0)
    assert report.exceeded(0.0, None) == []


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
