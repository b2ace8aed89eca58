"""Marian models of Hugging Face, read here, against the library's own generation."""

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import sentencepiece
import torch

from dragoman_training.beam import BeamOptions, beam_search_all
from dragoman_training.checkpoint import LoadedCheckpoint, load_model
from dragoman_training.data import encode_source
from dragoman_training.decode import greedy
from dragoman_training.errors import CheckpointError, ModelImportError
from dragoman_training.importing.kinds import import_model
from dragoman_training.steering import Steering

transformers = pytest.importorskip("transformers", reason="the oracle is not installed")

MOST = 14  # tokens of an answer
TEXT = ["the small dog runs over the green tree", "a house in the garden", "over there", "children with dogs"]
NO_TWICE = Steering(no_repeat_ngram_size=1)
MakeFolder = Callable[..., Path]


@pytest.fixture(scope="module")
def pieces() -> bytes:
    """A small SentencePiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 9),
        model_writer=model,
        vocab_size=44,
        model_type="bpe",
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


@pytest.fixture
def make_folder(pieces: bytes, tmp_path: Path) -> MakeFolder:
    """Write a folder with a model of random weights, as the library saves it; returns it."""

    def make(pickled: bool = False, separate: bool = False, **changes: Any) -> Path:
        processor = sentencepiece.SentencePieceProcessor(model_proto=pieces)
        learned = [processor.id_to_piece(i) for i in range(len(processor)) if not processor.is_control(i)]
        tokens = ["</s>", "<unk>", ">>de<<", *(piece for piece in learned if piece != "<unk>"), "<pad>"]
        pad = len(tokens) - 1
        config = transformers.MarianConfig(
            vocab_size=len(tokens),
            **{
                "d_model": 16,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 24,
                "decoder_ffn_dim": 24,
                "max_position_embeddings": 64,
                "activation_function": "swish",
                "scale_embedding": True,
                "init_std": 1.0,
                "pad_token_id": pad,
                "decoder_start_token_id": pad,
                "eos_token_id": 0,
                "forced_eos_token_id": 0,
                "tie_word_embeddings": not separate,
                "share_encoder_decoder_embeddings": not separate,
                **changes,
            },
        )
        torch.manual_seed(5)
        model = transformers.MarianMTModel(config).eval()
        for name, parameter in model.named_parameters():
            if "layers" in name and "norm" not in name:
                parameter.data.normal_(std=0.4)  # its own are too small to tell mistakes apart
        model.final_logits_bias.normal_(std=0.5)
        model.final_logits_bias[0, 0] += 4.0  # answers end
        generation = {"bad_words_ids": [[pad]], "max_length": 512, "renormalize_logits": True, "num_beams": 4}
        model.generation_config.update(**generation)
        folder = tmp_path / "opus"
        model.save_pretrained(folder)
        if pickled:
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
            (folder / "model.safetensors").unlink()
        (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
        for side in ("source", "target"):
            (folder / f"{side}.spm").write_bytes(pieces)
        return folder

    return make


def sources(count: int, size: int) -> list[list[int]]:
    """Ids at random, closed by </s>, as the library's tokenizer closes them."""
    rng = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (count,), generator=rng).tolist()
    return [[*torch.randint(3, size - 1, (length,), generator=rng).tolist(), 0] for length in lengths]


@torch.inference_mode()
def generated(folder: Path, rows: list[list[int]], most: int = MOST, **options: Any) -> tuple[list[list[int]], Any]:
    """What the library answers, without the token that it begins with; and all else that it tells.

    No token comes twice: what a model without training says would be one word again and again.
    """
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    pad, width = model.config.pad_token_id, max(map(len, rows))
    batch = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    out = model.generate(
        input_ids=batch,
        attention_mask=(batch != pad).long(),
        do_sample=False,
        max_length=most + 1,
        output_scores=True,
        no_repeat_ngram_size=1,
        return_dict_in_generate=True,
        **options,
    )
    answers = [[i for i in row[1:] if i != pad] for row in out.sequences.tolist()]
    return answers, out


def imported(folder: Path, tmp_path: Path) -> LoadedCheckpoint:
    """Import and load."""
    import_model(folder, tmp_path / "out")
    return load_model(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({}, "all"),
        ({"pickled": True, "scale_embedding": False, "activation_function": "relu", "decoder_layers": 1}, "all"),
        ({"separate": True, "activation_function": "gelu"}, "none"),
    ],
    ids=["as published", "pickled", "untied"],
)  # fmt: skip
def test_greedy_answers_are_those_of_generate(
    make_folder: MakeFolder, tmp_path: Path, options: dict[str, Any], tied: str
) -> None:
    """final_logits_bias and the forbidden <pad> included. At the limit theirs puts </s> in place of the last token
    (forced_eos_token_id); ours says that the answer was cut."""
    folder = make_folder(**options)
    ours = imported(folder, tmp_path)
    assert ours.model.config.tied_embeddings == tied
    size = len(ours.target_tokenizer)
    rows = sources(200, size)
    theirs, _ = generated(folder, rows, num_beams=1)
    lengths = set()
    for found, answer in zip(greedy(ours.model, rows, MOST, ours.special, steering=NO_TWICE), theirs, strict=True):
        lengths.add(len(answer))
        assert answer[-1] == ours.special.eos
        if found.finish_reason == "stop":
            assert [*found.tokens, ours.special.eos] == answer
        else:
            assert len(answer) == MOST and found.tokens[:-1] == answer[:-1]
    assert len(lengths) > 3


def test_beams_find_what_generate_finds_with_early_stopping(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Tokens and scores, of every answer that ends before the limit: there theirs ends them all, at no cost."""
    folder = make_folder()
    ours = imported(folder, tmp_path)
    rows = sources(100, len(ours.target_tokenizer))
    theirs, out = generated(folder, rows, num_beams=4, early_stopping=True)
    options = BeamOptions(beam_size=4, max_new_tokens=MOST, steering=NO_TWICE)
    found = [hypotheses[0] for hypotheses in beam_search_all(ours.model, rows, options, ours.special)]
    for one, answer, score in zip(found, theirs, out.sequences_scores.tolist(), strict=True):
        if one.finish_reason == "stop":
            assert [*one.tokens, ours.special.eos] == answer
            assert one.score == pytest.approx(score, abs=1e-4)
        else:
            assert len(answer) == MOST and answer[-1] == ours.special.eos
    assert sum(one.finish_reason == "stop" for one in found) >= 60
    assert len({len(one.tokens) for one in found}) > 3


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_text_is_split_as_by_the_librarys_tokenizer(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Both ways, language tokens included."""
    folder = make_folder()
    ours = imported(folder, tmp_path)
    theirs = transformers.MarianTokenizer(
        source_spm=str(folder / "source.spm"), target_spm=str(folder / "target.spm"), vocab=str(folder / "vocab.json")
    )
    for text in [*TEXT, ">>de<< the dog", "unknown \u1234 letters"]:
        ids = encode_source(ours.source_tokenizer, text, ours.special)
        assert ids == theirs(text)["input_ids"]
    ids = [5, 6, 7, 8, 20, 30]
    assert ours.target_tokenizer.decode(ids).strip() == theirs.decode(ids, skip_special_tokens=True).strip()


def test_generation_config_wins_and_what_is_forbidden_stays_so(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder()
    settings = json.loads((folder / "generation_config.json").read_text())
    pad = settings["decoder_start_token_id"]
    settings |= {"bad_words_ids": [[pad], [7]], "suppress_tokens": [9]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    special = imported(folder, tmp_path).special
    assert {7, 9, pad} <= {*special.never_produced} and special.unk not in special.never_produced
    assert (special.pad, special.eos, special.unk, special.decoder_start) == (pad, 0, 1, pad)


class Evil:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickled_code_is_never_run(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder(pickled=True)
    torch.save({"model.shared.weight": Evil(tmp_path / "touched")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelImportError, match=r"pytorch_model\.bin is damaged, or holds more than tensors"):
        import_model(folder, tmp_path / "out")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(tmp_path / "touched")))
    with pytest.raises(ModelImportError, match=r"pytorch_model\.bin is damaged, or holds more than tensors"):
        import_model(folder, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["opus"]


def test_all_that_is_not_supported_is_told_in_one_message(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder()
    config = json.loads((folder / "config.json").read_text())
    config |= {"encoder_ffn_dim": 32, "activation_function": "mish", "static_position_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"forced_bos_token_id": 5, "bad_words_ids": [[4, 5]], "begin_suppress_tokens": [3]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelImportError) as error:
        import_model(folder, tmp_path / "out")
    for words in ("ffn_dim 32", "mish", "learned positions", "forced_bos_token_id 5", "sequences", "begin_suppress"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b'{"model_type": "marian"}', "config.json lacks the numbers d_model"),
        ("vocab.json", b"[]", "vocab.json holds no JSON object"),
        ("vocab.json", b'{"</s>": 0, "<unk>": 0}', "vocab.json has 2 tokens: their ids must be different"),
        ("vocab.json", b'{"</s>": 0}', "vocab.json lacks the token <unk>"),
        ("source.spm", None, "source.spm cannot be read"),
        ("target.spm", b"no model", "not a SentencePiece model"),
        ("model.safetensors", None, "neither model.safetensors nor pytorch_model.bin"),
        ("model.safetensors", b"\xff" * 40, "model.safetensors is damaged"),
        ("generation_config.json", b"{", "generation_config.json cannot be read"),
    ],
)
def test_damaged_files_are_refused_by_name_and_nothing_written(
    make_folder: MakeFolder, tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    folder = make_folder()
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises((ModelImportError, CheckpointError), match=words):
        import_model(folder, tmp_path / "out", "marian")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["opus"]


def test_weights_that_do_not_fit_are_refused_by_name(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder()
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = "model.encoder.layers.0.fc1.weight"
    weight = tensors.pop(name)
    for changed, words in (
        (tensors, r"encoder\.0\.feed_forward\.inner\.weight is missing"),
        ({**tensors, name: weight[:-1].clone()}, r"encoder\.0\.feed_forward\.inner\.weight is \(23, 16\)"),
        ({**tensors, name: weight, "model.encoder.layer_norm.weight": weight[0].clone()}, "encoder.layer_norm.weight"),
    ):
        safetensors.torch.save_file(changed, path)
        with pytest.raises(ModelImportError, match=words):
            import_model(folder, tmp_path / "out")
