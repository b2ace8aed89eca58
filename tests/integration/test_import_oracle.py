"""A real model of CTranslate2's, imported, exported and served, against CTranslate2 itself."""

import json

import pytest

from dragoman.bundle import ModelBundle
from dragoman.cli.main import main
from dragoman_training.checkpoint import load_model
from dragoman_training.importing.ct2_file import read_model_file

pytest.importorskip("ctranslate2", reason="the oracle is not installed")
from tests.bench.import_oracle import Engine, Reference, check, settings  # which needs it


def test_every_search_of_the_engine_gives_ctranslate2s_tokens_and_scores(transliteration):
    """Greedy, beams of 2, 4 and 8, n-best, penalties, patience, prefixes, lengths, what is suppressed or repeated,
    alternatives, and scores of given targets; within 1e-4."""
    folder, checkpoint, bundle = transliteration
    lines: list[str] = []
    engine = Engine(ModelBundle.load(bundle))
    assert check(folder, load_model(checkpoint), 20, engine, lines.append) == 0, lines
    assert len(lines) == len([*settings()]) + 1
    assert sum(int(line.split()[0]) for line in lines) > 0.98 * 20 * len(lines)  # the others are ties


def test_the_reference_gives_them_too(transliteration):
    """So that where the engine differs, the graphs and the import are told apart."""
    folder, checkpoint, _ = transliteration
    lines: list[str] = []
    some = [setting for setting in settings() if setting.search.num_hypotheses in (1, 2)]
    assert check(folder, load_model(checkpoint), 8, Reference(load_model(checkpoint)), lines.append, some) == 0, lines


def test_a_served_answer_is_the_text(transliteration, capsys):
    """In two commands from the folder to an answer."""
    _, _, bundle = transliteration
    assert main(["generate", "--bundle", str(bundle), "--json", "\u0645 \u062d \u0645 \u062f"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "m a h m a d"


def test_nothing_of_the_file_is_changed(transliteration):
    """The weights in the checkpoint are the file's, to the bit."""
    folder, checkpoint, _ = transliteration
    file, model = read_model_file(folder / "model.bin"), load_model(checkpoint).model
    fused = file.floats("decoder/layer_3/attention/linear_1/weight")
    attention = [*model.decoder_layers()][3].cross_attention
    assert (fused[:32] == attention.key.weight.detach().numpy()).all()
    assert (fused[32:] == attention.value.weight.detach().numpy()).all()
    assert (file.floats("encoder/embeddings/weight") == model.source_embedding.weight[:51].detach().numpy()).all()
