"""A bundle is served only if it is, byte for byte, what was exported."""

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path

import pytest

from dragoman.bundle import MANIFEST_NAME, Limits, Manifest, ModelBundle, load_manifest, save_bundle
from dragoman.errors import BundleError
from dragoman.testing import scripted_manifest

FILES = {
    "source.json": b'{"a": 1}',
    "target.json": b'{"b": 2}',
    "none.onnx": bytes(range(256)) * 20,
    "golden.jsonl": b'{"text": "ab", "source": [4, 5, 2], "tokens": [4, 5], "score": -0.5, "answer": "ab"}\n',
}


@pytest.fixture
def bundle(tmp_path):
    return save_bundle(scripted_manifest(), FILES, tmp_path / "bundle")


def rewrite(bundle, change):
    """Change the manifest's JSON and sign it again, as a tool of another version would."""
    file = bundle.path / MANIFEST_NAME
    data = json.loads(file.read_text())
    del data["checksum"]
    change(data)
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    file.write_text(json.dumps({**data, "checksum": hashlib.sha256(canonical.encode()).hexdigest()}))


def count(data, exported, optimized):
    """Say of the decoder graph that two nodes of A or B are required, none of D, and how many there are."""
    data["graphs"][0]["decoder"].update(
        required_nodes={"A+B": 2, "D": 0}, exported_nodes=exported, optimized_nodes=optimized
    )


def test_what_is_saved_is_loaded(bundle):
    """Manifest and files survive a round trip; sizes and hashes are filled in by the save."""
    loaded = ModelBundle.load(bundle.path)
    assert loaded.manifest == dataclasses.replace(scripted_manifest(), files=loaded.manifest.files)
    assert {name: loaded.read(name) for name in FILES} == FILES
    (case,) = loaded.golden(loaded.graph_set("cpu", "fp32"))
    assert (case.tokens, case.score, case.answer) == ((4, 5), -0.5, "ab")


def test_a_bundle_can_be_moved_and_found_from_anywhere(bundle, tmp_path, monkeypatch):
    """No path is stored: the folder loads at another place and from another current directory."""
    moved = tmp_path / "elsewhere" / "b"
    moved.parent.mkdir()
    bundle.path.rename(moved)
    monkeypatch.chdir(moved.parent)
    assert ModelBundle.load(type(moved)("b")).manifest.name == "scripted"
    monkeypatch.chdir("/")
    assert ModelBundle.load(moved).manifest.name == "scripted"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "empty", "longer"])
def test_a_damaged_file_is_named(bundle, name, damage):
    """A missing, cut, altered or grown file stops the load with a message that names it."""
    path = bundle.path / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        middle = len(content) // 2
        path.write_bytes(
            {
                "truncated": content[:-1],
                "flipped": content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :],
                "empty": b"",
                "longer": content + b"x",
            }[damage]
        )
    with pytest.raises(BundleError, match=name):
        ModelBundle.load(bundle.path)


def test_a_pipe_in_place_of_a_file_is_refused_and_not_read(bundle):
    """Reading it would wait for ever."""
    (bundle.path / "none.onnx").unlink()
    os.mkfifo(bundle.path / "none.onnx")
    with pytest.raises(BundleError, match=r"none\.onnx is no regular file"):
        ModelBundle.load(bundle.path)


def test_every_flipped_bit_of_the_manifest_is_noticed(bundle):
    """A manifest cannot be altered unnoticed, whatever byte is hit: it fails to parse or to match its checksum."""
    file = bundle.path / MANIFEST_NAME
    content = bytearray(file.read_bytes())
    before = bundle.manifest
    for position in range(0, len(content), 7):
        content[position] ^= 1
        file.write_bytes(content)
        try:
            assert load_manifest(bundle.path) == before  # white space between fields means nothing
        except BundleError as error:
            assert MANIFEST_NAME in str(error)
        content[position] ^= 1


def test_another_format_version_says_what_to_do(bundle):
    """The message names both versions and the remedy."""
    rewrite(bundle, lambda data: data.update(format_version=7))
    with pytest.raises(BundleError, match=r"format_version 7; this version of dragoman reads 4: export"):
        ModelBundle.load(bundle.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("limits"), "limits"),
        (lambda d: d.update(name=""), "name has 0 characters; it must have at least 1 and at most 128"),
        (lambda d: d.update(version="1" * 129), "version has 129 characters"),
        (lambda d: d.update(name="en\x00de"), r"name is 'en\\x00de': it may hold printable characters alone"),
        (lambda d: d.update(version="1\n"), r"version is '1\\n': it may hold"),
        (lambda d: d.update(name="en-de "), r"name is 'en-de ': .*no blank at an end"),
        (lambda d: d.update(name="Wörter (zu Wörtern), 2½. Versuch"), None),
        (lambda d: d["special_ids"].pop("decoder_start"), "decoder_start"),
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d["model"].update(num_heads="two"), r"model.num_heads is 'two'; it must be int"),
        (lambda d: d["model"].update(num_heads=True), r"model.num_heads is True"),
        (lambda d: d["special_ids"].update(never_generated=3), "never_generated"),
        (lambda d: d["files"].pop("golden.jsonl"), r"golden.jsonl"),
        (lambda d: d["files"].update({"../evil": {"bytes": 1, "sha256": "0"}}), r"\.\./evil"),
        (lambda d: d.update(graphs=[]), "no graphs"),
        (lambda d: d["limits"].update(max_new_tokens=0), r"limits.max_new_tokens is 0; it must be at least 1"),
        (lambda d: d["special_ids"].update(decoder_start=30), r"special_ids hold 30.*30 tokens"),
        (lambda d: d["special_ids"].update(never_generated=[2]), "no answer could ever end"),
        (lambda d: d["tokenizers"]["source"].pop("normalization"), "normalization"),
        (
            lambda d: d["model"].update(source_vocab_size=38),
            r"tokenizers.source has 30 tokens, the model 38, .* 7 may be",
        ),
        (lambda d: d["model"].update(target_vocab_size=29), "tokenizers.target has 30 tokens, the model 29"),
        (lambda d: d["model"].update(target_vocab_size=32), r"never_generated lacks \[30, 31\]"),
        (lambda d: count(d, {"A": 1, "B": 1}, {"A": 2, "C": 1}), None),
        (lambda d: count(d, {"A": 1}, {"A": 2}), r"none\.onnx as exported: 1 A\+B nodes instead of 2"),
        (lambda d: count(d, {"B": 2}, {}), r"none\.onnx as optimised: 0 A\+B nodes instead of 2"),
        (lambda d: count(d, {"A": 2, "D": 1}, {"A": 2}), r"none\.onnx as exported: 1 D nodes instead of 0"),
    ],
)
def test_a_wrong_field_is_named(bundle, change, message):
    """Missing, unknown and ill-typed fields, a path that leaves the folder and counts that differ are refused."""
    rewrite(bundle, change)
    if message is None:
        ModelBundle.load(bundle.path)
        return
    with pytest.raises(BundleError, match=message):
        ModelBundle.load(bundle.path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format_version": 4}', b"[" * 200_000])
def test_a_manifest_that_is_none_is_refused(bundle, content):
    """Whatever stands in its place, the message names manifest.json."""
    (bundle.path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(BundleError, match=MANIFEST_NAME):
        ModelBundle.load(bundle.path)


def test_a_folder_that_is_no_bundle_is_refused(tmp_path):
    """A missing folder is named with its manifest."""
    with pytest.raises(BundleError, match=r"nowhere.*manifest\.json"):
        ModelBundle.load(tmp_path / "nowhere")


def test_saving_never_overwrites(bundle):
    """An existing folder is refused and stays as it was."""
    with pytest.raises(BundleError, match="exists already"):
        save_bundle(scripted_manifest("other"), FILES, bundle.path)
    assert ModelBundle.load(bundle.path).manifest.name == "scripted"


@pytest.mark.parametrize("can_swap", [True, False])
def test_a_bundle_is_replaced_when_that_is_asked_for(bundle, monkeypatch, can_swap):
    """The new one stands alone under the name, whether the file system swaps two folders in one step or not."""
    if not can_swap:
        monkeypatch.setattr("dragoman.bundle._swap", lambda one, other: False)
    (bundle.path / "none.onnx").unlink()  # a damaged one gives way too
    save_bundle(scripted_manifest("other"), FILES, bundle.path, overwrite=True)
    assert ModelBundle.load(bundle.path).manifest.name == "other"
    assert list(bundle.path.parent.iterdir()) == [bundle.path]


@pytest.mark.skipif(sys.platform != "linux", reason="swapping two folders in one step is a call of Linux")
def test_replacing_is_one_step(bundle, monkeypatch):
    """At no moment is there no bundle: the folders are swapped, nothing is renamed."""
    renamed = []
    monkeypatch.setattr(Path, "rename", lambda old, new: renamed.append((old, new)))
    save_bundle(scripted_manifest("other"), FILES, bundle.path, overwrite=True)
    assert renamed == []
    assert load_manifest(bundle.path).name == "other"


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_bundle_stays_when_its_replacement_fails(bundle, monkeypatch, step):
    """Whether the disk fails or the last move does: the old one is whole, and nothing lies beside it."""
    done = []
    rename = Path.rename

    def fail(*arguments):
        done.append(arguments)
        if step == "rename" and len(done) in (1, 3):  # the old one away, and back
            return rename(*arguments)
        raise OSError("disk full")

    if step == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr("dragoman.bundle._swap", lambda one, other: False)
        monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="disk full"):
        save_bundle(scripted_manifest("other"), FILES, bundle.path, overwrite=True)
    assert ModelBundle.load(bundle.path).manifest.name == "scripted"
    assert list(bundle.path.parent.iterdir()) == [bundle.path]


def test_what_is_no_bundle_is_never_overwritten(tmp_path):
    """A mistyped path costs nobody their files."""
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("...")
    with pytest.raises(BundleError, match=r"letters is no bundle.*not overwritten"):
        save_bundle(scripted_manifest(), FILES, tmp_path / "letters", overwrite=True)
    assert (tmp_path / "letters" / "dear.txt").exists()


def test_replacing_through_a_link_replaces_what_it_points_to(bundle, tmp_path):
    """The link stays a link."""
    link = tmp_path / "current"
    link.symlink_to(bundle.path)
    save_bundle(scripted_manifest("other"), FILES, link, overwrite=True)
    assert link.is_symlink()
    assert load_manifest(bundle.path).name == "other"


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    """If the disk fails half-way, there is neither a bundle nor a leftover."""

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_bundle(scripted_manifest(), FILES, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_files_may_be_given_by_their_place(tmp_path):
    """What is large need not be held in memory: the copy has the same size, hash and bytes."""
    (tmp_path / "graph").write_bytes(FILES["none.onnx"])
    given = save_bundle(scripted_manifest(), {**FILES, "none.onnx": tmp_path / "graph"}, tmp_path / "given")
    assert given.manifest == save_bundle(scripted_manifest(), FILES, tmp_path / "held").manifest
    assert given.read("none.onnx") == FILES["none.onnx"]


def test_an_unknown_graph_set_lists_those_that_exist(bundle):
    """The message says what could be asked for."""
    with pytest.raises(BundleError, match="cuda/fp16; it has cpu/fp32"):
        bundle.graph_set("cuda", "fp16")


def test_json_is_stable(bundle):
    """Writing what was read gives the same bytes."""
    text = (bundle.path / MANIFEST_NAME).read_text()
    assert json.loads(text)["checksum"] == Manifest.from_json(text).checksum
    assert Manifest.from_json(text).to_json() == text
    assert Manifest.from_json(text).limits == Limits(64, 64)
