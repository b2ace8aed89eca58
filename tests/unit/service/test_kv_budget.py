"""Whatever a model accepts fits the memory for its KV state, or it is not served."""

import pytest

from dragoman.bundle import Limits
from dragoman.config import EngineConfig
from dragoman.errors import ConfigError
from dragoman.served_model import check_kv_cache
from dragoman.testing import scripted_manifest

NEEDED = 8 * (64 + 128) * 32 * 4 * 2
"""8 slots, 64 source tokens and room for 128 target tokens, width 32 in fp32, keys and values of one layer."""


def check(num_bytes, element_bytes):
    config = EngineConfig(num_slots=8, max_kv_cache_bytes=num_bytes)
    check_kv_cache(scripted_manifest(limits=Limits(64, 100)), config, element_bytes)


def test_a_model_that_could_exceed_the_budget_is_refused_with_the_remedy():
    """By one byte."""
    check(NEEDED, 4)
    with pytest.raises(ConfigError, match=f"may need {NEEDED} bytes of KV cache, the limit is {NEEDED - 1}: lower"):
        check(NEEDED - 1, 4)


def test_caches_of_float16_need_half():
    """And no more is asked for them."""
    check(NEEDED // 2, 2)
    with pytest.raises(ConfigError, match=f"may need {NEEDED // 2} bytes"):
        check(NEEDED // 2 - 1, 2)
