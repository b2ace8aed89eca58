"""Look at this installation and machine, and say what is missing and what to do about it.

Prints versions, what the processor can do, cores and memory within their limits, the GPU and its libraries, and whether
the models load: those that ship with this build, or BUNDLE. Works without ONNX Runtime, too, and says so.
Without --provider, it looks whether the ONNX Runtime that is installed can run what it is for: the CPU or CUDA.
A line that begins with "!" is worth a look; "X" stands before what keeps a server from running.
Exit status: 0 nothing does, 1 something does.

  dragoman doctor
  dragoman doctor bundles/en-de --provider cuda
  dragoman doctor --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Final

from dragoman import cuda
from dragoman.bundle import ModelBundle
from dragoman.cli import runtime
from dragoman.config import PROVIDERS, DeviceConfig, EngineConfig, ServerConfig, embedded_bundle, embedded_models
from dragoman.errors import ConfigError, DragomanError
from dragoman.machine import Machine, read_machine

SUMMARY = "look at this installation and machine, and say what is missing"
EXTRA: str | None = None

_PACKAGES: Final = ("numpy", "protobuf", "grpcio", "grpcio-health-checking", "sentencepiece", "prometheus-client")
_RUNTIMES: Final = ("onnxruntime", "onnxruntime-gpu")
_INSTALL: Final = "in the source folder, pip install -c deploy/constraints.txt '.[cpu]' (or '.[gpu]')"


class State(StrEnum):
    """How it is with what was found."""

    OK = "ok"
    NOTE = "note"  # works, and is worth a look
    PROBLEM = "problem"  # keeps a server from running


_MARKS: Final = {State.OK: " ", State.NOTE: "!", State.PROBLEM: "X"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    group: str
    name: str
    found: str
    state: State = State.OK
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("bundle", type=Path, nargs="?", metavar="BUNDLE", help="a folder made by dragoman export")
    parser.add_argument("--provider", choices=PROVIDERS, help="what graphs shall run on")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the GPU to use (default: 0)")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="as serve will be told (default: 1)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="as serve will be told (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all that was found")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if something keeps a server from running."""
    engine = EngineConfig(num_replicas=args.replicas, num_threads=args.threads)
    device = DeviceConfig(device_id=args.device)
    provider = args.provider or ("cuda" if _version("onnxruntime-gpu") is not None else "cpu")
    findings = [
        *check_packages(),
        *check_machine(read_machine(), engine),
        *check_gpu(provider, device),
        *check_models(args.bundle, provider, engine, device),
    ]
    problems = sum(finding.state is State.PROBLEM for finding in findings)
    if args.json:
        report = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"ok": not problems, "provider": provider, "findings": report}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(describe(findings)))
        print(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'} for --provider {provider}")
    return 1 if problems else 0


def describe(findings: list[Finding]) -> Iterator[str]:
    """Lines for people: a block for each group, with what to do below what needs it."""
    width = max(len(finding.name) for finding in findings) + 2
    for group, members in groupby(findings, lambda finding: finding.group):
        yield group
        for finding in members:
            yield f"{_MARKS[finding.state]} {finding.name:<{width}}{finding.found}"
            if finding.remedy:
                yield f"  {'':<{width}}-> {finding.remedy}"


def check_packages() -> Iterator[Finding]:
    """What is installed, and whether ONNX Runtime is, once."""
    group = "packages"
    yield Finding(group, "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in ("dragoman", *_PACKAGES):
        found = _version(name)
        if found is None:
            yield Finding(group, name, "not installed", State.PROBLEM, _INSTALL)
        else:
            yield Finding(group, name, found)
    name = " and ".join(name for name in _RUNTIMES if _version(name) is not None) or _RUNTIMES[0]
    try:
        runtime.check_runtime()
        from dragoman.engine.provider import available_providers

        providers = ", ".join(available_providers())
    except ConfigError as error:
        yield Finding(group, name, "twice" if " and " in name else "not installed", State.PROBLEM, str(error))
    except ImportError as error:
        yield Finding(group, name, f"cannot be imported: {error}", State.PROBLEM, f"install it anew: {_INSTALL}")
    else:
        yield Finding(group, name, f"{_version(name) or 'of unknown version'}, for {providers}")


def check_machine(machine: Machine, engine: EngineConfig) -> Iterator[Finding]:
    """The processor, and whether the engine's threads and memory fit it."""
    group = "machine"
    features = ", ".join(machine.features) or "none of avx2, avx512, vnni, dot product"
    yield Finding(group, "processor", f"{machine.processor or 'unknown'} with {features}")
    if machine.multiplies_int8_fast:
        yield Finding(group, "int8", "exact, and fast: the processor has instructions for it")
    else:
        yield Finding(
            group,
            "int8",
            "exact, but slower than it could be: this processor has no VNNI (or dot product), and ONNX Runtime is told "
            "not to let the sums of its older instructions saturate",
            State.NOTE,
        )
    limit = (
        "" if machine.core_limit is None else f", of which its control group gives the time of {machine.core_limit:g}"
    )
    yield Finding(group, "cores", f"{machine.cores}{limit}")
    yield _check_threads(group, engine, machine.usable_cores)
    yield _check_memory(group, engine, machine)


def _check_threads(group: str, engine: EngineConfig, cores: float) -> Finding:
    wanted = engine.num_replicas * engine.num_threads
    found = f"{engine.num_replicas} x {engine.num_threads} (--replicas x --threads) on {cores:g} cores"
    if wanted > max(1, cores):
        return Finding(
            group, "threads", found, State.NOTE, "threads without a core of their own slow each other: have fewer"
        )
    if 2 * wanted <= cores:
        return Finding(group, "threads", f"{found}; for more throughput, --replicas {int(cores) // engine.num_threads}")
    return Finding(group, "threads", found)


def _check_memory(group: str, engine: EngineConfig, machine: Machine) -> Finding:
    usable = machine.usable_memory
    if usable is None:
        return Finding(group, "memory", "unknown")
    limit = "" if machine.memory_limit is None else " within its control group's limit"
    found = f"{_gib(usable)}{limit}"
    caches = engine.num_replicas * engine.max_kv_cache_bytes
    if caches > usable:
        remedy = f"KV caches may take {_gib(caches)}: lower --max-kv-cache-bytes or --replicas"
        return Finding(group, "memory", found, State.NOTE, remedy)
    return Finding(group, "memory", f"{found}; KV caches take {_gib(caches)} at most")


def check_gpu(provider: str, device: DeviceConfig) -> Iterator[Finding]:
    """The driver, its devices, CUDA's libraries, and whether ONNX Runtime can use them: problems for ``cuda`` alone."""
    group, wanted = "GPU", provider == "cuda"
    try:
        driver = cuda.read_driver()
    except ConfigError as error:
        if not wanted:
            yield Finding(group, "driver", "none, and none is needed to run on the CPU")
            return
        yield Finding(group, "driver", "none", State.PROBLEM, str(error))
    else:
        yield Finding(group, "driver", f"runs CUDA {driver.version[0]}.{driver.version[1]} and older")
        for item in driver.devices:
            capability = f"compute capability {item.compute_capability[0]}.{item.compute_capability[1]}"
            yield Finding(group, f"device {item.index}", f"{item.name}, {_gib(item.memory_bytes)}, {capability}")
    packages = ", ".join(f"{name} {number}" for name, number in cuda.nvidia_packages().items())
    yield Finding(group, "packages", packages or "none of NVIDIA's")
    if not wanted:
        return
    try:
        from dragoman.engine import provider as placement
    except ImportError:
        yield Finding(group, "CUDA", "not looked at: ONNX Runtime cannot be imported", State.PROBLEM)
        return
    if built_for := placement.cuda_version():
        placement.preload_libraries()
        names = cuda.library_names(built_for)
        absent = cuda.missing_libraries(names)
        remedy = f"onnxruntime-gpu[cuda,cudnn] brings it: {cuda.INSTALL}"
        for name in names:
            if name in absent:
                yield Finding(group, name, absent[name].removeprefix(f"{name}: "), State.PROBLEM, remedy)
            else:
                yield Finding(group, name, "loads")
    try:
        placement.check_available(device.device_id)
    except ConfigError as error:
        yield Finding(group, "CUDA", "cannot be used", State.PROBLEM, str(error))
    else:
        yield Finding(group, "CUDA", f"device {device.device_id} can be used")


def check_models(path: Path | None, provider: str, engine: EngineConfig, device: DeviceConfig) -> Iterator[Finding]:
    """Whether a bundle, or each embedded one, is whole, and loads as a server would load it."""
    graphs_for = provider.removesuffix("-dry")
    paths = [embedded_bundle(name) for name in embedded_models()] if path is None else [path]
    for folder in paths:
        try:
            bundle = ModelBundle.load(folder)
        except DragomanError as error:
            yield Finding("models", folder.name, "damaged", State.PROBLEM, str(error))
            continue
        kinds = ", ".join(f"{graphs.provider}/{graphs.precision}" for graphs in bundle.manifest.graphs)
        if all(graphs.provider != graphs_for for graphs in bundle.manifest.graphs):
            state = State.NOTE if path is None else State.PROBLEM
            precision = "fp16" if graphs_for == "cuda" else "int8 or fp32"
            remedy = f"it has no graphs for {graphs_for}: export the checkpoint with --precision {precision}"
            yield Finding("models", folder.name, f"whole, with graphs for {kinds}", state, remedy)
            continue
        problem = _load_problem(folder, provider, engine, device)
        if problem:
            yield Finding("models", folder.name, f"whole ({kinds}), but does not load", State.PROBLEM, problem)
            continue
        yield Finding("models", folder.name, f"loads for {provider}, and gives its golden answers ({kinds})")
        if provider == "cuda":
            yield from check_attention(folder, device)


def _load_problem(folder: Path, provider: str, engine: EngineConfig, device: DeviceConfig) -> str:
    try:
        from dragoman.pipeline import TextLimits
        from dragoman.served_model import ServedModel

        server = ServerConfig()
        limits = TextLimits(server.max_text_bytes, server.max_segments)
        ServedModel.load(folder, engine, limits, provider=provider, device=device)
    except (DragomanError, ImportError) as error:
        return str(error)
    return ""


def check_attention(
    folder: Path, device: DeviceConfig, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> Iterator[Finding]:
    """Which implementation each attention node of a bundle runs with on CUDA.

    ONNX Runtime decides by the shapes, reads its environment once, and prints to stdout: so a process of its own loads
    the bundle, whose golden set is answered on the way, and answers nothing more.
    """
    arguments = ["--bundle", str(folder), "--provider", "cuda", "--device", str(device.device_id), "--no-cuda-graphs"]
    done = run(
        [sys.executable, "-m", "dragoman.cli.main", "generate", *arguments],
        env={**os.environ, "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    kernels = cuda.attention_kernels(done.stdout)
    if done.returncode != 0 or not kernels:
        reason = done.stderr.strip().splitlines()[-1:] or ["ONNX Runtime told nothing"]
        yield Finding("attention", "kernels", f"unknown: {reason[0]}", State.NOTE)
    for item in kernels:
        name = f"{item.operator} {item.node}".strip()
        if item.kernel == "MATH":
            remedy = "not fused: cuDNN 9 and a GPU of compute capability 9.0 or later have kernels for it"
            yield Finding("attention", name, item.kernel, State.NOTE, remedy)
        else:
            yield Finding("attention", name, item.kernel)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
