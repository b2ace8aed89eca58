"""Checkpoint folders: complete or absent, and refused when they do not fit together."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dragoman_training import checkpoint
from dragoman_training.configfile import load_config
from dragoman_training.errors import CheckpointError
from dragoman_training.train import Trainer


@pytest.fixture
def trainer(toy: Path) -> Trainer:
    """A trainer with a started run and one step done."""
    trainer = Trainer(load_config("toy.toml"), toy / "run")
    trainer.start()
    trainer.step([trainer.train_data.pairs[:4]])
    return trainer


def test_a_checkpoint_loads_as_it_was_saved(trainer: Trainer) -> None:
    """Same weights, tokenizers and limits; a run folder gives its best."""
    trainer.progress.best_step = 1
    trainer.save({"step": 1})
    loaded = checkpoint.load_model(trainer.run)
    assert loaded.folder.name == "step-00000001"
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, loaded.model.get_parameter(name))
    assert loaded.source_tokenizer.tokens == trainer.tokenizers[0].tokens
    assert (loaded.max_source_tokens, loaded.max_target_tokens) == (8, 8)
    assert not loaded.model.training


@pytest.mark.parametrize("broken", ["safetensors.torch.save_file", "torch.save"])
def test_a_failed_write_leaves_no_checkpoint(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A disk that fills up in the middle: the older checkpoint stays whole, the newer does not appear."""
    trainer.save({})
    before = (trainer.run / "last").readlink()
    trainer.step([trainer.train_data.pairs[4:8]])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(broken, full)
        with pytest.raises(OSError, match="No space"):
            trainer.save({})
    assert [path.name for path in checkpoint.checkpoint_folders(trainer.run)] == ["step-00000001"]
    assert (trainer.run / "last").readlink() == before
    trainer.save({})
    assert [path.name for path in (trainer.run / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_the_newest_and_the_best_are_kept(trainer: Trainer) -> None:
    """Two newest by configuration, and the best however old."""
    trainer.progress.best_step = 1
    for step in range(1, 6):
        trainer.progress.step = step
        trainer.save({})
    names = [path.name for path in checkpoint.checkpoint_folders(trainer.run)]
    assert names == ["step-00000001", "step-00000004", "step-00000005"]


def change_record(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        record = json.loads((folder / "config.json").read_text())
        change(record)
        (folder / "config.json").write_text(json.dumps(record))

    return apply


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 20), r"model\.safetensors cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json cannot be read"),
        (change_record(lambda r: r.pop("limits")), "limits"),
        (change_record(lambda r: r.update(format=9)), "format 9"),
        (change_record(lambda r: r.update(special_ids=[1, 2])), "is incomplete"),
        (change_record(lambda r: r.update(limits=7)), "is incomplete"),
        (change_record(lambda r: r["special_ids"].pop("decoder_start")), r"lacks special_ids\.decoder_start"),  # type: ignore[attr-defined]  # plain JSON
        (change_record(lambda r: r["model"].update(ffn_dim=32)), r"has shape \(16, 8\), config\.json says \(32, 8\)"),  # type: ignore[attr-defined]  # plain JSON
        (change_record(lambda r: r["model"].update(encoder_layers=2)), r"weight encoder\.1.* one side only"),  # type: ignore[attr-defined]  # plain JSON
        (change_record(lambda r: r["model"].update(source_vocab_size=9)), "tokenizers of"),  # type: ignore[attr-defined]  # plain JSON
        (lambda folder: (folder / "source.tokenizer.json").unlink(), r"source\.tokenizer\.json"),
    ],
)
def test_a_damaged_checkpoint_is_refused(trainer: Trainer, damage: Callable[[Path], None], words: str) -> None:
    """The message names the file or what is missing; the decoder start id has no default."""
    trainer.save({})
    damage(trainer.run / "checkpoints" / "step-00000001")
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load_model(trainer.run / "last")


def test_a_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    """Neither run nor checkpoint."""
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        checkpoint.load_model(tmp_path)
