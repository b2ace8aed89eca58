"""Measuring a model on the dev data while it trains, and the lines that this leaves in metrics.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dragoman_training.data import Dataset, Pair, make_batch
from dragoman_training.decode import greedy_all
from dragoman_training.model import Transformer
from dragoman_training.optim import smoothed_loss
from dragoman_training.tokenizer import SPECIAL_IDS, SpecialIds
from dragoman_training.workers import Workers

ROWS = 256


@dataclass(frozen=True)
class Validation:
    """Loss a token (without smoothing) and share of dev lines that greedy decoding gets wrong."""

    loss: float
    word_error_rate: float


def validate(workers: Workers, dataset: Dataset, max_new_tokens: int, special: SpecialIds) -> Validation:
    """Loss and greedy word error rate; lines over the limits count as wrong. Draws no random numbers."""
    pairs = sorted(dataset.pairs, key=lambda pair: len(pair.source))
    chunks = [pairs[i : i + ROWS] for i in range(0, len(pairs), ROWS)]

    def work(model: Transformer, chunk: list[Pair]) -> tuple[float, int, int]:
        batch = make_batch(chunk)
        with torch.inference_mode():
            logits = model(batch.source, batch.source_lengths, batch.target)
            loss, tokens = smoothed_loss(logits, batch.labels, SPECIAL_IDS.pad, 0.0)
        outputs = greedy_all(model, [pair.source for pair in chunk], max_new_tokens, special)
        right = sum(out.tokens == pair.target[:-1] for out, pair in zip(outputs, chunk, strict=True))
        return loss.item(), tokens, right

    workers.training(False)
    losses, tokens, right = zip(*workers.map(work, chunks), strict=True)
    workers.training(True)
    return Validation(sum(losses) / sum(tokens), 1 - sum(right) / (len(pairs) + dataset.dropped))


def describe(metrics: dict[str, Any]) -> str:
    """One line for a person."""
    return (
        f"step {metrics['step']} epoch {metrics['epoch']}: train loss {metrics['train_loss']:.4f},"
        f" dev loss {metrics['dev_loss']:.4f}, dev word error rate {metrics['dev_word_error_rate']:.2%},"
        f" {metrics['seconds']:.0f} s, {metrics['cpu_seconds']:.0f} CPU s"
    )


def truncate_metrics(path: Path, step: int) -> None:
    """Keep the lines up to ``step``: a killed session may have written some, or half a one, of later steps."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            continue
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
