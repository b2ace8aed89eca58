"""Ask a server for its health: for the probes of a container, or for people.

  dragoman health                                  ready: it can answer requests now
  dragoman health --live                           alive: no engine is dead or hangs
  dragoman health --model en-de                    some version of this model can answer; en-de/2: this version
  dragoman health --address localhost:50051 --timeout 1

Exit status: 0 it is, 1 it is not, or there is no answer in time, 2 wrong use. Restart a container that is not alive;
send no requests to one that is not ready, which it is neither while models load nor while it drains.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from dragoman.cli.credentials import add_credentials_arguments, credentials_of
from dragoman.config import DEFAULT_PORT
from dragoman.errors import ConfigError

SUMMARY = "ask a server whether it is ready, or alive"
EXTRA: str | None = None

_SERVICE: Final = "dragoman.v1.GenerationService"
_LIVENESS: Final = "liveness"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--address",
        default=f"localhost:{DEFAULT_PORT}",
        metavar="HOST:PORT",
        help=f"the server's gRPC port (default: localhost:{DEFAULT_PORT})",
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--live", action="store_true", help="whether it is alive, rather than ready")
    asked.add_argument("--model", metavar="NAME[/VERSION]", help="whether this model can answer")
    asked.add_argument(
        "--service", metavar="NAME", help="the status of this name of grpc.health.v1 (default: the server)"
    )
    parser.add_argument(
        "--timeout", type=float, default=3.0, metavar="SECONDS", help="how long to wait for the answer (default: 3)"
    )
    add_credentials_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask once."""
    if not 0 < args.timeout <= 3600:
        raise ConfigError(f"--timeout is {args.timeout}; it must be above 0 and at most 3600 seconds")
    import grpc  # a quarter of a second of this command's half
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

    from dragoman.client_credentials import open_channel

    with open_channel(args.address, credentials_of(args), [("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        try:
            status = check(HealthCheckRequest(service=_asked(args)), timeout=args.timeout).status
        except grpc.RpcError as error:
            print(f"dragoman health: {args.address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(HealthCheckResponse.ServingStatus.Name(status))
    return int(status != HealthCheckResponse.SERVING)


def _asked(args: argparse.Namespace) -> str:
    if args.live:
        return _LIVENESS
    if args.model is not None:
        return f"{_SERVICE}/{args.model}"
    return str(args.service or "")
