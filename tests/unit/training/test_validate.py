"""What a validation says of a model."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dragoman_training.config import TokenizerConfig, TrainConfig
from dragoman_training.configfile import load_config
from dragoman_training.data import Pair
from dragoman_training.errors import DataError
from dragoman_training.model import Transformer
from dragoman_training.scoring import score_text
from dragoman_training.systems import CheckpointSystem
from dragoman_training.tokenizer import SPECIAL_IDS, PlainTokenizer
from dragoman_training.train import train
from dragoman_training.validate import describe, validate
from dragoman_training.workers import Workers

SOURCES, TARGETS = ["ab", "c", "", "abcabcabcabc"], ["A B", "C", "", "A"]


@pytest.fixture
def datasets() -> Any:
    """Two pairs within the limits, a blank one and one over them."""
    source, target = PlainTokenizer.build("character", ["abcd"]), PlainTokenizer.build("piece", ["A B C D"])
    pairs = [
        Pair([*source.encode(s), 2], [*target.encode(t), 2]) for s, t in zip(SOURCES[:2], TARGETS[:2], strict=True)
    ]
    return SimpleNamespace(tokenizers=(source, target), dev=pairs, dev_sources=SOURCES, dev_targets=TARGETS)


@pytest.fixture
def config(toy: Path) -> TrainConfig:
    """The toy configuration."""
    return load_config("toy.toml")


@pytest.fixture
def model(make_model: Callable[..., Transformer]) -> Transformer:
    """An untrained model for those vocabularies."""
    return make_model(source_vocab_size=8, target_vocab_size=8)


def test_loss_is_that_of_the_real_tokens(datasets: Any, config: TrainConfig, model: Transformer) -> None:
    """Pair by pair without padding: minus the mean log-probability of each target token and ``</s>``."""
    expected = []
    for pair in datasets.dev:
        read = torch.tensor([[SPECIAL_IDS.decoder_start, *pair.target[:-1]]])
        with torch.inference_mode():
            logits = model(torch.tensor([pair.source]), torch.tensor([len(pair.source)]).int(), read)[0]
        expected += [-logits[n].log_softmax(-1)[token].item() for n, token in enumerate(pair.target)]
    with Workers(model, 2, smoothing=0.1) as workers:
        found = validate(workers, datasets, config, SPECIAL_IDS)
    assert found.loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert found.metrics()["loss"] == found.loss


def test_every_dev_line_counts_and_blank_ones_come_back(datasets: Any, config: TrainConfig, model: Transformer) -> None:
    """Of four lines, the blank one is right and the one over the limit is empty; dropout comes back on."""
    with Workers(model, 2, smoothing=0.0) as workers:
        workers.training(True)
        found = validate(workers, datasets, config, SPECIAL_IDS)
        assert all(replica.training for replica in workers.models)
    assert found.outputs[2:] == ["", ""]
    right = sum(out == target for out, target in zip(found.outputs, TARGETS, strict=True))
    assert found.exact_match == right / 4
    assert found.metrics()["word_error_rate"] == 1 - right / 4
    assert found.text is None


def test_bleu_is_there_where_it_means_something(datasets: Any, config: TrainConfig, model: Transformer) -> None:
    """For subwords, or when it decides about the best: of the very text of the outputs, with the whole signature."""
    text = dataclasses.replace(config, tokenizer=TokenizerConfig(kind="bpe", vocab_size=264))
    metric = dataclasses.replace(config, loop=dataclasses.replace(config.loop, metric="chrf", bleu_tokenizer="none"))
    with Workers(model, 1, smoothing=0.0) as workers:
        for changed, tokenizer in ((text, "13a"), (metric, "none")):
            found = validate(workers, datasets, changed, SPECIAL_IDS)
            scores = score_text(found.outputs, TARGETS, tokenizer)
            assert (found.metrics()["bleu"], found.metrics()["chrf"]) == (scores.bleu, scores.chrf)
            assert found.signatures == scores.signatures
            assert f"tok:{tokenizer}" in found.signatures["bleu"]


def test_a_dev_set_over_the_limits_is_refused(datasets: Any, config: TrainConfig, model: Transformer) -> None:
    """There would be no loss."""
    datasets.dev = []
    with Workers(model, 1, smoothing=0.0) as workers, pytest.raises(DataError, match="no dev pair"):
        validate(workers, datasets, config, SPECIAL_IDS)


def test_validation_and_evaluation_agree(toy: Path) -> None:
    """The trainer's last figures are those of its last checkpoint's outputs, scored from their text."""
    config = load_config("toy.toml")
    train(dataclasses.replace(config, loop=dataclasses.replace(config.loop, metric="bleu")), toy / "run")
    last = json.loads((toy / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    targets = (toy / "dev.target").read_text().splitlines()
    outputs = CheckpointSystem(toy / "run" / "last").outputs((toy / "dev.source").read_text().splitlines()).lines
    scores = score_text(outputs, targets)
    assert (last["dev_bleu"], last["dev_chrf"]) == pytest.approx((scores.bleu, scores.chrf))
    assert last["signatures"] == scores.signatures
    assert last["dev_exact_match"] == sum(map(str.__eq__, outputs, targets)) / len(targets)


def test_the_line_for_people_has_the_figures_that_are_there() -> None:
    """BLEU and chrF where they were computed."""
    line = {"step": 4, "epoch": 1, "train_loss": 2, "dev_loss": 1.5, "seconds": 3, "cpu_seconds": 5}
    assert "dev word error rate 25.00%," in describe({**line, "dev_word_error_rate": 0.25})
    assert "dev BLEU 12.50, chrF 30.00," in describe({**line, "dev_bleu": 12.5, "dev_chrf": 30.0})
