"""grpc.health.v1 for strangers, whom it is open to: few watchers, short names, and nobody who reads slowly holds up
another, or the server's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.wire import MAX_NAME_CHARS

MAX_WATCHERS = 256

Status = health_pb2.HealthCheckResponse.ServingStatus


class Health(health_pb2_grpc.HealthServicer):
    """States by service; "" is the server as a whole. Of others `Check` says NOT_FOUND, `Watch` SERVICE_UNKNOWN."""

    def __init__(self) -> None:
        self._states: dict[str, Status] = {}
        self._changed = asyncio.Event()  # another one after each change
        self._num_watchers = 0

    def set(self, service: str, status: Status) -> None:
        """Sets what is said of a service from now on; waits for nobody."""
        self._states[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state now."""
        status = self._states.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        """All states now."""
        states = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._states.items()}
        return health_pb2.HealthListResponse(statuses=states)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state, and again whenever it is another one."""
        if len(request.service) > MAX_NAME_CHARS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"service has {len(request.service)} characters; it must have at most {MAX_NAME_CHARS}",
            )
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"this server has {MAX_WATCHERS} watchers already")
        self._num_watchers += 1
        try:
            told: Status | None = None
            while True:
                changed = self._changed
                status = self._states.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != told:
                    yield health_pb2.HealthCheckResponse(status=status)
                    told = status
                await changed.wait()
        finally:
            self._num_watchers -= 1
