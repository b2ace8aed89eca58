"""The training loop: validate, save, resume.

A run is a pure function of its configuration and data: killed at any moment and resumed, it goes through the same
batches with the same random bytes, and on a CPU ends with bit-equal weights.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

from dragoman_training import checkpoint, data
from dragoman_training.config import TrainConfig
from dragoman_training.errors import CheckpointError, DataError, TrainingError
from dragoman_training.model import Transformer
from dragoman_training.muon import MuonWithAdamW
from dragoman_training.optim import learning_rate, make_optimizer
from dragoman_training.tokenizer import SpecialIds, train_tokenizers
from dragoman_training.validate import describe, truncate_metrics, validate
from dragoman_training.workers import Workers

LOG = logging.getLogger(__name__)
MAX_BAD_STEPS = 10


@dataclass
class Progress:
    """Where a run stands; saved with each checkpoint. ``position`` counts the batches done in ``epoch``."""

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
    best_word_error_rate: float = math.inf


class Trainer:
    """One run in one folder. ``train`` does the whole job; the parts are apart for the tests."""

    def __init__(self, config: TrainConfig, run: Path) -> None:
        self.config, self.run = config, run
        files = {name: Path(getattr(config.data, name)) for name in ("train_source", "train_target")}
        dev_files = {name: Path(getattr(config.data, name)) for name in ("dev_source", "dev_target")}
        sources, targets = data.read_aligned(*files.values())
        dev_sources, dev_targets = data.read_aligned(*dev_files.values())
        self.tokenizers = train_tokenizers(config.tokenizer, sources, targets, config.loop.seed)
        limits = config.data.max_source_tokens, config.data.max_target_tokens
        self.train_data = data.encode_pairs(sources, targets, *self.tokenizers, *limits)
        self.dev_data = data.encode_pairs(dev_sources, dev_targets, *self.tokenizers, *limits)
        for dataset, kind in ((self.train_data, "training"), (self.dev_data, "dev")):
            if not dataset.pairs:
                raise DataError(f"none of {dataset.dropped} {kind} pairs fits the limits {limits}: raise them")
        model_config = config.model.with_vocabularies(len(self.tokenizers[0]), len(self.tokenizers[1]))
        self.special = SpecialIds(unused=tuple(range(len(self.tokenizers[1]), model_config.target_vocab_size)))
        described = {
            name: {"sha256": data.file_sha256(path), "lines": len(data.read_lines(path))}
            for name, path in {**files, **dev_files}.items()
        }
        self.record = checkpoint.run_record(model_config, self.special, self.tokenizers, config, described)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.loop.seed)
            self.model = Transformer(model_config)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.workers = Workers(self.model, config.loop.workers, config.loop.seed, config.optimizer.label_smoothing)
        if isinstance(self.optimizer, MuonWithAdamW):
            self.optimizer.share_work(self.workers.pool, config.loop.workers)
        self.progress = Progress()
        self.stop_signal: int | None = None

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, shares: list[list[data.Pair]]) -> None:
        """One update, or none and a count where the gradient is not finite."""
        progress, optimizer = self.progress, self.config.optimizer
        progress.step += 1
        schedule = self.config.schedule
        self.workers.dropout(enabled=progress.step <= schedule.steps - schedule.undropped_steps)
        loss, tokens = self.workers.accumulate(shares)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optimizer.max_gradient_norm)
        progress.target_tokens += tokens
        if math.isfinite(norm.item()):
            rate = learning_rate(progress.step, optimizer.learning_rate, schedule)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            progress.bad_in_a_row = 0
            progress.loss_sum += loss
            progress.loss_tokens += tokens
            return
        progress.skipped_steps += 1
        progress.bad_in_a_row += 1
        if progress.bad_in_a_row >= MAX_BAD_STEPS:
            raise TrainingError(
                f"the gradient was not finite {MAX_BAD_STEPS} times in a row, at step {progress.step}: lower"
                f" optimizer.learning_rate ({optimizer.learning_rate}) or lengthen schedule.warmup_steps"
            )

    def batches(self) -> Iterator[list[list[data.Pair]]]:
        """Endless batches, a share for each worker, from the saved position on; keeps epoch and position up to date.

        The shares are planned one by one, so that a batch mixes short and long pairs without padding.
        """
        pairs, loop = self.train_data.pairs, self.config.loop
        budget, spread = self.config.data.batch_tokens // loop.workers, self.config.data.length_spread
        while True:
            plan = data.plan_batches(pairs, budget, loop.seed, self.progress.epoch, spread)
            while (start := self.progress.position * loop.workers) < len(plan):
                self.progress.position += 1
                yield [[pairs[i] for i in share] for share in plan[start : start + loop.workers]]
            self.progress.epoch += 1
            self.progress.position = 0

    # -- saving and resuming -----------------------------------------------------------------------------------------

    def save(self, metrics: dict[str, Any]) -> None:
        """Write a checkpoint, move the links, remove old checkpoints."""
        state = {
            "progress": asdict(self.progress),
            "optimizer": self.optimizer.state_dict(),
            "generators": [generator.get_state() for generator in self.workers.generators],
        }
        args = (self.run, self.progress.step, self.model, self.tokenizers, self.record, state, metrics)
        self.settle(checkpoint.save_checkpoint(*args))

    def settle(self, newest: Path) -> None:
        """Links and pruning after ``newest`` was written (or found, on resuming)."""
        checkpoint.point(self.run / "last", newest)
        if self.progress.best_step is not None:
            best = self.run / "checkpoints" / f"step-{self.progress.best_step:08d}"
            checkpoint.point(self.run / "best", best)
        checkpoint.prune(self.run, self.config.loop.keep_checkpoints, self.progress.best_step)

    def start(self) -> None:
        """Make a new run folder; refuses one that exists."""
        if self.run.exists() and (not self.run.is_dir() or any(self.run.iterdir())):
            raise CheckpointError(f"{self.run} exists: continue it with --resume, or choose another --out")
        self.run.mkdir(parents=True, exist_ok=True)
        checkpoint.write_json(self.run / "config.json", self.record)

    def resume(self) -> None:
        """Continue after the newest complete checkpoint; refuses another configuration or other data."""
        if not (self.run / "config.json").exists():
            raise CheckpointError(f"there is no run in {self.run} to resume: leave out --resume")
        saved = checkpoint.read_json(self.run / "config.json")
        if changed := checkpoint.changed_field(saved, json.loads(json.dumps(self.record))):
            raise CheckpointError(f"{self.run} cannot be resumed: {changed}; restore it, or choose another --out")
        folders = checkpoint.checkpoint_folders(self.run)
        if folders:
            checkpoint.load_weights(self.model, folders[-1] / "model.safetensors")
            state = checkpoint.load_state(folders[-1])
            self.progress = Progress(**state["progress"])
            self.optimizer.load_state_dict(state["optimizer"])
            for generator, saved_state in zip(self.workers.generators, state["generators"], strict=True):
                generator.set_state(saved_state)
            self.settle(folders[-1])
        else:
            shutil.rmtree(self.run / "checkpoints", ignore_errors=True)
        truncate_metrics(self.run / "metrics.jsonl", self.progress.step)
        LOG.info("resumed at step %d", self.progress.step)

    # -- the whole job -----------------------------------------------------------------------------------------------

    def train(self) -> int | None:
        """Train to the last step, or until a signal: then save and return the signal's number."""
        steps, progress = self.config.schedule.steps, self.progress
        # The clocks restart from the saved sums: time spent between sessions does not count.
        clocks = time.monotonic() - progress.seconds, time.process_time() - progress.cpu_seconds
        quiet = not sys.stderr.isatty()
        with self.workers, tqdm(total=steps, initial=progress.step, unit="step", disable=quiet) as bar:
            self.workers.training(True)
            batches = self.batches()
            while progress.step < steps and self.stop_signal is None:
                self.step(next(batches))
                bar.update()
                progress.seconds = time.monotonic() - clocks[0]
                progress.cpu_seconds = time.process_time() - clocks[1]
                if progress.step % self.config.loop.validate_every == 0 or progress.step == steps:
                    metrics = self.validated(clocks)
                    bar.write(describe(metrics), file=sys.stderr)
                    self.save(metrics)
            if self.stop_signal is not None and progress.step > 0:
                self.save({"step": progress.step})
        return self.stop_signal

    def validated(self, clocks: tuple[float, float]) -> dict[str, Any]:
        """Validate, append a line to metrics.jsonl, remember the best; returns the line."""
        limit, progress = self.config.data.max_target_tokens, self.progress
        validation = validate(self.workers, self.dev_data, limit, self.special)
        progress.seconds = time.monotonic() - clocks[0]
        progress.cpu_seconds = time.process_time() - clocks[1]
        metrics = {
            "step": progress.step,
            "epoch": progress.epoch,
            "learning_rate": learning_rate(progress.step, self.config.optimizer.learning_rate, self.config.schedule),
            "train_loss": progress.loss_sum / max(progress.loss_tokens, 1),
            "dev_loss": validation.loss,
            "dev_exact_match": 1 - validation.word_error_rate,
            "dev_word_error_rate": validation.word_error_rate,
            "target_tokens": progress.target_tokens,
            "skipped_steps": progress.skipped_steps,
            "seconds": round(progress.seconds, 1),
            "cpu_seconds": round(progress.cpu_seconds, 1),
        }
        progress.loss_sum, progress.loss_tokens = 0.0, 0
        if validation.word_error_rate < progress.best_word_error_rate:
            progress.best_word_error_rate, progress.best_step = validation.word_error_rate, progress.step
        with (self.run / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        return metrics


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


def train(config: TrainConfig, run: Path, resume: bool = False) -> int | None:
    """Train ``config`` in folder ``run``; returns the signal that stopped it, None when it reached the last step."""
    trainer = Trainer(config, run)
    with stopping_on_signals(trainer):
        trainer.resume() if resume else trainer.start()
        steps, pairs = config.schedule.steps, len(trainer.train_data.pairs)
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        print(
            f"{run}: {pairs} pairs ({trainer.train_data.dropped} dropped), {parameters} parameters, "
            f"step {trainer.progress.step} of {steps}",
            file=sys.stderr,
        )
        stopped_by = trainer.train()
        if stopped_by is None:
            print(
                f"{run}: finished, best at step {trainer.progress.best_step}; next: dragoman evaluate", file=sys.stderr
            )
        return stopped_by
