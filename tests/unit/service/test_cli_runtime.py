"""What serve and generate share."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from dragoman.cli import generate, runtime, serve
from dragoman.config import SECTIONS, DeviceConfig, EngineConfig, ServerConfig
from dragoman.errors import ConfigError
from dragoman.setting import settings_of


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def version(name: str) -> str:
        if name not in names:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(runtime, "version", version)
    monkeypatch.setattr(runtime, "find_spec", lambda name: object() if names else None)


def test_two_onnx_runtimes_are_refused(monkeypatch):
    """They overwrite each other's files."""
    install(monkeypatch, "onnxruntime", "onnxruntime-gpu")
    with pytest.raises(ConfigError, match="pip uninstall onnxruntime onnxruntime-gpu"):
        runtime.check_runtime()


def test_no_onnx_runtime_names_the_extra(monkeypatch):
    """Either will do."""
    install(monkeypatch)
    with pytest.raises(ConfigError, match=r"extra \[cpu\].*\[gpu\]"):
        runtime.check_runtime()


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-gpu"])
def test_one_onnx_runtime_is_right(monkeypatch, name):
    """Whichever it is."""
    install(monkeypatch, name)
    runtime.check_runtime()


def parse(command: Any, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_options_become_settings_and_their_defaults_are_the_settings_own():
    """Every flag lands in its field."""
    assert runtime.settings(ServerConfig, parse(serve)) == ServerConfig()
    assert runtime.settings(EngineConfig, parse(generate)) == EngineConfig()
    args = parse(serve, "--port", "0", "--host", "::1", "--slots", "3", "--drain-seconds", "0.5")
    assert runtime.settings(ServerConfig, args) == ServerConfig(host="::1", port=0, drain_seconds=0.5)
    assert runtime.settings(EngineConfig, args) == EngineConfig(num_slots=3)
    args = parse(generate, "--provider", "cuda", "--device", "1", "--gpu-mem-limit", "5000", "--no-cuda-graphs")
    assert runtime.settings(DeviceConfig, args) == DeviceConfig(1, 5000, cuda_graphs=False)


def test_every_setting_has_a_flag():
    """Nothing can be set in code alone."""
    for known in (known for section in SECTIONS.values() for known in settings_of(section)):
        if known.kind is bool:
            flags = [known.flag]
        elif known.is_list:
            flags = [known.flag, ",".join(map(str, known.default or ("a", "b")))]
        else:
            flags = [known.flag, str(known.choices[0] if known.choices else known.default)]
        if known.name == "bundles":
            assert parse(serve, "a", "b").bundle == ["a", "b"]
        elif not known.secret:
            assert hasattr(parse(serve, *flags), known.name), known.name


def test_a_bad_setting_is_refused_with_its_limit():
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match="--port is 99999; it must be from 0 to 65535"):
        serve.run(parse(serve, "--port", "99999"))
    with pytest.raises(ConfigError, match="--slots is 0; it must be from 1 to 65536"):
        serve.run(parse(serve, "--slots", "0"))


@pytest.mark.parametrize("flag", ["--device=1", "--gpu-mem-limit=5000", "--no-cuda-graphs"])
def test_settings_of_a_gpu_are_refused_on_the_cpu(flag):
    """They would have no effect there."""
    for command in (serve, generate):
        with pytest.raises(ConfigError, match=rf"{flag.partition('=')[0]} was given without --provider cuda"):
            command.run(parse(command, flag))
        runtime.check_device_flags(parse(command, flag, "--provider", "cuda-dry"))


@pytest.mark.parametrize("arguments", [("--provider", "cuda"), ("--device", "1")])
def test_a_server_chooses_what_it_runs_on(arguments):
    """Where its graphs run is not its clients' business."""
    with pytest.raises(ConfigError, match="and --target were both given"):
        generate.run(parse(generate, "--target", "h:1", *arguments, "a"))


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this ONNX Runtime has CUDA")
def test_cuda_is_refused_where_the_onnx_runtime_has_none():
    """Before the bundle's files are read, with what to do: nothing is served from the CPU instead."""
    for command in (serve, generate):
        with pytest.raises(ConfigError, match=r"pip uninstall onnxruntime, and install onnxruntime-gpu; .*\.\[gpu\]"):
            command.run(parse(command, "--provider", "cuda"))


def test_a_bundle_and_a_model_together_are_refused(tmp_path):
    """One of them would be ignored."""
    with pytest.raises(ConfigError, match="choose one"):
        runtime.bundle_path(tmp_path, "g2p-en")
    assert runtime.bundle_path(tmp_path, None) == tmp_path


def test_what_is_served_is_what_was_named_or_every_embedded_model_with_the_default_first(tmp_path, monkeypatch):
    """Several bundles side by side; one of the embedded ones alone by its name."""
    bundles = [tmp_path / name for name in ("b", "a")]
    assert runtime.served_paths(bundles, None) == bundles
    assert runtime.served_paths(bundles[:1], None) == bundles[:1]
    assert [path.name for path in runtime.served_paths([], "g2p-en")] == ["g2p-en"]
    for some in (bundles, bundles[:1]):
        with pytest.raises(ConfigError, match="choose one"):
            runtime.served_paths(some, "g2p-en")
    monkeypatch.setattr(runtime, "embedded_models", lambda: ["aaa", runtime.DEFAULT_MODEL, "zzz"])
    monkeypatch.setattr(runtime, "embedded_bundle", Path)
    assert runtime.served_paths([], None) == [Path(runtime.DEFAULT_MODEL), Path("aaa"), Path("zzz")]


def test_an_unknown_embedded_model_is_refused_with_those_there_are():
    """By name."""
    with pytest.raises(ConfigError, match="'nothing'"):
        runtime.bundle_path(None, "nothing")


@pytest.mark.parametrize(
    "arguments",
    [("--stream",), ("--stream", "a", "b"), ("--stream", "--json", "a"), ("--bundle", "x", "--target", "h:1", "a")],
)
def test_options_that_contradict_each_other_are_refused(arguments):
    """Nothing is ignored in silence."""
    with pytest.raises(ConfigError):
        generate.run(parse(generate, *arguments))


def test_a_missing_bundle_is_named():
    """The message holds the file that could not be read."""
    from dragoman.errors import BundleError

    with pytest.raises(BundleError, match=r"nowhere is no bundle.*manifest\.json"):
        serve.run(parse(serve, str(Path("nowhere"))))
