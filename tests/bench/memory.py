"""Peak memory of `dragoman prepare` and `dragoman train` on a made-up corpus of millions of pairs.

    python tests/bench/memory.py                   # 2 million pairs; the limit is 1.5 GB for each command
    python tests/bench/memory.py --pairs 20000     # a trial
    python tests/bench/memory.py --kind unigram    # only that kind of tokenizer

Every command runs as a process of its own; printed are its time and the most memory it had resident, where pages of
memory-mapped token shards that happen to be in memory count too. Exit status 1 if a command fails or needs more than
the limit. The corpus, about 300 bytes a pair, and what is made of it lie in a temporary folder.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

CONFIG = """
[data]
train_source = "data/train.source"
train_target = "data/train.target"
dev_source = "data/dev.source"
dev_target = "data/dev.target"
max_source_tokens = 128
max_target_tokens = 128
batch_tokens = 2048

[tokenizer]
kind = "{kind}"
vocab_size = {vocab_size}

[model]
d_model = 64
num_heads = 2
ffn_dim = 64
encoder_layers = 1
decoder_layers = 1
tied_embeddings = "all"

[optimizer]
learning_rate = 1e-3

[schedule]
steps = {steps}
warmup_steps = 1

[loop]
validate_every = {steps}
"""


def write_corpus(folder: Path, pairs: int) -> None:
    """Sentences of 5 to 30 invented words each side, frequent and rare ones as in real text (Zipf's law)."""
    rng = random.Random(1)
    for side, letters in (("source", "abcdefghijklmnoprst"), ("target", "aeioubcdfghklmnprtvz")):
        words = ["".join(rng.choices(letters, k=rng.randint(2, 11))) for _ in range(50_000)]
        weights = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))
        with (folder / f"corpus.{side}").open("w") as file:
            for _ in range(pairs):
                file.write(" ".join(rng.choices(words, cum_weights=weights, k=rng.randint(5, 30))) + "\n")


def measure(folder: Path, *arguments: str) -> float:
    """Run a command; print and return its peak resident memory in MB."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "dragoman.cli.main", *arguments], cwd=folder)
    _, status, usage = os.wait4(process.pid, 0)
    peak = usage.ru_maxrss / 1000 if sys.platform == "linux" else usage.ru_maxrss / 1e6
    print(f"{' '.join(arguments[:2])}: {peak:.0f} MB at most, {time.monotonic() - start:.0f} s", flush=True)
    if status:
        sys.exit(f"dragoman {arguments[0]} failed with status {os.waitstatus_to_exitcode(status)}")
    return peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2_000_000)
    parser.add_argument("--kind", choices=("unigram", "bpe"), nargs="*", default=["unigram", "bpe"])
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=1500, metavar="MB")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, args.pairs)
        files = ["--source", "corpus.source", "--target", "corpus.target"]
        peaks = [measure(folder, "prepare", "pairs", *files, "--dev", "200", "--test", "200", "--out", "data")]
        for kind in args.kind:
            config = CONFIG.format(kind=kind, vocab_size=args.vocab_size, steps=args.steps)
            (folder / f"{kind}.toml").write_text(config)
            shards = folder / "data" / ".dragoman-shards"
            before = set(shards.glob("*"))
            peaks.append(measure(folder, "train", f"{kind}.toml", "--out", kind))  # tokenizers, shards, some steps
            peaks.append(measure(folder, "train", f"{kind}.toml", "--out", f"{kind}-again"))  # finds the shards
            if len(set(shards.glob("*")) - before) != 1:
                sys.exit(f"the second run with {kind} did not find the token shards of the first")
    return int(max(peaks) > args.limit)


if __name__ == "__main__":
    sys.exit(main())
