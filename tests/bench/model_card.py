"""The figures of a translation model's card: quality of each precision, and how the model stands what users type.

    python tests/bench/model_card.py --bundle BUNDLE --checkpoint RUN --dev DEV.en DEV.de --test TEST.en TEST.de

Prints two tables in Markdown. The first has BLEU and chrF with sacreBLEU's signatures, greedy and with a beam of 4, of
the checkpoint and of every precision of the bundles (--bundle may be repeated). The second is of what the first bundle
serves by default, on lines made here, the same ones each time: numbers, codes and placeholders that must arrive
unchanged, without and with --protect; then the test set in lower case, in capitals, and two sentences a line; and how
many of all outputs are empty, loop or were cut. The lines made here are English: for another source language their
figures mean less.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dragoman_training.corpus import read_aligned
from dragoman_training.scoring import NUMBER, PLACEHOLDER, Scores, copies, found, score
from dragoman_training.systems import CheckpointSystem, Outputs, ServedSystem, System

MADE_LINES = 200
CODE = re.compile(r"\b[A-Z]{2}\d{6,12}\b")
BEAMS = {"greedy": 1, "beam 4": 4}
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October"]
MONTHS += ["November", "December"]
NUMBER_FRAMES = {
    "number": ("There are {} people in the hall.", "He has sold {} books.", "My number is {}.", "Turn to page {}."),
    "date": ("She was born on {}.", "The letter is from {}.", "We will meet on {}.", "The offer ends on {}."),
    "time": ("The train leaves at {}.", "I got up at {}.", "It is {} now.", "The shop closes at {}."),
    "amount": ("I paid {} for it.", "It costs {}.", "She owes me {}.", "The bill comes to {}."),
}
CODE_FRAMES = ("Invoice {}", "The number of the order is {}.", "{} was sent yesterday.", "Have you paid {}?")
PLACEHOLDER_FRAMES = (
    "Hello {}, how are you?",
    "Please send it to {} today.",
    "I can't open {} on my computer.",
    "{} is new here.",
    "Do you know {}?",
)


@dataclass(frozen=True)
class Candidate:
    """A model to measure, which gives a system for each width of the beam, and one that protects, if it can."""

    name: str
    system: Callable[..., System]  # of the width, and patterns to protect


def number_lines(count: int, seed: int = 1) -> list[str]:
    """English sentences with numbers of one to seven digits, dates, times and amounts of money in turn."""
    chance = random.Random(f"numbers {seed}")
    kinds = list(NUMBER_FRAMES)
    lines = []
    for line in range(count):
        kind = kinds[line % len(kinds)]
        lines.append(chance.choice(NUMBER_FRAMES[kind]).format(made_up_number(kind, chance)))
    return lines


def made_up_number(kind: str, chance: random.Random) -> str:
    """Written as English has it; times by the clock of 24 hours, as those of 12 rightly change in translation."""
    year, month, day = chance.randint(1800, 2035), chance.randrange(12), chance.randint(1, 28)
    whole = chance.randint(10 ** (digits := chance.randrange(7)), 10 ** (digits + 1) - 1)
    if kind == "date":
        forms = f"{day} {MONTHS[month]} {year}", f"{MONTHS[month]} {day}, {year}", f"{year}-{month + 1:02}-{day:02}"
        return chance.choice(forms)
    if kind == "time":
        return f"{chance.randint(1, 23)}:{chance.randrange(60):02}"
    if kind == "amount":
        cents = chance.randrange(100)
        return chance.choice((f"${whole:,}.{cents:02}", f"€{whole % 1000}.{cents:02}", f"{whole} dollars"))
    return str(whole)


def code_lines(count: int, seed: int = 1) -> list[str]:
    """English sentences with identifiers of two letters and six to twelve digits, many of them alike."""
    chance = random.Random(f"codes {seed}")
    lines = []
    for _ in range(count):
        digits = "".join(chance.choice("0123456789") * chance.choice((1, 1, 2, 3)) for _ in range(12))
        letters = "".join(chance.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=2))
        lines.append(chance.choice(CODE_FRAMES).format(letters + digits[: chance.randint(6, 12)]))
    return lines


def placeholder_lines(count: int, seed: int = 1) -> list[str]:
    """English sentences with what programs put there: braces, printf's directives, tags, addresses."""
    chance = random.Random(f"placeholders {seed}")
    lines = []
    for _ in range(count):
        name = chance.choice(("name", "user", "file", "title", "count")) + chance.choice(("", "_1", "Id"))
        forms = f"{{{name}}}", f"{{{chance.randrange(10)}}}", "%s", "%d", f"<b>{name.capitalize()}</b>"
        address = f"https://www.{name.lower()}.com/{chance.randrange(1000)}"
        lines.append(chance.choice(PLACEHOLDER_FRAMES).format(chance.choice((*forms, address))))
    return lines


def two_a_line(sources: Sequence[str], targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Neighbours as one line, each pair once; of an odd number the last one stands alone."""
    return joined_by_two(sources), joined_by_two(targets)


def joined_by_two(lines: Sequence[str]) -> list[str]:
    return [" ".join(lines[start : start + 2]) for start in range(0, len(lines), 2)]


def quality_rows(
    candidates: Iterable[Candidate], sets: Mapping[str, tuple[list[str], list[str]]]
) -> tuple[list[list[str]], list[str]]:
    """A row a candidate and search, and the signatures of the figures."""
    rows, signatures = [], set[str]()
    for candidate in candidates:
        for search, beam in BEAMS.items():
            system = candidate.system(beam)
            cells = [candidate.name, search]
            for sources, targets in sets.values():
                text = scored(system.outputs(sources), sources, targets).text
                assert text is not None  # a tokenizer was named
                cells += [f"{text.bleu:.2f}", f"{text.chrf:.2f}"]
                signatures |= set(text.signatures.values())
            rows.append(cells)
    return rows, sorted(signatures)


def scored(outputs: Outputs, sources: Sequence[str], targets: Sequence[str]) -> Scores:
    """``dragoman evaluate``'s figures."""
    return score(outputs, sources, targets, bleu_tokenizer="13a")


def behaviour_rows(system_of: Callable[..., System], sources: Sequence[str], targets: Sequence[str]) -> dict[str, str]:
    """What the second table says of a system, and of the same one that protects; sources and targets: the test set."""
    system = system_of()
    rows = dict[str, str]()
    counted: list[Scores] = []
    for name, pattern, lines, protect in (
        ("numbers", NUMBER, number_lines(MADE_LINES), ("numbers",)),
        ("codes", CODE, code_lines(MADE_LINES), ("codes",)),
        ("placeholders", PLACEHOLDER, placeholder_lines(MADE_LINES), ("placeholders", "tags", "urls")),
    ):
        outputs = system.outputs(lines)
        rows[f"{name} that arrive, of {MADE_LINES} made-up lines"] = arrived(pattern, lines, outputs.lines)
        counted.append(scored(outputs, lines, lines))
        protected = system_of(*protect).outputs(lines)
        rows[f"- with `--protect {' --protect '.join(protect)}`"] = arrived(pattern, lines, protected.lines)
    for name, (asked, wanted) in {
        "as it is": (sources, targets),
        "in lower case": ([line.lower() for line in sources], targets),
        "in capitals, against the targets in capitals": (
            [line.upper() for line in sources],
            [line.upper() for line in targets],
        ),
        "two sentences a line": two_a_line(sources, targets),
    }.items():
        scores = scored(system.outputs(asked), asked, wanted)
        assert scores.text is not None
        ratio = scores.summary()["length_ratio"]
        rows[f"test set, {name}"] = f"BLEU {scores.text.bleu:.2f}, length ratio {ratio:.3f}"
        counted.append(scores)
    total = sum(scores.lines for scores in counted)
    for name, number in (
        ("empty", sum(scores.empty for scores in counted)),
        ("looping", sum(scores.looping for scores in counted)),
        ("cut at the limit", sum(scores.cut for scores in counted)),
        ("refused", sum(scores.refused for scores in counted)),
    ):
        rows[f"{name}, of all {total:,} lines above"] = str(number)
    return rows


def arrived(pattern: re.Pattern[str], sources: Sequence[str], outputs: Sequence[str]) -> str:
    """The share of the matches that arrive, and of the lines in which all of them do."""
    found_copies = copies(pattern, [(source, output, "") for source, output in zip(sources, outputs, strict=True)])
    pairs = [(found(pattern, source), found(pattern, output)) for source, output in zip(sources, outputs, strict=True)]
    whole = sum(not source - output for source, output in pairs)
    return f"{found_copies.rate:.1%} of {found_copies.total}; all of them in {whole / len(pairs):.1%} of the lines"


def served_candidates(bundle: Path) -> Iterator[Candidate]:
    """One for each precision of the CPU that a bundle has, its default first."""
    task = ServedSystem.of_bundle(bundle).task
    graphs = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["graphs"]

    def system(precision: str, beam: int, *protect: str) -> System:
        options = ["--bundle", str(bundle), "--precision", precision]
        options += [word for pattern in protect for word in ("--protect", pattern)]
        options += ["--beam-size", str(beam)] if beam > 1 else []
        return ServedSystem(str(bundle), options, {}, task)

    for precision in (one["precision"] for one in graphs if one["provider"] == "cpu"):
        yield Candidate(precision, partial(system, precision))


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, ["---"] * len(heading), *rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, action="append", required=True, metavar="DIR")
    parser.add_argument("--checkpoint", type=Path, metavar="RUN", help="a run or checkpoint, for the rows of PyTorch")
    parser.add_argument("--dev", type=Path, nargs=2, required=True, metavar=("SOURCES", "TARGETS"))
    parser.add_argument("--test", type=Path, nargs=2, required=True, metavar=("SOURCES", "TARGETS"))
    args = parser.parse_args(arguments)
    sets = {"dev": read_aligned(*args.dev), "test": read_aligned(*args.test)}
    served = [candidate for bundle in args.bundle for candidate in served_candidates(bundle)]
    candidates = list(served)
    if args.checkpoint:
        candidates.insert(0, Candidate("PyTorch", partial(CheckpointSystem, args.checkpoint)))
    rows, signatures = quality_rows(candidates, sets)
    heading = ["system", "search", *(f"{figure} on {name}" for name in sets for figure in ("BLEU", "chrF"))]
    print(table(heading, rows))
    print("\n" + "\n".join(f"`{signature}`" for signature in signatures) + "\n")
    columns = {search: behaviour_rows(partial(served[0].system, beam), *sets["test"]) for search, beam in BEAMS.items()}
    names = next(iter(columns.values()))
    merged = [[name, *(column[name] for column in columns.values())] for name in names]
    print(table([f"what {served[0].name} does", *columns], merged))


if __name__ == "__main__":
    main()
