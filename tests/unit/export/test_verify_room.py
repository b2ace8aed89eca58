"""How many slots an export compares on, and the memory that they get."""

import dataclasses

import pytest

pytest.importorskip("torch", reason="the runtime alone has no tools of the export")

from dragoman.bundle import Limits, ModelShape
from dragoman.testing import VOCABULARY, scripted_manifest
from dragoman_export.exporter import verify_room

GIB = 1 << 30
SIZE = len(VOCABULARY.tokens)


def room(shape, max_tokens, element_bytes=4):
    manifest = scripted_manifest(limits=Limits(max_tokens, max_tokens))
    return verify_room(dataclasses.replace(manifest, model=shape), element_bytes)


def test_a_model_with_long_limits_is_compared_on_fewer_slots():
    """Width 512 and 6 layers: 24 KiB a token, up to 1,024 of a source, and 2,048 places for 1,025 of a target."""
    shape = ModelShape(512, 8, 64, 6, 6, SIZE, SIZE)
    assert room(shape, 1024) == (14, 14 * 3072 * 24 * 1024)
    assert 14 * 3072 * 24 * 1024 <= GIB < 15 * 3072 * 24 * 1024
    assert room(shape, 1024, element_bytes=2) == (28, 28 * 3072 * 12 * 1024)


def test_a_small_model_is_compared_on_32_slots():
    """Which get no more than they need."""
    assert room(ModelShape(64, 2, 32, 1, 1, SIZE, SIZE), 64) == (32, 32 * (64 + 128) * 64 * 4 * 2)


def test_a_whole_beam_fits_whatever_it_takes():
    """Width 4096 and 24 layers: four slots of more than a GiB."""
    num_slots, num_bytes = room(ModelShape(4096, 32, 128, 24, 24, SIZE, SIZE), 1024)
    assert (num_slots, num_bytes) == (4, 4 * 3072 * 24 * 4096 * 4 * 2)
    assert num_bytes > GIB
