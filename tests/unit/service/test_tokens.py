"""Who calls, by bearer tokens of a file, and how much each may ask for."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from dragoman.errors import ConfigError, OverloadedError, UnauthenticatedError
from dragoman.tokens import Tokens

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
FILE = f"""
[alice]
secret = "{ALICE}"
requests_per_second = 2
max_running = 3

[bob]
sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}"
"""


def bearer(secret: str) -> dict[str, str | bytes]:
    return {"authorization": f"Bearer {secret}"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tokens.toml"
    file.write_text(FILE)
    return file


def test_a_token_names_its_caller_by_secret_or_hash(path):
    """The scheme may be written either way, as HTTP has it."""
    tokens = Tokens(str(path))
    assert tokens.allowance(bearer(ALICE), 0.0).token.name == "alice"
    assert tokens.allowance({"authorization": f"bearer {BOB}"}, 0.0).token.name == "bob"


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer "},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": ALICE},
        {"authorization": ALICE.encode()},
        bearer(ALICE[:-1]),
        bearer(ALICE + "0"),
        bearer("é" * 20),
        bearer(hashlib.sha256(BOB.encode()).hexdigest()),
    ],
)
def test_whoever_has_no_token_of_the_file_stays_out(path, metadata):
    """The message holds nothing of what was sent."""
    with pytest.raises(UnauthenticatedError) as caught:
        Tokens(str(path)).allowance(metadata, 0.0)
    assert ALICE[:8] not in str(caught.value)


def test_requests_are_paid_for_from_a_purse_that_fills_with_time(path):
    """Two a second: two at once, the third after half a second, which the refusal says."""
    allowance = Tokens(str(path)).allowance(bearer(ALICE), 100.0)
    allowance.pay(100.0)
    allowance.pay(100.0)
    with pytest.raises(OverloadedError, match="alice may make 2 requests a second") as caught:
        allowance.pay(100.0)
    assert caught.value.retry_after_seconds == pytest.approx(0.5)
    allowance.pay(100.5)
    allowance.pay(200.0)
    allowance.pay(200.0)
    with pytest.raises(OverloadedError):
        allowance.pay(200.0)


def test_a_call_of_many_requests_is_paid_for_by_those_to_come(path):
    """A batch of 9 is let in, as its first request is paid for; the next one waits for the other 8."""
    allowance = Tokens(str(path)).allowance(bearer(ALICE), 0.0)
    allowance.pay(0.0)
    allowance.charge(8)
    with pytest.raises(OverloadedError) as caught:
        allowance.pay(0.0)
    assert caught.value.retry_after_seconds == pytest.approx(4.0)


def test_calls_that_run_are_bounded_and_a_refused_one_costs_nothing(path):
    """Of the three that may run, one has to end before another begins; who has no limits has none."""
    tokens = Tokens(str(path))
    allowance = tokens.allowance(bearer(ALICE), 0.0)
    for second in range(3):
        allowance.enter(float(second))
    with pytest.raises(OverloadedError, match="3 calls of alice run, its limit is 3"):
        allowance.enter(10.0)
    allowance.leave()
    allowance.enter(10.0)
    bob = tokens.allowance(bearer(BOB), 0.0)
    for _ in range(100):
        bob.enter(0.0)


def test_a_changed_file_is_in_force_without_a_restart(path):
    """Tokens come, go and change their limits; calls that run go on counting."""
    tokens = Tokens(str(path))
    running = tokens.allowance(bearer(BOB), 0.0)
    running.enter(0.0)
    path.write_text(f'[bob]\nsecret = "{BOB}"\nmax_running = 1\n[carol]\nsecret = "carol-0123456789abcdef"\n')
    os.utime(path, ns=(1, 1))  # another time than before, on file systems whose clocks are coarse
    assert tokens.allowance(bearer(ALICE), 0.5).token.name == "alice"  # the file is not looked at for each call
    with pytest.raises(UnauthenticatedError):
        tokens.allowance(bearer(ALICE), 2.0)
    assert tokens.allowance(bearer("carol-0123456789abcdef"), 2.0).token.name == "carol"
    with pytest.raises(OverloadedError, match="1 calls of bob run"):
        tokens.allowance(bearer(BOB), 2.0).enter(2.0)


def test_a_broken_file_leaves_the_old_one_in_force(path, caplog):
    """It is logged once, without a secret."""
    tokens = Tokens(str(path))
    path.write_text(f'[alice]\nsecret = "{ALICE}\n')
    for now in (2.0, 4.0, 6.0):
        assert tokens.allowance(bearer(ALICE), now).token.name == "alice"
    path.unlink()
    assert tokens.allowance(bearer(ALICE), 8.0).token.name == "alice"
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and all("the old ones stay in force" in message for message in messages)
    assert ALICE not in "".join(messages)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["0 tokens", "from 1"]),
        ("secret = 'x'", ["'secret'", "table"]),
        ("[alice]", ["'alice'", "either secret or sha256"]),
        (f"[alice]\nsecret = '{ALICE}'\nsha256 = '{'0' * 64}'", ["either secret or sha256"]),
        ("[alice]\nsecret = 'short'", ["secret must be 16"]),
        ("[alice]\nsecret = 'sixteen and a blank'", ["secret must be 16"]),
        ("[alice]\nsha256 = 'ABC'", ["64 hexadecimal digits"]),
        (f"[alice]\nsecret = '{ALICE}'\nrate = 3", ["'rate'", "requests_per_second"]),
        (f"[alice]\nsecret = '{ALICE}'\nrequests_per_second = 0", ["requests_per_second must be", "above 0"]),
        (f"[alice]\nsecret = '{ALICE}'\nrequests_per_second = nan", ["requests_per_second must be"]),
        (f"[alice]\nsecret = '{ALICE}'\nrequests_per_second = true", ["requests_per_second must be"]),
        (f"[alice]\nsecret = '{ALICE}'\nmax_running = 1.5", ["max_running must be"]),
        (f"['a b']\nsecret = '{ALICE}'", ["'a b'", "letters"]),
        (f"[a]\nsecret = '{ALICE}'\n[b]\nsecret = '{ALICE}'", ["a and b have the same secret"]),
        ("[alice", ["no TOML"]),
        ("a = " + "[" * 5000, ["no TOML"]),
        ("a = " + "9" * 5000, ["no TOML"]),
    ],
)
def test_a_file_that_is_not_as_described_is_refused_at_the_start(path, text, words):
    """The message names the file, the place and the remedy, and no secret."""
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Tokens(str(path))
    for word in (*words, str(path)):
        assert word in str(caught.value)
    assert ALICE not in str(caught.value)


def test_a_missing_file_is_a_clear_error(tmp_path):
    """At the start, before anything is served."""
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        Tokens(str(tmp_path / "none.toml"))
