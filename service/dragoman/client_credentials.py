"""How a client proves who it is, and whom it trusts; and the channel that does so. Light: it needs grpc alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from dragoman.certificates import read_authorities, read_pair
from dragoman.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """By default, in the clear and without a token. Files are in PEM form, and read when a channel is made."""

    tls: bool = False  # speak TLS; implied by the files
    ca: str = ""  # a file of the authorities to trust; empty: the public ones that gRPC knows
    certificate: str = ""  # a file, for servers that want their callers' certificates
    key: str = ""  # the file of its private key
    server_name: str = ""  # whose name the server's certificate must have; empty: the target's host
    token: str = field(default="", repr=False)  # sent with each call, in the clear where there is no TLS

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("a client's certificate and its key belong together: give both, or neither")
        if not all(" " < character <= "~" for character in self.token):
            raise ConfigError("the token has characters that no token may have: visible ASCII without blanks alone")

    @property
    def encrypted(self) -> bool:
        """Whether TLS is spoken."""
        return self.tls or bool(self.ca or self.certificate or self.server_name)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


PLAIN = ClientCredentials()


def open_channel(target: str, credentials: ClientCredentials, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
    """A channel for threads. Raises ConfigError for files that cannot be used."""
    if not credentials.encrypted:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, *_secured(credentials, options))


def open_async_channel(
    target: str, credentials: ClientCredentials, options: Sequence[tuple[str, Any]]
) -> grpc.aio.Channel:
    """The same for the running event loop."""
    if not credentials.encrypted:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, *_secured(credentials, options))


def _secured(
    credentials: ClientCredentials, options: Sequence[tuple[str, Any]]
) -> tuple[grpc.ChannelCredentials, list[tuple[str, Any]]]:
    roots = read_authorities(credentials.ca, "ca") if credentials.ca else None
    key, chain = read_pair(credentials.certificate, credentials.key) if credentials.certificate else (None, None)
    own = [("grpc.ssl_target_name_override", credentials.server_name)] if credentials.server_name else []
    return grpc.ssl_channel_credentials(roots, key, chain), [*options, *own]
