"""Seconds and peak memory of an export: 6 + 6 layers, width 512, feed-forward 2,048, 32,000 tokens, random weights.

    python tests/bench/export_base.py --sources 64

Makes a checkpoint in a temporary folder and runs ``dragoman export`` on it, imports and loading included. Prints one
JSON object; ``memory_ratio`` is the peak above that of a tiny model's export, which is what the imports take, in sizes
of model.safetensors. Goals: under 60 seconds and at most 4. The sources, 5 to 40 tokens long, are what PyTorch and ONNX
Runtime both decode: their share of the time grows with their number. Linux only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman_training.model import Transformer

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 16, "num_heads": 2, "ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1},
    "base": {"d_model": 512, "num_heads": 8, "ffn_dim": 2048, "encoder_layers": 6, "decoder_layers": 6},
}
VOCABULARIES = {"tiny": 64, "base": 32_000}
MAX_TOKENS = 48


def write(name: str, folder: Path, count: int) -> None:
    """A checkpoint ``folder/NAME``, and texts beside it."""
    import torch

    from dragoman_training.checkpoint import write_checkpoint
    from dragoman_training.config import ModelConfig
    from dragoman_training.data import encode_source
    from dragoman_training.model import Transformer
    from dragoman_training.record import FORMAT
    from dragoman_training.tokenizer import SPECIAL_IDS, SPECIAL_TOKENS, PlainTokenizer, file_names

    size = VOCABULARIES[name]
    source, target = (
        PlainTokenizer("piece", [*SPECIAL_TOKENS, *(f"{side}{i}" for i in range(size - len(SPECIAL_TOKENS)))])
        for side in "st"
    )
    tokenizers = (source, target)
    rng = random.Random(0)
    texts = [" ".join(rng.choices(source.tokens[4:], k=rng.randint(5, 40))) for _ in range(count)]
    torch.manual_seed(0)
    config = ModelConfig(**SHAPES[name], source_vocab_size=size, target_vocab_size=size)
    model = Transformer(config).eval()
    end_sometimes(model, [encode_source(source, text) for text in texts[:16]])
    files = file_names(source, target)
    record = {
        "format": FORMAT,
        "model": vars(config),
        "special_ids": SPECIAL_IDS.as_dict(),
        "tokenizers": {
            side: {
                "kind": tokenizer.kind,
                "file": files[side],
                "sha256": hashlib.sha256(tokenizer.to_bytes()).hexdigest(),
                "num_tokens": len(tokenizer),
                "normalization": tokenizer.normalization,
            }
            for side, tokenizer in (("source", source), ("target", target))
        },
        "limits": {"max_source_tokens": MAX_TOKENS, "max_target_tokens": MAX_TOKENS},
        "training": {},
        "data": {},
    }
    write_checkpoint(folder / name, dict(model.named_parameters()), tokenizers, record, {})
    (folder / f"{name}.source").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def end_sometimes(model: Transformer, sources: list[list[int]]) -> None:
    """Set the bias of the end token so that it is the best at one step of sixteen: a golden set needs ends."""
    import torch

    from dragoman_training.decode import greedy
    from dragoman_training.tokenizer import SPECIAL_IDS

    bias, end = model.projection.bias.data, SPECIAL_IDS.eos
    bias[end] = -1000
    gaps = []
    for source, answer in zip(sources, greedy(model, sources, MAX_TOKENS), strict=True):
        inputs = torch.tensor([[SPECIAL_IDS.decoder_start, *answer.tokens[:-1]]])
        with torch.inference_mode():
            logits = model(torch.tensor([source]), torch.tensor([len(source)], dtype=torch.int32), inputs)[0]  # (T, V)
        gaps.append(logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0] - logits[:, end])
    bias[end] += torch.cat(gaps).quantile(1 / 16)


def measured(name: str, folder: Path) -> tuple[float, float, int]:
    """Export ``folder/NAME``: seconds, CPU seconds, and the most memory that the process held, in bytes."""
    arguments = ["export", name, "--sources", f"{name}.source", "--out", f"{name}.bundle"]
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "dragoman.cli.main", *arguments], cwd=folder, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the export of the {name} model failed")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=64, metavar="N", help="how many are decoded (default: 64)")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)  # in a process of its own: a child's peak starts
    args = parser.parse_args()  # with its parent's, which therefore must stay small
    if args.write is not None:
        for name in SHAPES:
            write(name, args.write, args.sources)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, __file__, "--write", folder, "--sources", str(args.sources)], check=True)
        _, _, imports = measured("tiny", folder)
        seconds, cpu_seconds, peak = measured("base", folder)
        weights = (folder / "base" / "model.safetensors").stat().st_size
    figures = {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "weights_megabytes": round(weights / 1e6, 1),
        "imports_megabytes": round(imports / 1e6, 1),
        "peak_megabytes": round(peak / 1e6, 1),
        "memory_ratio": round((peak - imports) / weights, 2),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
