"""Metrics over HTTP: ``GET /metrics``, and nothing else."""

from __future__ import annotations

import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import BaseRequestHandler
from typing import Any, Final, Self
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from dragoman.errors import ConfigError

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1  # how long close may have to wait


class MetricsServer:
    """Serves one registry from threads of its own. It listens as soon as it exists, on ``port``."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """``port`` 0 picks a free one. Raises ConfigError when the address cannot be listened on."""
        try:
            self._server = _Listener((host, port), partial(_Handler, registry))
        except (OSError, UnicodeError, TypeError) as error:  # the latter two for a host that is no name
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {reason}: choose another --metrics-port (0: a free one)"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True  # restarts need not wait for old connections; a live listener is still refused
    allow_reuse_port = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: Callable[[Any, Any, Self], BaseRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):  # a scraper that hangs up is no event
            logger.exception("could not serve metrics")


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds that a silent connection may hold a thread
    protocol_version = "HTTP/1.1"

    def __init__(self, registry: CollectorRegistry, *args: Any) -> None:
        self._registry = registry
        super().__init__(*args)

    def do_GET(self) -> None:
        if urlsplit(self.path).path != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self._registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is no event."""
