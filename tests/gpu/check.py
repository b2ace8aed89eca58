"""Checks and measures the device runner: on a GPU, or on the CPU in its place as far as that goes. See run.sh.

Checks: logits are those of the fp32 graphs on the CPU, with rows that joined at different steps, and stay so without
cuDNN's and XQA's attention; a step writes its own rows' next positions and nothing else; a row does not feel its
neighbours; steps replayed from CUDA graphs are those that were launched one kernel at a time.

Measured: the first run of each shape, steps of each bucket of rows with and without CUDA graphs, the share of the
memory's bandwidth that they reach, and where it is importable CTranslate2 at the same size and lengths.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dragoman import cuda
from dragoman.bundle import GraphSet, Limits, ModelBundle, ModelShape
from dragoman.config import DeviceConfig
from dragoman.engine import provider as placement
from dragoman.engine.device import Device
from dragoman.engine.device_runner import DeviceRunner
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.errors import DragomanError
from dragoman.types import FloatArray, TokenIds

SIZES = {  # width, heads, inner width, encoder and decoder layers, vocabulary, source and target capacity
    "toy": (64, 1, 96, 1, 1, 64, 64),
    "small": (256, 4, 1024, 6, 2, 8000, 128),
    "base": (512, 8, 2048, 6, 6, 32000, 128),
}
RELATIVE_TOLERANCE = 0.01  # root mean square of the differences over that of the logits, as the export has it
SOURCE_TOKENS, STEPS = 25, 30  # of each row that is timed
MAX_ENCODE_TOKENS = 4096
FIRST_TOKEN = 4  # those below are special in a vocabulary that is made here
VARIANTS = {  # of a process's environment: which kernels of attention ONNX Runtime may choose
    "parity": {},
    "parity without cuDNN's attention": {"ORT_ENABLE_CUDNN_FLASH_ATTENTION": "0"},
    "parity without XQA": {"ORT_ENABLE_XQA": "0"},
}


@dataclass(frozen=True)
class Subject:
    """The graphs that are looked at, and where they lie."""

    name: str
    folder: Path
    shape: ModelShape
    limits: Limits
    graphs: GraphSet  # fp16
    reference: GraphSet | None  # fp32, for the CPU
    never_generated: TokenIds
    ffn_dim: int  # of a bundle, which does not tell, four times the width

    def runner(self, device: Device, num_slots: int) -> DeviceRunner:
        """One of so many rows, warmed up by nobody."""
        return DeviceRunner(
            device,
            self.shape,
            self.graphs,
            self.folder.joinpath,
            num_slots,
            self.limits,
            MAX_ENCODE_TOKENS,
            self.never_generated,
        )

    def tokens(self, *shape: int, seed: int = 0) -> Any:
        """Some, of no special meaning."""
        vocabulary = min(self.shape.source_vocab_size, self.shape.target_vocab_size)
        return np.random.default_rng(seed).integers(FIRST_TOKEN, vocabulary, shape)


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    state: str  # ok, FAILED, skipped, or measured
    detail: str
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=("cuda", "cuda-dry"), help="default: cuda where it can be used")
    parser.add_argument("--device", type=int, default=0, help="the GPU to use (default: 0)")
    parser.add_argument("--bundle", type=Path, help="look at its graphs; default: at some with random weights")
    parser.add_argument("--size", choices=SIZES, help="of these (default: base; on the CPU, toy)")
    parser.add_argument("--slots", type=int, help="the most rows (default: 128; on the CPU, 8)")
    parser.add_argument("--json", type=Path, default=Path("runs/gpu-check.json"), help="where the figures go")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # see check_parity
    args = parser.parse_args()
    if args.child is not None:
        return child(args.child)

    started = time.perf_counter()
    gpu, refusal = find_gpu(args.device, args.provider)
    provider = args.provider or ("cuda-dry" if gpu is None else "cuda")
    if provider == "cuda" and gpu is None:
        print(f"check.py: {refusal}", file=sys.stderr)
        return 1
    device = Device(provider, DeviceConfig(device_id=args.device))
    slots = args.slots or (128 if provider == "cuda" else 8)
    results = [] if gpu is not None else [Result("everything that only a GPU can show", "skipped", refusal)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            subject = take(args.bundle) if args.bundle else make(args.size or default_size(provider), Path(folder))
        except ImportError as error:
            print(f"check.py: {error}: name a --bundle, or install what the export needs", file=sys.stderr)
            return 1
        tell(f"{subject.name} on {provider}, up to {slots} rows")
        for result in examine(subject, device, slots, gpu, Path(folder)):
            tell(f"{result.state:<9} {result.name}: {result.detail}")
            results.append(result)
    seconds = time.perf_counter() - started
    report = {
        "subject": subject.name,
        "provider": provider,
        "seconds": round(seconds, 1),
        "versions": {**versions(), **cuda.nvidia_packages()},
        "gpu": None if gpu is None else dataclasses.asdict(gpu),
        "results": [dataclasses.asdict(result) for result in results],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print("\n".join(table(report, results)))
    print(f"\n{seconds:.0f} s; figures in {args.json}")
    return 1 if any(result.state == "FAILED" for result in results) else 0


def tell(line: str) -> None:
    """What goes on, while it does."""
    print(line, file=sys.stderr, flush=True)


def find_gpu(device_id: int, provider: str | None) -> tuple[cuda.Device | None, str]:
    """The GPU, or why there is none."""
    if provider == "cuda-dry":
        return None, "cuda-dry was asked for"
    try:
        return placement.check_available(device_id), ""
    except DragomanError as error:
        return None, str(error)


def default_size(provider: str) -> str:
    return "base" if provider == "cuda" else "toy"


def take(path: Path) -> Subject:
    """A bundle's graphs. Raises BundleError where it has none for CUDA."""
    bundle = ModelBundle.load(path)
    manifest = bundle.manifest
    reference = [graphs for graphs in manifest.graphs if (graphs.provider, graphs.precision) == ("cpu", "fp32")]
    return Subject(
        f"{manifest.name} {manifest.version}",
        path.resolve(),
        manifest.model,
        manifest.limits,
        bundle.graph_set("cuda"),
        reference[0] if reference else None,
        manifest.special_ids.never_generated,
        4 * manifest.model.d_model,
    )


def make(size: str, folder: Path) -> Subject:
    """Graphs of a model that nobody trained: kernels do not care. Raises ImportError without torch."""
    import torch

    from dragoman_export.graph_sets import write_graphs
    from dragoman_export.targets import FP16, FP32
    from dragoman_training.config import ModelConfig
    from dragoman_training.model import Transformer

    width, heads, inner, encoder_layers, decoder_layers, vocabulary, capacity = SIZES[size]
    config = ModelConfig(
        d_model=width,
        num_heads=heads,
        ffn_dim=inner,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        source_vocab_size=vocabulary,
        target_vocab_size=vocabulary,
    )
    tell(f"making graphs of a {size} model")
    torch.manual_seed(0)
    written = write_graphs(Transformer(config).eval(), (FP32, FP16), None, folder)
    shape = ModelShape(width, heads, width // heads, encoder_layers, decoder_layers, vocabulary, vocabulary)
    limits = Limits(capacity, capacity)
    return Subject(
        f"a {size} model with random weights",
        folder,
        shape,
        limits,
        written.sets[FP16],
        written.sets[FP32],
        tuple(range(FIRST_TOKEN - 2)),
        inner,
    )


def examine(subject: Subject, device: Device, slots: int, gpu: cuda.Device | None, folder: Path) -> Iterator[Result]:
    """Everything, one after the other; what raises is a check that failed, and the next one has its turn."""
    parts: list[tuple[str, Callable[[], Iterator[Result]]]] = [
        ("parity", lambda: check_parity(subject, device, folder)),
        ("in place", lambda: check_in_place(subject, device)),
        ("neighbours", lambda: check_neighbours(subject, device)),
        ("CUDA graphs", lambda: check_cuda_graphs(subject, device)),
        ("timings", lambda: measure(subject, device, slots, gpu)),
        ("CTranslate2", lambda: compare(subject, device, slots)),
    ]
    for name, part in parts:
        try:
            yield from part()
        except Exception as error:  # one part's failure shall not hide what the others find
            yield Result(name, "FAILED", " ".join(f"{type(error).__name__}: {error}".split()))


# Checks


def check_parity(subject: Subject, device: Device, folder: Path) -> Iterator[Result]:
    """Each in a process of its own: ONNX Runtime reads its environment once, and prints which kernels it took."""
    if subject.reference is None:
        yield Result("parity", "skipped", "the bundle has no cpu/fp32 graphs to compare with")
        return
    file = folder / "subject.pickle"
    eager = dataclasses.replace(device, config=dataclasses.replace(device.config, cuda_graphs=False))
    file.write_bytes(pickle.dumps((subject, eager)))
    for name, variables in VARIANTS.items():
        if variables and device.kind == "cpu":
            yield Result(name, "skipped", "the CPU has one kernel")
            continue
        done = subprocess.run(
            [sys.executable, __file__, "--child", str(file)],
            env={**os.environ, "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1", **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            yield Result(name, "FAILED", " ".join(done.stderr.strip().splitlines()[-1:]))
            continue
        relative = float(done.stdout.strip().splitlines()[-1])
        kernels = [dataclasses.asdict(kernel) for kernel in cuda.attention_kernels(done.stdout)]
        by_kind = sorted({f"{kernel['operator']} {kernel['kernel']}" for kernel in kernels})
        detail = f"off by {relative:.2e} of the logits; kernels: {', '.join(by_kind) or 'not told'}"
        state = "ok" if relative < RELATIVE_TOLERANCE else "FAILED"
        yield Result(name, state, detail, {"relative_difference": relative, "kernels": kernels})


def child(file: Path) -> int:
    """What one process of ``check_parity`` does: the last line of its output is the difference."""
    subject, device = pickle.loads(file.read_bytes())  # our own, of a moment ago
    rows = 8
    model = OrtModel(subject.shape, subject.reference, subject.folder.joinpath, num_threads=os.cpu_count() or 1)
    expected = staggered(OrtRunner(model, rows, 1 << 40), subject, rows)
    actual = staggered(subject.runner(device, rows), subject, rows)
    print(relative_difference(actual, expected))
    return 0


def staggered(runner: Any, subject: Subject, rows: int, steps: int | None = None) -> FloatArray:
    """Logits of rows that join one after the other, with sources of all lengths: the first fills its capacity.

    So that in one step rows have 0, some and all but one of their positions filled.
    """
    limits = subject.limits
    steps = min(steps or limits.max_new_tokens, limits.max_new_tokens)
    lengths = np.linspace(1, limits.max_source_tokens, rows).astype(int)
    joins = np.linspace(0, steps - 1, rows).astype(int)  # the last one has one step
    sources = [tuple(subject.tokens(length, seed=row).tolist()) for row, length in enumerate(lengths)]
    tokens = subject.tokens(steps, rows, seed=1000)
    runner.reserve(int(lengths.max()), steps)
    found = []
    for step in range(steps):
        for row in np.flatnonzero(joins == step):
            runner.admit([sources[row]], [[int(row)]])
        active = int((joins <= step).sum())
        found.append(logits_of(runner, tokens[step, :active]))
    return np.concatenate(found)


def logits_of(runner: Any, tokens: Any) -> FloatArray:
    """A step's, copied to the host."""
    decoded = runner.decode(tokens)
    return np.array(decoded if isinstance(decoded, np.ndarray) else runner.logits.read()[: len(tokens)])


def relative_difference(actual: FloatArray, expected: FloatArray) -> float:
    """Root mean square of the differences, as a share of that of the values. NaN where one is."""
    difference = actual.astype(np.float64) - expected
    return float(np.sqrt(np.mean(difference**2)) / np.sqrt(np.mean(expected.astype(np.float64) ** 2)))


def check_in_place(subject: Subject, device: Device) -> Iterator[Result]:
    """A step of three rows of eight: their next positions change, and nothing else, but the idle row's first one."""
    rows, used, bucket = 8, 3, 4
    runner = subject.runner(device, rows)
    runner.admit([tuple(subject.tokens(5, seed=row).tolist()) for row in range(rows)], [[row] for row in range(rows)])
    for step in range(4):
        runner.decode(subject.tokens(rows, seed=step))
    before = {name: buffer.read() for name, buffer in runner.kv.self_buffers.items()}
    sources = {name: buffer.read() for name, buffer in runner.kv.cross_buffers.items()}
    position = int(runner.kv.cached[0])
    runner.decode(subject.tokens(used, seed=9))
    wrong = []
    for name, buffer in runner.kv.self_buffers.items():
        changed = (buffer.read() != before[name]).any(axis=(1, 3))  # (slots, C)
        allowed = np.zeros_like(changed)
        allowed[:used, position] = allowed[used:bucket, 0] = True
        if (changed & ~allowed).any() or not changed[:used, position].all():
            wrong.append(name)
    wrong += [f"cross_{n}" for n, buffer in runner.kv.cross_buffers.items() if (buffer.read() != sources[n]).any()]
    state = "FAILED" if wrong else "ok"
    yield Result("a step writes its own positions alone", state, f"wrong: {', '.join(wrong)}" if wrong else "as it is")


def check_neighbours(subject: Subject, device: Device) -> Iterator[Result]:
    """One row beside others and alone: within a bucket, and across buckets."""
    source, tokens = tuple(subject.tokens(7, seed=1).tolist()), subject.tokens(10, seed=2)

    def first_row(rows: int, seed: int) -> FloatArray:
        runner = subject.runner(device, 8)
        others = [tuple(subject.tokens(3 + 5 * row, seed=seed + row).tolist()) for row in range(1, rows)]
        runner.admit([source, *others], [[row] for row in range(rows)])
        found = []
        for step, token in enumerate(tokens):
            fed = subject.tokens(rows, seed=seed + 100 + step)
            fed[0] = token
            found.append(logits_of(runner, fed)[0])
        return np.stack(found)

    company = first_row(8, 10)
    within = relative_difference(first_row(8, 5000), company)
    across = {rows: relative_difference(first_row(rows, 10), company) for rows in (1, 2, 5)}
    worst = max(within, *across.values())
    detail = f"in one bucket {'to the last bit' if within == 0 else f'{within:.1e}'}, across buckets {worst:.1e}"
    figures = {"within_a_bucket": within, "across_buckets": across}
    yield Result(
        "a row does not feel its neighbours", "ok" if worst < RELATIVE_TOLERANCE else "FAILED", detail, figures
    )


def check_cuda_graphs(subject: Subject, device: Device) -> Iterator[Result]:
    """Captured in the middle of a run, as it comes, and replayed with other lengths."""
    if device.kind == "cpu":
        yield Result("CUDA graphs", "skipped", "there are none on the CPU")
        return
    eager = dataclasses.replace(device, config=dataclasses.replace(device.config, cuda_graphs=False))
    expected = staggered(subject.runner(eager, 8), subject, 8, steps=50)
    relative = relative_difference(staggered(subject.runner(device, 8), subject, 8, steps=50), expected)
    detail = "50 steps " + ("equal to the last bit" if relative == 0 else f"off by {relative:.1e}")
    state = "ok" if relative < RELATIVE_TOLERANCE else "FAILED"
    yield Result("CUDA graphs", state, detail, {"relative_difference": relative})


# Figures


def measure(subject: Subject, device: Device, slots: int, gpu: cuda.Device | None) -> Iterator[Result]:
    """First runs, and then steps of each bucket; with CUDA graphs, and on a GPU without them, too."""
    configs = {"with CUDA graphs": device.config, "without": dataclasses.replace(device.config, cuda_graphs=False)}
    if device.kind == "cpu":
        configs = {"on the CPU": device.config}
    for name, config in configs.items():
        runner = subject.runner(dataclasses.replace(device, config=config), slots)
        yield from measure_first_runs(runner, name)
        for rows in runner.row_buckets:
            yield measure_bucket(subject, runner, rows, name, gpu)


def measure_first_runs(runner: DeviceRunner, name: str) -> Iterator[Result]:
    """What the warm-up of each shape takes."""
    seconds: dict[str, list[float]] = {}
    last = time.perf_counter()

    def heard(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds.setdefault(what, []).append(now - last)
        last = now

    runner.warm_up(heard)
    parts = [
        f"{what} {sum(each):.2f} s for {len(each)} shapes, at most {max(each):.2f}" for what, each in seconds.items()
    ]
    figures = {"seconds": seconds, "encoder_shapes": runner.encode_shapes(), "row_buckets": runner.row_buckets}
    plan = "; ".join(runner.plan.lines())
    yield Result(f"first runs, {name}", "measured", f"{', '.join(parts)}; memory: {plan}", {**figures, "plan": plan})


def measure_bucket(subject: Subject, runner: DeviceRunner, rows: int, name: str, gpu: cuda.Device | None) -> Result:
    """Greedy steps of a full bucket: a step with its best tokens on the host, as the engine asks for them."""
    sources = [tuple(subject.tokens(SOURCE_TOKENS, seed=row).tolist()) for row in range(rows)]
    steps = min(STEPS, subject.limits.max_new_tokens)
    fed = subject.tokens(rows, seed=rows)
    encode, decode = list[float](), list[float]()
    for _ in range(3):  # the first has what is new in it
        begin = time.perf_counter()
        runner.admit(sources, [[row] for row in range(rows)])
        encode.append(time.perf_counter() - begin)
        runner.copied.clear()
        begin = time.perf_counter()
        for _ in range(steps):
            runner.decode(fed).best(0)
        decode.append((time.perf_counter() - begin) / steps)
    step, encoder = min(decode), min(encode)
    token_bytes = runner.kv_cache_bytes // (runner.num_slots * (runner.kv.source_capacity + runner.kv.target_capacity))
    moved = decoder_bytes(subject) + rows * token_bytes * (SOURCE_TOKENS + steps // 2)
    share = moved / step / gpu.bandwidth if gpu is not None and gpu.bandwidth else None
    figures = {
        "rows": rows,
        "step_seconds": step,
        "encode_seconds": encoder,
        "decode_tokens_per_second": rows / step,
        "tokens_per_second": rows * steps / (encoder + steps * step),
        "bytes_per_step": moved,
        "share_of_bandwidth": share,
        "bytes_to_host_per_step": sum(runner.copied.values()) / steps,
    }
    detail = (
        f"step {step * 1e3:.3f} ms, {rows / step:,.0f} tokens/s; encoder {encoder * 1e3:.2f} ms, together "
        f"{figures['tokens_per_second']:,.0f} tokens/s; bandwidth {'unknown' if share is None else f'{share:.0%}'}; "
        f"{figures['bytes_to_host_per_step']:.0f} bytes a step to the host"
    )
    return Result(f"{rows} rows, {name}", "measured", detail, figures)


def decoder_bytes(subject: Subject) -> int:
    """Weights that a step reads: the decoder's file, without its table of embeddings, of which it reads a few rows."""
    table = 2 * subject.shape.target_vocab_size * subject.shape.d_model
    size = (subject.folder / subject.graphs.decoder.file).stat().st_size
    return max(size - table, table)  # one table may serve as both, and then is read as the projection


def compare(subject: Subject, device: Device, slots: int) -> Iterator[Result]:
    """CTranslate2 in float16, with random weights of the same sizes, in a process of its own."""
    if device.kind == "cpu":
        yield Result("CTranslate2", "skipped", "on the CPU, the graphs that are looked at would be no match for it")
        return
    request = {
        **dataclasses.asdict(subject.shape),
        "ffn_dim": subject.ffn_dim,
        "device": device.kind,
        "device_id": device.device_id,
        "compute_type": "float16",
        "rows": [rows for rows in (1, 8, 32, 128) if rows <= slots],
        "source_tokens": SOURCE_TOKENS,
        "steps": STEPS,
    }
    script = Path(__file__).with_name("ctranslate.py")
    done = subprocess.run([sys.executable, script, json.dumps(request)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join(done.stderr.strip().splitlines()[-1:])
        yield Result("CTranslate2", "skipped" if "ModuleNotFoundError" in reason else "FAILED", reason)
        return
    report = json.loads(done.stdout.strip().splitlines()[-1])
    for rows, speed in report["tokens_per_second"].items():
        detail = f"{speed:,.0f} tokens/s, encoder and all, float16"
        yield Result(f"CTranslate2 {report['version']}, {rows} rows", "measured", detail, {"tokens_per_second": speed})


def versions() -> dict[str, str]:
    import dragoman

    known = {"python": platform.python_version(), "numpy": np.__version__, "dragoman": dragoman.__version__}
    return {**known, "onnxruntime": placement.runtime_version(), "cuda": placement.cuda_version()}


def table(report: dict[str, Any], results: Sequence[Result]) -> Iterator[str]:
    """For people."""
    gpu = report["gpu"]
    yield f"{report['subject']} on {report['provider']}" + (f", {gpu['name']}" if gpu else "")
    yield ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    width = max(len(result.name) for result in results)
    for result in results:
        yield f"{result.name:<{width}}  {result.state:<8}  {result.detail}"


if __name__ == "__main__":
    sys.exit(main())
