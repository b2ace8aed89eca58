"""``grpc.health.v1``: whether to send requests here. "" is the server as a whole; every service has its status.

The stock servicer forgets its other watchers when one of them leaves, and waits for slow ones; hence this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from dragoman.errors import ModelNotFoundError, NotReadyError
from dragoman.servicers.rpc import Call, Method

SERVICE = "grpc.health.v1.Health"


class HealthServicer:
    """NOT_SERVING until it is told otherwise."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = ("", *services)
        self._status = HealthCheckResponse.NOT_SERVING
        self._closed = False
        self._changed = asyncio.Event()  # a new one for each change: whoever holds the old one is told

    def methods(self) -> tuple[Method, ...]:
        """The RPCs of the service."""
        return (
            Method(SERVICE, "Check", HealthCheckRequest, self._check),
            Method(SERVICE, "Watch", HealthCheckRequest, self._watch, stream_reply=True),
        )

    def set_serving(self, serving: bool) -> None:
        """Change the status and tell all watchers."""
        self._status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        self._tell()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _check(self, request: HealthCheckRequest, call: Call) -> AsyncGenerator[HealthCheckResponse]:
        if request.service not in self._services:
            raise ModelNotFoundError(f"no service {request.service[:100]!r}; there is {', '.join(self._services[1:])}")
        yield HealthCheckResponse(status=self._status)

    async def _watch(self, request: HealthCheckRequest, call: Call) -> AsyncGenerator[HealthCheckResponse]:
        last = None
        while not self._closed:
            changed = self._changed
            # The protocol wants SERVICE_UNKNOWN here, not an error: the service might be added later.
            known = request.service in self._services
            status = self._status if known else HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                yield HealthCheckResponse(status=status)
                last = status
            if changed is self._changed:  # else it changed while the reply was on its way
                await changed.wait()
        raise NotReadyError("the server is stopping")
