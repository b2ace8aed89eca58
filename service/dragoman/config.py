"""Settings, validated once and passed down, and where the embedded models are."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from dragoman.errors import ConfigError

DEFAULT_MODEL = "g2p-en"
DEFAULT_PORT = 50051
DEFAULT_METRICS_PORT = 9464


def embedded_models() -> list[str]:
    """The names of the models that ship inside the package."""
    folder = _models_folder()
    return sorted(p.name for p in folder.iterdir() if (p / "manifest.json").is_file()) if folder.is_dir() else []


def embedded_bundle(name: str) -> Path:
    """The folder of an embedded model. Raises ConfigError listing those that exist."""
    if name not in embedded_models():
        raise ConfigError(f"no embedded model {name!r}; there is {', '.join(embedded_models()) or 'none'}")
    return _models_folder() / name


def _models_folder() -> Path:
    return Path(str(resources.files("dragoman"))) / "models"


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

    def __post_init__(self) -> None:
        for name in (
            "num_slots",
            "num_replicas",
            "num_threads",
            "max_waiting",
            "max_encode_tokens",
            "max_kv_cache_bytes",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if not self.stuck_seconds > 0:
            raise ConfigError(f"stuck_seconds is {self.stuck_seconds}; it must be above 0")


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
        for name in ("max_message_bytes", "max_text_bytes", "max_segments", "max_batch_items"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if not self.drain_seconds >= 0:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}; it must be 0 or more")
