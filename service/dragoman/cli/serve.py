"""Serve models over gRPC, with health, reflection and metrics, until SIGTERM or SIGINT.

Without BUNDLE, --model and --models, all embedded models. A request that names no model goes to the first bundle.

--models DIR serves what is in a folder: bundles, and folders of bundles that are the versions of one model, each named
by its version (DIR/en-de/2). The newest version of each is served, or as many as --model-versions says. SIGHUP (or
--poll-seconds) looks again: a new version is verified, replays its golden set and takes over; those before it finish
what they have, and their memory is given back. One that fails is told in the log, and nothing changes. To be safe
against half a copy, copy to a name that begins with a dot, and rename.

When it is ready, one JSON line goes to stdout: {"port": ..., "metrics_port": ..., "models": [...]}. Logs go to stderr.
Health answers before: NOT_SERVING while models load.

SIGTERM drains: health says NOT_SERVING, new calls are refused, running ones end, exit status 0. A second signal exits
at once with status 1. When the engine fails, the exit status is 70.

Each option below can also stand in a TOML file (max_waiting = 200, and what one model has of its own below
[per_model.NAME]) or in the environment (DRAGOMAN_MAX_WAITING=200). Options win over the environment, and that over the
file. --check prints them all, with where each value comes from, and ends: 0 if they can be served, 2 if not.

  dragoman serve
  dragoman serve bundles/en-de --host 0.0.0.0 --slots 128
  dragoman serve --config server.toml --check
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dragoman.cli import runtime
from dragoman.config import (
    SECTIONS,
    AuthConfig,
    DeviceConfig,
    EngineConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    RepositoryConfig,
    ServerConfig,
    TlsConfig,
    TracingConfig,
)
from dragoman.errors import ConfigError
from dragoman.logs import logging_to_stderr
from dragoman.setting import settings_of
from dragoman.settings import FILE_VARIABLE, Settings, read_settings

if TYPE_CHECKING:
    from dragoman.model_repository import ModelRepository
    from dragoman.served_model import ServedModel
    from dragoman.server import Server

SUMMARY = "serve models over gRPC"
EXTRA: str | None = "cpu"

EXIT_ENGINE_DEAD: Final = 70
"""EX_SOFTWARE of sysexits.h."""

_CLOSE_SECONDS: Final = 3.0
"""How long a server with a dead engine may take to close; a hung thread would take for ever."""

_SPLIT_SENTENCES: Final = {"model": None, "on": True, "off": False}

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "%(prog)s [BUNDLE ...] [--config FILE] [--check | --list-metrics] [settings]"
    parser.add_argument("bundle", nargs="*", metavar="BUNDLE", help="folders made by dragoman export")
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"settings as TOML (default: ${FILE_VARIABLE})")
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--check", action="store_true", help="do not serve: look whether it could, and print all settings"
    )
    only.add_argument("--list-metrics", action="store_true", help="do not serve: print a table of all metrics")
    for title, section in SECTIONS.items():
        runtime.add_settings(parser.add_argument_group(title), section, given_only=True, omit=("bundles",))


def run(args: argparse.Namespace) -> int:
    """Load, serve, drain. Does not return when the engine died: a hung thread must not keep the process alive."""
    if args.list_metrics:
        from dragoman.metrics import metrics_table

        print(metrics_table())
        return 0
    settings = settings_of_command(args)
    if args.check:
        return check(settings)
    runtime.check_runtime()
    with logging_to_stderr(settings.section(LogConfig)):
        return _run(settings)


def _run(settings: Settings) -> int:
    from dragoman.bundle import load_manifest
    from dragoman.metrics import ServerMetrics
    from dragoman.model_loader import ModelLoader
    from dragoman.model_table import ModelTable
    from dragoman.observer import RequestObserver
    from dragoman.pipeline import TextLimits
    from dragoman.served_model import ServedModel
    from dragoman.server import Server
    from dragoman.tracing import open_traces

    config = settings.section(ServerConfig)
    metrics = ServerMetrics(settings.section(MetricsConfig))
    log = settings.section(LogConfig)
    traces = open_traces(settings.section(TracingConfig))
    observer = RequestObserver(metrics, traces, logs_requests=log.requests, logs_text=log.text)
    repository, models = repository_of(settings.section(RepositoryConfig))

    def load(path: Path) -> ServedModel:
        name = load_manifest(path).name
        how = settings.section(ModelConfig, name)
        model = ServedModel.load(
            path,
            settings.section(EngineConfig, name),
            TextLimits(config.max_text_bytes, config.max_segments, _SPLIT_SENTENCES[config.split_sentences]),
            metrics.listener(name),
            provider=how.provider,
            precision=how.precision or None,
            shortlist=how.shortlist,
            device=settings.section(DeviceConfig, name),
            progress=partial(_tell_warm_up, name),
        )
        _tell_loaded(model, how.provider, path)
        return model

    async def main() -> int:
        table = ModelTable(default=models.default_model)
        loader = ModelLoader(table, repository, load, models, config.drain_seconds)
        tls, auth = settings.section(TlsConfig), settings.section(AuthConfig)
        return await serve(Server(table, config, metrics, loader, tls=tls, auth=auth, observer=observer))

    try:
        return asyncio.run(main())
    finally:
        if traces is not None:
            traces.close()


def settings_of_command(args: argparse.Namespace) -> Settings:
    """What the options, the environment and the file say together. Raises ConfigError."""
    known = {known.name for section in SECTIONS.values() for known in settings_of(section)}
    flags = {name: value for name, value in vars(args).items() if name in known}
    if args.bundle:
        flags["bundles"] = tuple(args.bundle)
    settings = read_settings(args.config, os.environ, flags)
    settings.check()
    providers = {settings.section(ModelConfig, model).provider for model in ("", *settings.models)}
    if providers == {"cpu"} and (unused := settings.origins(DeviceConfig)):
        raise runtime.unused_device(unused)
    return settings


def check(settings: Settings) -> int:
    """Print all settings, and look at what they name: bundles, certificates, tokens, packages. Raises as they do."""
    sys.stdout.write(settings.to_toml())
    sys.stdout.flush()
    runtime.check_runtime()
    repository, models = repository_of(settings.section(RepositoryConfig))
    bundles = repository.scan()
    for bundle in bundles:
        if bundle.problem:
            raise ConfigError(f"{bundle.path} cannot be served: {bundle.problem}")
    names = {bundle.name for bundle in bundles}
    for what, name in (("default_model", models.default_model), *(("per_model", name) for name in settings.models)):
        if name and name not in names:
            raise ConfigError(f"{what} names {name!r}, which is not to be served; there is {', '.join(sorted(names))}")
    tls, auth = settings.section(TlsConfig), settings.section(AuthConfig)
    from dragoman.certificates import Certificates
    from dragoman.tokens import Tokens
    from dragoman.tracing import check_tracing

    if tls.certificate:
        Certificates(tls)
    if auth.tokens:
        Tokens(auth.tokens)
    check_tracing(settings.section(TracingConfig))
    return 0


def repository_of(config: RepositoryConfig) -> tuple[ModelRepository, RepositoryConfig]:
    """Where models come from: a folder, or bundles, which are all served. Raises ConfigError and BundleError."""
    from dragoman.bundle import load_manifest
    from dragoman.model_repository import ModelRepository

    if config.folder:
        if config.bundles or config.model:
            raise ConfigError("--models was given beside BUNDLE or --model: choose one")
        return ModelRepository(folder=Path(config.folder)), config
    paths = runtime.served_paths([Path(path) for path in config.bundles], config.model or None)
    if not paths:
        raise ConfigError("there is no model to serve: this build embeds none, give a BUNDLE")
    default = config.default_model or load_manifest(paths[0]).name
    return ModelRepository(paths), replace(config, versions=len(paths), default_model=default)


def _tell_loaded(model: ServedModel, provider: str, path: Path) -> None:
    if model.plan is not None:
        logger.info("%s on %s takes, each replica: %s", model.name, provider, "; ".join(model.plan.lines()))
    kind = model.graphs.precision if model.shortlist is None else f"{model.graphs.precision} with its shortlist"
    logger.info("loaded %s version %s, %s, from %s", model.name, model.version, kind, path)
    if not model.graphs.batch_invariant:
        logger.warning("%s: answers may depend, in their last digits, on who shares the batch", kind)


def _tell_warm_up(name: str, what: str, done: int, total: int) -> None:
    logger.info("%s warms up: %s, shape %d of %d", name, what, done, total)


async def serve(server: Server) -> int:
    """Run a server until a signal or its engine's death; returns the exit status. Raises as ``Server.start``."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    reloads: set[asyncio.Task[None]] = set()

    def stop(number: signal.Signals) -> None:
        if stopping.is_set():
            logger.warning("%s again: exiting at once, running requests are lost", number.name)
            _exit_now(1)
        logger.info("%s: draining", number.name)
        stopping.set()

    def reload() -> None:
        logger.info("SIGHUP: looking for new versions of the models")
        task = loop.create_task(server.reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, reload)
    starting = asyncio.create_task(server.start())
    interrupted = asyncio.create_task(stopping.wait())
    await asyncio.wait((starting, interrupted), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        logger.info("stopped before it served")
        _exit_now(0)  # the thread that loads would be waited for
    starting.result()
    ready = {"port": server.port, "metrics_port": server.metrics_port, "models": server.model_names}
    print(json.dumps(ready), flush=True)

    failed = asyncio.create_task(server.failed())
    stopped = asyncio.create_task(_drain_when(stopping, server))
    await asyncio.wait((failed, stopped), return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        logger.critical("%s", failed.result())
        try:
            await asyncio.wait_for(server.close(), _CLOSE_SECONDS)
        except TimeoutError:
            logger.critical("a thread hangs: exiting without it")
        _exit_now(EXIT_ENGINE_DEAD)
    failed.cancel()
    await stopped
    await server.close()
    logger.info("stopped")
    return 0


async def _drain_when(stopping: asyncio.Event, server: Server) -> None:
    await stopping.wait()
    if not await server.drain():
        logger.warning("drain took too long: requests that still run are lost")


def _exit_now(status: int) -> None:
    sys.stdout.flush()
    logging.shutdown()
    os._exit(status)
