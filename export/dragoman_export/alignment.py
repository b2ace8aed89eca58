"""The graph that aligns a finished answer with its source: which attention it shows, and the proof that it does.

A decoder layer's cross-attention says where the decoder looked for each target token. Some heads of some layers look at
the word that is being translated, others at none in particular: which are the former is measured, on the model's own
answers, without alignments made by people. What is surely aligned are tokens that were copied, such as numbers and
names: the candidate that aligns most of these with themselves is taken. Models that copy too little are judged by how
close to the diagonal their alignments are, which is right only for languages of like order. (A head that knew nothing
but copies would be taken too; the score in the manifest is about copied tokens, and no error rate.)

A token's weights are those of the step that produced it or of the one that read it; the latter are the better in many
models, lower layers above all (Chen et al. 2020, "Accurate Word Alignment Induction from Neural Machine Translation",
https://aclanthology.org/2020.emnlp-main.42), so that both are candidates.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from dragoman.bundle import Alignment, Graph
from dragoman.engine.aligner import OrtForcedPass
from dragoman.engine.runner import open_graph
from dragoman.types import FloatArray
from dragoman.vocabulary import Vocabulary
from dragoman_export.alignment_graph import AlignmentGraph, attention_weights
from dragoman_export.counts import FLOAT_PRODUCTS, INTEGER_PRODUCTS, Products
from dragoman_export.errors import ExportError
from dragoman_export.quantize import Range, to_int8
from dragoman_export.targets import FP32, INT8, Target, Tolerance
from dragoman_export.trace import checked, trace
from dragoman_export.weights import SharedWeights
from dragoman_training.attention import split_heads
from dragoman_training.checkpoint import LoadedCheckpoint
from dragoman_training.data import pad
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import SpecialIds

MAX_EXAMPLES = 300  # evenly taken from those given
MIN_COPIED = 50  # fewer copied tokens than this say too little about a head
PARITY_EXAMPLES = 64
BATCH = 16


@dataclass(frozen=True)
class Example:
    """A source with its template, and the model's answer to it, without start and end token.

    ``own`` is where in the source the text's own tokens are: with others no word is aligned.
    """

    source: tuple[int, ...]
    answer: tuple[int, ...]
    own: slice


@dataclass(frozen=True)
class Recorded:
    """What a checkpoint says of its own attention: it is ``head`` of ``layer`` that aligns, or the mean of all heads.

    In models that were trained elsewhere it is the attention of the step that produced a token.
    """

    layer: int
    head: int | None

    @classmethod
    def of(cls, checkpoint: LoadedCheckpoint) -> Recorded | None:
        """What a checkpoint says, if anything. Raises ExportError for attention that the model lacks."""
        if (record := checkpoint.record.get("alignment")) is None:
            return None
        config, recorded = checkpoint.model.config, cls(record["layer"], record["head"])
        if recorded.layer not in range(config.decoder_layers) or recorded.head not in (None, *range(config.num_heads)):
            raise ExportError(
                f"the checkpoint's config.json says that head {recorded.head} of decoder layer {recorded.layer} "
                f"aligns; the model has {config.num_heads} heads in each of {config.decoder_layers} layers: import it "
                "again"
            )
        return recorded


@dataclass(frozen=True)
class Choice:
    """The candidate that aligns best. Fields as in ``dragoman.bundle.Alignment``."""

    layer: int
    head: int | None
    shift: int
    basis: str
    score: float
    num_tokens: int

    def weights(self, attention: FloatArray) -> FloatArray:
        """This candidate's weights (T, S) among all: attention (layers, heads, T + 1, S)."""
        layer = attention[self.layer, :, self.shift : self.shift + attention.shape[2] - 1]  # (heads, T, S)
        chosen: FloatArray = layer.mean(axis=0) if self.head is None else layer[self.head]
        return chosen

    def alignment(self, graph: Graph) -> Alignment:
        """What the manifest says of it, with nothing measured yet."""
        return Alignment(
            graph,
            self.layer,
            self.head,
            self.shift,
            self.basis,
            self.score,
            self.num_tokens,
            max_weight_difference=0.0,
            agreement=1.0,
        )


class Scores:
    """How well each candidate aligns, summed over answers: layers x shifts x (the mean of all heads, each head)."""

    def __init__(self, layers: int, heads: int) -> None:
        self._copied = np.zeros((layers, 2, 1 + heads))
        self._close = np.zeros((layers, 2, 1 + heads))
        self._num_copied = 0
        self._num_tokens = 0

    def add(self, attention: FloatArray, copied: Sequence[tuple[int, int]]) -> None:
        """One answer of T tokens to a text of S own tokens.

        attention: (layers, heads, T + 1, S), a row for each step: T that produced a token, then one that read the last.
        ``copied`` are positions of source and target tokens that are surely aligned.
        """
        steps, length = attention.shape[2] - 1, attention.shape[3]
        heads = np.concatenate([attention.mean(axis=1, keepdims=True), attention], axis=1)  # (layers, 1 + heads, …)
        diagonal = (np.arange(steps) + 0.5) / steps
        for shift in (0, 1):
            best = heads[:, :, shift : shift + steps].argmax(axis=-1)  # (layers, 1 + heads, T)
            self._copied[:, shift] += sum(best[:, :, target] == source for source, target in copied)
            self._close[:, shift] += (1 - np.abs((best + 0.5) / length - diagonal)).sum(axis=-1)
        self._num_copied += len(copied)
        self._num_tokens += steps

    def choice(self, recorded: Recorded | None = None) -> Choice:
        """The best candidate; of equal ones the lowest layer, which is the cheapest, and the mean of its heads.

        With one that is ``recorded`` already, that.
        """
        enough = self._num_copied >= MIN_COPIED
        sums, number = (self._copied, self._num_copied) if enough else (self._close, self._num_tokens)
        layer, shift, head = (int(index) for index in np.unravel_index(sums.argmax(), sums.shape))
        if recorded is not None:
            layer, shift, head = recorded.layer, 0, 0 if recorded.head is None else 1 + recorded.head
        return Choice(
            layer=layer,
            head=None if head == 0 else head - 1,
            shift=shift,
            basis="copied" if enough else "diagonal",
            score=float(sums[layer, shift, head]) / number,
            num_tokens=number,
        )


def copied_tokens(source: Sequence[str], target: Sequence[str]) -> list[tuple[int, int]]:
    """Positions of source and target tokens that are surely aligned: alike but for case, and once on each side.

    Marks alone, such as a full stop, are none of them: attention rests on these for want of another place.
    """
    sides = [[token.strip().casefold() for token in side] for side in (source, target)]
    counts = [Counter(side) for side in sides]
    places = {token: position for position, token in enumerate(sides[0])}
    return [
        (places[token], position)
        for position, token in enumerate(sides[1])
        if counts[0][token] == counts[1][token] == 1 and any(map(str.isalnum, token))
    ]


@torch.inference_mode()
def cross_attentions(model: Transformer, examples: Sequence[Example], special: SpecialIds) -> Iterator[FloatArray]:
    """All cross-attention weights of each example by PyTorch: (layers, heads, T + 1, S), the template included."""
    layers = list(model.decoder_layers())
    seen: dict[tuple[int, str], Tensor] = {}

    def watch(index: int, name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def see(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[index, name] = split_heads(output, model.config.num_heads)

        return module.register_forward_hook(see)

    handles = [watch(index, "query", layer.cross_attention.query) for index, layer in enumerate(layers)]
    handles += [watch(index, "key", layer.cross_attention.key) for index, layer in enumerate(layers)]
    try:
        for begin in range(0, len(examples), BATCH):
            batch = examples[begin : begin + BATCH]
            lengths = torch.tensor([len(example.source) for example in batch], dtype=torch.int32)
            model(
                pad([example.source for example in batch], special.pad),  # (B, S)
                lengths,
                pad([[special.decoder_start, *example.answer] for example in batch], special.pad),  # (B, T + 1)
            )
            weights = torch.stack(
                [attention_weights(seen[index, "query"], seen[index, "key"], lengths) for index in range(len(layers))]
            )  # (layers, B, H, T + 1, S)
            for row, example in enumerate(batch):
                yield weights[:, row, :, : 1 + len(example.answer), : len(example.source)].numpy()
    finally:
        for handle in handles:
            handle.remove()


def choose(
    model: Transformer,
    examples: Sequence[Example],
    special: SpecialIds,
    source: Vocabulary,
    target: Vocabulary,
    recorded: Recorded | None = None,
) -> Choice:
    """The layer, head and step that align the examples best, or are ``recorded``. Deterministic."""
    scores = Scores(model.config.decoder_layers, model.config.num_heads)
    for example, attention in zip(examples, cross_attentions(model, examples, special), strict=True):
        copied = copied_tokens(_texts(source, example.source[example.own]), _texts(target, example.answer))
        scores.add(attention[..., example.own], copied)
    return scores.choice(recorded)


def _texts(vocabulary: Vocabulary, ids: Sequence[int]) -> list[str]:
    """What tokens stand for; nothing, for a byte of a character."""
    pieces = [vocabulary.pieces[index] for index in ids]
    return [piece if isinstance(piece, str) else "" for piece in pieces]


def write_alignment(
    model: Transformer,
    examples: Sequence[Example],
    special: SpecialIds,
    source: Vocabulary,
    target: Vocabulary,
    folder: Path,
    encoders: Mapping[Target, Graph],
    ranges: Mapping[str, Range] | None = None,
    weights: SharedWeights | None = None,
    recorded: Recorded | None = None,
) -> Alignment:
    """Choose, trace, check and compare; the graphs' files are left in ``folder``.

    The examples are dev sources and the model's own answers. ``encoders`` are the encoder graphs in ``folder``: that of
    FP32, whose alignment graph has to be exact, then perhaps that of INT8, whose own is returned. ``ranges`` are those
    that it was written with, ``weights`` what it shares its constants with. What is ``recorded`` is not chosen. Raises
    ExportError where no answer has a token, a graph's nodes are not those that the model's shape requires, or its
    weights are not PyTorch's.
    """
    usable = [example for example in examples if example.answer]
    if not usable:
        raise ExportError(
            f"none of {len(examples)} sources has an answer to align: train the model further, or leave --alignment out"
        )
    stride = -(-len(usable) // MAX_EXAMPLES)
    chosen = sorted(usable[::stride], key=lambda example: len(example.source))  # little padding in a batch
    choice = choose(model, chosen, special, source, target, recorded)
    compared = [*chosen[:: -(-len(chosen) // PARITY_EXAMPLES)], chosen[-1]]  # the shortest and the longest among them
    module = AlignmentGraph(model, choice.layer, choice.head)
    traced = trace(module, FP32.file("alignment", "onnx"))
    for precision, encoder in encoders.items():
        graph = _write(module, traced, precision, folder, ranges, weights)
        alignment = choice.alignment(graph)
        session = open_graph(encoder, folder.joinpath, num_threads=1)
        forced_pass = OrtForcedPass(alignment, session, special.decoder_start, folder.joinpath)
        found = compare(model, forced_pass, choice, compared, special, precision.tolerance)
    return dataclasses.replace(alignment, max_weight_difference=found.max_difference, agreement=found.agreement)


def _write(
    module: AlignmentGraph,
    traced: onnx.ModelProto,
    precision: Target,
    folder: Path,
    ranges: Mapping[str, Range] | None,
    weights: SharedWeights | None,
) -> Graph:
    """The graph of one precision, checked."""
    file, products = precision.file("alignment", "onnx"), Products(FLOAT_PRODUCTS)
    if precision == INT8:
        traced, products = to_int8(traced, ranges), Products(INTEGER_PRODUCTS, by_row=ranges is None)
    graph = checked(file, traced, module.required_nodes(products), folder)
    return weights.take(graph) if weights is not None and precision == INT8 else graph


@dataclass(frozen=True)
class Comparison:
    """What the comparison of a graph with PyTorch found.

    ``agreement`` is the share of target tokens of which both look at the same source token most.
    """

    max_difference: float  # of a weight
    agreement: float


def compare(
    model: Transformer,
    forced_pass: OrtForcedPass,
    choice: Choice,
    examples: Sequence[Example],
    special: SpecialIds,
    tolerance: Tolerance,
) -> Comparison:
    """How far the weights, and those of coverage, are from PyTorch's.

    Raises ExportError, NaN included, where one differs by more than ``tolerance.logits`` allows of the logits that it
    comes from, or all by more than ``tolerance.relative`` of their size.
    """
    largest = wrong = size = 0.0
    agreed = number = 0
    for example, attention in zip(examples, cross_attentions(model, examples, special), strict=True):
        weights, expected = forced_pass(example.source, example.answer), choice.weights(attention)
        coverage = forced_pass.coverage(example.source, example.answer)
        for actual, right in ((weights, expected), (coverage, attention[-1].mean(axis=0))):
            difference = actual - right
            largest = float(np.maximum(largest, np.abs(difference).max()))
            wrong, size = wrong + float((difference**2).sum()), size + float((right**2).sum())
        if not largest <= tolerance.logits:
            raise ExportError(
                f"alignment weights differ from PyTorch's by {largest:.3g} on a source of {len(example.source)} "
                f"tokens; at most {tolerance.logits} is rounding: the graph does not compute what the model does"
            )
        agreed += int((weights.argmax(axis=1) == expected.argmax(axis=1)).sum())
        number += len(weights)
    relative = (wrong / size) ** 0.5
    if not relative <= tolerance.relative:
        raise ExportError(
            f"alignment weights differ from PyTorch's by {relative:.3g} of their size; at most {tolerance.relative} is "
            "allowed: the graph does not compute what the model does, or its values spread too far for this precision"
        )
    return Comparison(largest, agreed / number)
