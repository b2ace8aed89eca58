"""Which package may load which: the arrows between training, export and service, each tried in a fresh interpreter."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

LOADED = """
import importlib, json, pkgutil, sys

for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded_by(*modules: str) -> set[str]:
    """The top-level modules in memory after importing the modules and everything below them."""
    done = subprocess.run([sys.executable, "-c", LOADED, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip where a package is not installed: the runtime alone has neither torch nor the tools of the export."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def test_the_service_loads_no_torch_onnx_training_or_export():
    """The whole runtime, every module of it, runs without the packages that make models."""
    loaded = loaded_by("dragoman")

    assert {"dragoman", "onnxruntime", "grpc"} <= loaded  # it did load everything
    assert loaded.isdisjoint({"torch", "onnx", "onnxscript", "safetensors", "dragoman_training", "dragoman_export"})


@needs("torch")
def test_training_does_not_load_the_service_or_the_export():
    """Training a model needs no server and no export tools."""
    loaded = loaded_by("dragoman_training")

    assert {"dragoman_training", "torch"} <= loaded
    assert loaded.isdisjoint({"dragoman", "dragoman_export", "onnx", "onnxruntime", "onnxscript", "grpc"})


@needs("torch", "onnx", "onnxscript")
def test_the_export_does_not_load_the_server():
    """The bridge reads training and writes bundles; gRPC and metrics are none of its business."""
    loaded = loaded_by("dragoman_export")

    assert {"dragoman_export", "torch", "onnx"} <= loaded
    assert loaded.isdisjoint({"grpc", "prometheus_client"})


@pytest.mark.parametrize("module", ["dragoman.bundle", "dragoman.inspection"])
def test_the_bundle_format_needs_the_standard_library_alone(module):
    """A bundle can be read, written and shown where nothing but Python is installed."""
    loaded = loaded_by(module) - {"dragoman", "__main__", "__mp_main__"}

    # What a bare interpreter has loaded here (start-up hooks of site-packages) is not the bundle's doing.
    assert loaded - loaded_by() <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("policy", ["dragoman.engine.scheduler", "dragoman.engine.queue", "dragoman.engine.slots"])
def test_policy_loads_no_runtime(policy):
    """What decides is plain Python: it can be tested and read without ONNX Runtime or gRPC."""
    assert loaded_by(policy).isdisjoint({"onnxruntime", "grpc", "google", "prometheus_client"})


def test_a_client_may_be_in_a_process_with_one_of_the_inference_protocol():
    """Others generate messages of the same names, and no process can have them twice: only the server has ours."""
    code = "import sys, dragoman.client; print('dragoman.oip' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_help_is_fast_because_it_loads_no_runtime():
    """The console script starts without the heavy imports; a command loads what it needs when it runs."""
    assert loaded_by("dragoman.cli.main").isdisjoint({"onnxruntime", "grpc", "google", "prometheus_client", "torch"})
