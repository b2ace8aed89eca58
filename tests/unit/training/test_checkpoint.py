"""Checkpoint folders: complete or absent, and refused when they do not fit together."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import safetensors.torch
import torch

from dragoman_training import checkpoint, folders
from dragoman_training.configfile import load_config
from dragoman_training.errors import CheckpointError
from dragoman_training.trainer import Trainer

Limited = Callable[[int], AbstractContextManager[None]]


@pytest.fixture
def trainer(toy: Path) -> Trainer:
    """A trainer with a started run and one step done."""
    trainer = Trainer(load_config("toy.toml"), toy / "run")
    trainer.start()
    step(trainer, 0)
    return trainer


def step(trainer: Trainer, first: int) -> None:
    trainer.step([[trainer.datasets.train[n] for n in range(first, first + 4)]])


def test_a_checkpoint_loads_as_it_was_saved(trainer: Trainer) -> None:
    """Same weights, tokenizers and limits; a run folder gives its best."""
    trainer.progress.best_step = 1
    trainer.save({"step": 1})
    loaded = checkpoint.load_model(trainer.run)
    assert loaded.folder.name == "step-00000001"
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, loaded.model.get_parameter(name))
    assert loaded.source_tokenizer.to_bytes() == trainer.tokenizers[0].to_bytes()
    assert (loaded.max_source_tokens, loaded.max_target_tokens) == (8, 8)
    assert not loaded.model.training


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries, which no test waits for."""
    seen: list[float] = []
    monkeypatch.setattr("dragoman_training.checkpoint.time.sleep", seen.append)
    return seen


@pytest.mark.parametrize("file", ["model.safetensors", "training_state.pt"])
def test_a_disk_that_fails_for_good_leaves_the_last_checkpoint(
    trainer: Trainer, pauses: list[float], caplog: pytest.LogCaptureFixture, small_files_only: Limited, file: str
) -> None:
    """Three tries with growing pauses and warnings that tell path, reason and free space; then the run ends.

    Whichever library was writing, the words are the disk's and ours.
    """
    trainer.save({})
    before = (trainer.run / "last").readlink()
    size = (trainer.run / "last" / file).stat().st_size
    assert all(
        path.stat().st_size < size or path.name == "training_state.pt" or path.name == file
        for path in (trainer.run / "last").iterdir()
    )
    step(trainer, 4)
    caplog.set_level(logging.WARNING)
    with small_files_only(size - 200), pytest.raises(CheckpointError) as caught:
        trainer.save({})
    path = re.escape(str(trainer.run / "checkpoints" / "step-00000002"))
    told = rf"{path} could not be written \(File too large[^)]*\)?\), [0-9,]+ MiB free"
    assert re.fullmatch(rf"{told}, in 3 tries: make room, then continue with --resume", str(caught.value))
    assert len(pauses) == 2 and pauses[0] < pauses[1]
    assert len(caplog.messages) == 2
    assert all(re.fullmatch(rf"{told}: next try in \d+ s", line) for line in caplog.messages)
    assert [path.name for path in checkpoint.checkpoint_folders(trainer.run)] == ["step-00000001"]
    assert (trainer.run / "last").readlink() == before
    trainer.save({})
    assert [path.name for path in (trainer.run / "checkpoints").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("broken", ["safetensors.torch.save_file", "torch.save", "dragoman_training.folders.flush"])
def test_a_passing_write_error_loses_nothing(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, pauses: list[float], broken: str
) -> None:
    """Failed once, written the second time."""
    module, _, name = broken.rpartition(".")
    work = {"safetensors.torch": safetensors.torch, "torch": torch, "dragoman_training.folders": folders}
    function, failures = getattr(work[module], name), [OSError(28, "No space left on device")]

    def fails_once(*args: object) -> object:
        if failures:
            raise failures.pop()
        return function(*args)

    monkeypatch.setattr(broken, fails_once)
    trainer.save({})
    assert len(pauses) == 1
    assert checkpoint.load_model(trainer.run / "last").folder.name == "step-00000001"
    assert checkpoint.load_state(trainer.run / "last")["progress"]["step"] == 1


class Killed(BaseException):
    """Nothing catches it."""


def test_killed_at_any_moment_of_saving_the_newest_checkpoint_loads(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each flush in turn, until a saving comes through: what is listed is whole, and leftovers go."""
    trainer.save({})
    trainer.progress.step, came_through, moment = 2, False, 0
    while not came_through:
        moment += 1
        remaining = iter(range(moment))

        def killing(path: Path, remaining: Iterator[int] = remaining, last: int = moment - 1) -> None:
            if next(remaining, -1) == last:
                raise Killed

        monkeypatch.setattr(folders, "flush", killing)
        monkeypatch.setattr(checkpoint, "flush", killing)
        shutil.rmtree(trainer.run / "checkpoints" / "step-00000002", ignore_errors=True)
        try:
            trainer.save({})
            came_through = True
        except Killed:
            newest = checkpoint.checkpoint_folders(trainer.run)[-1]
            for folder in (newest, trainer.run / "last"):
                checkpoint.load_model(folder)
                checkpoint.load_state(folder)
    assert moment > 8
    assert checkpoint.load_model(trainer.run / "last").folder.name == "step-00000002"
    assert [path.name for path in (trainer.run / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    """Of nine digits, too."""
    names = ["step-00000002", "step-00000010", "step-99999999", "step-100000000"]
    for name in reversed(names):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [folder.name for folder in checkpoint.checkpoint_folders(tmp_path)] == names


def test_a_copy_beside_the_checkpoints_is_none_of_them(tmp_path: Path) -> None:
    """What a user put there, to keep an early state, is neither resumed from nor pruned: a folder or a file."""
    for name in ("step-00000004", "step-00000004-keep", "step-00000008"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-99999999", "step-99999999.tar"):
        (tmp_path / "checkpoints" / name).write_text("")
    assert [folder.name for folder in checkpoint.checkpoint_folders(tmp_path)] == ["step-00000004", "step-00000008"]


def test_the_newest_and_the_best_are_kept(trainer: Trainer) -> None:
    """Two newest by configuration, and the best however old."""
    trainer.progress.best_step = 1
    for step in range(1, 6):
        trainer.progress.step = step
        trainer.save({"dev_loss": 1.0})
    names = [path.name for path in checkpoint.checkpoint_folders(trainer.run)]
    assert names == ["step-00000001", "step-00000004", "step-00000005"]


def test_the_state_of_a_signal_takes_no_place_of_a_validated_checkpoint(trainer: Trainer) -> None:
    """It stays while it is the newest."""
    seen = []
    for step, metrics in ((2, {"dev_loss": 1.0}), (3, {"dev_loss": 1.0}), (4, {}), (5, {}), (6, {"dev_loss": 1.0})):
        trainer.progress.step = step
        trainer.save(metrics)
        seen.append([int(path.name[-1]) for path in checkpoint.checkpoint_folders(trainer.run)])
    assert seen == [[2], [2, 3], [2, 3, 4], [2, 3, 5], [3, 6]]


@pytest.mark.parametrize("content", ["{", "null", None])
def test_an_old_checkpoint_with_damaged_metrics_stops_no_run(
    trainer: Trainer, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    """It counts as one of no validation, and so goes; what cannot be read at all is told."""
    for step in (2, 3):
        trainer.progress.step = step
        trainer.save({"dev_loss": 1.0})
    file = trainer.run / "checkpoints" / "step-00000002" / "metrics.json"
    file.unlink() if content is None else file.write_text(content)
    trainer.progress.step = 4
    trainer.save({"dev_loss": 1.0})
    assert [path.name[-1] for path in checkpoint.checkpoint_folders(trainer.run)] == ["3", "4"]
    warnings = [line for line in caplog.messages if f"{file} cannot be read" in line]
    assert len(warnings) == (content != "null")


def change_record(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        record = json.loads((folder / "config.json").read_text())
        change(record)
        (folder / "config.json").write_text(json.dumps(record))

    return apply


def edit_tokenizer(old: str, new: str) -> Callable[[Path], None]:
    """Another file in the tokenizer's place: of another size, or of equal size."""

    def apply(folder: Path) -> None:
        path = folder / "source.tokenizer.json"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

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
        (edit_tokenizer('"d"]', '"d", "e"]'), "has 9 tokens: the model was trained with 8"),
        (edit_tokenizer('"c", "d"]', '"d", "c"]'), "is not the tokenizer that the model was trained with"),
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
