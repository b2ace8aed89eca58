"""Variants of training pairs: each kind by its definition, what they leave alone, and the files that they go to."""

import argparse
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman_training.augment import CHANGES, Recipe, augmented
from dragoman_training.cli import prepare as command
from dragoman_training.cli.prepare import SHARES
from dragoman_training.errors import ConfigError

Pair = tuple[str, str]
Run = Callable[..., tuple[int, dict[str, list[str]]]]

NOTHING = dict.fromkeys(SHARES, 0.0)
PAIRS = [
    ("Tom lives in Boston.", "Tom wohnt in Boston."),
    ("I paid 40 dollars!", "Ich zahlte 40 Dollar!"),
    ("What is the time?", "Wie spät ist es?"),
    ('She said "no" to Mary-Ann', "Sie sagte »nein« zu Mary-Ann"),
    ("In 1987 there were 12 of them.", "1987 waren es 12."),
]


def only(kind: str, pairs: list[Pair], seed: int = 1) -> list[Pair]:
    """The variants of one kind, of each pair that can have one."""
    counts = Counter[str]()
    made = list(augmented(pairs, Recipe(**NOTHING | {kind: 1.0}), seed, counts))
    assert counts == Counter({"as it is": len(pairs), kind: len(made) - len(pairs)})
    left = list(made)
    for pair in pairs:
        left.remove(pair)
    return left


def replacements(pair: Pair, variant: Pair) -> list[tuple[str, str]]:
    """Which word of the pair, replaced by what on both sides, gives the variant."""
    found = []
    for old in ("Tom", "Boston", "40", "1987", "12"):
        before, _, after = pair[0].partition(old)
        new = variant[0].removeprefix(before).removesuffix(after)
        if old in pair[0] and tuple(side.replace(old, new) for side in pair) == variant:
            found.append((old, new))
    return found


# -- kinds -------------------------------------------------------------------------------------------------------------


def test_each_kind_by_an_example() -> None:
    """Those that draw nothing at random; a pair that a change leaves as it is has no variant."""
    assert only("lowered", [PAIRS[0], ("all low", "Klein")]) == [("tom lives in boston.", "Tom wohnt in Boston.")]
    assert only("raised", [("It's hot.", "Es ist heiß.")]) == [("IT'S HOT.", "ES IST HEISS.")]
    assert only("bare", [*PAIRS[:3], ("Wait ...", "Warte …"), ("?!", "?!"), ("No mark", "Keins."), ("A.", "B")]) == [
        ("Tom lives in Boston", "Tom wohnt in Boston"),
        ("I paid 40 dollars", "Ich zahlte 40 Dollar"),
        ("What is the time", "Wie spät ist es"),
        ("Wait ", "Warte "),
    ]


def test_joined_lines_are_the_pairs_before_in_their_order() -> None:
    """Two or three, on both sides the same ones; none at the beginning and none of over 400 characters."""
    pairs = [(f"s{n}", f"t{n}") for n in range(200)]
    lines = only("joined", pairs)
    assert len(lines) == 199
    assert {len(source.split()) for source, _ in lines} == {2, 3}
    for number, (source, target) in enumerate(lines, start=1):
        ends = [int(word[1:]) for word in source.split()]
        assert ends == list(range(number + 1 - len(ends), number + 1))
        assert target == source.replace("s", "t")
    assert only("joined", [("a" * 200, "b"), ("c" * 200, "d"), ("e", "f" * 400)]) == []


def test_nothing_is_joined_with_itself() -> None:
    """Translations of one source stand together in many corpora: a line that says a thing twice teaches loops."""
    assert only("joined", [("a", "1"), ("a", "2"), ("b", "2"), ("b", "2")]) == []
    assert only("joined", [("a", "1"), ("b", "2")]) == [("a b", "1 2")]


@pytest.mark.parametrize("kind", ["renamed", "renumbered"])
def test_one_shared_word_is_replaced_on_both_sides_and_nothing_else_changes(kind: str) -> None:
    """With the made-up word put back, the pair is what it was; a number gives a number of two to seven digits."""
    for seed in range(200):
        for pair in PAIRS:
            for variant in only(kind, [pair], seed):
                ((old, new),) = replacements(pair, variant)
                assert bool(re.fullmatch(r"[1-9]\d{1,6}", new)) == old.isdecimal()
    assert {bool(only(kind, [pair])) for pair in (PAIRS[1], PAIRS[4])} == {True}
    assert bool(only(kind, [PAIRS[0]])) == (kind == "renamed")
    assert only(kind, [PAIRS[2]]) == []


@pytest.mark.parametrize(
    "pair",
    [
        ("Tom met Tom.", "Tom traf ihn."),  # which of the two would it be?
        ("Computer games", "Computerspiele"),  # a part of another word
        ("Tom's house", "Toms Haus"),
        ("It was 3rd.", "Es war 3."),
        ("May I?", "May ich? Maya!"),
    ],
)
def test_a_word_that_is_not_clearly_the_same_on_both_sides_is_left_alone(pair: Pair) -> None:
    assert only("renamed", [pair]) == []


def test_what_is_copied_is_the_same_on_both_sides_and_of_every_sort() -> None:
    """Names, numbers, codes, placeholders and addresses; none is a word of the pair."""
    texts = [source for seed in range(300) for source, target in only("copied", [PAIRS[0]], seed) if source == target]
    assert len(texts) == 300
    for pattern in (
        r"^\D+$",
        r"\b\d{2,7}\b",
        r"%s",
        r"\{\w+\}",
        r"<\w+>",
        r"https://www\.\w+\.com/",
        r"\w@\w+\.org",
        r"[A-Z]-\d",
    ):
        assert any(re.search(pattern, text) for text in texts), pattern
    assert not any("Tom" in text.split() for text in texts)


# -- all of them -------------------------------------------------------------------------------------------------------


def corpus(number: int) -> list[Pair]:
    names = ["Tom", "Mary", "Boston", "Paris"]
    return [
        (f"Number {n} is what {names[n % 4]} wants.", f"Die Nummer {n} will {names[n % 4]} haben.")
        for n in range(10, 10 + number)
    ]


def test_variants_do_not_depend_on_the_order_but_for_joined() -> None:
    """Each pair has the same ones wherever it stands; the same file and seed give the same lines, another seed not."""
    recipe, pairs = Recipe(**NOTHING | dict.fromkeys(CHANGES, 0.4)), corpus(200)
    forth = list(augmented(pairs, recipe, 1, Counter()))
    back = list(augmented(pairs[::-1], recipe, 1, Counter()))
    assert sorted(forth) == sorted(back) and forth != back
    assert forth == list(augmented(pairs, recipe, 1, Counter()))
    assert forth != list(augmented(pairs, recipe, 2, Counter()))


def test_shares_are_met() -> None:
    """Of each kind about as many as asked for: five standard deviations of the draw at most beside it."""
    n = 4000
    shares = {"lowered": 0.1, "raised": 0.3, "bare": 0.5, "joined": 0.05, "renamed": 0.2, "renumbered": 1.0}
    shares["copied"] = 0.01
    counts = Counter[str]()
    made = list(augmented(corpus(n), Recipe(**shares), 7, counts))
    assert counts["as it is"] == n and counts.total() == len(made)
    for kind, share in shares.items():
        assert abs(counts[kind] - share * n) <= 5 * (n * share * (1 - share)) ** 0.5 + 1, kind


def test_the_lines_stay_the_same_from_version_to_version() -> None:
    """A training set is known by its recipe and seed: the model that was trained on it can be trained again."""
    made = list(augmented(corpus(300), Recipe(), 1, Counter()))
    assert made[:3] == [
        ("Number 10 is what Boston wants.", "Die Nummer 10 will Boston haben."),
        ("Number 329 is what Boston wants.", "Die Nummer 329 will Boston haben."),
        ("Number 942816 is what Boston wants.", "Die Nummer 942816 will Boston haben."),
    ]
    content = "".join(f"{source}\t{target}\n" for source, target in made)
    digest = hashlib.sha256(content.encode()).hexdigest()
    assert (len(made), digest) == (710, "ffaeda7820fa90f4fb935f4dd2168852e1c6c6e8d07daa677350eb4f845830bd")


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=f"bare is {share}: it must be from 0 to 1"):
        Recipe(bare=share)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``prepare augment`` in a folder with a corpus; its status, and the lines of each file in ``out``."""
    monkeypatch.chdir(tmp_path)
    for name, side in (("s", 0), ("t", 1)):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS))

    def run(*arguments: object) -> tuple[int, dict[str, list[str]]]:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        status = command.run(parser.parse_args(["augment", "--out", "out", *map(str, arguments)]))
        files = [path for path in Path("out").glob("*") if path.suffix != ".json"]
        return status, {path.name: path.read_text().split("\n")[:-1] for path in files}

    return run


def test_files_and_report_agree(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library\'s pairs in its order; the counts of the report add up and are printed."""
    with (tmp_path / "s").open("a") as s, (tmp_path / "t").open("a") as t:
        s.write("\nlast\n")
        t.write("blank\nletzte\n")
    status, files = run("--source", "s", "--target", "t", "--lowered", 1, "--joined", 0.5, "--seed", 3)
    expected = list(augmented([*PAIRS, ("last", "letzte")], Recipe(lowered=1.0, joined=0.5), 3, Counter()))
    assert status == 0
    assert files == {"train.source": [s for s, _ in expected], "train.target": [t for _, t in expected]}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["read"] == {"train": 7} and report["dropped"] == {"blank source": 1}
    assert report["made"]["as it is"] == 6 and report["made"]["lowered"] == 5
    assert sum(report["made"].values()) == report["kept"]["train"] == len(expected)
    assert report["recipe"] == {**{name: getattr(Recipe, name) for name in SHARES}, "lowered": 1.0, "joined": 0.5}
    assert report["seed"] == 3
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["made:", "lowered", "5"] in printed and ["kept:", "train", str(len(expected))] in printed


def test_no_variant_is_a_source_of_dev_or_test(run: Run, tmp_path: Path) -> None:
    """Lowered or bare, a training pair may become what dev asks: it goes. Of a pair of theirs nothing is made."""
    (tmp_path / "dev.tsv").write_text("tom lives in boston.\tAha\n\tblank\nTom lives in Boston.\tTom lebt in Boston.\n")
    (tmp_path / "test.tsv").write_text("What is the time\tWie spät\n")
    shares = [argument for name in SHARES for argument in (f"--{name}", float(name in ("lowered", "bare")))]
    named = ["--dev-tsv", "dev.tsv", "--test-tsv", "test.tsv"]
    status, files = run("--source", "s", "--target", "t", *named, *shares)
    assert status == 0
    assert files["dev.source"] == ["tom lives in boston.", "Tom lives in Boston."]
    assert (files["test.source"], files["test.target"]) == (["What is the time"], ["Wie spät"])
    assert not set(files["train.source"]) & {*files["dev.source"], *files["test.source"]}
    assert "Tom lives in Boston" not in files["train.source"]  # nearly a dev pair, and its answer
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["dropped"] == {
        "blank source (dev)": 1,
        "source in dev or test": 1,
        "variant with a source in dev or test": 1,
    }
    assert report["kept"] == {"train": sum(report["made"].values()) - 1, "dev": 2, "test": 1}
    assert report["read"] == {"train": 5, "dev": 3, "test": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no training text: give --source"),
        (["--source", "s"], "--source: give a source with its target"),
        (["--tsv", "missing"], "missing cannot be read (No such file or directory): check the path"),
        (["--source", "s", "--target", "t", "--raised", "2"], "raised is 2.0: it must be from 0 to 1"),
        (["--tsv", "empty"], "the training text is empty: at least one pair is needed"),
        (["--tsv", "blank"], "none of 2 pairs is left to train on (blank source: 2): add text"),
        (
            ["--source", "s", "--target", "t", "--dev-tsv", "empty"],
            "the dev set has no pair of two texts (it is empty)",
        ),
        (["--source", "s", "--target", "blank"], "s has 5 lines but blank has 2"),
    ],
)
def test_what_cannot_be_done_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """In the words of the other kinds; nothing is left behind."""
    (tmp_path / "empty").write_text("")
    (tmp_path / "blank").write_text(" \t1\n\t2\n")
    assert run(*arguments) == (2, {})
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob(".writing-*"))


def test_nothing_is_overwritten(run: Run, tmp_path: Path) -> None:
    assert run("--source", "s", "--target", "t")[0] == 0
    before = (tmp_path / "out" / "train.source").read_bytes()
    assert run("--source", "t", "--target", "s")[0] == 2
    assert (tmp_path / "out" / "train.source").read_bytes() == before
