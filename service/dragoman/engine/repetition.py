"""The loop guard: whether an answer goes round in circles. Pure Python; looks at tokens alone, never at scores.

A decoder that has lost its way says "(laughter)(applause)" until its limit ends it. Such an answer ends with one cycle
of tokens over and over; no language does that so often. In 353,497 distinct sentences of German and English (Tatoeba
and Multi30k), as characters and as SentencePiece models of 1,000, 4,000 and 8,000 tokens see them (unigram and BPE),
and in 133,019 pronunciations of CMUdict, no stretch of cycles is longer than 22 tokens, and no cycle comes more than 5
times in a row. The guard asks for 64 tokens and 6 times.

Not seen are circles with something new in each round ("1, 2, 3, 4, …") or longer than 32 tokens: the limit on new
tokens ends those.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_CYCLE = 32
MIN_TOKENS = 64
MIN_ROUNDS = 6
CHECK_EVERY = 8

SOURCE_ROUNDS = 4
"""A source that repeats itself so often may ask for an answer that does."""


def loops(tokens: Sequence[int], num_given: int = 0) -> bool:
    """Whether ``tokens`` end with a cycle of at most 32 tokens, at least 6 times in a row, over at least 64 tokens.

    The last round need not be complete. The first ``num_given`` tokens, a prefix that the model did not choose, do not
    count. To be asked after each token: it looks at every 8th alone, so that a loop is found at most 7 tokens late.
    """
    count = len(tokens) - num_given
    if count < MIN_TOKENS or count % CHECK_EVERY:
        return False
    last = tokens[-1]
    for cycle in range(1, MAX_CYCLE + 1):
        stretch = max(MIN_TOKENS, MIN_ROUNDS * cycle)
        # Each token is the one a cycle before it. Most cycles are ruled out by the last token.
        if stretch <= count and tokens[-1 - cycle] == last and tokens[-stretch:-cycle] == tokens[cycle - stretch :]:
            return True
    return False


def repeats(source: Sequence[int]) -> bool:
    """Whether anywhere in a source a cycle of at most 32 tokens comes at least 4 times in a row.

    A line of eighty dots or "ha ha ha ha ha" is translated into its like: for such a source the guard is to be off.
    This asks for less than ``loops`` does, for the two sides' tokens may be of different sizes.
    """
    for cycle in range(1, min(MAX_CYCLE, len(source) // SOURCE_ROUNDS) + 1):
        same = 0
        for token, later in zip(source, source[cycle:], strict=False):
            same = same + 1 if token == later else 0
            if same == (SOURCE_ROUNDS - 1) * cycle:
                return True
    return False
