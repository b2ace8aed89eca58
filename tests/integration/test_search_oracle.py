"""Every search of the engine, over real graphs, against the plain PyTorch reference."""

import subprocess
import sys
from pathlib import Path

import pytest

from dragoman_export.exporter import ExportOptions, export
from dragoman_training.checkpoint import load_model

BENCH = Path(__file__).parents[1] / "bench" / "decoding.py"


@pytest.fixture(scope="module")
def exact_bundle(reverse_data, reverse_run, tmp_path_factory):
    """The toy model in fp32 alone, with an alignment graph."""
    sources = tuple((reverse_data / "dev.source").read_text().split()[:20])
    options = ExportOptions("exact", "1", sources=sources, alignment=True)
    return export(load_model(reverse_run), options, tmp_path_factory.mktemp("exact") / "bundle").bundle.path


def test_greedy_and_beams_of_1_to_8_with_all_options_are_pytorchs(reverse_data, reverse_run, exact_bundle):
    """Penalties, that for coverage included, patience, n-best, steering, prefixes, alternatives: tokens and scores of
    every hypothesis.
    """
    arguments = [reverse_run, exact_bundle, reverse_data / "dev.source", "--count", "40"]
    done = subprocess.run(
        [sys.executable, BENCH, *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 39 and all(line.split(": ")[0].endswith("ties, 0 differ") for line in lines)
    assert sum("coverage_penalty" in line for line in lines) == 9
    assert sum(int(line.split()[0]) for line in lines) > 0.98 * 40 * 39
