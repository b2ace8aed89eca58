"""What the runner does to the process it lives in."""

import os
import subprocess
import sys


def test_onnx_runtime_reports_to_nobody(tmp_path):
    """Opening a model leaves no usage database in the home folder and starts no thread to upload one."""
    program = """
import os
from dragoman.config import EngineConfig, embedded_bundle
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel
ServedModel.load(embedded_bundle("g2p-en"), EngineConfig(num_slots=1), TextLimits(100, 1))
print(os.environ["ORT_DISABLE_TELEMETRY"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert list(tmp_path.rglob("*")) == []
