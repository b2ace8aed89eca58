"""A shortlist's table and columns: each row gets the logits of its own candidates, whoever else is there."""

import dataclasses
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.bundle import ModelShape
from dragoman.engine.candidates import Candidates, read_arrays
from dragoman.engine.projection import STEP, Columns, Projection
from dragoman.errors import BundleError

SHAPE = ModelShape(8, 1, 8, 1, 1, source_vocab_size=4, target_vocab_size=900)
RNG = np.random.default_rng(0)
ARRAYS: dict[str, np.ndarray] = {
    "offsets": np.array([0, 2, 2, 5, 6], np.int32),
    "tokens": np.array([7, 3, 3, 4, 899, 5], np.int32),
    "always": np.array([2, 9], np.int32),
    "weights": RNG.integers(0, 256, (900, 8)).astype(np.uint8),
    "scales": RNG.integers(1, 5, 900).astype(np.float32),
    "bias": RNG.integers(-9, 10, 900).astype(np.float32),
}


def with_array(name, array):
    return {**ARRAYS, name: array}


@pytest.mark.parametrize(
    ("source", "prefix", "expected"),
    [
        ((1,), (), [2, 9]),
        ((0,), (), [2, 3, 7, 9]),
        ((0, 2, 0), (), [2, 3, 4, 7, 9, 899]),
        ((3,), (9, 600, 600), [2, 5, 9, 600]),
    ],
)
def test_candidates_are_the_sources_everyones_and_the_prefixs(source, prefix, expected):
    """Ascending, each once."""
    assert Candidates.checked(ARRAYS, SHAPE).of(source, prefix).tolist() == expected


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (with_array("offsets", ARRAYS["offsets"][:-1]), r"'offsets' is int32 of shape \(4,\); it must be int32 of .*5"),
        (with_array("offsets", np.array([0, 5, 2, 5, 6], np.int32)), "offsets do not ascend from 0"),
        (with_array("offsets", np.array([1, 2, 2, 5, 6], np.int32)), "offsets do not ascend from 0"),
        (with_array("tokens", ARRAYS["tokens"][:-1]), r"'tokens' is int32 of shape \(5,\)"),
        (with_array("tokens", ARRAYS["tokens"] + np.int32(1)), "tokens hold 900, but the target vocabulary has 900"),
        (with_array("always", np.array([-1], np.int32)), "always hold -1"),
        (with_array("always", ARRAYS["always"].astype(np.int64)), "'always' is int64"),
        ({name: array for name, array in ARRAYS.items() if name != "always"}, "no array 'always'"),
    ],
)
def test_a_table_of_another_model_is_refused(arrays, words):
    """What is wrong with it is named."""
    with pytest.raises(BundleError, match=words):
        Candidates.checked(arrays, SHAPE)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (with_array("weights", ARRAYS["weights"][:, :7]), r"'weights' is uint8 of shape \(900, 7\)"),
        (with_array("weights", ARRAYS["weights"].view(np.int8)), "'weights' is int8"),
        (with_array("scales", ARRAYS["scales"][:8]), "'scales' is float32 of shape"),
        ({name: array for name, array in ARRAYS.items() if name != "bias"}, "no array 'bias'"),
    ],
)
def test_a_projection_of_another_model_is_refused(arrays, words):
    """So is one that lacks the bias that the graph asks for."""
    with pytest.raises(BundleError, match=words):
        Projection.checked(arrays, SHAPE, has_bias=True)


def saved(**arrays):
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 cut", saved(**ARRAYS)[:-30], saved(tokens=np.array([{}], object)), b"\x93NUMPY\x01\x00"],
)
def test_what_is_no_archive_of_arrays_is_refused(content):
    """Empty, cut, or with objects in it, which are never unpacked."""
    with pytest.raises(BundleError, match="no archive of arrays"):
        read_arrays(content)


def test_an_archive_gives_its_arrays():
    """Under their names."""
    arrays = read_arrays(saved(**ARRAYS))
    assert set(arrays) == set(ARRAYS)
    assert all(np.array_equal(arrays[name], array) for name, array in ARRAYS.items())


class Rows:
    """A replica's rows as the engine keeps them, 0..R-1, with what each row's logits must be."""

    def __init__(self, num_slots, has_bias=True):
        self.projection = Projection.checked(ARRAYS, SHAPE, has_bias=has_bias)
        self.columns = Columns(self.projection, num_slots)
        self.num_slots = num_slots
        self.rows = []
        self.buffer = np.zeros((num_slots, 900), np.float32)

    def admit(self, candidates):
        self.columns.install(len(self.rows), candidates)
        self.rows.append(candidates)

    def finish(self, index):
        last = self.rows.pop()
        if index < len(self.rows):
            self.columns.move(len(self.rows), index)
            self.rows[index] = last

    def step(self, x):
        """The rows' logits after a step with hidden states x (R, D) of whole numbers."""
        columns, rows = self.columns, len(self.rows)
        columns.keep(rows)
        bias = 0 if columns.bias is None else columns.bias
        columns.logits[:rows] = x @ (columns.weights.astype(np.float32) - 128) * columns.scales + bias
        columns.spread(self.buffer[:rows])
        return self.buffer[:rows]

    def expected(self, x):
        """All logits as one product over the whole vocabulary gives them, then masked row by row."""
        full = x @ (self.projection.weights.astype(np.float32) - 128).T * self.projection.scales
        full += 0 if self.projection.bias is None else self.projection.bias
        masked = np.full_like(full, -np.inf)
        for row, candidates in enumerate(self.rows):
            masked[row, candidates] = full[row, candidates]
        return masked


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.integers(1, 9))
def test_rows_get_their_own_candidates_logits_whatever_came_and_went(seed, has_bias, num_slots):
    """Rows begin, move and end in any order, with few candidates and many; columns grow, are used again, and shrink."""
    rng = np.random.default_rng(seed)
    state = Rows(num_slots, has_bias)
    for _ in range(40):
        while len(state.rows) < num_slots and rng.random() < 0.6:
            many = int(rng.choice([1, 20, 200, 700]))
            state.admit(np.sort(rng.choice(900, many, replace=False)))
        while state.rows and rng.random() < 0.4:
            state.finish(int(rng.integers(len(state.rows))))
        if state.rows:
            x = rng.integers(-5, 6, (len(state.rows), 8)).astype(np.float32)
            assert np.array_equal(state.step(x), state.expected(x))


def test_columns_are_no_more_than_the_rows_need():
    """With some to spare; what one row needs is not kept for the many that were there."""
    state = Rows(num_slots=8)
    for start in range(0, 800, 100):
        state.admit(np.arange(start, start + 100))
    assert 800 <= state.columns.capacity <= 800 * 1.125 + STEP
    while len(state.rows) > 1:
        state.finish(0)
    state.step(np.ones((1, 8), np.float32))
    assert 100 <= state.columns.capacity <= 2 * STEP


def test_a_row_like_the_one_before_it_replaces_no_array():
    """So that addresses stay bound: columns that nobody needs any more are used for others."""
    state = Rows(num_slots=2)
    state.admit(np.arange(100))
    generation = state.columns.generation
    for start in range(100, 800, 50):
        state.finish(0)
        state.admit(np.arange(start, start + 100))
        x = np.full((1, 8), 2, np.float32)
        assert np.array_equal(state.step(x), state.expected(x))
    assert state.columns.generation == generation


def test_what_steering_wrote_is_gone_at_the_next_step():
    """The logits are the caller's to change; a row that takes another's place shows nothing of it."""
    state = Rows(num_slots=2)
    state.admit(np.arange(0, 10))
    state.admit(np.arange(5, 15))
    x = np.ones((2, 8), np.float32)
    state.step(x)[:] = -np.inf
    assert np.array_equal(state.step(x), state.expected(x))
    state.finish(0)
    assert np.array_equal(state.step(x[:1]), state.expected(x[:1]))


def test_a_projection_is_frozen():
    """Replicas share it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rows(1).projection.bias = None
