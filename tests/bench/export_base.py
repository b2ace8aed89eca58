"""Seconds and peak memory of an export: 6 + 6 layers, width 512, feed-forward 2,048, 32,000 tokens, random weights.

    python tests/bench/export_base.py --sources 64

Makes a checkpoint in a temporary folder and exports it in a process of its own, loading included. Prints one JSON
object; ``memory_ratio`` is the peak above what the imports take, in sizes of model.safetensors. Goals: under 60 seconds
and at most 4. The sources, 5 to 40 tokens long, are what PyTorch and ONNX Runtime both decode: their share of the time
grows with their number. Linux only.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

VOCABULARY = 32_000
MAX_TOKENS = 48
SHAPE = {"d_model": 512, "num_heads": 8, "ffn_dim": 2048, "encoder_layers": 6, "decoder_layers": 6}


def random_sources(tokens: tuple[str, ...], count: int) -> list[str]:
    """Texts of 5 to 40 tokens."""
    rng = random.Random(0)
    return [" ".join(rng.choices(tokens[4:], k=rng.randint(5, 40))) for _ in range(count)]


@torch.inference_mode()
def write(folder: Path, count: int) -> None:
    """A checkpoint, and texts beside it. Its answers end: the bias of </s> is such that it is the best now and then."""
    from dragoman_training.checkpoint import FORMAT, write_checkpoint
    from dragoman_training.config import ModelConfig
    from dragoman_training.data import encode_source
    from dragoman_training.decode import greedy
    from dragoman_training.model import Transformer
    from dragoman_training.tokenizer import SPECIAL_IDS, PlainTokenizer, file_names

    tokenizer, other = (
        PlainTokenizer("piece", ["<pad>", "<s>", "</s>", "<unk>", *(f"{side}{i}" for i in range(VOCABULARY - 4))])
        for side in "st"
    )
    config = ModelConfig(**SHAPE, source_vocab_size=VOCABULARY, target_vocab_size=VOCABULARY)
    torch.manual_seed(0)
    model = Transformer(config).eval()
    texts = random_sources(tuple(tokenizer.tokens), count)
    bias = model.projection.bias.data
    bias[SPECIAL_IDS.eos] = -1000
    gaps = []
    sources = [encode_source(tokenizer, text) for text in texts[:16]]
    for source, answer in zip(sources, greedy(model, sources, MAX_TOKENS), strict=True):
        inputs = torch.tensor([[SPECIAL_IDS.decoder_start, *answer.tokens[:-1]]])
        logits = model(torch.tensor([source]), torch.tensor([len(source)], dtype=torch.int32), inputs)[0]  # (T, V)
        gaps.append(logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0] - logits[:, SPECIAL_IDS.eos])
    bias[SPECIAL_IDS.eos] += torch.cat(gaps).quantile(1 / 16)

    files = file_names(tokenizer, other)
    record = {
        "format": FORMAT,
        "model": vars(config),
        "special_ids": SPECIAL_IDS.as_dict(),
        "tokenizers": {
            side: {
                "kind": kept.kind,
                "file": files[side],
                "sha256": hashlib.sha256(kept.to_bytes()).hexdigest(),
                "num_tokens": len(kept),
                "normalization": kept.normalization,
            }
            for side, kept in (("source", tokenizer), ("target", other))
        },
        "limits": {"max_source_tokens": MAX_TOKENS, "max_target_tokens": MAX_TOKENS},
        "training": {},
        "data": {},
    }
    write_checkpoint(folder / "base", dict(model.named_parameters()), (tokenizer, other), record, {})
    (folder / "sources").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def peak_bytes() -> int:
    """The most memory that this process has held."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def export(folder: Path) -> dict[str, float]:
    """The export by its command, measured. The imports come first and do not count."""
    import onnxscript  # noqa: F401  # what torch.onnx.export imports when it is called
    import torch._dynamo  # noqa: F401  # the same
    from torch.onnx._internal.exporter import _core  # noqa: F401  # the same

    from dragoman_export import exporter  # noqa: F401
    from dragoman_export.cli import export as command

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = [folder / "base", "--sources", folder / "sources", "--out", folder / "bundle"]
    imports, started = peak_bytes(), time.perf_counter()
    status = command.run(parser.parse_args([str(argument) for argument in arguments]))
    if status:
        raise SystemExit(status)
    weights = (folder / "base" / "model.safetensors").stat().st_size
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "weights_megabytes": round(weights / 1e6, 1),
        "peak_megabytes_above_imports": round((peak_bytes() - imports) / 1e6, 1),
        "memory_ratio": round((peak_bytes() - imports) / weights, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=64, metavar="N", help="how many are decoded (default: 64)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # what the process that is measured gets
    args = parser.parse_args()
    if args.folder is not None:
        print(json.dumps(export(args.folder)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.sources)
        return subprocess.run([sys.executable, __file__, "--folder", folder], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
