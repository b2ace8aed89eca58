"""Who translates: checkpoints, ``dragoman generate`` as a process, files of outputs."""

import json
import os
import sys
from pathlib import Path

import pytest

from dragoman_training.config import TokenizerConfig
from dragoman_training.configfile import load_config
from dragoman_training.decode import Hypothesis
from dragoman_training.errors import CheckpointError, DataError
from dragoman_training.systems import CheckpointSystem, FileSystem, ServedSystem, Task, system_at, translate
from dragoman_training.tokenizer import SPECIAL_IDS, PlainTokenizer, SentencePieceTokenizer
from dragoman_training.train import train

# What stands in for the service's command: capitals, one refused line, one that reaches the limit.
GENERATE = """
import json, sys
if "bad" in sys.argv: sys.exit("starting\\nerror: no bundle here")
if sys.argv[1:3] == ["generate", "--model-info"]:
    print(json.dumps({"model": "m", "version": "1", "checksum": open("served").read(), "max_new_tokens": 9}))
    sys.exit()
assert sys.argv[1:5] == ["generate", "--json", "--on-error", "keep-going"], sys.argv
print(sys.argv[5:], file=open("arguments", "w"))
status = 0
CODES = {"refused": "source_too_long", "unknown": "invalid_request", "full": "overloaded", "nan": "internal"}
for line in sys.stdin.buffer.read().decode("utf-8").split("\\n")[:-1]:
    reason = "length" if line == "long" else "stop"
    reply = {"text": line.upper(), "segments": [{"hypotheses": [{"finish_reason": reason}]}] if line.strip() else []}
    if line in CODES:
        reply, status = {"error": {"code": CODES[line], "message": f"it is {line}"}}, 1
    sys.stdout.buffer.write(json.dumps(reply, ensure_ascii=False).encode("utf-8") + b"\\n")
    if line == "die": sys.exit(1)
sys.exit(status)
"""


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for ``python -m dragoman.cli.main``, and a folder as the current one."""
    package = tmp_path / "dragoman" / "cli"
    package.mkdir(parents=True)
    (tmp_path / "dragoman" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "main.py").write_text(GENERATE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_bundle(folder: Path, kind: str) -> Path:
    """As much of a bundle as training looks at."""
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"tokenizers": {"target": {"kind": kind, "file": "t.json"}}}))
    (folder / "t.json").write_bytes(PlainTokenizer.build("character", ["ab"]).to_bytes())
    return folder


def test_lines_are_treated_as_the_service_treats_them() -> None:
    """Blank lines and blanks around a line come back unchanged and unread; too long ones give an empty line."""
    tokenizer = PlainTokenizer.build("character", ["abcdef"])
    asked: list[list[int]] = []

    def search(sources: list[list[int]]) -> list[Hypothesis]:
        asked.extend(sources)
        return [Hypothesis(ids[:-1][::-1], [], 0.0, "length" if len(ids) == 3 else "stop") for ids in sources]

    outputs = translate(["abc", "", " \u3000 ", "  ab\t", "abcdef", "c"], (tokenizer, tokenizer), 4, search)
    assert outputs.lines == ["cba", "", " \u3000 ", "  ba\t", "", "c"]
    assert outputs.cut == {3}
    assert outputs.refused == {4}
    assert [len(ids) for ids in asked] == [4, 3, 2]


def test_a_line_of_which_the_tokenizer_keeps_nothing_comes_back_unchanged() -> None:
    """A zero-width blank, which the rule takes away: no model is asked what it would invent."""
    config = TokenizerConfig(kind="bpe", vocab_size=264, normalization="nmt_nfkc", joint=True)
    tokenizer = SentencePieceTokenizer.train(config, ["ab", "ba", "aab"] * 5, seed=1)
    asked: list[list[int]] = []

    def search(sources: list[list[int]]) -> list[Hypothesis]:
        asked.extend(sources)
        return [Hypothesis(ids[:-1], [], 0.0, "length") for ids in sources]

    outputs = translate(["ab", " \u200b ", "\u200b"], (tokenizer, tokenizer), 9, search)
    assert outputs.lines == ["ab", " \u200b ", "\u200b"]
    assert asked == [[*tokenizer.encode("ab"), SPECIAL_IDS.eos]]
    assert outputs.cut == {0}
    assert not outputs.refused


def test_a_checkpoint_is_decoded_in_order(toy: Path) -> None:
    """Line by line or together, greedily or with a beam of one; its task is that of its tokenizer."""
    train(load_config("toy.toml"), toy / "run")
    lines = ["abc", "", "  ", "abcdabcdabcd", "d"]
    system = CheckpointSystem(toy / "run")
    outputs = system.outputs(lines)
    assert outputs.lines[1:4] == ["", "  ", ""]
    assert [system.outputs([line]).lines[0] for line in lines] == outputs.lines
    assert len(CheckpointSystem(toy / "run", beam_size=3).outputs(lines).lines) == 5
    assert system.task == Task(is_text=False, unit="piece")
    assert system.identity() == CheckpointSystem(toy / "run" / "best").identity()
    for size in (0, 1001, 1_000_000):
        with pytest.raises(DataError, match=f"beam size is {size}: it must be 1 to 1000"):
            CheckpointSystem(toy / "run", beam_size=size)


def test_a_bundle_is_run_as_a_process(generate: Path) -> None:
    """Answers in order, refused and cut lines by number, characters of any kind; blank lines stay."""
    system = ServedSystem.of_bundle(make_bundle(generate / "good", "sentencepiece"))
    outputs = system.outputs(["ab", "refused", "", "long", "é\u2028ß\x0c", "unknown"])
    assert outputs.lines == ["AB", "", "", "LONG", "É\u2028SS\x0c", ""]
    assert outputs.refused == {1, 5}
    assert outputs.cut == {3}
    assert outputs.seconds > 0
    assert (generate / "arguments").read_text() == f"['--bundle', '{generate / 'good'}']\n"
    assert system.task == Task(is_text=True, unit="piece")


def test_a_server_is_asked_through_the_same_command(generate: Path) -> None:
    """By its address."""
    assert ServedSystem.of_server("localhost:1").outputs(["ab"]).lines == ["AB"]
    assert (generate / "arguments").read_text() == "['--target', 'localhost:1']\n"


@pytest.mark.parametrize(("line", "told"), [("full", r"it is full \(overloaded\)"), ("nan", r"it is nan \(internal")])
def test_a_line_without_an_answer_that_is_not_its_own_fault_is_an_error(generate: Path, line: str, told: str) -> None:
    """A server that stays full, or a row that failed: never counted as refused by the model."""
    with pytest.raises(DataError, match=rf"localhost:1 has no answer to '{line}'.*: {told}.*run the command again"):
        ServedSystem.of_server("localhost:1").outputs(["ab", "refused", line, "cd"])


def test_a_server_is_known_by_what_it_serves(generate: Path) -> None:
    """Another model behind the same address is another system; the same at another address is the same."""
    (generate / "served").write_text("one")
    first = ServedSystem.of_server("localhost:1").identity()
    assert first == {"model": "m", "version": "1", "checksum": "one"}
    assert ServedSystem.of_server("localhost:2").identity() == first
    (generate / "served").write_text("two")
    assert ServedSystem.of_server("localhost:1").identity() != first
    with pytest.raises(DataError, match="--model-info --target bad ended with status 1: error: no bundle here"):
        ServedSystem.of_server("bad").identity()


def test_a_failed_process_is_told_with_its_last_words(generate: Path) -> None:
    """Also one that ends early with the status of a refused line."""
    with pytest.raises(DataError, match=r"--target bad ended with status 1: error: no bundle here"):
        ServedSystem.of_server("bad").outputs(["ab"])
    with pytest.raises(DataError, match=r"ended with status 1: no message"):
        ServedSystem.of_server("localhost:1").outputs(["ab", "die", "cd"])


def test_a_bundle_of_plain_units_says_so(generate: Path) -> None:
    """The unit is that of its target vocabulary."""
    system = system_at(make_bundle(generate / "plain", "plain"))
    assert isinstance(system, ServedSystem)
    assert system.task == Task(is_text=False, unit="character")


def test_what_is_none_of_them_is_refused(tmp_path: Path) -> None:
    """A folder with something else, a manifest of something else."""
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        system_at(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(DataError, match="is no bundle"):
        system_at(tmp_path)


def test_a_file_of_outputs_needs_a_line_for_each_source(tmp_path: Path) -> None:
    """It is read as it is."""
    path = tmp_path / "out"
    path.write_bytes("a\u2028b\r\n\n c\n".encode())
    assert system_at(path).outputs(["x", "y", "z"]).lines == ["a\u2028b", "", " c"]
    with pytest.raises(DataError, match="out has 3 lines but there are 2 sources: line n must match"):
        FileSystem(path).outputs(["x", "y"])
