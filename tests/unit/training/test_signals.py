"""Signals that stop a run: noted, or an exception where there is nothing to save."""

import os
import signal
from contextlib import suppress

import pytest

from dragoman_training.signals import Stopped, StopSignal


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_ends_nothing(number: int) -> None:
    """In the block; after it, the handlers of before are back."""
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert stop.number is None
        send(number)
        assert stop.number == number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_where_there_is_nothing_to_save_a_signal_ends_the_block(number: int) -> None:
    """Through a handler of errors, too; the handlers of before are back."""
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught, StopSignal() as stop, stop.at_once():
        try:
            send(number)
            pytest.fail("the block goes on")
        except Exception:
            pytest.fail("taken for an error")
    assert caught.value.number == number
    assert signal.getsignal(number) is before


def test_a_signal_of_before_ends_the_block_as_it_begins() -> None:
    """It came in the moment before."""
    with StopSignal() as stop:
        send(signal.SIGTERM)
        with pytest.raises(Stopped), stop.at_once():
            pytest.fail("the block begins")


def test_a_signal_after_the_block_is_noted_again() -> None:
    """Whether the block came to its end or not."""
    with StopSignal() as stop:
        with stop.at_once():
            pass
        send(signal.SIGTERM)
        with pytest.raises(Stopped), stop.at_once():
            pass
        send(signal.SIGINT)
        assert stop.number == signal.SIGINT


def test_an_exception_that_a_library_loses_or_replaces_ends_the_block_all_the_same() -> None:
    """C++ makes errors of its own of what its callback raises, and Python drops what a destructor raises."""
    with StopSignal() as stop, pytest.raises(Stopped), stop.at_once():
        try:
            send(signal.SIGTERM)
        except Stopped:
            raise RuntimeError("unknown error") from None
    with StopSignal() as stop, pytest.raises(Stopped), stop.at_once(), suppress(Stopped):  # as after a destructor
        send(signal.SIGTERM)


def test_other_errors_pass() -> None:
    """Without a signal, nothing changes."""
    with StopSignal() as stop, pytest.raises(RuntimeError, match="broken"), stop.at_once():
        raise RuntimeError("broken")
