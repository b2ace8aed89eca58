"""More pairs out of the pairs there are, so that a model meets what users type and a tidy corpus lacks.

Text without capitals or in nothing but capitals, without its last mark, several sentences in one line, and names,
numbers, codes and placeholders that no training text holds: those must be copied, and are here, on both sides alike.
Which variants a pair gets depends on the seed and its own text alone, but for ``joined``, which needs the pairs before
it: where a file is sorted, these are much alike, and it should be shuffled first.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

from dragoman_training.config import require
from dragoman_training.errors import DataError
from dragoman_training.filtering import PairFilter
from dragoman_training.folders import explained, written_aside
from dragoman_training.prepare import Pairs, describe_counts, refuse_unfit, survey_given, text_hash, write_given

COPIED = re.compile(r"(?<![\w'’-])(?:[A-Z]\w{2,}|\d+)(?![\w'’-])")
"""A word that a translation may leave as it is: it begins with a capital, or is a number."""

LAST_MARK = re.compile(r"[.!?…]+$")
ONSETS = ["b", "br", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kr", "l", "m", "n", "p", "qu", "r", "s", "sch"]
ONSETS += ["st", "t", "tr", "v", "w", "x", "y", "z", "th", "sh", "ch", ""]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ei", "ou", "ee", "ö", "ü", "é", "y"]
CODAS = ["", "", "", "n", "r", "l", "s", "m", "ck", "nd", "rt", "ss", "lm", "x"]
LONGEST_JOINED = 400  # characters of each side
MADE_SOURCE = "variant with a source in dev or test"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The share of pairs that also appear so changed, from 0 to 1 each.

    ``lowered``: the source without capitals. ``raised``: both sides in capitals. ``bare``: both without their last
    mark. ``joined``: with the pair before, and sometimes the one before that, as one line. ``renamed``: one word that
    stands once on either side (a name, a number) replaced by a made-up one, the same on both sides; ``renumbered``: the
    same of pairs that share a number, once more. ``copied``: no translation at all, two made-up names, numbers, codes
    or placeholders that both sides consist of. A share is of the pairs drawn: not every pair has a word to replace.
    """

    lowered: float = 0.04
    raised: float = 0.02
    bare: float = 0.04
    joined: float = 0.08
    renamed: float = 0.15
    renumbered: float = 1.0
    copied: float = 0.005

    def __post_init__(self) -> None:
        for item in fields(self):
            share = getattr(self, item.name)
            require(0 <= share <= 1, item.name, share, "it must be from 0 to 1")


def augmented(
    pairs: Iterable[tuple[str, str]], recipe: Recipe, seed: int, counts: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Each pair, followed by its variants in the recipe's order; ``counts`` gets how many there are of each kind.

    A pair itself counts as ``as it is``. One that a change leaves as it was gets no such variant. Holds three pairs in
    memory.
    """
    before: list[tuple[str, str]] = []
    for pair in pairs:
        chance = Random(f"{seed}\n{pair[0]}\n{pair[1]}")
        counts["as it is"] += 1
        yield pair
        for kind, share in ((item.name, getattr(recipe, item.name)) for item in fields(recipe)):
            if chance.random() >= share:
                continue
            variant = joined(before, pair, chance) if kind == "joined" else CHANGES[kind](pair, chance)
            if variant is not None and variant != pair:
                counts[kind] += 1
                yield variant
        before = [*before[-1:], pair]


def lowered(pair: tuple[str, str], chance: Random) -> tuple[str, str]:
    """The source without capitals."""
    return pair[0].lower(), pair[1]


def raised(pair: tuple[str, str], chance: Random) -> tuple[str, str]:
    """Both sides in capitals."""
    return pair[0].upper(), pair[1].upper()


def bare(pair: tuple[str, str], chance: Random) -> tuple[str, str] | None:
    """Both sides without their last mark; None if a side has none, or nothing else."""
    source, target = (LAST_MARK.sub("", side) for side in pair)
    if not source.strip() or not target.strip() or source == pair[0] or target == pair[1]:
        return None
    return source, target


def joined(before: list[tuple[str, str]], pair: tuple[str, str], chance: Random) -> tuple[str, str] | None:
    """One or two pairs before and this one as one line.

    None at the beginning, where the line would be too long, and where a text stands in it twice, as of two translations
    of one source: nobody should learn to say things twice.
    """
    parts = [*before[-chance.choice((1, 1, 2)) :], pair]
    source, target = (" ".join(sides) for sides in zip(*parts, strict=True))
    if len(parts) == 1 or max(len(source), len(target)) > LONGEST_JOINED:
        return None
    if any(len(set(sides)) < len(parts) for sides in zip(*parts, strict=True)):
        return None
    return source, target


def renamed(pair: tuple[str, str], chance: Random) -> tuple[str, str] | None:
    """One shared word replaced, a number by a number; None if the sides share none."""
    return replaced(pair, shared_words(pair), chance)


def renumbered(pair: tuple[str, str], chance: Random) -> tuple[str, str] | None:
    """One shared number replaced; None if the sides share none."""
    return replaced(pair, [word for word in shared_words(pair) if word.isdecimal()], chance)


def copied(pair: tuple[str, str], chance: Random) -> tuple[str, str]:
    """Nothing of the pair: text that any language leaves as it is."""
    text = " ".join(chance.choice((made_up_name, made_up_number, made_up_code))(chance) for _ in range(2))
    return text, text


CHANGES = {
    "lowered": lowered,
    "raised": raised,
    "bare": bare,
    "renamed": renamed,
    "renumbered": renumbered,
    "copied": copied,
}


def shared_words(pair: tuple[str, str]) -> list[str]:
    """The words that stand exactly once on either side, also as a part of others, and may be copied."""
    words = COPIED.findall(pair[0])
    return [word for word in words if all(side.count(word) == 1 for side in pair) and word in COPIED.findall(pair[1])]


def replaced(pair: tuple[str, str], words: list[str], chance: Random) -> tuple[str, str] | None:
    """The pair with one of ``words`` replaced on both sides; None if there is none."""
    if not words:
        return None
    old = chance.choice(words)
    new = made_up_number(chance) if old.isdecimal() else made_up_word(chance)
    return pair[0].replace(old, new), pair[1].replace(old, new)


def made_up_word(chance: Random) -> str:
    """Mostly a name; now and then a code or a placeholder."""
    kind = chance.random()
    if kind < 0.8:
        return made_up_name(chance)
    return made_up_code(chance)


def made_up_name(chance: Random) -> str:
    """One to three syllables with a capital, sometimes two such words."""
    words = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        syllables = (
            chance.choice(ONSETS) + chance.choice(VOWELS) + chance.choice(CODAS)
            for _ in range(chance.choice((1, 2, 2, 3)))
        )
        words.append("".join(syllables).capitalize())
    return " ".join(words)


def made_up_number(chance: Random) -> str:
    """Two to seven digits: 2 and more, so that a plural beside it stays right."""
    return str(chance.choice("123456789")) + "".join(chance.choice(string.digits) for _ in range(chance.randint(1, 6)))


def made_up_code(chance: Random) -> str:
    """As in the names of products, rooms, files and addresses, and placeholders of formats."""
    letters = "".join(chance.choice(string.ascii_uppercase) for _ in range(chance.randint(1, 3)))
    name = made_up_name(chance).split()[0]
    return chance.choice(
        (
            f"{letters}{made_up_number(chance)}",
            f"{letters}-{made_up_number(chance)}",
            f"{{{name.lower()}}}",
            f"{{{chance.randint(0, 9)}}}",
            "%s",
            f"<{name.lower()}>",
            f"https://www.{name.lower()}.com/{letters.lower()}",
            f"{name.lower()}@{letters.lower()}.org",
            f"@{name}",
            f"#{name}",
        )
    )


def prepare_augmented(
    folder: Path, train: Pairs, given: Mapping[str, Pairs], recipe: Recipe, seed: int
) -> dict[str, Any]:
    """Write ``train.source``, ``train.target`` and ``report.json`` into ``folder``, new or empty; returns the report.

    ``given`` has the pairs of ``dev`` and ``test`` where there are files of them: they are written beside it as they
    are. A training pair with a source of theirs is left out, and nothing is made of it; so is a variant with one.
    Repeated pairs stay, and each gets its variants. Text is read once and never held in memory, but for dev and test
    (twice, as hashes). Raises ``DataError`` as ``prepare_pairs`` does.
    """
    refuse_unfit(folder)
    evaluation = survey_given(given)
    held_out = {int(number) for survey in evaluation.values() for number in survey.sources}
    dropped, made = Counter[str](), Counter[str]()
    kept = 0

    def free(pairs: Iterable[tuple[str, str]], reason: str) -> Iterator[tuple[str, str]]:
        for pair in pairs:
            if held_out and text_hash(pair[0]) in held_out:
                dropped[reason] += 1
            else:
                yield pair

    with explained(folder, DataError), written_aside(folder) as aside:
        with (
            (aside / "train.source").open("w", encoding="utf-8", newline="\n") as sources,
            (aside / "train.target").open("w", encoding="utf-8", newline="\n") as targets,
        ):
            usable = free(PairFilter().kept(train(), dropped), "source in dev or test")
            for source, target in free(augmented(usable, recipe, seed, made), MADE_SOURCE):
                sources.write(f"{source}\n")
                targets.write(f"{target}\n")
                kept += 1
        read = made["as it is"] + dropped.total() - dropped[MADE_SOURCE]
        if not read:
            raise DataError("the training text is empty: at least one pair is needed")
        if not kept:
            raise DataError(f"none of {read} pairs is left to train on ({describe_counts(dropped)}): add text")
        write_given(aside, given, evaluation)
        for name, survey in evaluation.items():
            dropped.update({f"{reason} ({name})": count for reason, count in survey.dropped.items()})
        report: dict[str, Any] = {
            "read": {"train": read, **{name: survey.read for name, survey in evaluation.items()}},
            "made": {name: made[name] for name in ("as it is", *asdict(recipe)) if made[name]},
            "dropped": dict(sorted(dropped.items())),
            "kept": {"train": kept, **{name: len(survey.pairs) for name, survey in evaluation.items()}},
            "recipe": asdict(recipe),
            "seed": seed,
        }
        (aside / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report
