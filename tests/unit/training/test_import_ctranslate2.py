"""Models in CTranslate2's format, read here, against CTranslate2 itself."""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.training.ct2_models import SPECIALS, packed, random_spec, save

from dragoman_training.checkpoint import load_model
from dragoman_training.decode import greedy, score
from dragoman_training.errors import CheckpointError, ModelImportError
from dragoman_training.importing.ct2_file import read_model_file
from dragoman_training.importing.ctranslate2 import read_ctranslate2
from dragoman_training.importing.kinds import import_model

ctranslate2 = pytest.importorskip("ctranslate2", reason="the oracle is not installed")
SPECS = ctranslate2.specs

SOURCES = ["s3 s4 s5", "s10", "s7 s7 s8 s9 s3 s4 s10"]
TARGETS = ["t3 t4 t5 t6", "", "t8 t7 t8"]


def same_scores(folder: Path, out: Path) -> Any:
    """Import and compare the scores of given targets; returns what was imported, loaded."""
    import_model(folder, out)
    ours = load_model(out)
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32", intra_threads=1)
    theirs = translator.score_batch([s.split() for s in SOURCES], [t.split() for t in TARGETS])
    for source, target, expected in zip(SOURCES, TARGETS, theirs, strict=True):
        ids = ours.special.source(ours.source_tokenizer.encode(source))
        found = score(ours.model, ids, ours.target_tokenizer.encode(target), ours.special)
        assert found == pytest.approx(expected.log_probs, abs=1e-4)
    texts = [
        t.hypotheses[0]
        for t in translator.translate_batch(
            [s.split() for s in SOURCES], beam_size=1, min_decoding_length=0, max_decoding_length=9
        )
    ]
    read = [ours.special.source(ours.source_tokenizer.encode(source)) for source in SOURCES]
    for answer, expected in zip(greedy(ours.model, read, 9, ours.special), texts, strict=True):
        tokens = ours.target_tokenizer.tokens  # type: ignore[attr-defined]  # a plain one
        assert [tokens[i] for i in answer.tokens] == expected
    return ours


def plain(_: Any) -> None:
    """Nothing is changed."""


def stored_positions(spec: Any) -> None:
    for number, side in enumerate((spec.encoder, spec.decoder)):
        side.position_encodings.encodings = np.random.default_rng(number).standard_normal((16 + number, 8)).astype("f4")


def tied(spec: Any) -> None:
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = spec.decoder.projection.weight


def zero_start(spec: Any) -> None:
    tied(spec)
    stored_positions(spec)
    spec.decoder.start_from_zero_embedding = True


def unscaled(spec: Any) -> None:
    spec.encoder.scale_embeddings = spec.decoder.scale_embeddings = False
    for side in (spec.encoder, spec.decoder):
        for layer in side.layer:
            layer.ffn.linear_0.bias = "__optional"


def scaled_otherwise(spec: Any) -> None:
    tied(spec)
    spec.encoder.scale_embeddings, spec.decoder.scale_embeddings = np.float32(3.0), np.float32(0.5)
    spec.decoder.layer[1].attention.queries_scale = np.float32(0.9)


ACTIVATION = SPECS.Activation
SHAPES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "norm first, sinusoids": ({}, plain, {}),
    "norm behind, GELU, stored positions": ({"pre_norm": False, "activation": ACTIVATION.GELU}, stored_positions, {}),
    "norms of embeddings, SiLU": (
        {"layernorm_embedding": True, "activation": ACTIVATION.SWISH},
        plain,
        {"add_source_bos": True, "add_source_eos": True, "decoder_start_token": "</s>"},
    ),
    "begins with zeros, tied": ({"pre_norm": False, "rows": (9, 9)}, zero_start, {"add_source_eos": True}),
    "unscaled, few biases, GELU by tanh": ({"activation": ACTIVATION.GELUTanh}, unscaled, {"layer_norm_epsilon": 1e-2}),
    "scaled by other factors": ({"rows": (9, 9), "heads": 4}, scaled_otherwise, {}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_ctranslate2s_scores_and_greedy_answers(tmp_path: Path, name: str) -> None:
    options, change, settings = SHAPES[name]
    spec = random_spec(SPECS, **options)
    change(spec)
    folder = save(spec, tmp_path / "model", **settings)
    if name == "begins with zeros, tied":  # one vocabulary: tokens of both sides are called alike
        tokens = [*SPECIALS, "s3", "s4", "t3", "t4", "s10", "t5"]
        (folder / "source_vocabulary.json").unlink()
        (folder / "target_vocabulary.json").unlink()
        (folder / "shared_vocabulary.txt").write_text("".join(f"{token}\n" for token in tokens))
    found = same_scores(folder, tmp_path / "out")
    config = found.model.config
    assert config.tied_embeddings == ("all" if name == "begins with zeros, tied" else "none")
    assert config.num_positions == (16 if change in (stored_positions, zero_start) else 0)
    assert found.max_source_tokens == found.max_target_tokens == (config.num_positions or 512)
    assert found.record["import"]["format"] == "ctranslate2" and found.record["import"]["types"] == ["float32"]


@pytest.mark.parametrize("quantization", ["int8", "int16", "float16", "bfloat16", "int8_float16", "int8_bfloat16"])
def test_quantized_weights_are_read_as_ctranslate2_reads_them(tmp_path: Path, quantization: str) -> None:
    """As its own converter writes them; it computes in float32, too."""
    found = same_scores(save(random_spec(SPECS), tmp_path / "model", quantization), tmp_path / "out")
    assert found.record["import"]["types"] == [quantization.partition("_")[0]]


@pytest.mark.parametrize("version", range(2, 7))
def test_every_binary_version_is_read(tmp_path: Path, version: int) -> None:
    """CTranslate2 reads the file, too."""
    folder = save(random_spec(SPECS), tmp_path / "model")
    path = folder / "model.bin"
    whole = read_model_file(path)
    # Versions 2 and 3 know types by their width, and nothing of 4 bytes but float32.
    kept = {name: v for name, v in whole.variables.items() if version >= 4 or v.kind in ("float32", "int16", "int8")}
    path.write_bytes(packed(replace(whole, variables=kept), version))
    assert same_scores(folder, tmp_path / "out").record["import"]["binary_version"] == version


def test_a_vocabulary_of_lines_keeps_tokens_that_are_breaks_and_gets_the_unknown_token(tmp_path: Path) -> None:
    folder = save(random_spec(SPECS), tmp_path / "model")
    for side, rows in (("source", 11), ("target", 9)):
        (folder / f"{side}_vocabulary.json").unlink()
        tokens = ["<blank>", "<s>", "</s>", *(f"{side[0]}{i}" for i in range(3, rows - 1))]
        tokens[4] = "\u2028"
        (folder / f"{side}_vocabulary.txt").write_bytes("\n".join(tokens).encode())
    found = same_scores(folder, tmp_path / "out")
    special = found.special
    assert (special.pad, special.bos, special.eos, special.unk, special.decoder_start) == (0, 1, 2, 8, 1)
    assert special.never_produced == tuple(range(9, 16)) and special.source([5]) == [5]
    assert found.source_tokenizer.encode("s3 \u2028 <s> nothing") == [3, 4, 10, 10]


def test_recorded_alignment_heads_are_kept(tmp_path: Path) -> None:
    """The default of a model that was not trained to align is no record."""
    for number, (layer, heads, expected) in enumerate(
        [
            (-1, 1, None),
            (-2, 1, {"layer": 0, "head": 0}),
            (1, 0, {"layer": 1, "head": None}),
            (0, 2, {"layer": 0, "head": None}),
        ]
    ):
        spec = random_spec(SPECS, alignment_layer=layer, alignment_heads=heads)
        assert read_ctranslate2(save(spec, tmp_path / str(number))).alignment == expected


def test_all_that_is_not_supported_is_told_in_one_message(tmp_path: Path) -> None:
    spec = random_spec(SPECS, with_relative_position=True, ffn_glu=True, rms_norm=True, activation=ACTIVATION.Tanh)
    folder = save(spec, tmp_path / "model", decoder_start_token=None)
    with pytest.raises(ModelImportError) as error:
        import_model(folder, tmp_path / "out")
    for words in ("model.bin", "relative positions", "gated", "RMSNorm", "activation 5", "decoder_start_token is null"):
        assert words in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"specification": "WhisperSpec"}, "the specification WhisperSpec"),
        ({"revision": 8}, "revision 8"),
        ({"rename": ("encoder/layer_0/ffn/linear_0/weight", "encoder/layer_0/ffn/strange/weight")}, "lacks the var"),
        ({"rename": ("encoder/layer_norm/gamma", "encoder/gate/gamma")}, "mixture of experts"),
        ({"rename": ("encoder/layer_norm/beta", "encoder/strange/beta")}, "RMSNorm"),
        ({"rename": ("encoder/layer_0/ffn/linear_0/bias", "encoder/strange/bias")}, "encoder/strange/bias"),
        ({"rename": ("encoder/num_heads", "encoder/strange/num_heads")}, "other heads in the encoder"),
    ],
)  # fmt: skip
def test_a_model_of_another_kind_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = save(random_spec(SPECS), tmp_path / "model")
    path = folder / "model.bin"
    file = read_model_file(path)
    old, new = change.pop("rename", ("", ""))
    variables = {new if name == old else name: variable for name, variable in file.variables.items()}
    path.write_bytes(packed(replace(file, variables=variables, **change), 6))
    with pytest.raises(ModelImportError, match=words):
        read_ctranslate2(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in order."""
    return save(random_spec(SPECS, layers=(1, 1)), tmp_path / "model")


def test_a_file_that_was_cut_anywhere_is_refused_and_nothing_written(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.bin"
    whole = path.read_bytes()
    for size in [0, 1, 3, *range(4, len(whole), len(whole) // 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelImportError, match=r"model\.bin"):
            import_model(folder, tmp_path / "out", "ctranslate2")
    path.write_bytes(whole + b"\0")
    with pytest.raises(ModelImportError, match=r"model\.bin .* 1 bytes follow"):
        import_model(folder, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]


NAME = struct.pack("<H", 2) + b"a\0"
HEAD = struct.pack("<I", 6) + NAME + struct.pack("<I", 7)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("<I", 1) + NAME, "binary version is 1"),
        (struct.pack("<I", 7) + NAME, "binary version is 7"),
        (struct.pack("<IH", 6, 60_000), "it ends at byte 6"),
        (struct.pack("<IH", 6, 2) + b"ab", "no name before byte 8"),
        (struct.pack("<IH", 6, 2) + b"\xff\0", "no name before byte 8"),
        (HEAD + struct.pack("<I", 2**32 - 1), "it ends at byte 16"),
        (HEAD + struct.pack("<I", 1) + NAME + struct.pack("<B3IBI", 3, *[2**32 - 1] * 3, 0, 4), "are not"),
        (HEAD + struct.pack("<I", 1) + NAME + struct.pack("<BIBI", 1, 2**30 - 1, 0, 2**32 - 4), "4294967292 more"),
        (HEAD + struct.pack("<I", 1) + NAME + struct.pack("<BIBI", 1, 1, 9, 4) + b"\0" * 4, "unknown type 9"),
        (HEAD + struct.pack("<I", 2) + 2 * (NAME + struct.pack("<BBI", 0, 1, 1) + b"\0"), "has a twice"),
        (HEAD + struct.pack("<II", 0, 1) + NAME + NAME, "a stands for a, which it lacks"),
        (HEAD + struct.pack("<II", 0, 2**32 - 1), "it ends at byte 20"),
    ],
)
def test_a_declared_size_is_never_believed(folder: Path, content: bytes, words: str) -> None:
    """Whatever the file says it holds, what it does not hold is not reserved: the message names the file."""
    (folder / "model.bin").write_bytes(content)
    with pytest.raises(ModelImportError, match=rf"model\.bin is no model .*{words}"):
        read_ctranslate2(folder)


def test_weights_that_are_no_numbers_are_refused_and_nothing_written(tmp_path: Path) -> None:
    spec = random_spec(SPECS)
    spec.decoder.layer[1].ffn.linear_1.weight[2, 3] = math.nan
    folder = save(spec, tmp_path / "model")
    with pytest.raises(ModelImportError, match=r"decoder\.1\.feed_forward\.outer\.weight .* no numbers"):
        import_model(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "config.json holds no settings"),
        ("source_vocabulary.json", '["<s>", 4]', "source_vocabulary.json is no list of tokens"),
        ("source_vocabulary.json", '["<s>", "a"]', "11 source tokens, the vocabulary 3"),
        ("source_vocabulary.json", None, "has no source vocabulary"),
        ("target_vocabulary.json", '["<s>", "a"]', "target_vocabulary.json lacks the end of a sentence, </s>"),
        ("target_vocabulary.json", json.dumps(["</s>", "<s>", "<unk>", *6 * ["a"]]), "not all different"),
        ("model.bin", None, "model.bin cannot be read"),
    ],
)
def test_files_beside_the_model_are_checked(folder: Path, name: str, content: str | None, words: str) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises((ModelImportError, CheckpointError), match=words):
        read_ctranslate2(folder)


def test_pieces_without_their_tokenizer_are_noticed(tmp_path: Path) -> None:
    folder = save(random_spec(SPECS), tmp_path / "model")
    tokens = [*SPECIALS, *(f"\u2581s{i}" for i in range(3, 11))]
    (folder / "source_vocabulary.json").write_text(json.dumps(tokens))
    assert "source.spm" in read_ctranslate2(folder).notes[0]


def test_a_folder_that_is_there_is_not_written_to(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(CheckpointError, match="choose another --out"):
        import_model(folder, tmp_path / "out")


def test_what_is_no_model_is_told_what_would_be_one(tmp_path: Path) -> None:
    with pytest.raises(ModelImportError, match=r"\.argosmodel"):
        import_model(tmp_path, tmp_path / "out")
