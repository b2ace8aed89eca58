"""The average of checkpoints: its numbers, what it may be used for, and what cannot be averaged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dragoman_training import checkpoint
from dragoman_training.averaging import average_checkpoints, newest_checkpoints
from dragoman_training.configfile import load_config
from dragoman_training.errors import CheckpointError
from dragoman_training.train import train


@pytest.fixture
def run(toy_with_everything: Path) -> Path:
    """A run that kept three checkpoints."""
    train(load_config("toy.toml", ["loop.keep_checkpoints=3"]), toy_with_everything / "run")
    return toy_with_everything / "run"


def test_the_average_is_the_arithmetic_mean(run: Path) -> None:
    """Against numpy in double precision; the newest come, and the folder loads with their tokenizers."""
    folders = newest_checkpoints(run, 2)
    assert [folder.name for folder in folders] == ["step-00000008", "step-00000012"]
    average_checkpoints(folders, run.parent / "mean")
    loaded = checkpoint.load_model(run.parent / "mean")
    one, two = (load_file(folder / "model.safetensors") for folder in folders)
    for name, parameter in loaded.model.named_parameters():
        mean = ((one[name].astype(np.float64) + two[name]) / 2).astype(np.float32)
        np.testing.assert_array_equal(parameter.detach().numpy(), mean)
    assert loaded.source_tokenizer.to_bytes() == checkpoint.load_model(run).source_tokenizer.to_bytes()
    assert [source["name"] for source in loaded.record["averaged"]] == ["step-00000008", "step-00000012"]
    assert str(run) not in (run.parent / "mean" / "config.json").read_text()


def test_the_sum_is_taken_in_double_precision(run: Path) -> None:
    """A small number between two large ones that cancel is not lost."""
    folders = newest_checkpoints(run, 3)
    for folder, value in zip(folders, (1e8, 1.0, -1e8), strict=True):
        weights = load_file(folder / "model.safetensors")
        save_file({name: np.full_like(weight, value) for name, weight in weights.items()}, folder / "model.safetensors")
    average_checkpoints(folders, run.parent / "mean")
    assert all((w == np.float32(1 / 3)).all() for w in load_file(run.parent / "mean" / "model.safetensors").values())


@pytest.mark.parametrize("number", [0, 4])
def test_more_checkpoints_than_there_are_is_refused(run: Path, number: int) -> None:
    """The message tells how many there are and how to keep more."""
    with pytest.raises(CheckpointError, match=rf"has 3 .*validations, not {number}: .*loop\.keep_checkpoints"):
        newest_checkpoints(run, number)


def test_a_folder_without_checkpoints_is_told_to_be_none(toy: Path) -> None:
    """Not "choose 1 to 0"."""
    with pytest.raises(CheckpointError, match="has no checkpoint of a validation: name a run, or wait"):
        newest_checkpoints(toy, 1)


def test_a_full_disk_is_told_with_the_folder_and_the_remedy(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever words the library that writes has for it; nothing is left."""

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match=r"mean could not be written \(Error while .* MiB free: make room, or"):
        average_checkpoints(newest_checkpoints(run, 1), run.parent / "mean")
    assert not [path for path in run.parent.iterdir() if "mean" in path.name]


def test_an_old_best_checkpoint_is_no_neighbour_of_the_newest(run: Path) -> None:
    """Step 8 is gone: steps 4 and 12 are not the two newest; 12 alone is."""
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    with pytest.raises(CheckpointError, match=r"no longer has the checkpoint of step 8.*loop\.keep_checkpoints"):
        newest_checkpoints(run, 2)
    assert [folder.name for folder in newest_checkpoints(run, 1)] == ["step-00000012"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "d_model"), 16),
        (("tokenizers", "source", "sha256"), "0" * 64),
        (("special_ids", "decoder_start"), 2),
    ],
)
def test_checkpoints_that_do_not_belong_together_are_refused(run: Path, path: tuple[str, ...], value: object) -> None:
    """Other shapes, tokenizers or special ids: the message names the field, and nothing is written."""
    folders = newest_checkpoints(run, 2)
    record = json.loads((folders[0] / "config.json").read_text())
    entry = record
    for name in path[:-1]:
        entry = entry[name]
    entry[path[-1]] = value
    (folders[0] / "config.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=path[-1]):
        average_checkpoints(folders, run.parent / "mean")
    assert not (run.parent / "mean").exists()


def test_weights_of_another_shape_are_refused(run: Path) -> None:
    """Whatever config.json says."""
    folders = newest_checkpoints(run, 2)
    weights = load_file(folders[1] / "model.safetensors")
    name = sorted(weights)[0]
    save_file({**weights, name: np.zeros((3, 3), np.float32)}, folders[1] / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has shape \(3, 3\), the others have"):
        average_checkpoints(folders, run.parent / "mean")


def test_a_folder_that_exists_is_not_overwritten(run: Path) -> None:
    """Nor is anything but a checkpoint read."""
    with pytest.raises(CheckpointError, match="exists: choose another --out"):
        average_checkpoints(newest_checkpoints(run, 1), run)
    with pytest.raises(CheckpointError, match="is no checkpoint folder"):
        average_checkpoints([run], run.parent / "mean")
