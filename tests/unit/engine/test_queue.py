"""The queue: bounded, in order, fair between replicas, and it never hands out what is over."""

import threading
from types import SimpleNamespace

import pytest

from dragoman.engine.queue import Queue
from dragoman.engine.search import Hypothesis
from dragoman.engine.sequence import Sequence, Status
from dragoman.errors import DeadlineError, InvalidRequestError, OverloadedError, RequestCancelledError
from dragoman.types import GenerationRequest


def sequence(length=3, rows=1, **options):
    search = SimpleNamespace(rows=[Hypothesis(1) for _ in range(rows)])
    return Sequence(GenerationRequest((5,) * length, 10, **options), search, arrived=0.0)


def put(queue, sequences):
    for s in sequences:
        queue.put(s)
    return sequences


def take(queue, num_running=0, num_free=100, max_encode_tokens=1000):
    return queue.take(num_running, num_free, max_encode_tokens)


def test_first_come_first_served_up_to_the_free_slots():
    """Three wait, two slots are free: the first two are taken, in order."""
    queue = Queue(10, 1, 100)
    waiting = put(queue, [sequence() for _ in range(3)])
    assert take(queue, num_free=2) == waiting[:2]
    assert queue.num_waiting == 1


def test_a_full_queue_refuses_and_names_the_limit():
    """The request over the limit is refused; those that wait are not touched."""
    queue = Queue(2, 1, 100)
    put(queue, [sequence(), sequence()])
    with pytest.raises(OverloadedError, match="limit is 2"):
        queue.put(sequence())
    assert queue.num_waiting == 2
    assert queue.sweep(now=0.0) == []


def test_room_is_told_for_several_at_once():
    """Two more fit or they do not; asking changes nothing."""
    queue = Queue(3, 1, 100)
    queue.put(sequence())
    queue.check_room(2)
    with pytest.raises(OverloadedError, match="limit is 3"):
        queue.check_room(3)
    assert queue.num_waiting == 1


def test_the_encoders_budget_counts_padding():
    """Lengths 4, 4, 10 under a budget of 12: 3 x 10 would be padded to 30, so only the first two go together."""
    queue = Queue(10, 1, 100)
    waiting = put(queue, [sequence(4), sequence(4), sequence(10)])
    assert take(queue, max_encode_tokens=12) == waiting[:2]
    assert take(queue, max_encode_tokens=12) == waiting[2:]


def test_a_lone_source_over_the_budget_is_still_served():
    """A budget never starves a long source: it is encoded alone."""
    queue = Queue(10, 1, 100)
    long, _ = put(queue, [sequence(50), sequence(2)])
    assert take(queue, max_encode_tokens=12) == [long]


def test_a_replica_takes_its_share_only():
    """Two replicas, six waiting: the first takes three, and nothing more while the second has taken none."""
    queue = Queue(10, 2, 100)
    put(queue, [sequence() for _ in range(6)])
    assert len(take(queue)) == 3
    assert take(queue, num_running=3) == []
    assert len(take(queue)) == 3


def test_a_request_of_more_rows_than_a_replica_has_is_refused():
    """It could never run: the message names both numbers."""
    queue = Queue(10, 1, 8)
    queue.put(sequence(rows=8))
    with pytest.raises(InvalidRequestError, match=r"needs 9 rows .* decodes 8"):
        queue.put(sequence(rows=9))
    assert queue.num_waiting == 1


def test_cancelled_and_expired_sequences_leave_without_being_taken():
    """A sweep hands out both with their reasons; the third still waits, in its place."""
    queue = Queue(10, 1, 100)
    cancelled, expired, good = put(queue, [sequence(), sequence(deadline=5.0), sequence(deadline=50.0)])
    assert queue.sweep(now=1.0) == []
    cancelled.cancel()
    queue.cancelled(cancelled)
    dropped = queue.sweep(now=6.0)
    assert [d.sequence for d in dropped] == [cancelled, expired]
    assert [type(d.error) for d in dropped] == [RequestCancelledError, DeadlineError]
    assert [s.status for s in (cancelled, expired)] == [Status.FINISHED] * 2
    assert take(queue) == [good]


def test_each_deadline_counts_when_it_comes():
    """Whichever comes first, whatever was put first: a sweep at that moment finds it, and only it."""
    queue = Queue(10, 1, 100)
    late, early, middle = put(queue, [sequence(deadline=9.0), sequence(deadline=5.0), sequence(deadline=7.0)])
    for now, expired in ((4.999, []), (5.0, [early]), (6.9, []), (7.0, [middle]), (9.0, [late])):
        assert [d.sequence for d in queue.sweep(now)] == expired


def test_what_was_taken_is_never_swept():
    """A cancel and a deadline of a running sequence are its scheduler's: the queue hands nobody out twice."""
    queue = Queue(10, 1, 100)
    (running,) = put(queue, [sequence(deadline=5.0)])
    assert take(queue) == [running]
    running.cancel()
    queue.cancelled(running)
    assert queue.sweep(now=9.0) == []


def test_a_sequence_that_is_cancelled_twice_and_expires_ends_once():
    """Three reasons, one end."""
    queue = Queue(10, 1, 100)
    (once,) = put(queue, [sequence(deadline=5.0)])
    once.cancel()
    queue.cancelled(once)
    queue.cancelled(once)
    assert [d.sequence for d in queue.sweep(now=9.0)] == [once]
    assert queue.sweep(now=9.0) == []
    assert queue.num_waiting == 0


def test_wait_returns_when_something_arrives_or_the_queue_closes():
    """A waiting thread wakes with True for work, with False for the end."""
    queue = Queue(10, 1, 100)
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


def test_a_displaced_sequence_wakes_a_thread_that_waits():
    """It must be told its end even when nothing else is left to do."""
    queue = Queue(2, 1, 100)
    put(queue, [sequence(caller="a"), sequence(caller="a"), sequence(caller="b")])
    assert len(take(queue)) == 2
    woken: list[bool] = []
    thread = threading.Thread(target=lambda: woken.append(queue.wait()))
    thread.start()
    thread.join(10)
    assert woken == [True]
    assert [type(d.error) for d in queue.sweep(now=0.0)] == [OverloadedError]


def test_threads_that_take_while_others_put_and_cancel_lose_nothing():
    """Two replicas and an event loop at once: each sequence is taken or dropped, once."""
    queue = Queue(10_000, 2, 4)
    ends: list[list[Sequence]] = [[], []]
    ended = threading.Semaphore(0)

    def replica(mine: list[Sequence]) -> None:
        while queue.wait():
            dropped = [d.sequence for d in queue.sweep(now=0.0)]
            taken = queue.take(0, 4, 50)
            mine += dropped + taken
            for s in taken:
                s.status = Status.FINISHED
            queue.finished(len(taken))
            if dropped or taken:
                ended.release(len(dropped) + len(taken))

    threads = [threading.Thread(target=replica, args=(mine,)) for mine in ends]
    for thread in threads:
        thread.start()
    sequences = [sequence(1 + i % 7, rows=1 + i % 4, caller=str(i % 5), priority=i % 3) for i in range(3000)]
    for i, s in enumerate(sequences):
        queue.put(s)
        if i % 3 == 0:
            sequences[i // 2].cancel()
            queue.cancelled(sequences[i // 2])
    for _ in sequences:
        assert ended.acquire(timeout=60)
    queue.close()
    for thread in threads:
        thread.join(30)
    assert sorted(map(id, ends[0] + ends[1])) == sorted(map(id, sequences))
