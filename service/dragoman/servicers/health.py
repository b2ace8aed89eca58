"""``grpc.health.v1``: whether to send requests here, and whether this process is of any use still.

    ""                                                 the server: it can answer requests
    "dragoman.v1.GenerationService", ...               the same, for each service
    "dragoman.v1.GenerationService/MODEL"              some version of this model can
    "dragoman.v1.GenerationService/MODEL/VERSION"      this one can
    "liveness"                                         false once an engine is dead or hangs: start the process anew

All but the last are NOT_SERVING while models load and while the server drains. The stock servicer forgets its other
watchers when one of them leaves, and waits for slow ones; hence this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from dragoman.errors import ModelNotFoundError, NotReadyError
from dragoman.model_status import ModelState
from dragoman.model_table import ModelTable
from dragoman.servicers.rpc import Call, Method

SERVICE: Final = "grpc.health.v1.Health"
LIVENESS: Final = "liveness"


class HealthServicer:
    """NOT_SERVING until it is told otherwise. Statuses are worked out when they are asked for, and so never stale."""

    def __init__(self, table: ModelTable, services: Sequence[str]) -> None:
        self._table = table
        self._services = tuple(services)
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()  # a new one for each change: whoever holds the old one is told

    def methods(self) -> tuple[Method, ...]:
        """The RPCs of the service."""
        return (
            Method(SERVICE, "Check", HealthCheckRequest, self._check, is_open=True),
            Method(SERVICE, "Watch", HealthCheckRequest, self._watch, stream_reply=True, is_open=True),
        )

    @property
    def is_serving(self) -> bool:
        """What the status of the server is."""
        return self._serving and self._table.is_live and bool(self._table.models)

    def set_serving(self, serving: bool) -> None:
        """False: whatever the models' states, nothing is served. Tells all watchers."""
        self._serving = serving
        self.tell()

    def tell(self) -> None:
        """Some model's state may have changed: look, and tell the watchers whom it concerns."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        self.tell()

    def _is_serving(self, service: str) -> bool | None:
        """None for a name that means nothing here."""
        if service == LIVENESS:
            return self._table.is_live
        if service in ("", *self._services):
            return self.is_serving
        states = [
            status.state
            for status in self._table.statuses()
            for name in self._services
            if service in (f"{name}/{status.name}", f"{name}/{status.name}/{status.version}")
        ]
        return self.is_serving and ModelState.READY in states if states else None

    async def _check(self, request: HealthCheckRequest, call: Call) -> AsyncGenerator[HealthCheckResponse]:
        serving = self._is_serving(request.service)
        if serving is None:
            raise ModelNotFoundError(
                f"no service {request.service[:100]!r}; there is {LIVENESS}, {', '.join(self._services)}, and each of "
                "these with /MODEL or /MODEL/VERSION behind it"
            )
        yield HealthCheckResponse(status=_STATUSES[serving])

    async def _watch(self, request: HealthCheckRequest, call: Call) -> AsyncGenerator[HealthCheckResponse]:
        last = None
        while not self._closed:
            changed = self._changed
            # The protocol wants SERVICE_UNKNOWN here, not an error: the service might be added later.
            status = _STATUSES[self._is_serving(request.service)]
            if status != last:
                yield HealthCheckResponse(status=status)
                last = status
            if changed is self._changed:  # else it changed while the reply was on its way
                await changed.wait()
        raise NotReadyError("the server is stopping")


_STATUSES: Final = {
    True: HealthCheckResponse.SERVING,
    False: HealthCheckResponse.NOT_SERVING,
    None: HealthCheckResponse.SERVICE_UNKNOWN,
}
