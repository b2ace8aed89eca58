"""Training end to end at toy size: files, resume, signals, refusals, numbers that are not finite."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dragoman_training import checkpoint
from dragoman_training.cli import train as command
from dragoman_training.configfile import load_config
from dragoman_training.errors import CheckpointError, DataError, TrainingError
from dragoman_training.train import Trainer, train

PROGRAM = "import sys; from dragoman_training.cli import train as t; import argparse; p = argparse.ArgumentParser();"
PROGRAM += "t.add_arguments(p); sys.exit(t.run(p.parse_args()))"


def weights(run: Path) -> bytes:
    return (run / "last" / "model.safetensors").read_bytes()


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def longer(toy: Path, steps: int) -> None:
    path = toy / "toy.toml"
    path.write_text(path.read_text().replace("steps = 12", f"steps = {steps}"))


def use(toy: Path, kind: str) -> None:
    path = toy / "toy.toml"
    path.write_text(path.read_text().replace("[optimizer]", f'[optimizer]\nkind = "{kind}"'))


def test_a_run_leaves_the_documented_files(toy: Path) -> None:
    """Config, metrics, the newest checkpoints and relative links; no absolute path anywhere in the records."""
    assert run_command("toy.toml", "--out", "run") == 0
    run = toy / "run"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [4, 8, 12]
    assert metrics[-1]["dev_exact_match"] == pytest.approx(1 - metrics[-1]["dev_word_error_rate"])
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert {"step-00000008", "step-00000012"} <= set(names)
    assert len(names) <= 3  # the two newest and the best
    assert str((run / "last").readlink()) == "checkpoints/step-00000012"
    best = min(metrics, key=lambda line: line["dev_word_error_rate"])["step"]
    assert str((run / "best").readlink()) == f"checkpoints/step-{best:08d}"
    assert sorted(path.name for path in (run / "last").iterdir()) == [
        "config.json",
        "metrics.json",
        "model.safetensors",
        "source.tokenizer.json",
        "target.tokenizer.json",
        "training_state.pt",
    ]
    record = (run / "last" / "config.json").read_text()
    assert record == (run / "config.json").read_text()
    assert str(toy) not in record
    assert json.loads(record)["special_ids"]["decoder_start"] == 1


def test_a_run_is_repeatable_bit_for_bit(toy: Path) -> None:
    """Same configuration and data, same weights, whatever random numbers were drawn before."""
    config = load_config("toy.toml")
    train(config, toy / "a")
    torch.rand(3)
    train(config, toy / "b")
    assert weights(toy / "a") == weights(toy / "b")


@pytest.mark.parametrize(("stop_after", "kind"), [(1, "muon"), (5, "adamw"), (5, "muon"), (8, "muon")])
def test_a_stopped_run_resumes_to_equal_weights(
    toy: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int, kind: str
) -> None:
    """Stopped by a signal between or at validations, then resumed: bit-equal to a run without a stop."""
    use(toy, kind)
    config = load_config("toy.toml")
    train(config, toy / "whole")
    step = Trainer.step

    def step_then_signal(self: Trainer, shares: list[object]) -> None:
        step(self, shares)  # type: ignore[arg-type]  # passed on as it came
        if self.progress.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step_then_signal)
        assert train(config, toy / "parts") == signal.SIGTERM
    assert (toy / "parts" / "last").readlink().name == f"step-{stop_after:08d}"
    assert train(config, toy / "parts", resume=True) is None
    assert weights(toy / "parts") == weights(toy / "whole")
    lines = [json.loads(line) for line in (toy / "parts" / "metrics.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (toy / "whole" / "metrics.jsonl").read_text().splitlines()]
    for line in [*lines, *whole]:
        line.pop("seconds")
        line.pop("cpu_seconds")
    assert lines == whole


# Runs the command, and kills itself at the n-th of these moments: a step, or a flush while something is written.
KILLED = """
import os, signal, sys
from dragoman_training import checkpoint, train
moments = int(sys.argv.pop())

def counted(function):
    def wrapper(*args):
        global moments
        moments -= 1
        if moments == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return wrapper

checkpoint.flush = counted(checkpoint.flush)
train.Trainer.step = counted(train.Trainer.step)
"""


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_killed_at_any_moment_it_resumes_to_equal_weights(toy: Path, kind: str) -> None:
    """SIGKILL in a step and while writing, each time restarted with --resume: bit-equal to a run without a stop."""
    use(toy, kind)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    rng = random.Random(kind)
    # A validation and its checkpoint are 4 steps and 10 flushes: the first kill may come before any checkpoint.
    for number, moments in enumerate([rng.randint(2, 18), rng.randint(2, 24)]):
        arguments = ["toy.toml", "--out", "killed", *["--resume"] * (number > 0), str(moments)]
        done = subprocess.run([sys.executable, "-c", KILLED + PROGRAM, *arguments], env=environment, check=False)
        assert done.returncode == -signal.SIGKILL
    config = load_config("toy.toml")
    assert train(config, toy / "killed", resume=True) is None
    assert train(config, toy / "whole") is None
    assert weights(toy / "killed") == weights(toy / "whole")


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_in_order(toy: Path, number: signal.Signals, status: int) -> None:
    """The process ends with its documented status and leaves a checkpoint that loads."""
    longer(toy, 100_000)
    arguments = [sys.executable, "-c", PROGRAM, "toy.toml", "--out", "run"]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    while count_lines(toy / "run" / "metrics.jsonl") < 1:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == status, errors
    assert "--resume" in errors
    state = checkpoint.load_state(toy / "run" / "last")
    assert (toy / "run" / "last").readlink().name == f"step-{state['progress']['step']:08d}"
    assert checkpoint.load_model(toy / "run").max_source_tokens == 8


def test_an_existing_folder_needs_resume(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second start is refused in one line and changes nothing."""
    assert run_command("toy.toml", "--out", "run") == 0
    before = weights(toy / "run")
    assert run_command("toy.toml", "--out", "run") == 2
    assert "--resume" in capsys.readouterr().err
    assert weights(toy / "run") == before


def test_resuming_a_finished_run_changes_nothing(toy: Path) -> None:
    """There is nothing left to do."""
    config = load_config("toy.toml")
    train(config, toy / "run")
    before = weights(toy / "run")
    assert train(config, toy / "run", resume=True) is None
    assert weights(toy / "run") == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("learning_rate = 1e-2", "learning_rate = 2e-2", "training.optimizer.learning_rate is 0.02, was 0.01"),
        ("d_model = 8", "d_model = 16", "model.d_model is 16, was 8"),
        ("steps = 12", "steps = 13", "training.schedule.steps is 13, was 12"),
    ],
)
def test_resuming_with_another_configuration_is_refused(toy: Path, old: str, new: str, words: str) -> None:
    """The message names the field and both values."""
    train(load_config("toy.toml"), toy / "run")
    (toy / "toy.toml").write_text((toy / "toy.toml").read_text().replace(old, new))
    with pytest.raises(CheckpointError, match=words):
        train(load_config("toy.toml"), toy / "run", resume=True)


def test_resuming_with_other_data_is_refused(toy: Path) -> None:
    """The files are known by their hash."""
    train(load_config("toy.toml"), toy / "run")
    lines = (toy / "dev.source").read_text().splitlines()
    (toy / "dev.source").write_text("".join(f"{line}\n" for line in reversed(lines)))
    with pytest.raises(CheckpointError, match=r"data\.dev_source\.sha256"):
        train(load_config("toy.toml"), toy / "run", resume=True)


def test_resuming_nothing_is_refused(toy: Path) -> None:
    """There must be a run."""
    with pytest.raises(CheckpointError, match=r"there is no run in .* to resume"):
        train(load_config("toy.toml"), toy / "none", resume=True)


def test_a_gradient_that_is_not_finite_skips_the_step(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is counted, the weights stay as they were, and training goes on."""
    trainer = Trainer(load_config("toy.toml"), toy / "run")
    accumulate = trainer.workers.accumulate

    def poisoned(shares: list[object]) -> tuple[float, int]:
        loss, tokens = accumulate(shares)  # type: ignore[arg-type]  # passed on as it came
        if trainer.progress.step == 3:
            next(iter(trainer.model.parameters())).grad.view(-1)[0] = float("nan")  # type: ignore[union-attr]  # there is a gradient
        return loss, tokens

    monkeypatch.setattr(trainer.workers, "accumulate", poisoned)
    trainer.start()
    assert trainer.train() is None
    assert (trainer.progress.skipped_steps, trainer.progress.bad_in_a_row) == (1, 0)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_ten_bad_gradients_in_a_row_end_the_run(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a message that says what to change, status 2, and no checkpoint with bad weights."""
    monkeypatch.setattr(
        "dragoman_training.workers.smoothed_loss",
        lambda logits, labels, pad, smoothing: (logits.sum() * float("nan"), 1),
    )
    assert run_command("toy.toml", "--out", "run") == 2
    assert "10 times in a row" in capsys.readouterr().err
    for folder in checkpoint.checkpoint_folders(toy / "run"):
        assert all(torch.isfinite(p).all() for p in checkpoint.load_model(folder).model.parameters())


def test_weights_that_are_not_finite_are_never_written(toy: Path) -> None:
    """Saving refuses and leaves no folder."""
    trainer = Trainer(load_config("toy.toml"), toy / "run")
    trainer.start()
    trainer.model.source_embedding.weight.data[0, 0] = float("inf")
    with pytest.raises(TrainingError, match=r"source_embedding\.weight is not finite"):
        trainer.save({})
    assert checkpoint.checkpoint_folders(toy / "run") == []


def test_data_that_never_fits_is_refused(toy: Path) -> None:
    """Limits that drop every pair are named."""
    path = toy / "toy.toml"
    path.write_text(path.read_text().replace("max_source_tokens = 8", "max_source_tokens = 1"))
    with pytest.raises(DataError, match="60 training pairs"):
        train(load_config("toy.toml"), toy / "run")


def test_embeddings_tied_across_sides_need_one_vocabulary(toy: Path) -> None:
    """Equal sizes are not enough: the tokens must be the same."""
    path = toy / "toy.toml"
    path.write_text(path.read_text().replace("d_model = 8", 'd_model = 8\ntied_embeddings = "all"'))
    with pytest.raises(DataError, match="vocabularies differ"):
        Trainer(load_config("toy.toml"), toy / "run")
