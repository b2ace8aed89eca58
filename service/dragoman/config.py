"""Settings, validated once and passed down, and where the embedded models are."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from dragoman.errors import ConfigError

DEFAULT_MODEL = "g2p-en"
DEFAULT_PORT = 50051
DEFAULT_METRICS_PORT = 9464
PROVIDERS = ("cpu", "cuda", "cuda-dry")
"""Where graphs can run. ``cuda-dry`` does what ``cuda`` does, with its graphs and buffers, on the CPU: for tests."""


def embedded_models() -> list[str]:
    """The names of the models that ship inside the package."""
    folder = _models_folder()
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__")
    except OSError:  # not there, or not for us to read
        return []


def embedded_bundle(name: str) -> Path:
    """The folder of an embedded model. Raises ConfigError listing those that exist."""
    if name not in embedded_models():
        raise ConfigError(f"no embedded model {name!r}; there is {', '.join(embedded_models()) or 'none'}")
    return _models_folder() / name


def _models_folder() -> Path:
    return Path(str(resources.files("dragoman"))) / "models"


def check_counts(config: EngineConfig | ServerConfig, **limits: int) -> None:
    """Raises ConfigError unless each named setting is from 1 to its limit: what is beyond is a mistake."""
    for name, limit in limits.items():
        value = getattr(config, name)
        if not 1 <= value <= limit:
            raise ConfigError(f"{name} is {value}; it must be from 1 to {limit}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one model is run. All sizes are bounds that hold whatever the callers do."""

    num_slots: int = 64  # rows a replica decodes together
    num_replicas: int = 1  # engine threads over one shared session
    num_threads: int = 1  # ONNX Runtime threads of one run
    max_waiting: int = 1024  # requests that wait, over all replicas; more are refused
    max_encode_tokens: int = 4096  # source tokens, padding included, of one encoder run
    max_kv_cache_bytes: int = 2 << 30  # per replica; a model whose limits could exceed it is not served
    stuck_seconds: float = 30.0  # a step that takes longer means a hung engine
    share_equal: bool = True  # requests of one caller for the same answer, at the same time, are computed once

    def __post_init__(self) -> None:
        check_counts(self, num_slots=1 << 16, num_replicas=256, num_threads=1024, max_waiting=1 << 24)
        check_counts(self, max_encode_tokens=1 << 30, max_kv_cache_bytes=1 << 50)
        if not self.stuck_seconds > 0:
            raise ConfigError(f"stuck_seconds is {self.stuck_seconds}; it must be above 0")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """How a GPU is used; matters to the providers ``cuda`` and ``cuda-dry`` alone."""

    device_id: int = 0  # as CUDA counts them
    mem_limit_bytes: int = 0  # of the GPU's memory, that a model may take; 0: all of it
    cuda_graphs: bool = True  # capture a step's kernels once, and replay them

    def __post_init__(self) -> None:
        for name, limit in (("device_id", 1 << 10), ("mem_limit_bytes", 1 << 50)):
            if not 0 <= (value := getattr(self, name)) <= limit:
                raise ConfigError(f"{name} is {value}; it must be from 0 to {limit}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server meets the network."""

    host: str = "0.0.0.0"
    port: int = DEFAULT_PORT  # 0 picks a free one
    metrics_port: int = DEFAULT_METRICS_PORT  # 0 picks a free one
    drain_seconds: float = 30.0  # how long SIGTERM lets running requests finish
    max_message_bytes: int = 4 << 20  # of one gRPC message, either way
    max_text_bytes: int = 64 << 10  # of one request's text, in UTF-8
    max_segments: int = 256  # lines of one request's text
    max_batch_items: int = 1024  # items of one BatchGenerate

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            value = getattr(self, name)
            if not 0 <= value <= 65535:
                raise ConfigError(f"{name} is {value}; it must be from 0 to 65535 (0 picks a free port)")
        check_counts(self, max_message_bytes=1 << 30, max_text_bytes=1 << 30, max_segments=1 << 20)
        check_counts(self, max_batch_items=1 << 20)
        if not self.drain_seconds >= 0:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}; it must be 0 or more")
