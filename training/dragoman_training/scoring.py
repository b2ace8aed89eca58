"""Figures about lines of text: outputs against their sources and targets, wherever the outputs come from.

The text is what a user reads: detokenised, with no subword marks. BLEU and chrF are sacreBLEU's (Post 2018) and always
come with its signature; they go from 0 to 100, rates are shares of 1. The trainer's validation and
``dragoman evaluate`` both score here, so that equal text gives equal numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dragoman_training.errors import DataError
from dragoman_training.systems import Outputs, Task
from dragoman_training.tokenizer import split_text

NUMBER = re.compile(r"\d+")
# Possessive (++), and from the first brace on only: otherwise a long row of braces or zeros takes its length squared.
PLACEHOLDER = re.compile(
    r"https?://[^\s<>\"]*[^\s<>\".,;:!?)\]}]"  # a URL, without the punctuation behind it
    r"|</?[A-Za-z][^<>]*>"  # a tag
    r"|(?<!\{)\{++[^{}]*+\}++"
    r"|%(?:\(\w++\)|\d++\$)?[-+0#]*+\d*+(?:\.\d++)?[sdifxX@](?![A-Za-z])"
)
LOOP = 4  # so many times in a row, the same words or letters are no longer language


@dataclass(frozen=True)
class TextScores:
    """Corpus BLEU and chrF, and sacreBLEU's signature of each by the names ``bleu`` and ``chrf``."""

    bleu: float
    chrf: float
    signatures: dict[str, str]


@dataclass(frozen=True)
class Copies:
    """Of the strings that a source holds and a translation must not change: how many there are, how many arrived."""

    total: int
    copied: int

    @property
    def rate(self) -> float | None:
        """The share that arrived; None where there is none to copy."""
        return self.copied / self.total if self.total else None


@dataclass(frozen=True)
class Scores:
    """Counts, from which the rates follow: of lines, where the name does not say of what."""

    lines: int
    wrong: int  # differs from the target
    wrong_for_all: int | None  # differs from every reference; None without references
    edits: int  # token insertions, deletions and substitutions that turn outputs into targets
    target_tokens: int
    output_characters: int
    target_characters: int
    numbers: Copies
    added_numbers: int  # lines with a number more often than source and target have it
    placeholders: Copies
    empty: int  # blank, though the source is not
    looping: int  # see ``loops``; not where the target does so, too
    cut: int
    refused: int
    seconds: float
    text: TextScores | None

    def summary(self) -> dict[str, float | int | None]:
        """All figures by name. None: the figure does not apply to this data, as there is nothing to count."""
        text, tokens, characters = self.text, self.target_tokens, self.target_characters
        result: dict[str, float | int | None] = {
            "lines": self.lines,
            "exact_match": 1 - self.wrong / self.lines,
            "word_error_rate": self.wrong / self.lines,
            "token_error_rate": self.edits / tokens if tokens else None,
        }
        if self.wrong_for_all is not None:
            result["any_match_error_rate"] = self.wrong_for_all / self.lines
        if text is not None:
            result |= {"bleu": text.bleu, "chrf": text.chrf}
        result |= {
            "number_copy_rate": self.numbers.rate,
            "lines_with_added_numbers": self.added_numbers,
            "placeholder_copy_rate": self.placeholders.rate,
            "length_ratio": self.output_characters / characters if characters else None,
            "empty_outputs": self.empty,
            "looping_outputs": self.looping,
            "cut_outputs": self.cut,
            "refused_sources": self.refused,
        }
        if self.seconds > 0:
            result["sentences_per_second"] = self.lines / self.seconds
        return result


def score(
    outputs: Outputs,
    sources: Sequence[str],
    targets: Sequence[str],
    references: Sequence[Sequence[str]] | None = None,
    task: Task = Task(),  # noqa: B008  # frozen
    bleu_tokenizer: str | None = None,
) -> Scores:
    """Compare outputs with sources and targets line by line; ``references`` holds all accepted lines of each.

    BLEU and chrF are computed for text, with sacreBLEU's 13a unless ``bleu_tokenizer`` says otherwise; for plain units
    only with a ``bleu_tokenizer``. Raises ``DataError`` when there are no lines, or not as many of each.
    """
    check_aligned(outputs.lines, sources, "source")
    check_aligned(outputs.lines, targets, "target")
    wrong_for_all = None
    if references is not None:
        check_aligned(outputs.lines, references, "reference")
        wrong_for_all = sum(out not in accepted for out, accepted in zip(outputs.lines, references, strict=True))
    rows = list(zip(sources, outputs.lines, targets, strict=True))
    tokens = [(split_text(task.unit, out), split_text(task.unit, target)) for _, out, target in rows]
    is_scored = task.is_text or bleu_tokenizer is not None
    return Scores(
        lines=len(rows),
        wrong=sum(out != target for _, out, target in rows),
        wrong_for_all=wrong_for_all,
        edits=sum(edit_distance(out, target) for out, target in tokens),
        target_tokens=sum(len(target) for _, target in tokens),
        output_characters=sum(len(out) for _, out, _ in rows),
        target_characters=sum(len(target) for _, _, target in rows),
        numbers=copies(NUMBER, rows),
        added_numbers=sum(adds_numbers(*row) for row in rows),
        placeholders=copies(PLACEHOLDER, rows),
        empty=sum(bool(source.strip()) and not out.strip() for source, out, _ in rows),
        looping=sum(loops(out) and not loops(target) for _, out, target in rows),
        cut=len(outputs.cut),
        refused=len(outputs.refused),
        seconds=outputs.seconds,
        text=score_text(outputs.lines, targets, bleu_tokenizer or "13a") if is_scored else None,
    )


def score_text(outputs: Sequence[str], targets: Sequence[str], bleu_tokenizer: str = "13a") -> TextScores:
    """Score outputs against one target each. ``bleu_tokenizer`` is sacreBLEU's ``--tokenize``: ``none`` for text that
    is tokenized already. Raises ``DataError`` when there are no lines, or not as many of both.
    """
    from sacrebleu.metrics.bleu import BLEU  # slow to import, and not needed for plain tasks
    from sacrebleu.metrics.chrf import CHRF

    check_aligned(outputs, targets, "target")
    # "force" only silences a warning about text that looks tokenized.
    bleu, chrf = BLEU(tokenize=bleu_tokenizer, force=True), CHRF()
    bleu_score = bleu.corpus_score(outputs, [targets]).score
    chrf_score = chrf.corpus_score(outputs, [targets]).score
    signatures = {"bleu": f"BLEU|{bleu.get_signature()}", "chrf": f"chrF2|{chrf.get_signature()}"}
    return TextScores(bleu_score, chrf_score, signatures)


def check_aligned(outputs: Sequence[str], others: Sequence[object], name: str) -> None:
    """Raise ``DataError`` unless there is one output a line, and one line at least."""
    if len(others) != len(outputs):
        raise DataError(f"{len(outputs)} outputs but {len(others)} {name} lines: line n must match line n")
    if not others:
        raise DataError("there are no lines to score: at least one is needed")


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """The least number of insertions, deletions and substitutions that turn ``a`` into ``b`` (Levenshtein).

    The columns of the usual table, a bit a row (Myers 1999, in the form of Hyyrö 2003). It takes ``len(a)`` steps on
    numbers of ``len(b)`` bits: a fraction of a second for 16,384 tokens each, the most that a model may produce.
    """
    if not b:
        return len(a)
    rows: dict[str, int] = {}  # token to the rows that it stands in
    for row, token in enumerate(b):
        rows[token] = rows.get(token, 0) | 1 << row
    every, last, distance = (1 << len(b)) - 1, 1 << (len(b) - 1), len(b)
    more, less = every, 0  # rows whose cell is one more, and one less, than the cell above
    for token in a:
        equal = rows.get(token, 0)
        as_diagonal = (((equal & more) + more) ^ more) | equal | less  # equal to the cell up left
        grown, shrunk = (less | ~(as_diagonal | more)) & every, more & as_diagonal  # against the cell on the left
        distance += bool(grown & last) - bool(shrunk & last)
        grown, shrunk = grown << 1 | 1, shrunk << 1  # the row above all grows with each column
        more, less = (shrunk | ~(as_diagonal | grown)) & every, grown & as_diagonal & every
    return distance


def found(pattern: re.Pattern[str], text: str) -> Counter[str]:
    """How often each match stands in a text. A number is a run of digits with no digit beside it."""
    return Counter(match.group() for match in pattern.finditer(text))


def copies(pattern: re.Pattern[str], rows: Sequence[tuple[str, str, str]]) -> Copies:
    """Of all matches in the sources, those that stand in the output unchanged, each counted as often as in both."""
    pairs = [(found(pattern, source), found(pattern, out)) for source, out, _ in rows]
    return Copies(sum(source.total() for source, _ in pairs), sum((source & out).total() for source, out in pairs))


def adds_numbers(source: str, output: str, target: str) -> bool:
    """Whether the output has a number more often than the source and than the target has it, as "5 5" for "5"."""
    return bool(found(NUMBER, output) - (found(NUMBER, source) | found(NUMBER, target)))


def loops(text: str) -> bool:
    """Whether the same words, or the same two or more letters within a word, follow each other ``LOOP`` times."""
    words = text.split()
    return repeats(words, 1) or any(repeats(word, 2) for word in words)


def repeats(items: Sequence[str], shortest: int) -> bool:
    """Whether a row of at least ``shortest`` items stands ``LOOP`` times in a row.

    Then as many items in a row equal those ``size`` places on as one repetition less has: one of them stands at a
    multiple of that number. Only these are looked at, and from there both ways, so that text without repetitions takes
    little more than one reading, however long it is.
    """
    for size in range(shortest, len(items) // LOOP + 1):
        needed = size * (LOOP - 1)
        for place in range(0, len(items) - size, needed):
            start = end = place
            while end < min(place + needed, len(items) - size) and items[end] == items[end + size]:
                end += 1
            while end > place and start > 0 and end - start < needed and items[start - 1] == items[start - 1 + size]:
                start -= 1
            if end - start >= needed:
                return True
    return False
