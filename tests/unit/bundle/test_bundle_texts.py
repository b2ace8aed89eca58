"""What a bundle says of its texts: languages, sentences, substitutes."""

import dataclasses
import json

import pytest

from dragoman.bundle import MANIFEST_NAME, PROTECTION_KINDS, Manifest, ModelBundle, TextRules, save_bundle
from dragoman.errors import BundleError
from dragoman.inspection import describe
from dragoman.testing import scripted_manifest

FILES = dict.fromkeys(("source.json", "target.json", "none.onnx", "golden.jsonl"), b"{}")
TEXTS = TextRules("en", "pt-br", True, PROTECTION_KINDS)


def test_it_is_saved_and_loaded(tmp_path):
    """As a part of the manifest and of its checksum."""
    manifest = dataclasses.replace(scripted_manifest(), texts=TEXTS)
    assert save_bundle(manifest, FILES, tmp_path / "bundle").manifest.texts == TEXTS
    assert manifest.checksum != scripted_manifest().checksum


def test_a_bundle_that_says_nothing_is_as_it_was_before_it_could(tmp_path):
    """The manifest has no such field then, so that older bundles keep their checksums, and can be read."""
    bundle = save_bundle(scripted_manifest(), FILES, tmp_path / "bundle")
    data = json.loads((tmp_path / "bundle" / MANIFEST_NAME).read_text())
    assert "texts" not in data and data["checksum"] == bundle.manifest.checksum
    assert ModelBundle.load(tmp_path / "bundle").manifest.texts is None
    assert Manifest.from_json(bundle.manifest.to_json()) == bundle.manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_language": "English"}, "texts.source_language is 'English'; it must be a code of ISO 639"),
        ({"target_language": ""}, "texts.target_language is ''"),
        ({"protect_with": ("code", "magic")}, "texts.protect_with has 'magic'; it may have braces, code, itself"),
    ],
)
def test_what_means_nothing_is_refused(change, message):
    """By name, with what may stand there."""
    with pytest.raises(BundleError, match=message):
        dataclasses.replace(TEXTS, **change)


def test_inspect_tells_of_it():
    """Or that there is nothing to tell."""
    lines = describe(dataclasses.replace(scripted_manifest(), texts=TEXTS), {})
    told = "en to pt-br, each sentence a segment; protected text is read as braces, code, itself"
    assert any(line.startswith("  texts") and line.endswith(told) for line in lines)
    assert any(line.split() == ["texts", "nothing", "said"] for line in describe(scripted_manifest(), {}))
