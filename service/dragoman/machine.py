"""What this machine gives a process: what its processor can, cores, memory, and the limits of control groups.

Reads Linux' /proc and /sys alone; what they do not tell is None or empty, on other systems everything. Formats:
proc(5) and cgroups(7).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_AVX512: Final = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_VNNI: Final = {"avx512_vnni", "avx_vnni"}
_UNLIMITED: Final = 1 << 60
"""Version 1 of control groups writes a number beyond this for "no limit"."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores are those that may be used at once: control groups limit time, and so may allow a part of one."""

    processor: str
    features: tuple[str, ...]  # of those that ONNX Runtime's kernels are written for, by the names used here
    cores: int  # that the process may be scheduled on
    core_limit: float | None  # of the control group
    memory_bytes: int | None
    memory_limit: int | None  # of the control group

    @property
    def usable_cores(self) -> float:
        """Cores within the control group's limit."""
        return self.cores if self.core_limit is None else min(self.cores, self.core_limit)

    @property
    def usable_memory(self) -> int | None:
        """Bytes within the control group's limit; None where nothing tells."""
        known = [size for size in (self.memory_bytes, self.memory_limit) if size is not None]
        return min(known, default=None)

    @property
    def multiplies_int8_fast(self) -> bool:
        """Whether one instruction multiplies four pairs of 8-bit numbers and adds them up, without saturating."""
        return "vnni" in self.features or "dot product" in self.features


def read_machine(root: Path = Path("/")) -> Machine:
    """This machine's; ``root`` is where its /proc and /sys are."""
    processor, flags = _read_processor(root / "proc/cpuinfo")
    features = [name for name, needed in (("avx2", {"avx2"}), ("avx512", _AVX512)) if needed <= flags]
    features += ["vnni"] if _VNNI & flags else []
    features += ["dot product"] if "asimddp" in flags else []  # 64-bit Arm's
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    core_limit, memory_limit = _read_limits(root)
    return Machine(processor, tuple(features), cores, core_limit, _read_memory(root / "proc/meminfo"), memory_limit)


def _read_processor(path: Path) -> tuple[str, set[str]]:
    name, flags = "", set[str]()
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        match key.strip():
            case "model name":
                name = name or value.strip()
            case "flags" | "Features":
                flags |= set(value.split())
    return name, flags


def _read_memory(path: Path) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _read_limits(root: Path) -> tuple[float | None, int | None]:
    """The tightest limits of cores and of bytes, from the process's group up to the topmost one."""
    cores, sizes = list[float](), list[int]()
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        for folder in _folders(root / "sys/fs/cgroup", controllers, group):
            period = _number(folder / "cpu.cfs_period_us")
            for quota, of in (*_pair(folder / "cpu.max"), (_number(folder / "cpu.cfs_quota_us"), period)):
                if quota is not None and of and quota > 0:
                    cores.append(quota / of)
            for name in ("memory.max", "memory.limit_in_bytes"):
                if (size := _number(folder / name)) is not None and size < _UNLIMITED:
                    sizes.append(size)
    return min(cores, default=None), min(sizes, default=None)


def _folders(base: Path, controllers: str, group: str) -> Iterator[Path]:
    """A group's folder and those above it; version 1 has a tree for each set of controllers, version 2 has one."""
    tree = base / controllers if controllers else base
    path = tree / group.strip("/")
    while path != tree.parent:
        yield path
        path = path.parent


def _pair(path: Path) -> Iterator[tuple[int | None, int | None]]:
    """``cpu.max``: quota and period in microseconds, or "max"."""
    quota, _, period = _read(path).partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        yield int(quota), int(period)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not this system, or not for us to read
        return ""
