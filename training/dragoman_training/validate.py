"""Measuring a model on the dev data while it trains, and saying it to a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dragoman_training.config import TrainConfig
from dragoman_training.data import Datasets, Pair, make_batch
from dragoman_training.decode import Hypothesis, greedy, in_groups
from dragoman_training.errors import DataError
from dragoman_training.loss import projection_loss
from dragoman_training.model import Transformer
from dragoman_training.scoring import TextScores, score_text
from dragoman_training.systems import translate
from dragoman_training.tokenizer import SpecialIds
from dragoman_training.workers import Workers

ROWS = 128


@dataclass(frozen=True)
class Validation:
    """Loss a token, without smoothing; share of dev lines that greedy decoding gets right; BLEU and chrF, if asked for.

    ``outputs`` are the text that was scored, a line for each dev line.
    """

    loss: float
    exact_match: float
    text: TextScores | None = None
    outputs: list[str] = field(default_factory=list, repr=False)

    def metrics(self) -> dict[str, float]:
        """All figures by name. BLEU and chrF are from 0 to 100, rates are shares of 1."""
        figures = {"loss": self.loss, "exact_match": self.exact_match, "word_error_rate": 1 - self.exact_match}
        if self.text is not None:
            figures |= {"bleu": self.text.bleu, "chrf": self.text.chrf}
        return figures

    @property
    def signatures(self) -> dict[str, str]:
        """sacreBLEU's signature of each figure that has one."""
        return self.text.signatures if self.text is not None else {}


def validate(workers: Workers, datasets: Datasets, config: TrainConfig, special: SpecialIds) -> Validation:
    """Measure the workers' model and leave it in training mode. Draws no random numbers, changes no gradients.

    The loss is that of the dev pairs within the limits; ``DataError`` where there is none. Every dev line is
    translated as ``dragoman evaluate`` does it, and compared as text. BLEU and chrF are computed for SentencePiece
    tokenizers, and for plain ones where ``loop.metric`` is one of them.
    """
    pairs = sorted(datasets.dev, key=lambda pair: len(pair.source))
    if not pairs:
        raise DataError("no dev pair is within data.max_source_tokens and data.max_target_tokens: raise them")
    limits, loop, targets = config.data, config.loop, datasets.dev_targets

    def losses(model: Transformer, chunk: list[Pair]) -> tuple[float, int]:
        return summed_loss(model, chunk, special)

    def search(sources: list[list[int]]) -> list[Hypothesis]:
        def decode(model: Transformer, group: list[Sequence[int]]) -> list[Hypothesis]:
            return greedy(model, group, limits.max_target_tokens, special)

        return in_groups(sources, ROWS, lambda groups: workers.map(decode, groups))

    workers.training(False)
    measured = workers.map(losses, [pairs[i : i + ROWS] for i in range(0, len(pairs), ROWS)])
    outputs = translate(datasets.dev_sources, datasets.tokenizers, limits.max_source_tokens, search).lines
    workers.training(True)
    is_text = config.tokenizer.kind != "plain" or loop.metric in ("bleu", "chrf")
    return Validation(
        loss=sum(loss for loss, _ in measured) / sum(tokens for _, tokens in measured),
        exact_match=sum(out == target for out, target in zip(outputs, targets, strict=True)) / len(targets),
        text=score_text(outputs, targets, loop.bleu_tokenizer) if is_text else None,
        outputs=outputs,
    )


@torch.inference_mode()
def summed_loss(model: Transformer, pairs: list[Pair], special: SpecialIds) -> tuple[float, int]:
    """The cross-entropy summed over the real target tokens of the pairs, and their number."""
    device = next(model.parameters()).device
    batch = make_batch(pairs, special)
    source, lengths, target, labels = (
        part.to(device) for part in (batch.source, batch.source_lengths, batch.target, batch.labels)
    )
    hidden = model.decode_hidden(target, model.encode(source, lengths), lengths)  # (B, T, D)
    return projection_loss(hidden, model.projection, labels, special.pad, 0.0).item(), sum(len(p.target) for p in pairs)


def describe_signatures(signatures: dict[str, str]) -> list[str]:
    """A line for a person for each figure that has a signature of sacreBLEU: how it was computed."""
    names = {"bleu": "BLEU", "chrf": "chrF"}
    return [f"dev {names.get(name, name)} is sacreBLEU's {signature}" for name, signature in signatures.items()]


def describe(metrics: dict[str, Any]) -> str:
    """One line for a person, of a line of metrics.jsonl: each figure of the dev data that is there."""
    words = {"dev_bleu": "BLEU {:.2f}", "dev_chrf": "chrF {:.2f}", "dev_word_error_rate": "word error rate {:.2%}"}
    figures = [text.format(metrics[name]) for name, text in words.items() if name in metrics]
    return (
        f"step {metrics['step']} epoch {metrics['epoch']}: train loss {metrics['train_loss']:.4f},"
        f" dev loss {metrics['dev_loss']:.4f}, dev {', '.join(figures)},"
        f" {metrics['seconds']:.0f} s, {metrics['cpu_seconds']:.0f} CPU s"
    )
