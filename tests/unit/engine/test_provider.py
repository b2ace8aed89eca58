"""CUDA or nothing: what ONNX Runtime would do on the CPU instead is found, and refused by name."""

from types import SimpleNamespace

import onnxruntime as ort
import pytest

from dragoman.bundle import load_manifest
from dragoman.config import embedded_bundle
from dragoman.engine import provider
from dragoman.engine.provider import CUDA, check_available, check_placement, misplaced_nodes, record_placement
from dragoman.errors import BundleError, ConfigError


def session(file):
    """A real session, on the CPU, that tells where its nodes are."""
    options = ort.SessionOptions()
    record_placement(options)
    path = embedded_bundle("g2p-en") / file
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class ScriptedSession:
    """A session with nodes here and there."""

    def __init__(self, providers, **nodes):
        self.providers, self.nodes = providers, nodes

    def get_providers(self):
        return self.providers

    def get_provider_graph_assignment_info(self):
        for name, kinds in self.nodes.items():
            nodes = [SimpleNamespace(op_type=kind, name=f"node_{kind}") for kind in kinds]
            yield SimpleNamespace(ep_name=name, get_nodes=lambda nodes=nodes: nodes)


def test_onnx_runtime_tells_the_nodes_that_are_on_the_cpu():
    """Of a graph that is there altogether, all attention and all products are named, and no arithmetic of shapes."""
    graphs = load_manifest(embedded_bundle("g2p-en")).graphs[0]
    for graph in (graphs.encoder, graphs.decoder):
        kinds = [name.partition(" ")[0] for name in misplaced_nodes(session(graph.file))]
        required = sum(number for kind, number in graph.required_nodes.items() if kind.startswith("GroupQuery"))
        assert kinds.count("GroupQueryAttention") == required > 0
        assert "MatMulIntegerToFloat" in kinds or "MatMulInteger" in kinds or "DynamicQuantizeMatMul" in kinds
        assert "Shape" not in kinds and "Squeeze" not in kinds


def test_a_session_on_the_cpu_is_refused_as_a_provider_that_did_not_load():
    """ONNX Runtime only logs it. The message has what the loader says, and what to install."""
    with pytest.raises(ConfigError, match=r"decoder\.onnx: .* CUDA provider does not load: .*\.so.*\.\[gpu\]"):
        check_placement(ScriptedSession(["CPUExecutionProvider"]), "decoder.onnx")


def test_a_node_on_the_cpu_is_refused_by_name():
    """But for shapes, whose readers are on the CPU."""
    both = [CUDA, "CPUExecutionProvider"]
    check_placement(ScriptedSession(both, **{CUDA: ["MatMul", "Sin"], "CPUExecutionProvider": ["Squeeze"]}), "a.onnx")
    strange = ScriptedSession(both, **{CUDA: ["MatMul"], "CPUExecutionProvider": ["Squeeze", "Sin", "Mish"]})
    with pytest.raises(BundleError, match=r"^a\.onnx: .* would run Sin node_Sin, Mish node_Mish on the CPU"):
        check_placement(strange, "a.onnx")


@pytest.mark.skipif(CUDA in ort.get_available_providers(), reason="the ONNX Runtime that is installed has CUDA")
def test_an_onnx_runtime_without_cuda_is_refused_with_what_to_install():
    """Before a file is read."""
    with pytest.raises(
        ConfigError, match=r"which is for .*CPUExecutionProvider alone: pip uninstall onnxruntime, .*gpu"
    ):
        check_available(0)


def test_missing_libraries_are_refused_by_name(monkeypatch, capfd):
    """Those that the provider opens without, too; ONNX Runtime's own search for them prints nothing on stdout."""
    monkeypatch.setattr(provider, "available_providers", lambda: (CUDA,))
    monkeypatch.setattr(provider, "cuda_version", lambda: "13.0")
    monkeypatch.setattr(provider.cuda, "read_driver", lambda: provider.cuda.Driver((13, 0), ("a device",)))
    monkeypatch.setattr(ort, "preload_dlls", lambda directory: print("Failed to load"))
    monkeypatch.setattr(ort, "set_default_logger_severity", lambda severity: None)
    monkeypatch.setattr(provider, "preload_libraries", provider.preload_libraries.__wrapped__)  # not once a process
    missing = {"libcudnn.so.9": "libcudnn.so.9: not there"}
    monkeypatch.setattr(provider.cuda, "missing_libraries", lambda names: missing if "libcudnn.so.9" in names else {})
    with pytest.raises(
        ConfigError, match=r"do not load: libcudnn\.so\.9: not there; onnxruntime-gpu\[cuda,cudnn\] brings"
    ):
        check_available(0)
    missing.clear()
    assert check_available(0) == "a device"
    assert capfd.readouterr().out == ""
