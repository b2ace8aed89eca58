"""The table of a shortlist: from a model's training text, the tokens that an answer may be made of, by its source."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.engine.candidates import Candidates
from dragoman.engine.projection import Projection
from dragoman.vocabulary import Vocabulary
from dragoman_export.errors import ExportError
from dragoman_export.lexicon import Pair, learn_lexicon
from dragoman_training.checkpoint import LoadedCheckpoint
from dragoman_training.corpus import count_lines, iterate_lines

MAX_PAIRS = 200_000  # evenly taken from those given
LEAST_PROBABILITY = 1e-4
"""A lexicon gives some share to all that ever met: below this it is chance."""


@dataclass(frozen=True)
class ShortlistOptions:
    """The training text, aligned line by line, and how many candidates there are.

    ``num_per_token`` are the most probable ones of each source token; ``num_always`` the most frequent target tokens of
    all, which every source has.
    """

    sources: Path
    targets: Path
    num_per_token: int = 50
    num_always: int = 100

    def __post_init__(self) -> None:
        for name in ("num_per_token", "num_always"):
            if (value := getattr(self, name)) < 1:
                raise ExportError(f"{name} of the shortlist is {value}; it must be at least 1")


def find_candidates(
    options: ShortlistOptions, checkpoint: LoadedCheckpoint, source: Vocabulary, target: Vocabulary
) -> Candidates:
    """Those of a model's text.

    Beside what the options say, every source has the end token and, of a vocabulary with byte fallback, the 256 bytes;
    and every source token the target token of its name, for what is copied. What is never produced is none. Raises
    ExportError, and DataError for files that cannot be read.
    """
    config, special = checkpoint.model.config, checkpoint.special
    counts = np.zeros(config.target_vocab_size, np.int64)

    def counted() -> Iterator[Pair]:
        for pair in _pairs(options, checkpoint):
            np.add.at(counts, pair[1], 1)
            yield pair

    lexicon = learn_lexicon(counted(), config.source_vocab_size, config.target_vocab_size)
    never = np.array(special.never_produced, np.int64)
    counts[[*never, special.eos]] = 0
    frequent = np.argsort(-counts, kind="stable")[: options.num_always]
    frequent = frequent[counts[frequent] > 0]
    pieces = [index for index, piece in enumerate(target.pieces) if isinstance(piece, bytes)]
    always = np.unique([special.eos, *frequent, *pieces])
    places = {name: index for index, name in enumerate(target.tokens)}
    copies = np.array([(i, places[name]) for i, name in enumerate(source.tokens) if name in places]).reshape(-1, 2)
    sources, targets = lexicon.best(options.num_per_token, LEAST_PROBABILITY)
    links = np.concatenate([sources, copies[:, 0]]) * config.target_vocab_size
    links = np.unique(links + np.concatenate([targets, copies[:, 1]]))
    sources, targets = np.divmod(links, config.target_vocab_size)
    own = ~np.isin(targets, [*never, *always])  # what everyone has needs no place in a source token's list
    sources, targets = sources[own], targets[own]
    offsets = np.searchsorted(sources, np.arange(config.source_vocab_size + 1))
    return Candidates(
        config.target_vocab_size, offsets.astype(np.int32), targets.astype(np.int32), always.astype(np.int32)
    )


def to_bytes(candidates: Candidates, projection: Projection) -> bytes:
    """The file: see ``dragoman/engine/candidates.py``. The same arrays give the same bytes."""
    arrays: dict[str, NDArray[Any]] = {
        "offsets": candidates.offsets,
        "tokens": candidates.tokens,
        "always": candidates.always,
        "weights": projection.weights,
        "scales": projection.scales,
    }
    if projection.bias is not None:
        arrays["bias"] = projection.bias
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def _pairs(options: ShortlistOptions, checkpoint: LoadedCheckpoint) -> Iterator[Pair]:
    """The token ids of the pairs that training would take, by their lengths."""
    numbers = [count_lines(path) for path in (options.sources, options.targets)]
    if numbers[0] != numbers[1]:
        raise ExportError(
            f"{options.sources} has {numbers[0]} lines and {options.targets} {numbers[1]}: the text for the shortlist "
            "must be aligned line by line"
        )
    stride = -(-numbers[0] // MAX_PAIRS) or 1
    lines = zip(iterate_lines(options.sources), iterate_lines(options.targets), strict=True)
    for source, target in islice(lines, 0, None, stride):
        pair = checkpoint.source_tokenizer.encode(source), checkpoint.target_tokenizer.encode(target)
        if len(pair[0]) < checkpoint.max_source_tokens and len(pair[1]) < checkpoint.max_target_tokens:
            yield pair
