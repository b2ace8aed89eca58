"""Serve models over gRPC, with health, reflection and metrics, until SIGTERM or SIGINT.

Without BUNDLE and --model, all embedded models. A request that names no model goes to the first.

When it is ready, one JSON line goes to stdout: {"port": ..., "metrics_port": ..., "models": [...]}. Logs go to stderr.

SIGTERM drains: health says NOT_SERVING, new calls are refused, running ones end, exit status 0. A second signal exits
at once with status 1. When the engine fails, the exit status is 70.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dragoman.cli import runtime
from dragoman.config import DeviceConfig, EngineConfig, ServerConfig
from dragoman.errors import ConfigError

if TYPE_CHECKING:
    from dragoman.server import Server

SUMMARY = "serve models over gRPC"
EXTRA: str | None = "cpu"

EXIT_ENGINE_DEAD: Final = 70
"""EX_SOFTWARE of sysexits.h."""

_CLOSE_SECONDS: Final = 3.0
"""How long a server with a dead engine may take to close; a hung thread would take for ever."""

_SERVER_FLAGS: Final = {
    "host": ("--host", "the address to listen on"),
    "port": ("--port", "the gRPC port; 0 picks a free one"),
    "metrics_port": ("--metrics-port", "the port of GET /metrics; 0 picks a free one"),
    "drain_seconds": ("--drain-seconds", "how long SIGTERM lets running requests end"),
    "max_message_bytes": ("--max-message-bytes", "size of one gRPC message, either way"),
    "max_text_bytes": ("--max-text-bytes", "size of one request's text"),
    "max_segments": ("--max-segments", "non-blank lines of one request's text"),
    "max_batch_items": ("--max-batch-items", "items of one BatchGenerate"),
}

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("bundle", type=Path, nargs="*", metavar="BUNDLE", help="folders made by dragoman export")
    parser.add_argument("--model", metavar="NAME", help="instead of BUNDLE, one embedded model alone")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what to log on stderr (default: info)",
    )
    runtime.add_settings(parser.add_argument_group("server"), ServerConfig, _SERVER_FLAGS)
    runtime.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Load, serve, drain. Does not return when the engine died: a hung thread must not keep the process alive."""
    config = runtime.settings(ServerConfig, args)
    engine = runtime.settings(EngineConfig, args)
    paths = runtime.served_paths(args.bundle, args.model)
    runtime.check_device_flags(args)
    runtime.check_runtime()
    logging.basicConfig(
        stream=sys.stderr, level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from dragoman.bundle import load_manifest
    from dragoman.metrics import ServerMetrics
    from dragoman.pipeline import TextLimits
    from dragoman.served_model import ServedModel
    from dragoman.server import Server

    names = [load_manifest(path).name for path in paths]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"two bundles are named {twice[0]!r}, and metrics tell models apart by their names alone: serve one"
        )
    metrics = ServerMetrics()
    models = []
    for path, name in zip(paths, names, strict=True):
        model = ServedModel.load(
            path,
            engine,
            TextLimits(config.max_text_bytes, config.max_segments),
            metrics.listener(name),
            provider=args.provider,
            precision=args.precision,
            shortlist=args.shortlist,
            device=runtime.settings(DeviceConfig, args),
            progress=partial(_tell_warm_up, name),
        )
        if model.plan is not None:
            logger.info("%s on %s takes, each replica: %s", name, args.provider, "; ".join(model.plan.lines()))
        kind = model.graphs.precision if model.shortlist is None else f"{model.graphs.precision} with its shortlist"
        logger.info("loaded %s version %s, %s, from %s", model.name, model.version, kind, path)
        if not model.graphs.batch_invariant:
            logger.warning("%s: answers may depend, in their last digits, on who shares the batch", kind)
        models.append(model)

    async def main() -> int:
        return await serve(Server(models, config, metrics), names)

    return asyncio.run(main())


def _tell_warm_up(name: str, what: str, done: int, total: int) -> None:
    logger.info("%s warms up: %s, shape %d of %d", name, what, done, total)


async def serve(server: Server, names: list[str]) -> int:
    """Run a server until a signal or its engine's death; returns the exit status."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop(number: signal.Signals) -> None:
        if stopping.is_set():
            logger.warning("%s again: exiting at once, running requests are lost", number.name)
            _exit_now(1)
        logger.info("%s: draining", number.name)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    await server.start()
    print(json.dumps({"port": server.port, "metrics_port": server.metrics_port, "models": names}), flush=True)

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
    sys.stderr.flush()
    os._exit(status)
