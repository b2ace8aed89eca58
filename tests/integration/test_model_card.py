"""The figures of a model card, of systems whose behaviour is known, and of a real bundle at toy size."""

import re

import pytest
from tests.bench import model_card

from dragoman_training.scoring import NUMBER, PLACEHOLDER
from dragoman_training.systems import Outputs, Task


class Translating:
    """A system that is a function of a line."""

    name = "function"
    task = Task()

    def __init__(self, function):
        self.function = function

    def identity(self):
        return {}

    def outputs(self, sources):
        return Outputs([self.function(source) for source in sources], 1.0)


def rows_of(function):
    sources = ["Tom ran.", "It is hot.", "We saw him there.", "Go home now, please.", "She sings."]
    return model_card.behaviour_rows(lambda *protect: Translating(str if protect else function), sources, sources)


def figure(rows, name):
    (value,) = [value for row, value in rows.items() if name in row and "--protect" not in row]
    return value


def test_a_system_that_copies_loses_nothing():
    """And scores 100 where the target is the source, in any case, one or two sentences a line."""
    rows = rows_of(str)
    assert figure(rows, "numbers").startswith("100.0% of ")
    assert figure(rows, "numbers").endswith("all of them in 100.0% of the lines")
    assert figure(rows, "placeholders").startswith("100.0% of ")
    for name in ("as it is", "in capitals", "two sentences"):
        assert figure(rows, name) == "BLEU 100.00, length ratio 1.000", name
    assert float(figure(rows, "in lower case").split()[1].strip(",")) < 90
    for name in ("empty", "looping", "cut", "refused"):
        assert figure(rows, name) == "0"


def test_what_is_lost_is_counted():
    """Digits, placeholders, whole answers; and answers that go on and on."""
    rows = rows_of(lambda line: re.sub(r"\d|\{\w+\}", "", line))
    assert figure(rows, "numbers").startswith("0.0% of ")
    assert figure(rows, "codes").startswith("0.0% of 200; ")
    assert re.match(r"[3-7]\d\.\d% of ", figure(rows, "placeholders"))
    assert [value[:7] for row, value in rows.items() if "--protect" in row] == ["100.0% "] * 3
    assert figure(rows_of(lambda line: ""), "empty") == str(3 * model_card.MADE_LINES + 5 + 5 + 5 + 3)
    assert figure(rows_of(lambda line: "so " * 9), "looping") == figure(rows_of(lambda line: ""), "empty")


@pytest.mark.parametrize(
    ("lines", "pattern"),
    [
        (model_card.number_lines, NUMBER),
        (model_card.code_lines, model_card.CODE),
        (model_card.placeholder_lines, PLACEHOLDER),
    ],
)
def test_the_made_up_lines_are_the_same_each_time_and_hold_what_they_are_for(lines, pattern):
    """Each line has something to copy; there are hardly two alike."""
    made = lines(200)
    assert made == lines(200) and made[:50] == lines(50)
    assert all(pattern.search(line) for line in made)
    assert len(set(made)) > 100


def test_numbers_come_in_all_lengths_and_forms():
    """One to seven digits, dates, times and amounts."""
    text = "\n".join(model_card.number_lines(200))
    assert {len(number) for number in re.findall(r"(?:page|number is|sold) (\d+)", text)} >= {1, 3, 5, 7}
    for pattern in (r"\d \w+ \d{4}\.", r"\d{4}-\d\d-\d\d", r"\b\d{1,2}:\d\d\b", r"\$\d[\d,]*\.\d\d", r"€\d"):
        assert re.search(pattern, text), pattern


def test_the_card_of_a_bundle(reverse_bundle, reverse_run, reverse_data, tmp_path, capsys, monkeypatch):
    """Rows for PyTorch and for each precision, searched alike; the toy model refuses what it cannot spell."""
    monkeypatch.setattr(model_card, "BEAMS", {"beam 2": 2})
    for name in ("source", "target"):
        lines = (reverse_data / f"dev.{name}").read_text().splitlines()[:20]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    files = [str(tmp_path / "source"), str(tmp_path / "target")]
    arguments = ["--bundle", str(reverse_bundle), "--checkpoint", str(reverse_run), "--dev", *files, "--test", *files]
    model_card.main(arguments)
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    first = {(row[0], row[1]): row[2:] for row in rows[2 : rows.index(next(r for r in rows if "what" in r[0]))]}
    assert set(first) == {(system, "beam 2") for system in ("PyTorch", "fp32", "int8", "w8")}
    assert first["fp32", "beam 2"] == first["PyTorch", "beam 2"]
    assert all(cells[:2] == cells[2:] and float(cells[0]) > 80 for cells in first.values())
    assert "`BLEU|nrefs:1|" in out and "`chrF2|" in out
    assert int(next(row for row in rows if row[0].startswith("refused"))[1]) >= 3 * model_card.MADE_LINES
