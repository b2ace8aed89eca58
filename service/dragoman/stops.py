"""Where an answer ends because of its text: stop strings, found across the borders of tokens, as the tokens come.

Of an answer that holds a stop string, the text before it is kept, and the fewest tokens that hold this text. That is a
matter of the tokens alone: neither how many of them come at once nor how many come behind the end changes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from dragoman.tokenizer import IncrementalDetokenizer, TargetTokenizer


class StopFinder:
    """Looks for the first of some texts to be complete in one that grows; of those that end together, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""  # the end of the text, which may be the beginning of a stop string
        self.found = False

    def push(self, text: str) -> str:
        """More text. Returns what is certain to be before every stop string; nothing more once one was found."""
        if self.found:
            return ""
        text = self._held + text
        places = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found = True
            self._held = ""
            return text[: min(places)[1]]
        certain = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]

    def close(self) -> str:
        """The text ends here. Returns what was held back of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of the stop string, which is not whole in it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class AnswerReader:
    """Turns an answer's tokens into its text, piece by piece, up to the first stop string behind the prefix.

    What stands before the stop string is kept as it is, a blank at its end included, as vLLM does: it may have been
    given out before the string began.
    """

    def __init__(
        self, tokenizer: TargetTokenizer, num_prefix: int, stops: Sequence[str], copied: Sequence[str] | None = ()
    ) -> None:
        """The first ``num_prefix`` tokens are not searched.

        ``copied``: what each ``<unk>`` stands for, the others for nothing; None where that is not known yet: there the
        text waits.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._unknown_id = tokenizer.unknown_id
        self._finder = StopFinder(stops)
        self._num_prefix = num_prefix
        self._lengths = [0]  # of the text after so many tokens
        self._kept = 0  # characters given out
        self._copied = None if copied is None else iter(copied)
        self._waits = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: nothing more will come."""
        return self._finder.found

    @property
    def num_tokens(self) -> int:
        """How many of the tokens are kept, once a stop string was found or the answer has ended."""
        num_tokens = len(self._lengths) - 1
        return max(self._num_prefix, bisect_left(self._lengths, self._kept)) if self.stopped else num_tokens

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens make final; may be empty."""
        out = []
        for token in tokens:
            if self.stopped or self._waits:
                break
            copied = ""
            if token == self._unknown_id:
                if self._copied is None:
                    self._waits = True
                    break
                copied = next(self._copied, "")
            piece = self._detokenizer.insert(copied) if copied else self._detokenizer.push((token,))
            self._lengths.append(self._lengths[-1] + len(piece))
            out.append(piece if len(self._lengths) <= self._num_prefix + 1 else self._finder.push(piece))
        return self._given_out(out)

    def close(self) -> str:
        """The text of the tail: the answer has ended."""
        tail = self._detokenizer.close()
        self._lengths[-1] += len(tail)
        return self._given_out([self._finder.push(tail), self._finder.close()])

    def _given_out(self, pieces: list[str]) -> str:
        text = "".join(pieces)
        self._kept += len(text)
        return text
