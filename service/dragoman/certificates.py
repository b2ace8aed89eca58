"""TLS for the gRPC port: its certificate, and those of callers where they need one. Renewed without a restart."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from dragoman.config import TlsConfig
from dragoman.errors import ConfigError
from dragoman.renewal import Renewed


class Certificates:
    """The files of a ``TlsConfig``. Each new connection uses the latest of them; those that exist keep theirs."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError for files that are missing, unreadable, or do not belong together."""
        self._config = config
        paths = [Path(path) for path in (config.certificate, config.key, config.client_ca) if path]
        self._files = Renewed("tls", paths, self._read)

    def credentials(self) -> grpc.ServerCredentials:
        """For one port."""
        return grpc.dynamic_ssl_server_credentials(
            self._files.value,
            self._renewed,  # type: ignore[arg-type]  # the stubs lack the None that gRPC documents
            require_client_authentication=bool(self._config.client_ca),
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks here before each handshake, on a thread of its own; None leaves it with what it has."""
        return self._files.value if self._files.renew() else None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        config = self._config
        key, chain = read_pair(config.certificate, config.key)
        roots = read_authorities(config.client_ca, "client_ca") if config.client_ca else None
        return grpc.ssl_server_certificate_configuration([(key, chain)], roots)


def read_file(path: str, name: str) -> bytes:
    """Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror or error}") from error


def read_pair(certificate: str, key: str) -> tuple[bytes, bytes]:
    """A private key and the chain of its certificate. Raises ConfigError for files that do not belong together.

    gRPC says nothing useful about bad files, and takes a key that is another certificate's.
    """
    pair = read_file(key, "key"), read_file(certificate, "certificate")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password="")  # without one, it would ask on the terminal
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"the certificate {certificate} and the key {key} cannot be used: {error}: give a certificate in PEM form "
            "and its own private key, not encrypted"
        ) from error
    return pair


def read_authorities(path: str, name: str) -> bytes:
    """Certificates to trust. Raises ConfigError unless there is one in PEM form."""
    data = read_file(path, name)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{name} {path} holds no certificate in PEM form: {error}") from error
    return data
