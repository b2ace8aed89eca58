"""Time of a decoding step by precision and number of rows, as ratios to the same graph with DynamicQuantizeMatMul.

    python tests/bench/precisions.py --shape small

Random weights; one thread; steps of all graphs interleaved, the least time of each counts. DynamicQuantizeMatMul has
one activation scale over all rows, so that a row feels its neighbours: it is what exact int8 must not be slower than.
Prints a line a number of rows: microseconds of its step, then its time divided by each precision's (above 1: faster).
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper
from torch import nn

from dragoman.bundle import ModelShape
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman_export.graph_sets import write_graphs
from dragoman_export.quantize import Range
from dragoman_export.targets import FP32, INT8, W8
from dragoman_training.config import ModelConfig
from dragoman_training.model import Transformer

SHAPES = {  # tokens, width, heads, feed-forward, layers of encoder and decoder
    "g2p-en": (48, 128, 4, 512, 4, 2),
    "small": (8000, 256, 4, 1024, 6, 2),
    "base": (32000, 512, 8, 2048, 6, 6),
}
SOURCE_TOKENS, STEPS = 25, 30


def dynamic(content: bytes) -> bytes:
    """An int8 graph with DynamicQuantizeMatMul for every static product."""
    model = onnx.load_from_string(content)
    nodes = []
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            continue
        if node.op_type == "MatMulIntegerToFloat":
            inputs = [node.input[0].removesuffix(".quantized"), node.input[1], node.input[3], "", *node.input[6:]]
            node = helper.make_node("DynamicQuantizeMatMul", inputs, node.output, domain="com.microsoft")
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model.SerializeToString()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    size = SHAPES[args.shape][0]
    torch.manual_seed(0)
    _, d_model, num_heads, ffn_dim, encoder_layers, decoder_layers = SHAPES[args.shape]
    config = ModelConfig(
        d_model=d_model,
        num_heads=num_heads,
        ffn_dim=ffn_dim,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        source_vocab_size=size,
        target_vocab_size=size,
    )
    model = Transformer(config).eval()
    shape = ModelShape(*(getattr(config, field.name) for field in dataclasses.fields(ModelShape)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranges = {name: Range(-4.0, 4.0) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        sets = write_graphs(model, [INT8, FP32, W8], ranges, folder).sets
        static, fp32, block = sets[INT8], sets[FP32], sets[W8]
        content = {file.name: file.read_bytes() for file in folder.iterdir()}
        row = write_graphs(model, [INT8], None, folder).sets[INT8]
        row_content = {file.name: file.read_bytes() for file in folder.iterdir()}
    replaced = {**content, static.decoder.file: dynamic(content[static.decoder.file])}
    runners = {
        "dynamic": OrtRunner(OrtModel(shape, static, replaced.__getitem__), 64, 1 << 32),
        "static": OrtRunner(OrtModel(shape, static, content.__getitem__), 64, 1 << 32),
        "row": OrtRunner(OrtModel(shape, row, row_content.__getitem__), 64, 1 << 32),
        "w8": OrtRunner(OrtModel(shape, block, content.__getitem__), 64, 1 << 32),
        "fp32": OrtRunner(OrtModel(shape, fp32, content.__getitem__), 64, 1 << 32),
    }
    source = (*range(4, 4 + SOURCE_TOKENS - 1), 2)
    print(f"{'rows':>4} {'us':>8} " + " ".join(f"{name:>8}" for name in runners if name != "dynamic"))
    for rows in args.rows:
        tokens = np.full(rows, 5, np.int64)
        best = dict.fromkeys(runners, float("inf"))
        for runner in runners.values():
            runner.reserve(SOURCE_TOKENS, STEPS)
        for _ in range(args.rounds):
            for kind, runner in runners.items():
                runner.admit([source] * rows, [[row] for row in range(rows)])
                started = time.perf_counter()
                for _ in range(STEPS):
                    runner.decode(tokens)
                best[kind] = min(best[kind], (time.perf_counter() - started) / STEPS)
        ratios = " ".join(f"{best['dynamic'] / value:>8.2f}" for kind, value in best.items() if kind != "dynamic")
        print(f"{rows:>4} {best['dynamic'] * 1e6:>8.0f} {ratios}", flush=True)


if __name__ == "__main__":
    main()
