"""One run, step by step: validate, save, resume.

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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dragoman_training import checkpoint, data
from dragoman_training.averaging import MovingAverage
from dragoman_training.changes import OF_THE_METRIC, OF_THE_PLAN, Changes, changed_settings, covered, refuse_changes
from dragoman_training.config import TrainConfig
from dragoman_training.distributed import Group, join
from dragoman_training.errors import CheckpointError, TrainingError
from dragoman_training.metrics import append_metrics, truncate_metrics
from dragoman_training.model import Transformer
from dragoman_training.muon import MuonWithAdamW
from dragoman_training.optim import learning_rate, make_optimizer
from dragoman_training.precision import LossScale
from dragoman_training.progress import Meter, Progress
from dragoman_training.record import run_record
from dragoman_training.signals import Stopped, StopSignal
from dragoman_training.tensorboard import RunWriter
from dragoman_training.tokenizer import SpecialIds
from dragoman_training.validate import describe, describe_signatures, validate
from dragoman_training.workers import Workers

LOG = logging.getLogger(__name__)
MAX_BAD_STEPS = 10
LOG_EVERY = 50  # steps between two points of TensorBoard's training curves
TELL_SECONDS = 30.0  # between two lines about progress, where there is no terminal for a bar


class Trainer:
    """One run in one folder. ``train`` does the whole job; the parts are apart for the tests.

    Of several processes, each has a trainer of its own, which takes the same steps; the main one alone validates,
    writes and speaks. Training ends early where ``stop`` hears a signal.
    """

    def __init__(
        self, config: TrainConfig, run: Path, group: Group | None = None, stop: StopSignal | None = None
    ) -> None:
        self.config, self.run = config, run
        self.group, self.stop = group or join(config.loop), stop or StopSignal()
        self.datasets = data.load_datasets(config, run)
        self.tokenizers = self.datasets.tokenizers
        sizes = len(self.tokenizers[0]), len(self.tokenizers[1])
        model_config = config.model.with_vocabularies(*sizes)
        self.special = SpecialIds(unused=tuple(range(sizes[1], model_config.target_vocab_size)))
        arguments = (model_config, self.special, self.tokenizers, config, self.datasets.record)
        self.record = run_record(*arguments, processes=self.group.world_size)
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
        """This process's shares of one step after another, from the saved position on, which goes along.

        The shares are planned one by one, so that a batch mixes short and long pairs without padding. There is always a
        next step, but where a signal came, in any process, before all had segmented their epoch.
        """
        loop, progress, group = self.config.loop, self.progress, self.group
        share_tokens = self.config.data.batch_tokens // (loop.workers * group.world_size)
        spread = self.config.data.length_spread
        while True:
            dataset = None
            # A signal ends the segmenting, of which nothing is saved; not the training, which ends by itself then.
            with suppress(Stopped), self.stop.at_once():
                dataset = self.datasets.train_for_epoch(progress.epoch)
            if group.any(dataset is None) or dataset is None:
                return
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
        """Links and pruning after ``newest`` was written, or found on resuming."""
        checkpoint.settle(self.run, newest, self.progress.best_step, self.config.loop.keep_checkpoints)

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
        changes = changed_settings(saved, self.record)
        refuse_changes(self.run, changes, allowed)
        if saved["tokenizers"] != self.record["tokenizers"]:
            raise CheckpointError(
                f"{self.run}/tokenizers are not those that the run began with: restore them, or choose another --out"
            )
        folders = checkpoint.checkpoint_folders(self.run)
        if folders:
            self.load(folders[-1])
            # Against the checkpoint, not the run: a change may have been allowed before, and nothing saved since.
            self.adapt(changed_settings(checkpoint.read_json(folders[-1] / "config.json"), self.record))
        self.record["history"] = saved.get("history", [])
        if changes:
            described = {name: {"old": old, "new": new} for name, (old, new) in changes.items()}
            self.record["history"].append({"step": self.progress.step, "changed": described})
        self.group.barrier()  # all have read: now the main process may write
        if self.group.is_main:
            if changes:
                checkpoint.write_json(self.run / "config.json", self.record)
            truncate_metrics(self.run / "metrics.jsonl", self.progress.step)
            if folders:
                self.settle(folders[-1])
            else:  # there mostly is none, and at worst what a killed process left there stays
                shutil.rmtree(self.run / "checkpoints", ignore_errors=True)

    def load(self, folder: Path) -> None:
        """Take weights, optimizer, average and progress from a checkpoint; ``CheckpointError`` if they do not fit."""
        path = folder / "model.safetensors"
        saved_weights = checkpoint.read_weights(path)
        checkpoint.fill_weights(self.model, saved_weights, path)
        state = checkpoint.load_state(folder)
        try:
            self.take(state, saved_weights, folder)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{folder}/training_state.pt is none that this version can continue ({type(error).__name__}: {error}):"
                f" continue with the version that wrote it, or remove {folder} to go on from the checkpoint before it"
            ) from error

    def take(self, state: dict[str, Any], saved_weights: dict[str, Tensor], folder: Path) -> None:
        """Take what a checkpoint's training state holds. Raises whatever comes of a state of another shape."""
        if "weights" in state:
            checkpoint.fill_weights(self.model, state["weights"], folder / "training_state.pt")
        if self.average:  # which starts from the weights where the run had none so far
            self.average.restart(saved_weights, state.get("average_updates", 0))
        self.progress = Progress.from_saved(state["progress"])
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
        told_signatures, told_at = False, time.monotonic()
        with (
            self.charting() as writer,
            self.workers,
            tqdm(total=steps, initial=progress.step, unit="step", disable=quiet) as bar,
        ):
            self.workers.training(True)
            batches = self.batches()
            while not self.finished and not self.stopping():
                began = time.monotonic()
                if (shares := next(batches, None)) is None:
                    continue  # a signal came, which stopping() tells to all
                loss, tokens = self.step(shares)
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
                    since_validation, told_at = Meter(), time.monotonic()
                elif quiet and time.monotonic() - told_at >= TELL_SECONDS:
                    self.say(self.standing(since_validation))
                    told_at = time.monotonic()
            if self.stop.number is not None and progress.step > 0:
                self.save({"step": progress.step})
        return self.stop.number

    def standing(self, meter: Meter) -> str:
        """Where the training stands between two validations; ``meter`` has measured since the last one."""
        step, steps, every = self.progress.step, self.config.schedule.steps, self.config.loop.validate_every
        following = min(step - step % every + every, steps)
        return (
            f"step {step} of {steps}: {meter.describe()}; validation at step {following} in"
            f" {meter.foretell(following - step)}"
        )

    @contextmanager
    def charting(self) -> Iterator[RunWriter | None]:
        """TensorBoard's writer, in the main process; closed however the training ends."""
        writer = RunWriter(self.run, after=self.progress.step) if self.group.is_main else None
        try:
            yield writer
        finally:
            if writer:
                with suppress(OSError):  # curves are not worth ending a run for, nor hiding how it ended
                    writer.close()

    def stopping(self) -> bool:
        """Whether this or another process was told to stop; all find out before the same step."""
        told = self.group.any(self.stop.number is not None)
        if told and self.stop.number is None:
            self.stop.number = signal.SIGTERM
        return told

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
            checkpoint.retried(lambda: append_metrics(path, metrics), path)
        return metrics

    def say(self, text: str) -> None:
        """One line on stderr."""
        if self.group.is_main:
            print(f"{self.run}: {text}", file=sys.stderr)
