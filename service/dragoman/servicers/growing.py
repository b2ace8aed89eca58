"""The text of an answer as far as it is certain, put together from segments that grow interleaved."""

from __future__ import annotations

from dragoman.answer import TextResult, TextUpdate


class GrowingText:
    """The best answer to one text: what was given away of it is never taken back."""

    def __init__(self, text: str) -> None:
        """``text`` is what is answered; what lies between its segments is part of the answer."""
        self._text = text
        self._position = 0  # of ``text``, up to which the answer is given away
        self._segment = 0  # the first that has not ended
        self._waiting: dict[int, str] = {}  # segments' text that was not given away, the current one's included
        self._sources: dict[int, tuple[int, int]] = {}
        self._ended: set[int] = set()
        self._sent = ""

    def push(self, update: TextUpdate) -> str:
        """What the answer grows by; empty where it grows behind a segment that has not ended."""
        if update.hypothesis > 0:  # another answer
            return ""
        segment = update.segment
        self._waiting[segment] = self._waiting.get(segment, "") + update.delta
        self._sources[segment] = update.source
        if update.result is not None:
            self._ended.add(segment)
        delta = ""
        while self._segment in self._sources:
            start, end = self._sources[self._segment]
            delta += self._text[self._position : start] + self._waiting.pop(self._segment, "")
            if self._segment not in self._ended:
                self._position = start
                break
            self._position = end
            self._segment += 1
        self._sent += delta
        return delta

    def close(self, result: TextResult) -> str:
        """The rest of the whole answer."""
        assert result.text.startswith(self._sent), "what was given away is what the answer begins with"
        return result.text[len(self._sent) :]
