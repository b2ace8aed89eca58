"""Argos packages: what they say is what CTranslate2 says, and a package that is not in order leaves no file."""

import argparse
import io
import json
import stat
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tests.unit.training.ct2_models import random_spec, save

from dragoman_training.checkpoint import load_model
from dragoman_training.cli import import_model as command
from dragoman_training.decode import greedy_all
from dragoman_training.errors import ModelImportError
from dragoman_training.importing import argos, kinds
from dragoman_training.systems import translate

ctranslate2 = pytest.importorskip("ctranslate2", reason="the oracle is not installed")
METADATA = {"package_version": "1.0", "from_code": "en", "to_code": "de", "license": "MIT", "type": "translate"}
TEXTS = ["a green tree", "the dog", "over the small green house", "unknown \u1234 letters"]
MakePackage = Callable[..., Path]


@pytest.fixture(scope="module")
def pieces() -> bytes:
    """A small SentencePiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the small dog runs over the green tree", "a house in the garden", *TEXTS[:3]] * 9),
        model_writer=model,
        vocab_size=40,
        model_type="bpe",
        character_coverage=1.0,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def model(pieces: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in CTranslate2's format whose vocabulary is that of the pieces."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    tokens = [processor.id_to_piece(i) for i in range(len(processor))]
    folder = save(random_spec(ctranslate2.specs, rows=(40, 40)), tmp_path_factory.mktemp("argos") / "model")
    for side in ("source", "target"):
        (folder / f"{side}_vocabulary.json").unlink()
    (folder / "shared_vocabulary.json").write_text(json.dumps(tokens))
    return folder


@pytest.fixture
def make_package(pieces: bytes, model: Path, tmp_path: Path) -> MakePackage:
    """Write a package; further members come last."""

    def make(metadata: dict[str, Any] = METADATA, left_out: str = "", more: Iterable[tuple[Any, bytes]] = ()) -> Path:
        path = tmp_path / "en_de.argosmodel"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
            members = {
                "translate-en_de/metadata.json": json.dumps(metadata).encode(),
                "translate-en_de/sentencepiece.model": pieces,
                "translate-en_de/README.md": b"read me",
                **{f"translate-en_de/model/{file.name}": file.read_bytes() for file in model.iterdir()},
            }
            for name, content in members.items():
                if name != left_out:
                    package.writestr(name, content)
            for member, content in more:
                package.writestr(member, content)
        return path

    return make


def refused(path: Path, words: str) -> None:
    """The import says why, naming the package, and leaves nothing, here or in the folder for temporary files."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(ModelImportError, match=words) as error:
        kinds.import_model(path, path.parent / "out", "argos")
    assert path.name in str(error.value)
    assert sorted(path.parent.iterdir()) == before


def test_a_package_translates_as_ctranslate2_does_with_its_pieces(
    make_package: MakePackage, pieces: bytes, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text in, text out, through the command."""
    out = tmp_path / "out"
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(make_package()), "--out", str(out)])) == 0
    printed = capsys.readouterr().out
    assert "1+2 layers of width 8, 40 source and 40 target tokens" in printed and "licence" in printed
    ours = load_model(out)
    assert ours.record["import"]["argos"] == {name: METADATA[name] for name in METADATA if name != "type"}
    processor = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    split = [processor.encode(text, out_type=str) for text in TEXTS]
    translator = ctranslate2.Translator(str(model), device="cpu", compute_type="float32", intra_threads=1)
    results = translator.translate_batch(split, beam_size=1, min_decoding_length=0, max_decoding_length=12)
    texts = [
        "".join(result.hypotheses[0]).replace("<unk>", "\ufffd").replace("<s>", "").replace("\u2581", " ").strip()
        for result in results
    ]
    tokenizers = ours.source_tokenizer, ours.target_tokenizer
    found = translate(
        TEXTS, tokenizers, 512, lambda sources: greedy_all(ours.model, sources, 12, ours.special), ours.special
    )
    assert [line.strip() for line in found.lines] == texts
    assert tokenizers[0] is tokenizers[1]


def test_a_refusal_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(tmp_path), "--out", str(tmp_path / "out")])) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert set(command.KINDS) == set(kinds.READERS)


@pytest.mark.parametrize("name", ["../evil", "/evil", "..\\evil", "C:\\evil", "translate-en_de/model/../../evil"])
def test_a_member_outside_the_package_is_refused(make_package: MakePackage, name: str) -> None:
    refused(make_package(more=[(zipfile.ZipInfo(name), b"evil")]), "member .* outside its folder")


def test_a_link_is_refused(make_package: MakePackage) -> None:
    link = zipfile.ZipInfo("translate-en_de/model/vmap.txt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    refused(make_package(more=[(link, b"/etc/passwd")]), r"member 'translate-en_de/model/vmap\.txt' is a link")


def test_a_package_too_large_is_refused_before_it_is_unpacked(
    make_package: MakePackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_package()
    monkeypatch.setattr(argos, "MOST_BYTES", 1000)
    refused(path, "bytes unpacked: 1,000 are allowed")


def test_a_member_larger_than_it_says_is_refused(make_package: MakePackage) -> None:
    """The sizes in the directory decide how much is unpacked; the checksum tells that it was not all."""
    path = make_package()
    data = bytearray(path.read_bytes())
    for signature, place in ((b"PK\1\2", 24), (b"PK\3\4", 22)):  # the uncompressed size of each header
        begin = (
            data.index(b"translate-en_de/model/model.bin")
            if signature == b"PK\3\4"
            else data.rindex(b"translate-en_de/model/model.bin")
        )
        header = data.rindex(signature, 0, begin)
        data[header + place : header + place + 4] = struct.pack("<I", 100)
    path.write_bytes(data)
    refused(path, "no Argos package that can be read")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_package_that_was_cut_is_refused(make_package: MakePackage, share: float) -> None:
    path = make_package()
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    refused(path, "no Argos package that can be read")


def test_a_package_with_changed_bytes_is_refused(make_package: MakePackage) -> None:
    path = make_package()
    data = bytearray(path.read_bytes())
    begin = data.index(b"translate-en_de/model/model.bin")
    data[begin + 200 : begin + 210] = bytes(10)
    path.write_bytes(data)
    refused(path, "no Argos package that can be read")


def test_all_that_is_not_supported_is_told_in_one_message(make_package: MakePackage) -> None:
    path = make_package({**METADATA, "target_prefix": "__de__"}, "translate-en_de/sentencepiece.model")
    refused(path, "a prefix of all targets .__de__.; a tokenizer that is no sentencepiece.model")


@pytest.mark.parametrize(
    ("left_out", "words"),
    [("metadata.json", "metadata.json cannot be read"), ("model/model.bin", "holds 0 models")],
)
def test_a_package_without_its_files_is_refused(make_package: MakePackage, left_out: str, words: str) -> None:
    refused(make_package(left_out=f"translate-en_de/{left_out}"), words)
