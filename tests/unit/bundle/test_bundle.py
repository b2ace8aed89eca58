"""A bundle is served only if it is, byte for byte, what was exported."""

import dataclasses
import hashlib
import json
import os

import pytest

from dragoman.bundle import MANIFEST_NAME, Limits, Manifest, ModelBundle, load_manifest, save_bundle
from dragoman.errors import BundleError
from dragoman.testing import scripted_manifest

FILES = {
    "source.json": b'{"a": 1}',
    "target.json": b'{"b": 2}',
    "none.onnx": bytes(range(256)) * 20,
    "golden.jsonl": b'{"text": "ab", "source": [4, 5, 2], "tokens": [4, 5], "score": -0.5}\n',
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


def test_what_is_saved_is_loaded(bundle):
    """Manifest and files survive a round trip; sizes and hashes are filled in by the save."""
    loaded = ModelBundle.load(bundle.path)
    assert loaded.manifest == dataclasses.replace(scripted_manifest(), files=loaded.manifest.files)
    assert {name: loaded.read(name) for name in FILES} == FILES
    (case,) = loaded.golden(loaded.graph_set("cpu", "fp32"))
    assert (case.tokens, case.score) == ((4, 5), -0.5)


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
    with pytest.raises(BundleError, match=r"format_version 7; this version of dragoman reads 2: export"):
        ModelBundle.load(bundle.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("limits"), "limits"),
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
    ],
)
def test_a_wrong_field_is_named(bundle, change, message):
    """Missing, unknown and ill-typed fields, a missing decoder start and a path that leaves the folder are refused."""
    rewrite(bundle, change)
    with pytest.raises(BundleError, match=message):
        ModelBundle.load(bundle.path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format_version": 2}', b"[" * 200_000])
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


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    """If the disk fails half-way, there is neither a bundle nor a leftover."""

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_bundle(scripted_manifest(), FILES, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


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
