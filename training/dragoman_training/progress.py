"""Where a run stands, and how fast its steps are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


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

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> Progress:
        """What was saved; ``ValueError`` where a field is missing or unknown, as in another version's checkpoint."""
        if differing := sorted({field.name for field in fields(cls)} ^ values.keys()):
            raise ValueError(f"progress: {differing[0]} is on one side only")
        return cls(**values)

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

    def foretell(self, steps: int) -> str:
        """When so many steps more will be done, at the pace so far; for a line of progress."""
        seconds = round(steps * self.step_seconds)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def curves(self) -> dict[str, float]:
        """For TensorBoard."""
        return {"train/loss": self.mean_loss, "train/tokens_per_second": self.tokens_per_second}
