"""Whose turn it is: priorities that starve nobody, callers that share the work, and a place for everyone."""

import contextlib
import gc
from types import FunctionType, MethodType, ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engine.order import LOW_TURN
from dragoman.engine.queue import Queue
from dragoman.engine.search import Hypothesis
from dragoman.engine.sequence import Sequence
from dragoman.errors import OverloadedError
from dragoman.types import GenerationRequest


def sequence(caller="", length=5, rows=1, **options):
    search = SimpleNamespace(rows=[Hypothesis(1) for _ in range(rows)])
    return Sequence(GenerationRequest((5,) * length, 1000, caller=caller, **options), search, arrived=0.0)


def put(queue, sequences):
    for s in sequences:
        queue.put(s)
    return sequences


def take_one(queue):
    """One turn: all rows are free, and the encoder's budget lets one go at a time."""
    (one,) = queue.take(0, 64, 1)
    return one


def drop(queue, *sequences):
    for s in sequences:
        s.cancel()
        queue.cancelled(s)
    return queue.sweep(now=0.0)


def test_the_higher_priority_goes_first_and_equal_ones_in_order():
    """Numbers below 0 are priorities too."""
    queue = Queue(100, 1, 64)
    low, middle, high, second = put(queue, [sequence(priority=p) for p in (-1, 0, 7, 0)])
    assert queue.take(0, 3, 1000) == [high, middle, second]
    assert queue.take(0, 3, 1000) == [low]


@pytest.mark.parametrize("num_priorities", [1, 2, 5])
def test_a_low_priority_is_served_under_endless_higher_ones(num_priorities):
    """Whatever arrives with each turn, the lowest one's comes within LOW_TURN x P turns."""
    queue = Queue(1000, 1, 64)
    put(queue, [sequence("busy", priority=1 + p) for p in range(num_priorities)])
    low = sequence("patient", priority=-5)
    queue.put(low)
    served = []
    for _ in range(LOW_TURN * (num_priorities + 1)):
        put(queue, [sequence("busy", priority=1 + p) for p in range(num_priorities)])
        served.append(take_one(queue))
    assert low in served


def test_most_turns_are_the_high_priorities():
    """Of 40 turns under a backlog of both, exactly 30 are the higher one's."""
    queue = Queue(1000, 1, 64)
    put(queue, [sequence(priority=p) for p in (0, 1) for _ in range(100)])
    served = [take_one(queue).request.priority for _ in range(40)]
    assert served.count(1) == 40 - 40 // LOW_TURN


def test_a_callers_thousand_delay_anothers_one_by_a_turn():
    """They have waited for long; who comes with a single one is second at the latest."""
    queue = Queue(2000, 1, 64)
    put(queue, [sequence("many") for _ in range(1000)])
    for _ in range(10):
        take_one(queue)
    single = sequence("single")
    queue.put(single)
    assert single in [take_one(queue), take_one(queue)]


def test_callers_without_a_name_are_one_caller():
    """First come, first served."""
    queue = Queue(100, 1, 64)
    waiting = put(queue, [sequence(length=1 + i * 7 % 5) for i in range(20)])
    assert queue.take(0, 64, 1000) == waiting


works = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 8)), min_size=1, max_size=20)


@given(works, works)
def test_callers_that_wait_get_even_shares_of_the_work(first, second):
    """At no moment has one got more than the largest two requests more than the other, however they are cut."""
    queue = Queue(1000, 1, 64)
    work = {"a": 0, "b": 0}
    left = {"a": len(first), "b": len(second)}
    for caller, requests in (("a", first), ("b", second)):
        put(queue, [sequence(caller, length, rows) for length, rows in requests])
    largest = {
        "a": max(length * rows for length, rows in first),
        "b": max(length * rows for length, rows in second),
    }
    while min(left.values()):
        served = take_one(queue)
        caller = served.request.caller
        left[caller] -= 1
        work[caller] += len(served.request.source) * len(served.hypotheses)
        assert abs(work["a"] - work["b"]) <= sum(largest.values())


def test_a_prefix_is_work_too():
    """One caller forces 45 tokens with each request, the other none: of the same work, nine times as many go."""
    queue = Queue(1000, 1, 64)
    put(queue, [sequence("forced", prefix=(7,) * 40) for _ in range(50)])
    put(queue, [sequence("free") for _ in range(90)])
    served = [take_one(queue).request.caller for _ in range(100)]
    assert served.count("free") >= 88


@pytest.mark.parametrize("same", [True, False], ids=["one that always comes back", "ever new ones"])
def test_small_requests_that_keep_coming_do_not_starve_a_large_one(same):
    """A caller whose request is worth 20 of theirs waits for 20 of them."""
    queue = Queue(100, 1, 64)
    large = sequence("large", 20)
    queue.put(large)
    for turn in range(1, 30):
        queue.put(sequence("small" if same else f"small-{turn}", 1))
        if take_one(queue) is large:
            break
    assert turn == 20


def test_cancelled_requests_are_not_charged():
    """A caller that took a thousand back goes on as if they had never been."""
    queue = Queue(2000, 1, 64)
    put(queue, [sequence("other") for _ in range(100)])
    drop(queue, *put(queue, [sequence("fickle") for _ in range(1000)]))
    wanted = sequence("fickle")
    queue.put(wanted)
    assert wanted in [take_one(queue), take_one(queue)]


def test_the_turn_of_a_cancelled_request_is_the_next_ones_for_its_own_work():
    """Behind a cancelled small request, a large one does not get the small one's early turn."""
    queue = Queue(100, 1, 64)
    small, large = put(queue, [sequence("a", 1), sequence("a", 50)])
    others = put(queue, [sequence("b", 10) for _ in range(6)])
    assert [d.sequence for d in drop(queue, small)] == [small]
    assert [take_one(queue) for _ in range(6)] == [*others[:4], large, others[4]]


def test_an_early_turn_that_a_cancel_leaves_does_not_turn_the_clock_back():
    """A turn of long ago is taken late: a newcomer still comes behind whoever had waited by then."""
    queue = Queue(100, 1, 64)
    huge, small = put(queue, [sequence("a", 100), sequence("a", 1)])
    waiting = put(queue, [sequence("b", 10) for _ in range(10)])
    for expected in waiting[:9]:
        assert take_one(queue) is expected
    drop(queue, huge)
    assert take_one(queue) is small
    newcomer = sequence("new", 50)
    queue.put(newcomer)
    assert [take_one(queue), take_one(queue)] == [waiting[9], newcomer]


def reachable(root):
    """How many objects hang on this one, leaving out code."""
    seen, todo = {id(root)}, [root]
    while todo:
        for item in gc.get_referents(todo.pop()):
            if id(item) not in seen and not isinstance(item, type | ModuleType | FunctionType | MethodType):
                seen.add(id(item))
                todo.append(item)
    return len(seen)


@pytest.mark.parametrize(("num_priorities", "served_every"), [(1, 10_000), (1000, 2)])
def test_nothing_is_kept_of_callers_that_left(num_priorities, served_every):
    """Thousands of callers come and go, served or not, with far deadlines: memory stays small."""
    queue = Queue(100, 1, 64)
    queue.put(sequence("patient", deadline=1e9))
    sizes = []
    for i in range(1, 4001):
        visitor = sequence(f"visitor {i}", priority=i % num_priorities, deadline=1e9)
        queue.put(visitor)
        if i % served_every:
            drop(queue, visitor)
        else:
            while take_one(queue) is not visitor:
                queue.put(sequence("patient", deadline=1e9))
        if i % 1000 == 0:
            sizes.append(reachable(queue))
    assert queue.num_callers == 1
    assert max(sizes) < 3000


def test_a_full_queue_has_room_for_a_caller_below_its_share():
    """One caller holds all ten places: another gets five of them, of the newest; neither gets more."""
    queue = Queue(10, 1, 64)
    greedy = put(queue, [sequence("greedy") for _ in range(10)])
    with pytest.raises(OverloadedError, match="10 requests wait already"):
        queue.put(sequence("greedy"))
    queue.check_room(5, "modest")
    with pytest.raises(OverloadedError):
        queue.check_room(6, "modest")
    modest = put(queue, [sequence("modest") for _ in range(5)])
    for caller in ("greedy", "modest"):
        with pytest.raises(OverloadedError):
            queue.put(sequence(caller))
    assert queue.num_waiting == 10
    dropped = queue.sweep(now=0.0)
    assert [d.sequence for d in dropped] == greedy[:4:-1]
    assert all(isinstance(d.error, OverloadedError) for d in dropped)
    assert sorted(map(id, queue.take(0, 64, 1000))) == sorted(map(id, greedy[:5] + modest))


def test_who_makes_room_gives_up_its_lowest_priority():
    """Its newest request of the lowest priority goes, not its newest of all."""
    queue = Queue(3, 1, 64)
    _, unimportant, _ = put(queue, [sequence("a", priority=p) for p in (1, 0, 2)])
    queue.put(sequence("b"))
    assert [d.sequence for d in queue.sweep(now=0.0)] == [unimportant]


def test_a_queue_of_as_many_callers_as_places_is_full():
    """Everybody has one place: nobody has more than an even share to give up."""
    queue = Queue(4, 1, 64)
    put(queue, [sequence(caller) for caller in "abcd"])
    with pytest.raises(OverloadedError):
        queue.put(sequence("e"))
    assert queue.sweep(now=0.0) == []


def test_the_work_that_goes_before_is_what_comes_before_in_turn():
    """Of other callers as much as one asks for oneself, of higher priorities all, of lower ones nothing."""
    queue = Queue(1000, 1, 64)
    assert queue.work_before(sequence("new", 10)) == 0
    put(queue, [sequence("many", 10) for _ in range(100)])
    put(queue, [sequence("few", 4)])
    put(queue, [sequence("high", 10, rows=2, priority=1), sequence("low", 10, priority=-1)])
    assert queue.work_before(sequence("new", 10)) == 10 + 4 + 20
    assert queue.work_before(sequence("many", 10)) == 1000 + 4 + 20
    assert queue.work_before(sequence("new", 10, priority=1)) == 10
    assert queue.work_before(sequence("new", 10, priority=2)) == 0


def test_a_higher_priority_takes_a_place_of_its_own_caller():
    """In a full queue, its newest of the lowest priority below makes room, and is told so; there is no other."""
    queue = Queue(4, 1, 64)
    first, low, second, high = put(queue, [sequence("a", priority=p) for p in (0, -1, 0, 3)])
    with pytest.raises(OverloadedError, match="4 requests wait already"):
        queue.put(sequence("a", priority=-1))
    put(queue, [sequence("a", priority=2) for _ in range(3)])
    dropped = queue.sweep(now=0.0)
    assert [d.sequence for d in dropped] == [low, second, first]
    assert all("same caller's with a higher priority: retry later" in str(d.error) for d in dropped)
    with pytest.raises(OverloadedError):
        queue.put(sequence("a", priority=2))
    assert queue.num_waiting == 4
    assert queue.take(0, 64, 1000)[0] is high


def test_no_priority_takes_a_place_of_another_caller():
    """Two callers share the places: whatever one says of its requests, the other keeps its half."""
    queue = Queue(4, 1, 64)
    modest = put(queue, [sequence("modest", priority=-5) for _ in range(2)])
    loud = put(queue, [sequence("loud", priority=p) for p in (9, 10)])
    with pytest.raises(OverloadedError):
        queue.put(sequence("loud", priority=9))
    top = sequence("loud", priority=10)
    queue.put(top)
    assert [d.sequence for d in queue.sweep(now=0.0)] == [loud[0]]
    assert set(queue.take(0, 64, 1000)) == {*modest, loud[1], top}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1)), max_size=12),
    st.integers(1, 6),
    st.sampled_from("abcd"),
    st.integers(-1, 1),
    st.integers(1, 7),
)
def test_there_is_room_for_as_many_as_are_told(waiting, max_waiting, caller, priority, count):
    """What is promised before the requests are made is kept for each of them, and what is refused would not fit."""
    queue = Queue(max_waiting, 1, 64)
    for other, p in waiting:
        with contextlib.suppress(OverloadedError):
            queue.put(sequence(other, priority=p))
    try:
        queue.check_room(count, caller, priority)
        fits = True
    except OverloadedError:
        fits = False
    try:
        put(queue, [sequence(caller, priority=priority) for _ in range(count)])
        went_in = True
    except OverloadedError:
        went_in = False
    assert fits == went_in
    assert queue.num_waiting <= max_waiting


def test_the_tokens_that_wait_are_bounded_and_a_lone_request_may_have_more():
    """The refusal names what waits, what was asked for, and the limit; what leaves gives its tokens back."""
    queue = Queue(10, 1, 100, max_waiting_tokens=10)
    large = sequence(length=50)
    queue.put(large)
    with pytest.raises(OverloadedError, match="50 source tokens wait already and this one has 3, the limit is 10"):
        queue.put(sequence(length=3))
    assert queue.take(0, 100, 1000) == [large]
    queue.put(sequence(length=6))
    queue.put(sequence(length=4))
    assert (queue.num_tokens, queue.num_waiting) == (10, 2)
    queue.take(0, 100, 1000)
    assert (queue.num_tokens, queue.work) == (0, 0)


def test_a_caller_of_few_tokens_gets_the_room_of_whoever_holds_the_most():
    """That one's newest requests end as overloads, and no more of them than it takes."""
    queue = Queue(10, 1, 100, max_waiting_tokens=12)
    heavy = [sequence(length=3, caller="heavy") for _ in range(4)]
    for one in heavy:
        queue.put(one)
    queue.put(sequence(length=4, caller="light"))
    dropped = queue.sweep(now=0.0)
    assert [one.sequence for one in dropped] == [heavy[3], heavy[2]]
    assert all(isinstance(one.error, OverloadedError) and "limit is 12" in str(one.error) for one in dropped)
    assert queue.num_tokens == 10
    with pytest.raises(OverloadedError):
        queue.put(sequence(length=3, caller="light"))  # 7 would be more than an even share
    assert queue.sweep(now=0.0) == []
