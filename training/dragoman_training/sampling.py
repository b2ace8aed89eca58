"""Random segmentations by a SentencePiece model: the same for the same seed, in any process on any machine.

The library samples too, but its generator gives other numbers in each process, whatever its seed: a run could not be
resumed exactly. This is plain Python, some ten thousand words a second.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from random import Random

import sentencepiece

CANDIDATES = 64  # a word's best segmentations, of which unigram sampling draws


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

    def sample(self, text: str, sampling: float, random: Random) -> list[int]:
        """The ids of one random segmentation."""
        normalized: str = self._processor.normalize(text)
        words = re.findall(r"\u2581[^\u2581]*|^[^\u2581]+", normalized)
        segment = self._merged if self.is_bpe else self._drawn
        return [i for word in words for i in segment(word, sampling, random)]

    def _drawn(self, word: str, sampling: float, random: Random) -> list[int]:
        found: list[list[int]] = self._processor.nbest_encode(word.lstrip("\u2581"), nbest_size=CANDIDATES)
        if not found:  # nothing but the mark of a blank
            return [self._processor.piece_to_id("\u2581")]
        fixed = self._placeholders(found[0])  # the best one is first, and has them all
        candidates = [ids for ids in found if self._placeholders(ids) == fixed]
        scores = [sum(self._processor.get_score(i) for i in ids) for ids in candidates]
        best = max(scores)
        return random.choices(candidates, [math.exp(sampling * (score - best)) for score in scores])[0]

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
                ids += self._ids(symbol)
        return ids

    def _next_merge(self, symbols: list[str], sampling: float, random: Random) -> int | None:
        """Where the best merge is of those that are not left out; None if there is none."""
        best, place = math.inf, None
        for index, (left, right) in enumerate(pairwise(symbols)):
            rank = self._ranks.get(left + right)
            if rank is not None and rank < best and random.random() >= sampling:
                best, place = rank, index
        return place

    def _ids(self, symbol: str) -> list[int]:
        """A piece's id; of a character without one, its bytes, or ``<unk>``."""
        processor = self._processor
        if not processor.is_unknown(index := processor.piece_to_id(symbol)):
            return [index]
        spelled = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in symbol.encode("utf-8")]
        return spelled if all(processor.is_byte(i) for i in spelled) else [index]
