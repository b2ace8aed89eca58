"""The training loop: validate, save, resume.

A run is a pure function of its configuration and data: killed at any moment and resumed, it goes through the same
batches with the same random numbers, and on a CPU ends with bit-equal weights. Random numbers need no saving: the order
of the pairs follows from seed and epoch, and each step seeds its own generators from seed, step and worker.
"""

from __future__ import annotations

import logging
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dragoman_training import checkpoint, data
from dragoman_training.averaging import MovingAverage
from dragoman_training.config import TrainConfig, require
from dragoman_training.distributed import Group, join
from dragoman_training.errors import CheckpointError, ConfigError, TrainingError
from dragoman_training.folders import locked
from dragoman_training.model import Transformer
from dragoman_training.muon import MuonWithAdamW
from dragoman_training.optim import learning_rate, make_optimizer
from dragoman_training.precision import LossScale
from dragoman_training.tensorboard import RunWriter
from dragoman_training.tokenizer import SpecialIds
from dragoman_training.validate import describe, describe_signatures, validate
from dragoman_training.workers import Workers

LOG = logging.getLogger(__name__)
MAX_BAD_STEPS = 10
LOG_EVERY = 50  # steps between two points of TensorBoard's training curves
LOCK = ".lock"  # in a run's folder, held while it is trained
# What may be in a run's folder before its config.json: an interrupted start leaves no more.
BEFORE_THE_START = (LOCK, "tokenizers", ".tokenizers.lock", ".writing-tokenizers", "shards")
# Settings that may differ when a run is resumed with --allow-change; of data, schedule and loop all may.
CHANGEABLE = (
    "data.",
    "schedule.",
    "loop.",
    "optimizer.",
    "processes",
    "tokenizer.sampling",
    "model.dropout",
    "model.attention_dropout",
    "model.activation_dropout",
)
# A change of these gives other batches, so that the place in the epoch means nothing any more. loop.accumulate does
# not: a step takes more or fewer shares of the same plan.
OF_THE_PLAN = (
    "data.train_source",
    "data.train_target",
    "data.max_source_tokens",
    "data.max_target_tokens",
    "data.batch_tokens",
    "data.length_spread",
    "tokenizer.sampling",
    "loop.seed",
    "loop.workers",
    "processes",
)
# A change of these makes the figures of earlier validations incomparable.
OF_THE_METRIC = ("data.dev_source", "data.dev_target", "loop.metric", "loop.bleu_tokenizer")

Changes = dict[str, tuple[Any, Any]]


@dataclass
class Progress:
    """Where a run stands; saved with each checkpoint. ``position`` counts the shares of ``epoch``'s plan done."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    skipped_steps: int = 0  # steps without update, since the gradient was not finite
    bad_in_a_row: int = 0
    loss_sum: float = 0.0  # training loss and target tokens since the last validation
    loss_tokens: int = 0
    target_tokens: int = 0
    seconds: float = 0.0  # time spent, over all sessions of the run
    cpu_seconds: float = 0.0
    best_step: int | None = None
    best_value: float | None = None  # of loop.metric
    validations_without_better: int = 0

    def judge(self, metric: str, value: float) -> None:
        """Take in a validation of the present step. The loss is better when lower, all else when higher.

        A value that is not finite is never better: until there is a finite one, there is no best.
        """
        sign = -1 if metric == "loss" else 1
        if math.isfinite(value) and (self.best_value is None or sign * value > sign * self.best_value):
            self.best_step, self.best_value, self.validations_without_better = self.step, value, 0
        else:
            self.validations_without_better += 1


@dataclass
class Meter:
    """Loss, target tokens and time of some steps of this session."""

    steps: int = 0
    loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, loss: float, tokens: int, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.loss += loss
        self.tokens += tokens
        self.seconds += seconds

    @property
    def mean_loss(self) -> float:
        """Loss a target token."""
        return self.loss / max(self.tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """Target tokens a second of training; validation and saving do not count."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def step_seconds(self) -> float:
        """Time of a step, with getting its batch."""
        return self.seconds / max(self.steps, 1)

    def describe(self) -> str:
        """For the progress bar."""
        return f"loss {self.mean_loss:.3f}, {self.tokens_per_second:,.0f} target tokens/s"

    def curves(self) -> dict[str, float]:
        """For TensorBoard."""
        return {"train/loss": self.mean_loss, "train/tokens_per_second": self.tokens_per_second}


class Trainer:
    """One run in one folder. ``train`` does the whole job; the parts are apart for the tests.

    Of several processes, each has a trainer of its own, which takes the same steps; the main one alone validates,
    writes and speaks.
    """

    def __init__(self, config: TrainConfig, run: Path, group: Group | None = None) -> None:
        self.config, self.run, self.group = config, run, group or join(config.loop)
        self.datasets = data.load_datasets(config, run)
        self.tokenizers = self.datasets.tokenizers
        sizes = len(self.tokenizers[0]), len(self.tokenizers[1])
        model_config = config.model.with_vocabularies(*sizes)
        self.special = SpecialIds(unused=tuple(range(sizes[1], model_config.target_vocab_size)))
        arguments = (model_config, self.special, self.tokenizers, config, self.datasets.record)
        self.record = checkpoint.run_record(*arguments, processes=self.group.world_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.loop.seed)
            self.model = Transformer(model_config).to(self.group.device)
        decay = config.optimizer.ema_decay
        self.average = MovingAverage(self.model, decay) if decay else None
        self.optimizer = make_optimizer(self.model, config.optimizer)
        loop, smoothing = config.loop, config.optimizer.label_smoothing
        self.workers = Workers(
            self.model,
            loop.workers,
            smoothing,
            precision=loop.precision,
            compiled=loop.compile,
            group=self.group,
        )
        if isinstance(self.optimizer, MuonWithAdamW) and len(self.workers.models) > 1:
            self.optimizer.share_work(self.workers.pool, len(self.workers.models))
        self.progress = Progress()
        self.stop_signal: int | None = None

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is validated and saved as the model, by name; a tied weight once."""
        return self.average.weights if self.average else {name: p.detach() for name, p in self.model.named_parameters()}

    @property
    def patience_is_over(self) -> bool:
        """Whether so many validations in a row brought nothing better that the run ends."""
        patience = self.config.loop.patience
        return 0 < patience <= self.progress.validations_without_better

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.progress.step >= self.config.schedule.steps or self.patience_is_over

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, shares: Sequence[Sequence[data.Pair]]) -> tuple[float, int]:
        """One update, or none and a count where the gradient is not finite; returns summed loss and target tokens."""
        progress, optimizer, schedule = self.progress, self.config.optimizer, self.config.schedule
        progress.step += 1
        self.seed_generators()
        self.workers.dropout(enabled=progress.step <= schedule.steps - schedule.undropped_steps)
        loss, tokens = self.workers.accumulate(shares)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optimizer.max_gradient_norm)
        progress.target_tokens += tokens
        if math.isfinite(norm.item()):
            rate = learning_rate(progress.step, optimizer.learning_rate, schedule)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            if self.average:
                self.average.update()
            progress.bad_in_a_row = 0
            progress.loss_sum += loss
            progress.loss_tokens += tokens
            return loss, tokens
        progress.skipped_steps += 1
        progress.bad_in_a_row += 1
        if progress.bad_in_a_row >= MAX_BAD_STEPS:
            raise TrainingError(
                f"the gradient was not finite {MAX_BAD_STEPS} times in a row, at step {progress.step}: lower"
                f" optimizer.learning_rate ({optimizer.learning_rate}) or lengthen schedule.warmup_steps; the last"
                " checkpoint is kept"
            )
        return 0.0, 0

    def seed_generators(self) -> None:
        """Give each worker the random numbers of this step: as many processes draw what as many workers of one draw."""
        for index, generator in enumerate(self.workers.generators):
            number = self.group.rank + self.group.world_size * index
            sequence = np.random.SeedSequence([self.config.loop.seed, self.progress.step, number])
            generator.manual_seed(int(sequence.generate_state(1)[0]))

    def batches(self) -> Iterator[list[list[data.Pair]]]:
        """Endless: this process's shares of one step after another, from the saved position on, which goes along.

        The shares are planned one by one, so that a batch mixes short and long pairs without padding.
        """
        loop, progress, group = self.config.loop, self.progress, self.group
        share_tokens = self.config.data.batch_tokens // (loop.workers * group.world_size)
        spread = self.config.data.length_spread
        while True:
            dataset = self.datasets.train_for_epoch(progress.epoch)
            plan = data.plan_batches(dataset, share_tokens, loop.seed, progress.epoch, spread)
            while (start := progress.position) < len(plan):
                progress.position += loop.workers * loop.accumulate * group.world_size
                own = plan[start : progress.position][group.rank :: group.world_size]
                yield [[dataset[int(i)] for i in share] for share in own]
            progress.epoch += 1
            progress.position = 0

    # -- saving and resuming -----------------------------------------------------------------------------------------

    def save(self, metrics: dict[str, Any]) -> None:
        """Write a checkpoint, move the links, remove old checkpoints; a failed write is tried again."""
        if not self.group.is_main:
            return
        step, scale = self.progress.step, self.workers.loss_scale
        state: dict[str, Any] = {"progress": asdict(self.progress), "optimizer": self.optimizer.state_dict()}
        if scale:
            state["loss_scale"] = asdict(scale)
        if self.average:
            state["average_updates"] = self.average.updates
            state["weights"] = {name: p.detach() for name, p in self.model.named_parameters()}
        arguments = (self.run, step, self.weights, self.tokenizers, self.record, state, metrics)
        path = self.run / "checkpoints" / f"step-{step:08d}"
        checkpoint.retried(lambda: self.settle(checkpoint.save_checkpoint(*arguments)), path)

    def settle(self, newest: Path) -> None:
        """Links and pruning after ``newest`` was written (or found, on resuming)."""
        checkpoint.point(self.run / "last", newest)
        if self.progress.best_step is not None:
            best = self.run / "checkpoints" / f"step-{self.progress.best_step:08d}"
            checkpoint.point(self.run / "best", best)
        checkpoint.prune(self.run, self.config.loop.keep_checkpoints, self.progress.best_step)

    def start(self) -> None:
        """Write the run's config.json: from now on it can be resumed."""
        if self.group.is_main:
            checkpoint.write_json(self.run / "config.json", self.record)

    def resume(self, allowed: Sequence[str] = ()) -> None:
        """Continue after the newest complete checkpoint; refuses another configuration or other data.

        ``allowed`` names settings that may have changed. Where these make other batches, the epoch starts again from
        its first batch; where they make other figures, the best checkpoint is chosen anew.
        """
        saved = checkpoint.read_json(self.run / "config.json")
        changes = checkpoint.changed_settings(saved, self.record)
        refuse_changes(self.run, changes, allowed)
        if saved["tokenizers"] != self.record["tokenizers"]:
            raise CheckpointError(
                f"{self.run}/tokenizers are not those that the run began with: restore them, or choose another --out"
            )
        folders = checkpoint.checkpoint_folders(self.run)
        if folders:
            self.load(folders[-1])
            # Against the checkpoint, not the run: a change may have been allowed before, and nothing saved since.
            self.adapt(checkpoint.changed_settings(checkpoint.read_json(folders[-1] / "config.json"), self.record))
        self.record["history"] = saved.get("history", [])
        if changes:
            described = {name: {"old": old, "new": new} for name, (old, new) in changes.items()}
            self.record["history"].append({"step": self.progress.step, "changed": described})
        self.group.barrier()  # all have read: now the main process may write
        if self.group.is_main:
            if changes:
                checkpoint.write_json(self.run / "config.json", self.record)
            checkpoint.truncate_metrics(self.run / "metrics.jsonl", self.progress.step)
            if folders:
                self.settle(folders[-1])
            else:
                shutil.rmtree(self.run / "checkpoints", ignore_errors=True)

    def load(self, folder: Path) -> None:
        """Take weights, optimizer, average and progress from a checkpoint."""
        path = folder / "model.safetensors"
        saved_weights = checkpoint.read_weights(path)
        checkpoint.fill_weights(self.model, saved_weights, path)
        state = checkpoint.load_state(folder)
        if "weights" in state:
            checkpoint.fill_weights(self.model, state["weights"], folder / "training_state.pt")
        if self.average:  # which starts from the weights where the run had none so far
            self.average.restart(saved_weights, state.get("average_updates", 0))
        self.progress = Progress(**state["progress"])
        # The moments of the saved state with the options of the configuration, which may have changed.
        options = [
            {name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, options, strict=True):
            group.update(own)
        if self.workers.loss_scale and "loss_scale" in state:
            self.workers.loss_scale = LossScale(**state["loss_scale"])

    def adapt(self, changes: Changes) -> None:
        """Say and do what follows from settings that changed since the checkpoint."""
        progress = self.progress
        for name, (old, new) in changes.items():
            self.say(f"{name} is {new!r}, was {old!r} up to step {progress.step}")
        if other := [name for name in changes if covered(name, OF_THE_PLAN)]:
            self.say(
                f"{other[0]} changes the batches: epoch {progress.epoch} starts again from its first batch;"
                f" {progress.position} batches of it are repeated"
            )
            progress.position = 0
        if other := [name for name in changes if covered(name, OF_THE_METRIC)]:
            self.say(f"{other[0]} changes the figures: the best checkpoint is chosen anew")
            progress.best_step, progress.best_value, progress.validations_without_better = progress.step, None, 0

    # -- the whole job -----------------------------------------------------------------------------------------------

    def train(self) -> int | None:
        """Train to the end, or until a signal: then save and return the signal's number."""
        steps, progress = self.config.schedule.steps, self.progress
        # The clocks restart from the saved sums: time spent between sessions does not count.
        clocks = time.monotonic() - progress.seconds, time.process_time() - progress.cpu_seconds
        quiet = not (self.group.is_main and sys.stderr.isatty())
        since_validation, since_log = Meter(), Meter()
        told_signatures = False
        with (
            self.charting() as writer,
            self.workers,
            tqdm(total=steps, initial=progress.step, unit="step", disable=quiet) as bar,
        ):
            self.workers.training(True)
            batches = self.batches()
            while not self.finished and not self.stopping():
                began = time.monotonic()
                loss, tokens = self.step(next(batches))
                took = time.monotonic() - began
                since_validation.add(loss, tokens, took)
                since_log.add(loss, tokens, took)
                progress.seconds = time.monotonic() - clocks[0]
                progress.cpu_seconds = time.process_time() - clocks[1]
                rate = self.optimizer.param_groups[0]["lr"]
                bar.set_postfix_str(f"{since_validation.describe()}, rate {rate:.2e}", refresh=False)
                bar.update()
                if progress.step % LOG_EVERY == 0:
                    self.chart(writer, {"train/learning_rate": rate, **since_log.curves()})
                    since_log = Meter()
                if progress.step % self.config.loop.validate_every == 0 or progress.step == steps:
                    metrics = self.validated(clocks, since_validation)
                    if self.group.is_main:
                        line = f"{describe(metrics)}, {since_validation.step_seconds:.3f} s a step"
                        bar.write(line, file=sys.stderr)
                        for line in () if told_signatures else describe_signatures(metrics["signatures"]):
                            bar.write(line, file=sys.stderr)
                        told_signatures = True
                    self.chart(writer, {f"dev/{n[4:]}": value for n, value in metrics.items() if n.startswith("dev_")})
                    self.save(metrics)
                    since_validation = Meter()
            if self.stop_signal is not None and progress.step > 0:
                self.save({"step": progress.step})
        return self.stop_signal

    @contextmanager
    def charting(self) -> Iterator[RunWriter | None]:
        """TensorBoard's writer, in the main process; closed however the training ends."""
        writer = RunWriter(self.run, after=self.progress.step) if self.group.is_main else None
        try:
            yield writer
        finally:
            if writer:
                with suppress(OSError):
                    writer.close()

    def stopping(self) -> bool:
        """Whether this or another process was told to stop; all find out before the same step."""
        if self.group.any(self.stop_signal is not None) and self.stop_signal is None:
            self.stop_signal = signal.SIGTERM
        return self.stop_signal is not None

    def chart(self, writer: RunWriter | None, figures: dict[str, float]) -> None:
        """Add points of this step to TensorBoard's curves, which are not worth ending a run for."""
        try:
            if writer:
                writer.scalars(self.progress.step, figures)
        except OSError as error:
            LOG.warning("%s: no points for TensorBoard at step %d: %s", self.run, self.progress.step, error)

    def validated(self, clocks: tuple[float, float], meter: Meter) -> dict[str, Any]:
        """Validate, append a line to metrics.jsonl, remember the best; returns the line."""
        progress, metric = self.progress, self.config.loop.metric
        figures: dict[str, float] = {}
        signatures: dict[str, str] = {}
        if self.group.is_main:
            with self.average.in_model() if self.average else nullcontext():
                validation = validate(self.workers, self.datasets, self.config, self.special)
            figures, signatures = validation.metrics(), validation.signatures
        progress.judge(metric, self.group.all_reduce_sum([figures.get(metric, 0.0)])[0])
        progress.seconds = time.monotonic() - clocks[0]
        progress.cpu_seconds = time.process_time() - clocks[1]
        metrics = {
            "step": progress.step,
            "epoch": progress.epoch,
            "learning_rate": learning_rate(progress.step, self.config.optimizer.learning_rate, self.config.schedule),
            "train_loss": progress.loss_sum / max(progress.loss_tokens, 1),
            **{f"dev_{name}": value for name, value in figures.items()},
            "signatures": signatures,
            "target_tokens": progress.target_tokens,
            "tokens_per_second": round(meter.tokens_per_second, 1),
            "skipped_steps": progress.skipped_steps,
            "best_step": progress.best_step,
            "validations_without_better": progress.validations_without_better,
            "seconds": round(progress.seconds, 1),
            "cpu_seconds": round(progress.cpu_seconds, 1),
        }
        progress.loss_sum, progress.loss_tokens = 0.0, 0
        if self.group.is_main:
            path = self.run / "metrics.jsonl"
            checkpoint.retried(lambda: checkpoint.append_metrics(path, metrics), path)
        return metrics

    # -- words for a person ------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """One line on stderr."""
        if self.group.is_main:
            print(f"{self.run}: {text}", file=sys.stderr)

    def introduce(self) -> None:
        """What is about to be trained, on what."""
        datasets, config, progress = self.datasets, self.config, self.progress
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.say(
            f"{counted(datasets.train)}, {len(datasets.dev)} for validation;"
            f" vocabularies of {len(self.tokenizers[0])} and {len(self.tokenizers[1])} tokens"
        )
        processes = f"{self.group.world_size} processes of " if self.group.world_size > 1 else ""
        self.say(
            f"{parameters:,} parameters on {processes}{self.group.device.type}, {config.loop.precision},"
            f" {config.loop.workers} workers; step {progress.step} of {config.schedule.steps};"
            f" token shards in {datasets.shards_folder}"
        )

    def conclude(self) -> None:
        """How this session ended."""
        progress, loop = self.progress, self.config.loop
        if self.stop_signal is not None:
            self.say(f"stopped by {signal.Signals(self.stop_signal).name}; continue with --resume")
            return
        ending = "finished"
        if progress.step < self.config.schedule.steps:
            ending = (
                f"stopped early at step {progress.step}: {loop.patience} validations without a better {loop.metric}"
            )
        if progress.best_step is None:
            self.say(f"{ending}; no best: no validation's {loop.metric} was a finite number")
            return
        self.say(f"{ending}; best at step {progress.best_step}; next: dragoman evaluate")


def counted(dataset: data.Dataset) -> str:
    """How many pairs are there, and how many were dropped for which reason."""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in dataset.dropped.items() if count)
    return f"{len(dataset):,} pairs (dropped: {dropped or 'none'})"


def covered(name: str, keys: Sequence[str]) -> bool:
    """Whether a changed field is one of ``keys`` or belongs to one: ``data.dev_source.sha256`` to ``data``."""
    return any(name == key or name.startswith(f"{key.rstrip('.')}.") for key in keys)


def refuse_changes(run: Path, changes: Changes, allowed: Sequence[str]) -> None:
    """``CheckpointError`` naming the first changed setting that is not allowed, or cannot be."""
    for name, (old, new) in changes.items():
        found = f"{run} cannot be resumed: {name} is {new!r}, was {old!r}"
        if not covered(name, CHANGEABLE) or name == "optimizer.kind":
            raise CheckpointError(f"{found}; the saved state would not fit: restore it, or choose another --out")
        if not covered(name, allowed):
            key = ".".join(name.split(".")[:2])
            raise CheckpointError(f"{found}; restore it, give --allow-change {key}, or choose another --out")


def refuse_unknown(allowed: Sequence[str]) -> None:
    """``ConfigError`` for a key of ``--allow-change`` that is no setting."""
    sections = {name: list(get_type_hints(kind)) for name, kind in get_type_hints(TrainConfig).items()}
    for key in allowed:
        section, _, name = key.partition(".")
        if key != "processes" and name not in sections.get(section, []):
            known = [f"{section}.{name}" for name in sections[section]] if section in sections else None
            choices = ", ".join(known or [*(f"{name}.KEY" for name in sections), "processes"])
            raise ConfigError(f"--allow-change {key}: there is no such setting; known here: {choices}")


def refuse_small_batch(config: TrainConfig, group: Group) -> None:
    """``ConfigError`` where a process's share of a batch cannot hold a longest row."""
    longest = max(config.data.max_source_tokens, config.data.max_target_tokens)
    least = longest * config.loop.workers * group.world_size
    remedy = f"it must hold a longest row ({longest} tokens) for each of {group.world_size} processes: at least {least}"
    require(config.data.batch_tokens >= least, "data.batch_tokens", config.data.batch_tokens, remedy)


def refuse_early(config: TrainConfig, run: Path, group: Group, allowed: Sequence[str]) -> None:
    """Refuse to resume what is not there, or with other settings, before any data is read."""
    if not (run / "config.json").exists():
        raise CheckpointError(f"there is no run in {run} to resume: leave out --resume")
    saved = checkpoint.read_json(run / "config.json")
    settings = checkpoint.config_record(config)
    try:
        now = {**saved, "model": {**saved["model"], **settings.pop("model")}, "training": settings}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{run}/config.json is incomplete: {error}") from error
    refuse_changes(run, checkpoint.changed_settings(saved, {**now, "processes": group.world_size}), allowed)


def refuse_existing(run: Path) -> None:
    """``CheckpointError`` for a new run in a place that holds anything but what an interrupted start left."""
    if run.exists() and (not run.is_dir() or any(path.name not in BEFORE_THE_START for path in run.iterdir())):
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
        shutil.rmtree(run / "tokenizers", ignore_errors=True)  # of another configuration, perhaps


@contextmanager
def stopping_on_signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and SIGINT end the training after the step in progress."""

    def stop(number: int, _: FrameType | None) -> None:
        trainer.stop_signal = number

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(config: TrainConfig, run: Path, resume: bool = False, allowed: Sequence[str] = ()) -> int | None:
    """Train ``config`` in folder ``run``; returns the signal that stopped it, None when it came to its end.

    With ``resume``, ``allowed`` names the settings (``section.key``) that may differ from the run's.
    """
    if allowed and not resume:
        raise ConfigError(f"--allow-change {allowed[0]} is for a run that is resumed: add --resume")
    refuse_unknown(allowed)
    group = join(config.loop)
    try:
        stopped_by = train_in_group(config, run, group, resume, allowed)
    except BaseException:
        group.close(failed=True)
        raise
    group.close()
    return stopped_by


def train_in_group(config: TrainConfig, run: Path, group: Group, resume: bool, allowed: Sequence[str]) -> int | None:
    """``train`` as one of the processes of ``group``."""
    refuse_small_batch(config, group)
    if resume:
        refuse_early(config, run, group, allowed)
    with ExitStack() as claimed:
        refusal = None
        if group.is_main:
            try:
                claim(run, resume, claimed)
            except CheckpointError as error:
                refusal = str(error)
        if (refusal := group.from_main(refusal)) is not None:  # all end, none waits for the others
            raise CheckpointError(refusal)
        trainer = Trainer(config, run, group)
        with stopping_on_signals(trainer):
            trainer.resume(allowed) if resume else trainer.start()
            trainer.introduce()
            stopped_by = trainer.train()
        trainer.conclude()
    return stopped_by
