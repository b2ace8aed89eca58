"""Time of a decoding step of int8 with a shortlist and without, by number of rows.

    python tests/bench/shortlist.py --shape small

Random weights; one thread, whose CPU time counts; steps of both interleaved, the least time of each counts. Source
tokens and candidates are drawn by Zipf's law, 50 a source token and 356 for all (100, and 256 bytes), so that rows
share many, as they do in text. Prints a line a number of rows: candidates a row, columns for all rows, microseconds of
a step without the shortlist, how many times faster it is with it, and microseconds to begin a row: to find its
candidates and put their columns in place.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from precisions import SHAPES, SOURCE_TOKENS, STEPS  # type: ignore[import-not-found]  # beside this file
from torch import nn

from dragoman.bundle import ModelShape, Shortlist
from dragoman.engine.candidates import Candidates
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman_export.graph_sets import write_graphs
from dragoman_export.quantize import Range
from dragoman_export.shortlist import to_bytes
from dragoman_export.targets import INT8
from dragoman_training.config import ModelConfig
from dragoman_training.model import Transformer

PER_TOKEN, ALWAYS = 50, 356


def candidates(size: int, rng: np.random.Generator) -> tuple[Candidates, np.ndarray]:
    """A table for so many tokens, and how often each comes."""
    weights = 1 / np.arange(1, size + 1)
    weights /= weights.sum()
    ids = rng.permutation(size)
    drawn = np.sort(ids[rng.choice(size, (size, PER_TOKEN), p=weights)], axis=1).astype(np.int32)
    offsets = np.arange(size + 1, dtype=np.int32) * PER_TOKEN
    return Candidates(size, offsets, drawn.ravel(), np.arange(ALWAYS, dtype=np.int32)), weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("small", "base"), default="small")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    size, *sizes = SHAPES[args.shape]
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    names = ("d_model", "num_heads", "ffn_dim", "encoder_layers", "decoder_layers")
    config = ModelConfig(**dict(zip(names, sizes, strict=True)), source_vocab_size=size, target_vocab_size=size)
    shape = ModelShape(*(getattr(config, field.name) for field in dataclasses.fields(ModelShape)))
    table, frequency = candidates(size, rng)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Transformer(config).eval()
        ranges = {name: Range(-4.0, 4.0) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        written = write_graphs(model, [INT8], ranges, folder, shortlist=True)
        assert written.shortlist is not None
        int8, (decoder, projection) = written.sets[INT8], written.shortlist
        content = {file.name: file.read_bytes() for file in folder.iterdir()}
    content["table"] = to_bytes(table, projection)
    shortlist = Shortlist("cpu", "int8", "table", decoder, "", PER_TOKEN, ALWAYS, 0.0, {})
    full = OrtRunner(OrtModel(shape, int8, content.__getitem__), 64, 1 << 32)
    short = OrtRunner(OrtModel(shape, int8, content.__getitem__, shortlist=shortlist), 64, 1 << 32)
    columns = short._columns
    assert columns is not None
    print(f"{'rows':>4} {'row':>6} {'columns':>8} {'us':>8} {'times':>6} {'begin us':>8}")
    for rows in args.rows:
        sources = [tuple(rng.choice(size, SOURCE_TOKENS, p=frequency).tolist()) for _ in range(rows)]
        tokens = np.full(rows, 5, np.int64)
        best = {full: float("inf"), short: float("inf")}
        begin = []
        for _ in range(args.rounds):
            for runner in best:
                runner.reserve(SOURCE_TOKENS, STEPS)
                runner.admit(sources, [[row] for row in range(rows)])
                started = time.thread_time()
                for _ in range(STEPS):
                    runner.decode(tokens)
                best[runner] = min(best[runner], (time.thread_time() - started) / STEPS)
            for row in range(rows):
                source = tuple(rng.choice(size, SOURCE_TOKENS, p=frequency).tolist())
                started = time.thread_time()
                columns.install(row, table.of(source))
                begin.append(time.thread_time() - started)
        mean = np.mean([len(table.of(source)) for source in sources])
        print(
            f"{rows:>4} {mean:>6.0f} {columns.capacity:>8} {best[full] * 1e6:>8.0f} {best[full] / best[short]:>6.2f} "
            f"{np.median(begin) * 1e6:>8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
