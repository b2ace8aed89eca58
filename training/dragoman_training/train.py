"""The whole job of training: refuse what cannot be, claim the run's folder, train in it or go on, say how it ended."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from dragoman_training import checkpoint
from dragoman_training.changes import changed_settings, refuse_changes, refuse_unknown
from dragoman_training.config import TrainConfig, require
from dragoman_training.data import Dataset
from dragoman_training.distributed import Group, join
from dragoman_training.errors import CheckpointError, ConfigError
from dragoman_training.folders import WRITING_PREFIX, locked
from dragoman_training.record import config_record
from dragoman_training.signals import Stopped, StopSignal
from dragoman_training.trainer import Trainer

LOCK = ".lock"  # in a run's folder, held while it is trained
# What may be in a run's folder before its config.json: an interrupted start leaves no more.
BEFORE_THE_START = (LOCK, "tokenizers", ".tokenizers.lock", "shards")
BEFORE_THE_START_ASIDE = f"{WRITING_PREFIX}tokenizers"  # and whatever begins so


def train(config: TrainConfig, run: Path, resume: bool = False, allowed: Sequence[str] = ()) -> int | None:
    """Train ``config`` in folder ``run``; returns the signal that stopped it, None when it came to its end.

    With ``resume``, ``allowed`` names the settings (``section.key``) that may differ from the run's. A signal that
    comes before the training begins ends it at once: there is nothing to save, and the same call begins again.
    """
    if allowed and not resume:
        raise ConfigError(f"--allow-change {allowed[0]} is for a run that is resumed: add --resume")
    refuse_unknown(allowed)
    group = join(config.loop)
    try:
        stopped_by = train_in_group(config, run, group, resume, allowed)
    except Stopped as stopped:
        group.close(failed=True)
        if group.is_main:
            name = signal.Signals(stopped.number).name
            print(f"{run}: stopped by {name} before training began: the same command starts again", file=sys.stderr)
        return stopped.number
    except BaseException:
        group.close(failed=True)
        raise
    group.close()
    return stopped_by


def train_in_group(config: TrainConfig, run: Path, group: Group, resume: bool, allowed: Sequence[str]) -> int | None:
    """``train`` as one of the processes of ``group``; raises ``Stopped`` for a signal before the training begins."""
    refuse_small_batch(config, group)
    if resume:
        refuse_early(config, run, group, allowed)
    with ExitStack() as claimed, StopSignal() as stop:
        refusal = None
        if group.is_main:
            try:
                claim(run, resume, claimed)
            except CheckpointError as error:
                refusal = str(error)
        if (refusal := group.from_main(refusal)) is not None:  # all end, none waits for the others
            raise CheckpointError(refusal)
        with stop.at_once():  # loading takes long where text is tokenized
            trainer = Trainer(config, run, group, stop)
        trainer.resume(allowed) if resume else trainer.start()
        introduce(trainer)
        stopped_by = trainer.train()
        conclude(trainer, stopped_by)
    return stopped_by


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuse_small_batch(config: TrainConfig, group: Group) -> None:
    """``ConfigError`` where a process's share of a batch cannot hold a longest row."""
    longest = max(config.data.max_source_tokens, config.data.max_target_tokens)
    least = longest * config.loop.workers * group.world_size
    remedy = f"it must hold a longest row ({longest} tokens) for each of {group.world_size} processes: at least {least}"
    require(config.data.batch_tokens >= least, "data.batch_tokens", config.data.batch_tokens, remedy)


def refuse_early(config: TrainConfig, run: Path, group: Group, allowed: Sequence[str]) -> None:
    """Refuse to resume what is not there, has gone further, or had other settings, before any data is read."""
    if not (run / "config.json").exists():
        raise CheckpointError(f"there is no run in {run} to resume: leave out --resume")
    saved = checkpoint.read_json(run / "config.json")
    settings = config_record(config)
    try:
        now = {**saved, "model": {**saved["model"], **settings.pop("model")}, "training": settings}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{run}/config.json is incomplete: {error}") from error
    refuse_changes(run, changed_settings(saved, {**now, "processes": group.world_size}), allowed)
    steps = config.schedule.steps
    for folder in checkpoint.checkpoint_folders(run)[-1:]:
        done = checkpoint.step_of(folder)
        remedy = f"{run} is at step {done} already: give at least {done}, or choose another --out"
        require(steps >= done, "schedule.steps", steps, remedy)


def refuse_existing(run: Path) -> None:
    """``CheckpointError`` for a new run in a place that holds anything but what an interrupted start left."""

    def is_more(path: Path) -> bool:
        return path.name not in BEFORE_THE_START and not path.name.startswith(BEFORE_THE_START_ASIDE)

    if run.exists() and (not run.is_dir() or any(map(is_more, run.iterdir()))):
        raise CheckpointError(f"{run} exists: continue it with --resume, or choose another --out")


def claim(run: Path, resume: bool, claimed: ExitStack) -> None:
    """Lock a run's folder for this process until ``claimed`` is closed; a new run's is made.

    ``CheckpointError`` where it holds something else, cannot be written, or another process has it.
    """
    if not resume:
        refuse_existing(run)
    try:
        run.mkdir(parents=True, exist_ok=True)
        claimed.enter_context(locked(run / LOCK, wait=False))
    except BlockingIOError as error:
        remedy = "wait until it ends, or choose another --out"
        raise CheckpointError(f"{run} is being trained by another process: {remedy}") from error
    except OSError as error:
        raise CheckpointError(f"{run} cannot be written ({error}): choose another --out") from error
    if not resume:
        refuse_existing(run)  # that process may have ended meanwhile
        # Of another configuration, perhaps. There mostly are none, and what cannot be removed is found when it is read.
        shutil.rmtree(run / "tokenizers", ignore_errors=True)


# -- words for a person ------------------------------------------------------------------------------------------------


def introduce(trainer: Trainer) -> None:
    """What is about to be trained, on what."""
    datasets, config, group = trainer.datasets, trainer.config, trainer.group
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    trainer.say(
        f"{counted(datasets.train)}, {len(datasets.dev)} for validation;"
        f" vocabularies of {len(trainer.tokenizers[0])} and {len(trainer.tokenizers[1])} tokens"
    )
    processes = f"{group.world_size} processes of " if group.world_size > 1 else ""
    trainer.say(
        f"{parameters:,} parameters on {processes}{group.device.type}, {config.loop.precision},"
        f" {config.loop.workers} workers; step {trainer.progress.step} of {config.schedule.steps};"
        f" token shards in {datasets.shards_folder}"
    )


def counted(dataset: Dataset) -> str:
    """How many pairs are there, and how many were dropped for which reason."""
    return f"{len(dataset):,} pairs (dropped: {dataset.reasons() or 'none'})"


def conclude(trainer: Trainer, stopped_by: int | None) -> None:
    """How this session ended."""
    progress, loop = trainer.progress, trainer.config.loop
    if stopped_by is not None:
        trainer.say(f"stopped by {signal.Signals(stopped_by).name}; continue with --resume")
        return
    ending = "finished"
    if progress.step < trainer.config.schedule.steps:
        ending = f"stopped early at step {progress.step}: {loop.patience} validations without a better {loop.metric}"
    if progress.best_step is None:
        trainer.say(f"{ending}; no best: no validation's {loop.metric} was a finite number")
        return
    trainer.say(f"{ending}; best at step {progress.best_step}; next: dragoman evaluate")
