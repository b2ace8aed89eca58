"""What the unit tests share: SentencePiece models at toy size, trained in a fraction of a second, once each."""

import io
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import settings
from sentencepiece import SentencePieceTrainer

settings.register_profile("dragoman", deadline=None)  # a busy machine is no failure
settings.load_profile("dragoman")

WORDS = "the a house garden dog runs over small green big tree in of with children play football night über straße 12"


@lru_cache
def train(kind: str = "bpe", byte_fallback: bool = True, normalization: str = "identity", **options: object) -> bytes:
    """A model file's content. With byte fallback it has up to 400 tokens, else 150."""
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS.split(), k=rng.randint(3, 9))) for _ in range(300)]
    model = io.BytesIO()
    values: dict[str, Any] = {
        "vocab_size": 400 if byte_fallback else 150,
        "user_defined_symbols": ["{name}"],
        "pad_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 3,
        **options,
    }
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type=kind,
        byte_fallback=byte_fallback,
        normalization_rule_name=normalization,
        hard_vocab_limit=False,  # unigram may find fewer
        num_threads=1,
        minloglevel=2,
        **values,
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def sentencepiece_model() -> Callable[..., bytes]:
    """Trains a model file's content: ``sentencepiece_model(kind, byte_fallback, normalization, **options)``."""
    return train
