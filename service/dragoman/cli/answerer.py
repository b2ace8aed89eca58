"""Whoever answers for a command: a model that runs here, or a server."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.cli import runtime
from dragoman.cli.credentials import add_credentials_arguments, check_no_credentials, credentials_of
from dragoman.config import DeviceConfig, EngineConfig, ServerConfig
from dragoman.errors import ConfigError

if TYPE_CHECKING:  # heavy
    from dragoman.answer import TextResult, TextScore, TextUpdate
    from dragoman.types import DecodingOptions


@dataclass(frozen=True, slots=True)
class Answerer:
    """What can be asked of a model, wherever it is."""

    generate: Callable[[str, DecodingOptions], Awaitable[TextResult]]
    stream: Callable[[str, DecodingOptions], AsyncGenerator[TextUpdate | TextResult]]
    score: Callable[[str, str], Awaitable[TextScore]]


def add_answerer_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say who answers, but for the engine's."""
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="the model to run here: a folder of dragoman export")
    parser.add_argument("--model", metavar="NAME", help=f"{runtime.model_help()}; with --target, the served model")
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help="ask this server instead of running a model here; IP:PORT,IP:PORT,... for several that share the work",
    )
    parser.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="with --target: of waiting requests, the higher goes first (-10 to 10)",
    )
    add_credentials_arguments(parser)


def check_answerer(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that exclude each other."""
    if args.target is None and args.priority is not None:
        raise ConfigError("--priority was given without --target: a model that runs here has no other callers")
    if args.target is None:
        check_no_credentials(args)
    if args.target is not None and args.bundle is not None:
        raise ConfigError("--bundle and --target were both given: a server chooses its own bundle")
    if args.target is not None and args.provider != "cpu":
        raise ConfigError("--provider and --target were both given: a server chooses what it runs on")
    if args.target is not None and args.precision:
        raise ConfigError("--precision and --target were both given: a server chooses its own graphs")
    if args.target is not None and (own := runtime.changed_engine_flags(args)):
        raise ConfigError(f"{', '.join(own)} and --target were both given: a server has its own engine settings")
    if args.target is not None and args.shortlist:
        raise ConfigError("--shortlist and --target were both given: a server chooses whether it has one")
    runtime.check_device_flags(args)


@asynccontextmanager
async def open_answerer(args: argparse.Namespace) -> AsyncIterator[Answerer]:
    """The one that the options name."""
    async with _served(args) if args.target is not None else _in_process(args) as answerer:
        yield answerer


@asynccontextmanager
async def _in_process(args: argparse.Namespace) -> AsyncIterator[Answerer]:
    runtime.check_runtime()
    from dragoman.pipeline import TextLimits
    from dragoman.served_model import ServedModel

    server = ServerConfig()
    engine = runtime.settings(EngineConfig, args)
    limits = TextLimits(server.max_text_bytes, server.max_segments)
    model = ServedModel.load(
        runtime.bundle_path(args.bundle, args.model),
        engine,
        limits,
        provider=args.provider,
        precision=args.precision or None,
        shortlist=args.shortlist,
        device=runtime.settings(DeviceConfig, args),
    )
    model.start()
    try:
        yield Answerer(model.pipeline.generate, model.pipeline.stream, model.pipeline.score)
    finally:
        await model.close()


@asynccontextmanager
async def _served(args: argparse.Namespace) -> AsyncIterator[Answerer]:
    from dragoman.client import AsyncClient

    priority = args.priority or 0
    async with AsyncClient(args.target, model=args.model or "", credentials=credentials_of(args)) as client:
        yield Answerer(
            partial(client.generate, priority=priority),
            partial(client.stream, priority=priority),
            partial(client.score, priority=priority),
        )
