"""A bundle's tokenizers are those that its model was trained with, or it is not loaded."""

import dataclasses
import json

import pytest
from sentencepiece import SentencePieceProcessor

from dragoman.bundle import MANIFEST_NAME, ModelBundle, SpecialIds, TokenizerEntry, Tokenizers, save_bundle
from dragoman.errors import BundleError
from dragoman.served_model import load_tokenizers
from dragoman.testing import VOCABULARY, scripted_manifest
from dragoman.vocabulary import SentencePieceVocabulary

OTHERS = {"none.onnx": b"graph", "golden.jsonl": b""}
PLAIN = json.dumps({"kind": "plain", "unit": "character", "tokens": VOCABULARY.tokens}).encode()


def padded(count):
    """A vocabulary's size, rounded up to a multiple of 8."""
    return -(-count // 8) * 8


def bundle_of(path, source, target=None, **changes):
    """A bundle around SentencePiece models, its model's vocabularies padded; one joint file without ``target``."""
    sides = {"source": source, "target": target or source}
    names = {side: f"{side}.tokenizer.model" if target else "tokenizer.model" for side in sides}
    vocabularies = {side: SentencePieceVocabulary(model) for side, model in sides.items()}
    sizes = {side: len(vocabulary.tokens) for side, vocabulary in vocabularies.items()}
    templates = {"source": ((), (2,)), "target": ((1,), (2,))}
    entries = {
        side: TokenizerEntry("sentencepiece", names[side], sizes[side], *templates[side], vocabulary.normalization)
        for side, vocabulary in vocabularies.items()
    }
    manifest = scripted_manifest()
    manifest = dataclasses.replace(
        manifest,
        model=dataclasses.replace(
            manifest.model, source_vocab_size=padded(sizes["source"]), target_vocab_size=padded(sizes["target"])
        ),
        special_ids=SpecialIds(2, 1, (0, 1, 3, *range(sizes["target"], padded(sizes["target"])))),
        tokenizers=Tokenizers(**entries),
        unknown_policy=vocabularies["source"].unknown_policy,
    )
    files = {names[side]: model for side, model in sides.items()}
    return save_bundle(dataclasses.replace(manifest, **changes), {**OTHERS, **files}, path)


def with_file(bundle, path, name, content):
    """The bundle with another file under its correct hash."""
    files = {name: bundle.read(name) for name in bundle.manifest.files}
    return save_bundle(bundle.manifest, {**files, name: content}, path)


def with_entry(bundle, path, **changes):
    """The bundle with another entry for its source tokenizer."""
    sides = bundle.manifest.tokenizers
    sides = dataclasses.replace(sides, source=dataclasses.replace(sides.source, **changes))
    files = {name: bundle.read(name) for name in bundle.manifest.files}
    return save_bundle(dataclasses.replace(bundle.manifest, tokenizers=sides), files, path)


@pytest.fixture
def sentencepiece(sentencepiece_model, tmp_path):
    """Two sides, each with a model of its own."""
    source = sentencepiece_model("bpe", False, "nfkc", vocab_size=90)
    return bundle_of(tmp_path / "bundle", source, sentencepiece_model("unigram", False, vocab_size=80))


def test_two_models_are_two_sides(sentencepiece):
    """Each side has its own vocabulary; the manifest tells each one's rule and size, without the padding."""
    source, target = load_tokenizers(sentencepiece)
    libraries = [
        SentencePieceProcessor(model_proto=sentencepiece.read(f"{side}.tokenizer.model"))
        for side in ("source", "target")
    ]
    assert source.encode("the dog") == (*libraries[0].encode("the dog"), 2)
    assert target.decode(libraries[1].encode("the dog")) == "the dog"
    sides = sentencepiece.manifest.tokenizers
    assert (sides.source.size, sides.source.normalization, sides.target.normalization) == (90, "nfkc", "identity")
    assert sentencepiece.manifest.model.source_vocab_size == 96


def test_a_joint_model_is_one_file_for_both_sides(sentencepiece_model, tmp_path):
    """What one side encodes, the other decodes."""
    bundle = bundle_of(tmp_path / "bundle", sentencepiece_model("bpe", True))
    source, target = load_tokenizers(bundle)
    assert target.decode(source.encode("the dog 🦩")) == "the dog 🦩"
    assert set(bundle.manifest.files) == {*OTHERS, "tokenizer.model"}
    assert bundle.manifest.unknown_policy == "byte_fallback"


def test_a_tokenizer_of_another_size_is_refused_by_size(sentencepiece, sentencepiece_model, tmp_path):
    """Its file and both sizes are named, even where its hash is right."""
    other = sentencepiece_model("bpe", False, "nfkc", vocab_size=95)
    bundle = with_file(sentencepiece, tmp_path / "other", "source.tokenizer.model", other)
    with pytest.raises(BundleError, match=r"source\.tokenizer\.model has 95 tokens, the manifest says 90"):
        load_tokenizers(bundle)


@pytest.mark.parametrize("name", ["source.tokenizer.model", "source.json"])
def test_a_tokenizer_of_equal_size_and_other_content_is_refused_by_hash(sentencepiece, tmp_path, name):
    """Two tokens have changed places: nothing but the content tells it from the right one."""
    if name == "source.json":
        files = {**OTHERS, name: PLAIN, "target.json": PLAIN}
        bundle = save_bundle(scripted_manifest(), files, tmp_path / "plain")
        changed = PLAIN.replace(b'"a", "b"', b'"b", "a"')
    else:
        bundle = sentencepiece
        changed = bundle.read(name).replace("\u2581t".encode(), "\u2581!".encode())
    assert len(changed) == len(bundle.read(name)) and changed != bundle.read(name)
    bundle.file(name).write_bytes(changed)
    with pytest.raises(BundleError, match=rf"{name} is damaged: its SHA-256 differs"):
        ModelBundle.load(bundle.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization": "identity"}, r"source\.tokenizer\.model normalises by 'nfkc', the manifest says 'identity'"),
        ({"kind": "plain"}, r"source\.tokenizer\.model: no plain vocabulary"),
        ({"kind": "wordpiece"}, r"source\.tokenizer\.model: tokenizer kind is 'wordpiece'; .* plain, sentencepiece"),
    ],
)
def test_an_entry_that_its_file_contradicts_is_refused(sentencepiece, tmp_path, changes, message):
    """Rule and kind are what the file says."""
    with pytest.raises(BundleError, match=message):
        load_tokenizers(with_entry(sentencepiece, tmp_path / "other", **changes))


def test_a_policy_that_the_tokenizer_cannot_follow_is_refused(sentencepiece_model, tmp_path):
    """No bytes, no fallback: the policy and the file are named."""
    bundle = bundle_of(tmp_path / "bundle", sentencepiece_model("bpe", False), unknown_policy="byte_fallback")
    with pytest.raises(
        BundleError, match=r"unknown_policy is 'byte_fallback'; what tokenizer\.model can do is 'refuse'"
    ):
        load_tokenizers(bundle)


def test_padding_that_could_be_generated_is_refused(sentencepiece_model, tmp_path):
    """An id beyond the tokenizer's has no text: the bundle is neither written nor read."""
    with pytest.raises(BundleError, match=r"never_generated lacks \[90, 91, 92, 93, 94, 95\]"):
        bundle_of(
            tmp_path / "bundle",
            sentencepiece_model("bpe", False, vocab_size=90),
            special_ids=SpecialIds(2, 1, (0, 1, 3)),
        )
    assert not (tmp_path / "bundle" / MANIFEST_NAME).exists()
