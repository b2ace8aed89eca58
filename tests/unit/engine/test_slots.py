"""Rows stay dense, whoever leaves."""

from hypothesis import given
from hypothesis import strategies as st

from dragoman.engine.search import Hypothesis
from dragoman.engine.slots import Move, SlotTable


def test_last_row_moves_into_a_freed_one():
    """Worked example: of rows A B C, A leaves: C moves from 2 to 0."""
    table = SlotTable(4)
    a, b, c = (Hypothesis(next_input=1) for _ in range(3))
    assert [table.take(h) for h in (a, b, c)] == [0, 1, 2]
    assert table.release(a) == Move(source=2, target=0)
    assert table.rows == [c, b]
    assert (a.slot, b.slot, c.slot) == (-1, 1, 0)


def test_freeing_the_last_row_moves_nothing():
    """The last row leaves without a move."""
    table = SlotTable(2)
    a, b = Hypothesis(next_input=1), Hypothesis(next_input=1)
    table.take(a)
    table.take(b)
    assert table.release(b) is None
    assert table.rows == [a]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_moves_carry_every_rows_content(steps):
    """Whatever the order of takes and releases: rows are dense, free + used = total, and content follows its owner."""
    table = SlotTable(8)
    content: list[object] = [None] * 8  # what a KvStore would hold
    for is_take, index in steps:
        if is_take and table.num_free:
            hypothesis = Hypothesis(next_input=1)
            content[table.take(hypothesis)] = hypothesis
        elif not is_take and index < table.num_used:
            move = table.release(table.rows[index])
            if move is not None:
                content[move.target] = content[move.source]
        assert table.num_free + table.num_used == table.num_slots
        assert content[: table.num_used] == table.rows
        assert [h.slot for h in table.rows] == list(range(table.num_used))
