"""Random segmentations by a SentencePiece model: the same for the same seed, in any process on any machine.

The library samples too, but its generator gives other numbers in each process, whatever its seed: a run could not be
resumed exactly. This is plain Python, many times slower than the best segmentation: some 50,000 words a
second for BPE; for unigram 100,000, but 4,000 of words that are not among the last ``CACHED_WORDS`` different ones.
"""

from __future__ import annotations

import math
import re
from array import array
from functools import lru_cache
from itertools import accumulate, pairwise
from random import Random
from typing import NamedTuple

import sentencepiece

CANDIDATES = 64  # a word's best segmentations, of which unigram sampling draws
CACHED_WORDS = 30_000  # unigram: the segmentations of so many are kept, up to about 3 kB each


class Candidates(NamedTuple):
    """A word's segmentations, one after another: where each ends in ``ids``, and the weights of it and those before."""

    ids: array[int]
    ends: array[int]
    weights: array[float]


class Sampler:
    """Word by word: no piece holds a blank.

    BPE leaves out each possible merge with probability ``sampling``, each time anew (Provilkov et al. 2020). Unigram
    draws from a word's best segmentations in proportion to their probability to the power ``sampling`` (Kudo 2018).
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor
        learned = [
            i
            for i in range(processor.get_piece_size())
            if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
        ]
        scores = [processor.get_score(i) for i in learned]
        self.is_bpe = all(score.is_integer() for score in scores)  # ranks; unigram has log probabilities
        # User-defined symbols come first, with the score 0, which BPE's first learned piece has too.
        num_defined = sum(score == 0 for score in scores) - self.is_bpe
        self._defined_ids = frozenset(learned[:num_defined])
        defined = sorted(map(processor.id_to_piece, self._defined_ids), key=lambda piece: (-len(piece), piece))
        self._defined = re.compile(f"({'|'.join(map(re.escape, defined))})") if defined else None
        self._ranks = {
            processor.id_to_piece(i): -score
            for i, score in zip(learned[num_defined:], scores[num_defined:], strict=True)
        }
        self._scores = [processor.get_score(i) for i in range(processor.get_piece_size())]
        self._ids = {processor.id_to_piece(i): (i,) for i in learned}
        self._candidates = lru_cache(maxsize=CACHED_WORDS)(self._find_candidates)

    def sample(self, text: str, sampling: float, random: Random) -> list[int]:
        """The ids of one random segmentation; a stretch of unknown characters is one ``<unk>``, as without sampling."""
        normalized: str = self._processor.normalize(text)
        words = re.findall(r"\u2581[^\u2581]*|^[^\u2581]+", normalized)
        segment = self._merged if self.is_bpe else self._drawn
        ids = [i for word in words for i in segment(word, sampling, random)]
        unknown = self._processor.unk_id()
        return [i for before, i in pairwise([-1, *ids]) if not before == i == unknown]

    def _drawn(self, word: str, sampling: float, random: Random) -> list[int]:
        ids, ends, weights = self._candidates(word, sampling)
        number = random.choices(range(len(ends)), cum_weights=weights)[0]
        return ids[ends[number - 1] if number else 0 : ends[number]].tolist()

    def _find_candidates(self, word: str, sampling: float) -> Candidates:
        found: list[list[int]] = [[self._processor.piece_to_id("\u2581")]]
        if letters := word.lstrip("\u2581"):  # not only the mark of a blank
            found = self._processor.nbest_encode(letters, nbest_size=CANDIDATES)
        fixed = self._placeholders(found[0])  # the best one is first, and has them all
        candidates = [ids for ids in found if self._placeholders(ids) == fixed]
        scores = [sum(self._scores[i] for i in ids) for ids in candidates]
        best = max(scores)
        return Candidates(
            array("i", [i for ids in candidates for i in ids]),
            array("i", accumulate(map(len, candidates))),
            array("d", accumulate(math.exp(sampling * (score - best)) for score in scores)),
        )

    def _placeholders(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self._defined_ids]

    def _merged(self, word: str, sampling: float, random: Random) -> list[int]:
        parts = self._defined.split(word) if self._defined else [word]
        ids: list[int] = []
        for number, part in enumerate(parts):
            symbols = [part] if number % 2 else list(part)  # a user-defined symbol is at each odd place
            while (place := self._next_merge(symbols, sampling, random)) is not None:
                symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
            for symbol in symbols:
                ids += self._ids.get(symbol) or self._spelled(symbol)
        return ids

    def _next_merge(self, symbols: list[str], sampling: float, random: Random) -> int | None:
        """Where the best merge is of those that are not left out; None if there is none."""
        best, place = math.inf, None
        for index, (left, right) in enumerate(pairwise(symbols)):
            rank = self._ranks.get(left + right)
            if rank is not None and rank < best and random.random() >= sampling:
                best, place = rank, index
        return place

    def _spelled(self, character: str) -> tuple[int, ...]:
        """Of a character without a piece, its bytes, or ``<unk>``."""
        processor = self._processor
        spelled = tuple(processor.piece_to_id(f"<0x{byte:02X}>") for byte in character.encode("utf-8"))
        return spelled if all(processor.is_byte(i) for i in spelled) else (processor.unk_id(),)
