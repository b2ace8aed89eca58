"""From a file of parallel text to a served translator, by the commands that a user would type, at toy size."""

import gzip
import json
import random
import subprocess
import sys

from tests.processes import dragoman

WORDS = {"one": "eins", "red": "rot", "house": "Haus", "café": "Café", "tree": "Baum", "big": "groß", "sea": "See"}
SHAPE = ("d_model=64", "num_heads=2", "ffn_dim=128", "encoder_layers=1", "decoder_layers=1", "dropout=0.0")
SETTINGS = (
    *(f"model.{setting}" for setting in SHAPE),
    "tokenizer.vocab_size=320",
    "data.batch_tokens=1024",
    "schedule.steps=240",
    "schedule.warmup_steps=40",
    "schedule.cooldown_steps=120",
    "loop.validate_every=60",
)


def sentences(number):
    """Pairs of a toy language: word for word, numbers stay."""
    rng = random.Random(1)
    for _ in range(number):
        source = rng.choices([*WORDS, "7", "42"], k=rng.randint(1, 5))
        yield " ".join(source), " ".join(WORDS.get(word, word) for word in source)


def test_from_parallel_text_to_a_served_translator(tmp_path):
    """Prepare, train a preset, average, evaluate, draw, export and generate: all agree, and the model has learned."""
    with gzip.open(tmp_path / "corpus.tsv.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"{source}\t{target}\n" for source, target in sentences(4000))
    dragoman("prepare", "pairs", "--tsv", "corpus.tsv.gz", "--dev", 50, "--test", 100, "--out", "data", cwd=tmp_path)
    report = json.loads((tmp_path / "data" / "report.json").read_text())
    assert report["read"]["train"] == 4000 and report["dropped"]["same pair before"] > 0
    overrides = [argument for setting in SETTINGS for argument in ("--set", setting)]
    dragoman("train", "tiny", *overrides, "--out", "run", cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [60, 120, 180, 240]
    assert lines[-1]["signatures"]["bleu"].startswith("BLEU|nrefs:1")
    dragoman("train", "report", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "report.png").read_bytes().startswith(b"\x89PNG")
    dragoman("average", "run", "--last", 2, "--out", "averaged", cwd=tmp_path)
    files = ("--source", "data/test.source", "--target", "data/test.target")
    dragoman("evaluate", "averaged", *files, "--json", "checkpoint.json", "--output", "outputs", cwd=tmp_path)
    figures = json.loads((tmp_path / "checkpoint.json").read_text())
    assert figures["exact_match"] >= 0.95 and figures["bleu"] > 95, figures
    dragoman("export", "averaged", "--sources", "data/dev.source", "--out", "bundle", cwd=tmp_path)
    dragoman("evaluate", "--bundle", "bundle", *files, "--json", "bundle.json", cwd=tmp_path)
    served = json.loads((tmp_path / "bundle.json").read_text())
    for name in ("exact_match", "bleu", "chrf", "number_copy_rate"):
        assert served[name] == figures[name], name
    command = [sys.executable, "-m", "dragoman.cli.main", "generate", "--bundle", str(tmp_path / "bundle")]
    text = "big house 42\n\ncafé Ωμέγα 🦩\n"  # characters that no training text had are spelled in bytes, not refused
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[:2] == ["groß Haus 42", ""]
    assert len(done.stdout.splitlines()) == 3
