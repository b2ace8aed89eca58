"""Not losing work: a run that is stopped or killed and resumed ends like one that never was; changes are refused."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import start

from dragoman_training import checkpoint, data, shards, tokenizer
from dragoman_training.averaging import average_checkpoints, newest_checkpoints
from dragoman_training.configfile import load_config
from dragoman_training.data import Pair
from dragoman_training.distributed import Group
from dragoman_training.errors import CheckpointError, ConfigError
from dragoman_training.folders import locked
from dragoman_training.tokenizer import SentencePieceTokenizer
from dragoman_training.train import train
from dragoman_training.trainer import Trainer

PROGRAM = "import sys; from dragoman_training.cli import train as t; import argparse; p = argparse.ArgumentParser();"
PROGRAM += "t.add_arguments(p); sys.exit(t.run(p.parse_args()))"
OF_THE_CLOCK = ("seconds", "cpu_seconds", "tokens_per_second")

Shares = Sequence[Sequence[Pair]]


def weights(run: Path) -> bytes:
    return (run / "last" / "model.safetensors").read_bytes()


def metrics_of(run: Path) -> list[dict[str, object]]:
    """The lines of metrics.jsonl, without what differs from run to run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in OF_THE_CLOCK} for line in lines]


class Watched:
    """What each step was given and how far it went, with a signal after one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> None:
        self.steps: list[tuple[int, float, list[list[Pair]]]] = []
        self.stop_after = stop_after
        step = Trainer.step

        def watched(trainer: Trainer, shares: Shares) -> tuple[float, int]:
            result = step(trainer, shares)
            rate = trainer.optimizer.param_groups[0]["lr"]
            self.steps.append((trainer.progress.step, rate, [list(share) for share in shares]))
            if trainer.progress.step == self.stop_after:
                self.stop_after = None
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        monkeypatch.setattr(Trainer, "step", watched)


@pytest.mark.parametrize(("stop_after", "kind"), [(1, "adamw"), (5, "muon"), (8, "sgd")])
def test_a_stopped_run_resumes_to_equal_weights(
    toy_with_everything: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int, kind: str
) -> None:
    """Stopped by a signal between or at validations, then resumed: the same batches and rates, bit-equal at the end."""
    toy = toy_with_everything
    config = load_config("toy.toml", [f"optimizer.kind={kind}"])
    with monkeypatch.context() as patch:
        whole = Watched(patch)
        train(config, toy / "whole")
    parts = Watched(monkeypatch, stop_after)
    assert train(config, toy / "parts") == signal.SIGTERM
    assert (toy / "parts" / "last").readlink().name == f"step-{stop_after:08d}"
    assert train(config, toy / "parts", resume=True) is None
    assert parts.steps == whole.steps
    assert [step for step, _, _ in parts.steps] == list(range(1, 13))
    assert weights(toy / "parts") == weights(toy / "whole")
    assert metrics_of(toy / "parts") == metrics_of(toy / "whole")


def test_a_stop_leaves_no_trace_in_the_average(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of step 6 is none of the two newest checkpoints: neither kept nor averaged in the end."""
    config = load_config("toy.toml", ["schedule.steps=8"])
    with monkeypatch.context() as patch:
        Watched(patch, stop_after=6)
        train(config, toy / "parts")
    kept = [folder.name for folder in checkpoint.checkpoint_folders(toy / "parts")]
    assert kept == ["step-00000004", "step-00000006"]
    with pytest.raises(CheckpointError, match="has 1 checkpoints of validations, not 2"):
        newest_checkpoints(toy / "parts", 2)
    train(config, toy / "parts", resume=True)
    train(config, toy / "whole")
    for run in (toy / "parts", toy / "whole"):
        average_checkpoints(newest_checkpoints(run, 2), toy / f"{run.name}-average")
    parts, whole = (toy / f"{name}-average" / "model.safetensors" for name in ("parts", "whole"))
    assert parts.read_bytes() == whole.read_bytes()
    parts_kept, whole_kept = (
        [folder.name for folder in checkpoint.checkpoint_folders(toy / name)] for name in ("parts", "whole")
    )
    assert parts_kept == whole_kept == ["step-00000004", "step-00000008"]


# Runs the command, and kills itself at the n-th of these moments: a step, or a flush while something is written.
KILLED = """
import os, signal, sys
from dragoman_training import checkpoint, folders, metrics, trainer
moments = int(sys.argv.pop())

def counted(function):
    def wrapper(*args):
        global moments
        moments -= 1
        if moments == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return wrapper

checkpoint.flush = metrics.flush = folders.flush = counted(folders.flush)
trainer.Trainer.step = counted(trainer.Trainer.step)
"""


@pytest.mark.parametrize("settings", [["tokenizer.sampling=0.0", "optimizer.kind=muon"], ["loop.seed=4"]])
def test_killed_at_any_moment_it_resumes_to_equal_weights(toy_with_everything: Path, settings: list[str]) -> None:
    """SIGKILL in a step and while writing, again and again, each time restarted: bit-equal to a run without a stop."""
    toy = toy_with_everything
    rng = random.Random(str(settings))
    # The start is a dozen flushes, a validation with its checkpoint 4 steps and a dozen flushes: killed at the start,
    # after a checkpoint, and once more.
    for moments in [rng.randint(2, 12), rng.randint(32, 40), rng.randint(2, 14)]:
        resume = ["--resume"] if (toy / "killed" / "config.json").exists() else []
        changes = [word for setting in settings for word in ("--set", setting)]
        arguments = ["toy.toml", "--out", "killed", *changes, *resume, str(moments)]
        assert start(KILLED + PROGRAM, *arguments, cwd=toy).wait().status == -signal.SIGKILL
        if (toy / "killed" / "last").exists():
            checkpoint.load_model(toy / "killed" / "last")
    assert (toy / "killed" / "last").exists()
    config = load_config("toy.toml", settings)
    assert train(config, toy / "killed", resume=True) is None
    assert train(config, toy / "whole") is None
    assert weights(toy / "killed") == weights(toy / "whole")
    assert metrics_of(toy / "killed") == metrics_of(toy / "whole")


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_in_order(toy: Path, number: signal.Signals, status: int) -> None:
    """The process ends with its documented status and leaves a checkpoint that loads."""
    process = start(PROGRAM, "toy.toml", "--out", "run", "--set", "schedule.steps=100_000", cwd=toy)
    while count_lines(toy / "run" / "metrics.jsonl") < 1:
        assert process.running
        time.sleep(0.01)
    process.send_signal(number)
    done = process.wait()
    assert done.status == status, done.err
    assert "--resume" in done.err
    state = checkpoint.load_state(toy / "run" / "last")
    assert (toy / "run" / "last").readlink().name == f"step-{state['progress']['step']:08d}"
    assert checkpoint.load_model(toy / "run").max_source_tokens == 8


def test_resuming_a_finished_run_changes_nothing(toy: Path) -> None:
    """There is nothing left to do."""
    config = load_config("toy.toml")
    train(config, toy / "run")
    before = weights(toy / "run")
    assert train(config, toy / "run", resume=True) is None
    assert weights(toy / "run") == before


def test_a_run_killed_before_its_first_checkpoint_begins_again(toy: Path) -> None:
    """There is a config.json and nothing else; half a line of metrics is dropped."""
    config = load_config("toy.toml")
    Trainer(config, toy / "run").start()
    (toy / "run" / "metrics.jsonl").write_text('{"step": 4, "dev_l')
    train(config, toy / "run", resume=True)
    train(config, toy / "whole")
    assert weights(toy / "run") == weights(toy / "whole")
    assert metrics_of(toy / "run") == metrics_of(toy / "whole")


# -- a signal where there is nothing to save ---------------------------------------------------------------------------


def signalling(function: Callable[..., Any], call: int = 1) -> Callable[..., Any]:
    """The function, with a signal to this process at the n-th of its calls."""
    calls = count(1)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "function",
    [
        (data, "read_aligned"),
        (tokenizer, "drawn_lines"),
        (SentencePieceTokenizer, "encode"),
    ],
    ids=["reading", "learning a vocabulary", "tokenizing"],
)
def test_a_signal_before_training_ends_at_once_and_says_so(
    toy_with_everything: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    function: tuple[Any, str],
) -> None:
    """In one line; nothing half written is left, and the same command starts again, to the same weights."""
    toy, config = toy_with_everything, load_config("toy.toml")
    with monkeypatch.context() as patch:
        patch.setattr(*function, signalling(getattr(*function)))  # the name is looked up at each call
        assert train(config, toy / "run") == signal.SIGTERM
    told = [line for line in capsys.readouterr().err.splitlines() if "SIGTERM" in line]
    assert told == [f"{toy / 'run'}: stopped by SIGTERM before training began: the same command starts again"]
    assert not (toy / "run" / "config.json").exists()
    assert [path for path in toy.rglob(".writing-*") if not path.name.endswith(".lock")] == []
    assert train(config, toy / "run") is None
    assert train(config, toy / "whole") is None
    assert weights(toy / "run") == weights(toy / "whole")


def test_a_signal_in_a_callback_of_the_library_is_not_taken_for_bad_text(
    toy_with_everything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SentencePiece makes an error of its own of what the lines that it reads raise."""
    draw = tokenizer.drawn_lines

    class Lines(list[str]):
        pop = signalling(list.pop, call=5)

    monkeypatch.setattr(tokenizer, "drawn_lines", lambda *limits: Lines(draw(*limits)))
    assert train(load_config("toy.toml"), toy_with_everything / "run") == signal.SIGTERM


def test_a_signal_while_a_run_is_loaded_to_be_resumed_changes_nothing(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command goes on, with the change that it allows."""
    config = load_config("toy.toml", ["schedule.steps=13"])
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(data, "run_tokenizers", signalling(data.run_tokenizers))
        assert train(config, stopped, resume=True, allowed=["schedule.steps"]) == signal.SIGTERM
    assert "stopped by SIGTERM before training began" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before
    assert train(config, stopped, resume=True, allowed=["schedule.steps"]) is None


def test_a_signal_ends_the_segmenting_of_an_epoch_and_saves(
    toy_with_everything: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, without a further step; resumed, the run ends like one that was left alone."""
    # An epoch has 4 steps: no validation is at its end, whose checkpoint would stay as it is.
    toy, config = toy_with_everything, load_config("toy.toml", ["loop.validate_every=3"])
    monkeypatch.setattr(shards, "CHUNK", 10)  # of 60 pairs, each segmented on two sides: 12 calls an epoch
    train(config, toy / "whole")
    with monkeypatch.context() as patch:
        calls = count()

        def counted(*args: Any) -> Any:
            next(calls)
            return segment(*args)

        segment = signalling(SentencePieceTokenizer.sample, call=12 + 3)
        patch.setattr(SentencePieceTokenizer, "sample", counted)
        assert train(config, toy / "run") == signal.SIGTERM
    assert next(calls) == 12 + 3
    assert "stopped by SIGTERM; continue with --resume" in capsys.readouterr().err
    progress = checkpoint.load_state(toy / "run" / "last")["progress"]
    assert (progress["epoch"], progress["position"]) == (1, 0)
    assert (toy / "run" / "last").readlink().name == f"step-{progress['step']:08d}"
    assert train(config, toy / "run", resume=True) is None
    assert weights(toy / "run") == weights(toy / "whole")
    assert metrics_of(toy / "run") == metrics_of(toy / "whole")


class TheOthersHeard(Group):
    """Of several processes: another one was told to stop."""

    def any(self, flag: bool) -> bool:
        return True


def test_a_signal_that_another_process_heard_ends_the_batches_here(toy: Path) -> None:
    """None goes on to a step in which it would wait for the others."""
    trainer = Trainer(load_config("toy.toml"), toy / "run", TheOthersHeard())
    assert list(trainer.batches()) == []
    assert trainer.stopping()


# -- damage ------------------------------------------------------------------------------------------------------------


def change_state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        torch.save(change(state) or state, path)

    return apply


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(b""), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-300]), "is damaged"),
        (lambda path: path.write_bytes(b"x" * 300), "is damaged"),
        (change_state(lambda state: [state]), "TypeError"),
        (change_state(lambda state: state.pop("progress") and None), "KeyError: 'progress'"),
        (change_state(lambda state: state["progress"].update(mood=1)), "progress: mood is on one side only"),
        (change_state(lambda state: state["progress"].pop("epoch") and None), "progress: epoch is on one side only"),
        (change_state(lambda state: state["optimizer"]["param_groups"].pop() and None), "ValueError: .*groups"),
    ],
)
def test_a_state_that_cannot_be_continued_is_refused_in_one_line(
    stopped: Path, damage: Callable[[Path], None], words: str
) -> None:
    """With the remedy, which works: the run goes on from the checkpoint before, as if it had been stopped there."""
    folder = stopped / "checkpoints" / "step-00000006"
    damage(folder / "training_state.pt")
    with pytest.raises(CheckpointError, match=words) as caught:
        train(load_config("toy.toml"), stopped, resume=True)
    message = str(caught.value)
    assert "\n" not in message and "weights_only" not in message
    assert str(folder / "training_state.pt") in message
    assert f"remove {folder} to go on from the checkpoint before it" in message


def test_without_its_newest_checkpoint_a_run_goes_on_from_the_one_before(stopped: Path, toy: Path) -> None:
    """To the same end."""
    shutil.rmtree(stopped / "checkpoints" / "step-00000006")
    train(load_config("toy.toml"), stopped, resume=True)
    train(load_config("toy.toml"), toy / "whole")
    assert weights(stopped) == weights(toy / "whole")
    assert metrics_of(stopped) == metrics_of(toy / "whole")


def test_damaged_bytes_in_the_metrics_do_not_keep_a_run_from_going_on(stopped: Path, toy: Path) -> None:
    """The line that they stand in goes."""
    with (stopped / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "dev_loss": \xff}\n')
    train(load_config("toy.toml"), stopped, resume=True)
    train(load_config("toy.toml"), toy / "whole")
    assert metrics_of(stopped) == metrics_of(toy / "whole")


# -- what may differ ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was stopped after step 6, in its second epoch."""
    with monkeypatch.context() as patch:
        Watched(patch, stop_after=6)
        assert train(load_config("toy.toml"), toy / "run") == signal.SIGTERM
    return toy / "run"


def test_a_run_from_before_a_setting_of_the_model_was_there_goes_on(stopped: Path) -> None:
    """What its config.json lacks had the default's value."""
    for path in (stopped / "config.json", *stopped.glob("checkpoints/*/config.json")):
        record = json.loads(path.read_text())
        for name in ("first_position", "num_positions", "scaled_embeddings", "embedding_norm", "layer_norm_epsilon"):
            del record["model"][name]
        path.write_text(json.dumps(record))
    assert train(load_config("toy.toml"), stopped, resume=True) is None
    with pytest.raises(CheckpointError, match=r"model\.embedding_norm is True, was False; the saved state"):
        train(load_config("toy.toml", ["model.embedding_norm=true"]), stopped, resume=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer.learning_rate=2e-2", "optimizer.learning_rate is 0.02, was 0.01"),
        ("data.batch_tokens=80", "data.batch_tokens is 80, was 64"),
        ("schedule.steps=13", "schedule.steps is 13, was 12"),
        ("model.dropout=0.2", "model.dropout is 0.2, was 0.1"),
        ("loop.workers=1", "loop.workers is 1, was 2"),
    ],
)
def test_resuming_with_another_setting_is_refused(stopped: Path, change: str, words: str) -> None:
    """The message names the setting, both values and the way to allow it; nothing is changed."""
    before = (stopped / "config.json").read_bytes()
    with pytest.raises(CheckpointError) as caught:
        train(load_config("toy.toml", [change]), stopped, resume=True)
    key = change.partition("=")[0]
    assert words in str(caught.value) and f"--allow-change {key}" in str(caught.value)
    assert (stopped / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.d_model=16", "model.d_model is 16, was 8"),
        ("optimizer.kind=muon", "optimizer.kind is 'muon', was 'adamw'"),
        ("tokenizer.source_unit=piece", "tokenizer.source_unit is 'piece', was 'character'"),
    ],
)
def test_what_the_saved_state_would_not_fit_cannot_be_allowed(stopped: Path, change: str, words: str) -> None:
    """Shape, optimizer and tokenizer stay."""
    key = change.partition("=")[0]
    with pytest.raises(CheckpointError, match="would not fit") as caught:
        train(load_config("toy.toml", [change]), stopped, resume=True, allowed=[key])
    assert words in str(caught.value)


def test_fewer_steps_than_are_done_are_refused(stopped: Path) -> None:
    """Whether the change is allowed or not; nothing is changed."""
    before = (stopped / "config.json").read_bytes()
    changes = {"schedule.steps": 5, "schedule.warmup_steps": 1, "schedule.cooldown_steps": 1}
    config = load_config("toy.toml", [f"{name}={value}" for name, value in changes.items()])
    with pytest.raises(ConfigError, match=r"schedule\.steps is 5: .*run is at step 6 already: give at least 6"):
        train(config, stopped, resume=True, allowed=list(changes))
    assert (stopped / "config.json").read_bytes() == before


def test_an_allowed_change_is_applied_and_recorded(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on with the new values, and config.json tells from which step on; it need not be allowed again."""
    changed = load_config("toy.toml", ["schedule.steps=16", "optimizer.learning_rate=2e-2"])
    allowed = ["schedule.steps", "optimizer.learning_rate"]
    with pytest.raises(CheckpointError, match=r"optimizer\.learning_rate is 0\.02"):
        train(changed, stopped, resume=True, allowed=["schedule.steps"])
    assert train(changed, stopped, resume=True, allowed=allowed) is None
    assert "schedule.steps is 16, was 12 up to step 6" in capsys.readouterr().err
    assert [line["step"] for line in metrics_of(stopped)] == [4, 8, 12, 16]
    record = json.loads((stopped / "last" / "config.json").read_text())
    changes = {"schedule.steps": {"old": 12, "new": 16}, "optimizer.learning_rate": {"old": 0.01, "new": 0.02}}
    assert record["history"] == [{"step": 6, "changed": changes}]
    assert record["training"]["schedule"]["steps"] == 16
    assert train(changed, stopped, resume=True) is None


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_every_allowed_option_of_the_optimizer_takes_effect(
    toy: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The saved state brings its moments, not its options; a bias still does not decay."""
    with monkeypatch.context() as patch:
        Watched(patch, stop_after=6)
        train(load_config("toy.toml", [f"optimizer.kind={kind}"]), toy / "run")
    changes = {"weight_decay": 0.5, "beta1": 0.6, "beta2": 0.7, "epsilon": 1e-3, "momentum": 0.8, "matrix_rate": 2.0}
    settings = [f"optimizer.{name}={value}" for name, value in changes.items()]
    trainer = Trainer(load_config("toy.toml", [f"optimizer.kind={kind}", *settings]), toy / "run")
    trainer.resume([f"optimizer.{name}" for name in changes])
    matrices, others = trainer.optimizer.param_groups
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    for group in (matrices, others):
        if kind == "sgd":
            assert group["momentum"] == 0.8
        else:
            assert (group["betas"], group["eps"]) == ((0.6, 0.7), 1e-3)
    if kind == "muon":
        assert (vars(trainer.optimizer)["momentum"], vars(trainer.optimizer)["matrix_rate"]) == (0.8, 2.0)
    assert trainer.optimizer.state_dict()["state"]  # the moments are there


def test_another_number_of_processes_starts_the_epoch_again(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each then has another share of the token budget."""
    trainer = Trainer(load_config("toy.toml"), stopped)
    trainer.resume()
    assert trainer.progress.position > 0
    trainer.adapt({"processes": (2, 1)})
    assert trainer.progress.position == 0
    assert "processes changes the batches" in capsys.readouterr().err


def test_other_batches_start_the_epoch_again(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a changed token budget the place in the epoch means nothing: one line tells what is repeated."""
    progress = checkpoint.load_state(stopped / "last")["progress"]
    assert progress["epoch"] == 1 and progress["position"] > 0
    config = load_config("toy.toml", ["data.batch_tokens=80"])
    watched = Watched(monkeypatch, stop_after=7)
    train(config, stopped, resume=True, allowed=["data.batch_tokens"])
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if "epoch 1 starts again from its first batch" in line]
    assert len(told) == 1
    assert "data.batch_tokens" in told[0] and f"{progress['position']} batches" in told[0]
    dataset = data.load_datasets(config, stopped).train
    plan = data.plan_batches(dataset, 40, config.loop.seed, 1)
    assert watched.steps[0][2] == [[dataset[int(n)] for n in share] for share in plan[:2]]


def test_a_change_takes_effect_even_if_nothing_was_saved_after_it_was_allowed(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed right after the resume: the next one needs no permission, and starts the epoch again all the same."""
    config = load_config("toy.toml", ["data.batch_tokens=80"])
    Trainer(config, stopped).resume(["data.batch_tokens"])
    capsys.readouterr()
    trainer = Trainer(config, stopped)
    trainer.resume()
    assert trainer.progress.position == 0
    assert "starts again from its first batch" in capsys.readouterr().err
    assert len(trainer.record["history"]) == 1


def test_another_metric_chooses_the_best_anew(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss cannot be compared with a share."""
    trainer = Trainer(load_config("toy.toml", ["loop.metric=exact_match"]), stopped)
    trainer.resume(["loop.metric"])
    assert (trainer.progress.best_step, trainer.progress.best_value) == (6, None)
    assert "the best checkpoint is chosen anew" in capsys.readouterr().err
    assert checkpoint.load_model(stopped).folder.name == "step-00000006"


@pytest.mark.parametrize("decays", [("0.0", "0.5"), ("0.5", "0.0")])
def test_the_moving_average_can_be_switched_on_and_off(
    toy: Path, monkeypatch: pytest.MonkeyPatch, decays: tuple[str, str]
) -> None:
    """It starts from the weights, and training goes on from the weights themselves when it ends."""
    first, then = (load_config("toy.toml", [f"optimizer.ema_decay={decay}"]) for decay in decays)
    with monkeypatch.context() as patch:
        Watched(patch, stop_after=6)
        train(first, toy / "run")
    state, saved = checkpoint.load_state(toy / "run" / "last"), toy / "run" / "last" / "model.safetensors"
    trainer = Trainer(then, toy / "run")
    trainer.resume(["optimizer.ema_decay"])
    expected = state.get("weights") or checkpoint.read_weights(saved)
    assert all((weight == expected[name]).all() for name, weight in trainer.model.named_parameters())
    assert all((weight == expected[name]).all() for name, weight in trainer.weights.items())


@pytest.mark.parametrize("name", ["train_source", "dev_source"])
def test_resuming_with_other_data_is_refused_unless_allowed(stopped: Path, toy: Path, name: str) -> None:
    """The files are known by their hash, wherever they are."""
    path = toy / name.replace("_", ".")
    path.write_text("".join(f"{line}\n" for line in reversed(path.read_text().splitlines())))
    with pytest.raises(CheckpointError, match=rf"data\.{name}\.sha256 is .*--allow-change data\.{name}"):
        train(load_config("toy.toml"), stopped, resume=True)
    assert train(load_config("toy.toml"), stopped, resume=True, allowed=[f"data.{name}"]) is None


def test_data_that_moved_is_the_same_data(stopped: Path, toy: Path) -> None:
    """The place on the disk is not part of a run."""
    (toy / "elsewhere").mkdir()
    (toy / "train.source").rename(toy / "elsewhere" / "train.source")
    config = load_config("toy.toml", ["data.train_source=elsewhere/train.source"])
    assert train(config, stopped, resume=True) is None


def test_other_tokenizers_in_the_run_are_refused(stopped: Path) -> None:
    """Ids would mean other tokens."""
    path = stopped / "tokenizers" / "source.tokenizer.json"
    path.write_text(path.read_text().replace('"a", "b"', '"b", "a"'))
    with pytest.raises(CheckpointError, match="tokenizers are not those that the run began with"):
        train(load_config("toy.toml"), stopped, resume=True)


def test_resuming_nothing_is_refused(toy: Path) -> None:
    """There must be a run."""
    with pytest.raises(CheckpointError, match=r"there is no run in .* to resume"):
        train(load_config("toy.toml"), toy / "none", resume=True)


def test_changes_are_allowed_only_when_resuming(toy: Path) -> None:
    """A new run has nothing to differ from."""
    with pytest.raises(ConfigError, match="add --resume"):
        train(load_config("toy.toml"), toy / "run", allowed=["loop.seed"])


@pytest.mark.parametrize(
    ("key", "words"),
    [("loop.sead", r"known here: .*loop\.seed"), ("lop.seed", r"loop\.KEY, processes"), ("loop", "loop.seed")],
)
def test_a_setting_that_does_not_exist_cannot_be_allowed(stopped: Path, key: str, words: str) -> None:
    """A typing error is told, with what there is."""
    with pytest.raises(ConfigError, match=rf"--allow-change {key}: there is no such setting; .*{words}"):
        train(load_config("toy.toml"), stopped, resume=True, allowed=["processes", key])


def test_one_process_at_a_time_trains_a_run(stopped: Path, toy: Path) -> None:
    """A second start and a second resume are refused at once, and touch nothing."""
    config = load_config("toy.toml")
    (toy / "new" / "tokenizers").mkdir(parents=True)
    for run, resume in ((stopped, True), (toy / "new", False)):
        with locked(run / ".lock"):
            before = sorted(path.name for path in run.iterdir())
            with pytest.raises(CheckpointError, match="is being trained by another process: wait"):
                train(config, run, resume)
            assert sorted(path.name for path in run.iterdir()) == before
        assert train(config, run, resume) is None


def test_a_place_that_cannot_be_written_is_refused(toy: Path) -> None:
    """With the way out."""
    (toy / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"run cannot be written .*choose another --out"):
        train(load_config("toy.toml"), toy / "file" / "run")
