"""The options of every command that calls a server: how to speak to it, and who calls."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dragoman.errors import ConfigError
from dragoman.settings import TOKEN_VARIABLE

if TYPE_CHECKING:  # heavy
    from dragoman.client_credentials import ClientCredentials

_FLAGS: Final = ("tls", "tls_ca", "tls_certificate", "tls_key", "tls_server_name", "token_file")


def add_credentials_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. None of them holds the token: what a command line says, others can read."""
    group = parser.add_argument_group("the connection to a server")
    group.add_argument("--tls", action="store_true", help="speak TLS, and trust the public authorities")
    group.add_argument("--tls-ca", metavar="FILE", help="speak TLS, and trust the authorities in this PEM file instead")
    group.add_argument("--tls-certificate", metavar="FILE", help="this caller's certificate (PEM), where it needs one")
    group.add_argument("--tls-key", metavar="FILE", help="its private key (PEM)")
    group.add_argument(
        "--tls-server-name", metavar="NAME", help="the name in the server's certificate (default: the target's host)"
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"a file of this caller's bearer token alone (default: what the variable {TOKEN_VARIABLE} holds, if set)",
    )


def credentials_of(args: argparse.Namespace) -> ClientCredentials:
    """What the options say. Raises ConfigError."""
    from dragoman.client_credentials import ClientCredentials

    if args.token_file is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
    else:
        try:
            token = args.token_file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"--token-file {args.token_file} cannot be read: {reason}") from None
        if not token:
            raise ConfigError(f"--token-file {args.token_file} is empty: put the token there")
    return ClientCredentials(
        tls=args.tls,
        ca=args.tls_ca or "",
        certificate=args.tls_certificate or "",
        key=args.tls_key or "",
        server_name=args.tls_server_name or "",
        token=token,
    )


def check_no_credentials(args: argparse.Namespace) -> None:
    """Raises ConfigError for such options where no server is called."""
    if given := [f"--{name.replace('_', '-')}" for name in _FLAGS if getattr(args, name)]:
        raise ConfigError(f"{', '.join(given)} was given without --target: there is no server to connect to")
