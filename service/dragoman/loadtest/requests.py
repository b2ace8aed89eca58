"""The requests of a mix, drawn by chance, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dragoman.loadtest.scenario import Part


@dataclass(frozen=True, slots=True)
class Request:
    """What one request is."""

    part: Part
    text: str
    streaming: bool
    cancel_seconds: float | None  # when this side cancels, from its sending on; None: it waits for the answer


def draw_requests(mix: Sequence[Part], seed: int) -> Iterator[Request]:
    """Without an end."""
    draw = random.Random(seed)
    weights = list(accumulate(part.weight for part in mix))
    words = {part.name: [word for text in part.texts for word in text.split()] for part in mix if part.words}
    while True:
        part = mix[0] if len(mix) == 1 else draw.choices(mix, cum_weights=weights)[0]
        text = _passage(words[part.name], part.words, draw) if part.words else draw.choice(part.texts)
        streaming = part.streaming > 0 and draw.random() < part.streaming
        cancels = part.cancel > 0 and draw.random() < part.cancel
        yield Request(part, text, streaming, draw.uniform(*part.cancel_after_ms) / 1000 if cancels else None)


def _passage(words: Sequence[str], lengths: tuple[int, int], draw: random.Random) -> str:
    """Words that follow each other, from the beginning again behind the last."""
    begin, length = draw.randrange(len(words)), draw.randint(*lengths)
    return " ".join(words[(begin + offset) % len(words)] for offset in range(length))
