"""Settings, validated once and passed down, and where the embedded models are.

Each setting is written here once, with its default, help and range. ``settings.py`` reads them from a file, from the
environment and from flags; ``setting.py`` says how their names there follow from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from dragoman.errors import ConfigError
from dragoman.setting import check, setting

DEFAULT_MODEL = "en-de"
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


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one model is run. All sizes are bounds that hold whatever the callers do."""

    num_slots: int = setting(64, "rows that a replica decodes together", name="slots", low=1, high=1 << 16)
    num_replicas: int = setting(1, "engine threads over one copy of the weights", name="replicas", low=1, high=256)
    num_threads: int = setting(1, "ONNX Runtime threads of one run", name="threads", low=1, high=1024)
    max_waiting: int = setting(1024, "requests that may wait, over all replicas; more are refused", low=1, high=1 << 24)
    max_waiting_tokens: int = setting(
        1 << 20, "source tokens of the requests that wait; a lone one may have more", low=1, high=1 << 40
    )
    max_encode_tokens: int = setting(4096, "source tokens, padding included, of one encoder run", low=1, high=1 << 30)
    max_kv_cache_bytes: int = setting(
        2 << 30, "KV memory of one replica; a model that could need more is not served", low=1, high=1 << 50
    )
    stuck_seconds: float = setting(
        30.0, "a step that takes longer means a hung engine: the server exits", low=0.001, high=1e9
    )
    share_equal: bool = setting(
        True, "compute equal requests that one caller has at the same time once", name="sharing"
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """How a GPU is used; matters to the providers ``cuda`` and ``cuda-dry`` alone."""

    device_id: int = setting(0, "the GPU to use, as CUDA counts them", name="device", low=0, high=1 << 10)
    mem_limit_bytes: int = setting(
        0,
        "bytes of the GPU's memory that each model takes at most; 0: all of it",
        name="gpu_mem_limit",
        low=0,
        high=1 << 50,
    )
    cuda_graphs: bool = setting(
        True, "capture a step's kernels once and replay them; without, faults are easier to find"
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which of a bundle's graphs run, and on what."""

    provider: str = setting(
        "cpu", "what to run the graphs on; cuda-dry does on the CPU what cuda does, for tests", choices=PROVIDERS
    )
    precision: str = setting("", "the graphs to run, of those that the bundle has; empty: its first")
    shortlist: bool = setting(
        False,
        "make answers of the candidates that the bundle's shortlist has for their sources: faster, where the "
        "vocabulary is large; the model must have been exported with --shortlist",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server meets the network."""

    host: str = setting(
        "127.0.0.1",
        "the address to listen on; 0.0.0.0: all of this machine's, for callers from elsewhere",
        metavar="ADDRESS",
    )
    port: int = setting(DEFAULT_PORT, "the gRPC port; 0 picks a free one", low=0, high=65535)
    metrics_host: str = setting("", "the address of GET /metrics; empty: as host", metavar="ADDRESS")
    metrics_port: int = setting(DEFAULT_METRICS_PORT, "the port of GET /metrics; 0 picks a free one", low=0, high=65535)
    drain_seconds: float = setting(30.0, "how long SIGTERM lets running requests end", low=0, high=1e9)
    max_message_bytes: int = setting(4 << 20, "size of one gRPC message, either way", low=1, high=1 << 30)
    max_text_bytes: int = setting(64 << 10, "size of one request's text, in UTF-8", low=1, high=1 << 30)
    max_segments: int = setting(256, "segments of one request's text: lines, or sentences", low=1, high=1 << 20)
    split_sentences: str = setting(
        "model",
        "whether each sentence of a text is a segment where a request does not say: on, off, or as the model has it; "
        "models that do not name their source's language never do",
        choices=("model", "on", "off"),
    )
    max_batch_items: int = setting(1024, "items of one BatchGenerate", low=1, high=1 << 20)
    max_calls: int = setting(
        0,
        "calls that make text, waiting or running; more are refused before they are read; 0: as many as there are rows "
        "of the models, and places to wait for one",
        low=0,
        high=1 << 20,
    )
    max_request_bytes: int = setting(64 << 20, "size of the requests of all these calls together", low=1, high=1 << 40)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Files in PEM form that make the gRPC port speak TLS; all empty: it speaks in the clear. See ``Certificates``."""

    certificate: str = setting(
        "",
        "PEM file of the server's certificate and of those between it and its root: the gRPC port then speaks TLS",
        name="tls_certificate",
        metavar="FILE",
    )
    key: str = setting("", "PEM file of the certificate's private key, not encrypted", name="tls_key", metavar="FILE")
    client_ca: str = setting(
        "",
        "PEM file of authorities: callers need a certificate that one of them has signed",
        name="tls_client_ca",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        check(self)
        if bool(self.certificate) != bool(self.key):
            given, missing = ("certificate", "key") if self.certificate else ("key", "certificate")
            raise ConfigError(f"tls has a {given} and no {missing}: give both, or neither to serve in the clear")
        if self.client_ca and not self.certificate:
            raise ConfigError("tls has a client_ca and no certificate: callers' certificates are for TLS, give both")


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """Who may call."""

    tokens: str = setting("", "a TOML file of bearer tokens; empty: whoever reaches the port may call", metavar="FILE")
    open_reflection: bool = setting(False, "reflection needs no token; health never does")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class RepositoryConfig:
    """Which models are served, and what may be changed about it while the server runs."""

    bundles: tuple[str, ...] = setting((), "folders made by dragoman export: the models to serve")
    model: str = setting("", "instead of bundles, one embedded model alone")
    folder: str = setting("", "a folder of models to serve, instead of bundles", name="models", metavar="DIR")
    default_model: str = setting("", "for requests that name none; empty: the first bundle, or the only model there is")
    versions: int = setting(
        1,
        "how many of the newest versions of each model in --models are served",
        name="model_versions",
        low=1,
        high=1 << 10,
    )
    max_loaded: int = setting(
        16,
        "versions in memory, those included that are loaded or drain; a swap needs room for one more",
        low=1,
        high=1 << 10,
    )
    poll_seconds: float = setting(
        0.0, "look for changes in the models' folders so long after the last look; 0: on SIGHUP alone", low=0, high=1e9
    )
    allow_control: bool = setting(
        False, "let callers load and unload models (RepositoryModelLoad, ...Unload)", name="allow_model_control"
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """What GET /metrics says."""

    latency_buckets: tuple[float, ...] = setting(
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
        "upper ends of the buckets of all histograms of seconds, rising",
        low=1e-6,
        high=1e6,
    )

    def __post_init__(self) -> None:
        check(self)
        buckets = self.latency_buckets
        if not 1 <= len(buckets) <= 100 or list(buckets) != sorted(set(buckets)):
            raise ConfigError(f"latency_buckets is {buckets}; it must be from 1 to 100 rising numbers")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What goes to stderr."""

    level: str = setting(
        "info",
        "what to log on stderr; info has one line for each request",
        name="log_level",
        choices=("debug", "info", "warning", "error"),
    )
    format: str = setting(
        "text", "of the log: for people, or one JSON object a line", name="log_format", choices=("text", "json")
    )
    requests: bool = setting(True, "log each request as it ends", name="log_requests")
    text: bool = setting(False, "texts and answers appear in the log", name="log_text")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Where spans go; the standard variables OTEL_... are read too, by OpenTelemetry itself."""

    endpoint: str = setting(
        "",
        "where OpenTelemetry spans go, by OTLP over HTTP, such as http://collector:4318; empty: to "
        "OTEL_EXPORTER_OTLP_ENDPOINT, or there are none",
        name="otlp_endpoint",
        metavar="URL",
    )
    headers: str = setting(
        "",
        "what goes with them, as NAME=VALUE with commas between, such as a collector's key",
        name="otlp_headers",
        secret=True,
    )
    ratio: float = setting(
        1.0,
        "share of the requests that are traced, of those without a traceparent that decides",
        name="trace_ratio",
        low=0,
        high=1,
    )

    def __post_init__(self) -> None:
        check(self)


SECTIONS: Final[dict[str, type]] = {
    "server": ServerConfig,
    "models": RepositoryConfig,
    "how models run": ModelConfig,
    "engine": EngineConfig,
    "GPU, with --provider cuda": DeviceConfig,
    "TLS": TlsConfig,
    "callers": AuthConfig,
    "metrics": MetricsConfig,
    "log": LogConfig,
    "traces": TracingConfig,
}
"""All settings of ``dragoman serve``, by the titles that people see."""

MODEL_SECTIONS: Final = (ModelConfig, EngineConfig, DeviceConfig)
"""Those that a model may have of its own."""
