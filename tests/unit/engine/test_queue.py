"""The queue: bounded, in order, fair between replicas, and it never hands out what is over."""

import threading

import pytest

from dragoman.engine.queue import Queue
from dragoman.engine.sequence import Hypothesis, Sequence, Status
from dragoman.errors import DeadlineError, OverloadedError, RequestCancelledError
from dragoman.types import GenerationRequest


def sequence(length=3, deadline=None):
    return Sequence(GenerationRequest((5,) * length, 10, deadline=deadline), [Hypothesis(1)], arrived=0.0)


def take(queue, num_running=0, num_free=100, max_encode_tokens=1000):
    return queue.take(num_running, num_free, max_encode_tokens)


def test_first_come_first_served_up_to_the_free_slots():
    """Three wait, two slots are free: the first two are taken, in order."""
    queue = Queue(10, 1)
    waiting = [sequence() for _ in range(3)]
    for s in waiting:
        queue.put(s)
    assert take(queue, num_free=2) == waiting[:2]
    assert queue.num_waiting == 1


def test_a_full_queue_refuses_and_names_the_limit():
    """The request over the limit is refused; those that wait are not touched."""
    queue = Queue(2, 1)
    queue.put(sequence())
    queue.put(sequence())
    with pytest.raises(OverloadedError, match="limit is 2"):
        queue.put(sequence())
    assert queue.num_waiting == 2


def test_room_is_told_for_several_at_once():
    """Two more fit or they do not; asking changes nothing."""
    queue = Queue(3, 1)
    queue.put(sequence())
    queue.check_room(2)
    with pytest.raises(OverloadedError, match="limit is 3"):
        queue.check_room(3)
    assert queue.num_waiting == 1


def test_the_encoders_budget_counts_padding():
    """Lengths 4, 4, 10 under a budget of 12: 3 x 10 would be padded to 30, so only the first two go together."""
    queue = Queue(10, 1)
    waiting = [sequence(4), sequence(4), sequence(10)]
    for s in waiting:
        queue.put(s)
    assert take(queue, max_encode_tokens=12) == waiting[:2]
    assert take(queue, max_encode_tokens=12) == waiting[2:]


def test_a_lone_source_over_the_budget_is_still_served():
    """A budget never starves a long source: it is encoded alone."""
    queue = Queue(10, 1)
    long = sequence(50)
    queue.put(long)
    queue.put(sequence(2))
    assert take(queue, max_encode_tokens=12) == [long]


def test_a_replica_takes_its_share_only():
    """Two replicas, six waiting: the first takes three, and nothing more while the second has taken none."""
    queue = Queue(10, 2)
    for _ in range(6):
        queue.put(sequence())
    assert len(take(queue)) == 3
    assert take(queue, num_running=3) == []
    assert len(take(queue)) == 3


def test_cancelled_and_expired_sequences_leave_without_being_taken():
    """A sweep hands out both with their reasons; the third still waits, in its place."""
    queue = Queue(10, 1)
    cancelled, expired, good = sequence(), sequence(deadline=5.0), sequence(deadline=50.0)
    for s in (cancelled, expired, good):
        queue.put(s)
    assert queue.sweep(now=1.0) == []
    cancelled.cancel()
    queue.cancelled()
    dropped = queue.sweep(now=6.0)
    assert [d.sequence for d in dropped] == [cancelled, expired]
    assert [type(d.error) for d in dropped] == [RequestCancelledError, DeadlineError]
    assert [s.status for s in (cancelled, expired)] == [Status.FINISHED] * 2
    assert take(queue) == [good]


def test_wait_returns_when_something_arrives_or_the_queue_closes():
    """A waiting thread wakes with True for work, with False for the end."""
    queue = Queue(10, 1)
    woken: list[bool] = []
    thread = threading.Thread(target=lambda: woken.append(queue.wait()))
    thread.start()
    queue.put(sequence())
    thread.join(10)
    assert woken == [True]
    take(queue)
    thread = threading.Thread(target=lambda: woken.append(queue.wait()))
    thread.start()
    queue.close()
    thread.join(10)
    assert woken == [True, False]
