"""The coverage penalty: by hand."""

import math

import numpy as np
import pytest

from dragoman.coverage import coverage_penalty


def test_the_penalty_by_hand():
    """The first position got more than enough, the second and third 3/8 each, the last none at all."""
    weights = np.array([[0.5, 0.25, 0.25, 0.0], [0.75, 0.125, 0.125, 0.0]], np.float32)
    assert coverage_penalty(weights) == pytest.approx(2 * math.log(3 / 8))
    assert coverage_penalty(np.ones((2, 3), np.float32)) == 0.0
    assert coverage_penalty(np.zeros((0, 3), np.float32)) == 0.0
