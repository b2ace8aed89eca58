"""Every search of the engine, over real graphs, against the plain PyTorch reference."""

import subprocess
import sys
from pathlib import Path

from dragoman_export.targets import FP32

BENCH = Path(__file__).parents[1] / "bench" / "decoding.py"


def test_greedy_and_beams_of_1_to_8_with_all_options_are_pytorchs(reverse_data, reverse_run, aligned_export):
    """Penalties, that for coverage included, patience, n-best, steering, prefixes, alternatives: tokens and scores of
    every hypothesis.
    """
    arguments = [reverse_run, aligned_export(FP32).path, reverse_data / "dev.source", "--count", "40"]
    done = subprocess.run(
        [sys.executable, BENCH, *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 39 and all(line.split(": ")[0].endswith("ties, 0 differ") for line in lines)
    assert sum("coverage_penalty" in line for line in lines) == 9
    assert sum(int(line.split()[0]) for line in lines) > 0.98 * 40 * 39
