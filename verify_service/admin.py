"""The rpc handlers of AdminService: who may call, and what is handed to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import grpc.aio

from outrider.errors import RETRY_SOON_S, InvalidArgument, NotFound, ResourceExhausted, Unauthenticated
from outrider.telemetry import get_logger
from outrider.thread_future import ThreadFuture
from outrider.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from verify_service.commands import Ask, Inbox
from verify_service.drafter import Drafter, Mode
from verify_service.drafters import Drafters

log = get_logger(__name__)

ResultT = TypeVar("ResultT")

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
PATH = f"/{SERVICE}/"  # what its methods' paths begin with
MAX_CALLS = 64  # that wait for the engine, which answers them all between two steps
_MODES = {
    admin_pb2.DRAFTER_MODE_ENABLED: Mode.ENABLED,
    admin_pb2.DRAFTER_MODE_DRAINING: Mode.DRAINING,
    admin_pb2.DRAFTER_MODE_DISABLED: Mode.DISABLED,
}
_WIRE_MODES = {mode: number for number, mode in _MODES.items()}


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Owned by the event loop; drafters: the engine's.

    has_token: callers had to send an admin token; else only Unix sockets are served.
    """

    def __init__(self, inbox: Inbox, drafters: Drafters, *, has_token: bool) -> None:
        self._inbox = inbox
        self._drafters = drafters
        self._has_token = has_token
        self._num_asked = 0  # of the engine, and not answered yet

    async def ListDrafters(
        self, request: admin_pb2.ListDraftersRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListDraftersResponse:
        """All drafters that are enlisted, and what was switched."""
        self._check(context)

        def look() -> admin_pb2.ListDraftersResponse:
            return admin_pb2.ListDraftersResponse(
                drafters=[_managed(drafter) for drafter in self._drafters],
                disabled_algorithms=sorted(self._drafters.disabled_algorithms),
            )

        return await self._ask(look)

    async def SetDrafterMode(
        self, request: admin_pb2.SetDrafterModeRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.SetDrafterModeResponse:
        """Switches what a drafter may have. NotFound for one that is not enlisted."""
        self._check(context)
        mode = _MODES.get(request.mode)
        if mode is None:
            raise InvalidArgument(f"mode is {request.mode}; known are {', '.join(_names())}", field="mode")

        def change() -> admin_pb2.SetDrafterModeResponse:
            found = [drafter for drafter in self._drafters if drafter.drafter_id == request.drafter_id]
            if not found:
                raise NotFound(f"no drafter {request.drafter_id!r} is enlisted", field="drafter_id")
            moved = sum(self._drafters.set_mode(drafter, mode) for drafter in found)
            return admin_pb2.SetDrafterModeResponse(drafter=_managed(found[0]), moved_sessions=moved)

        response = await self._ask(change)
        log.info("drafter mode set", drafter=request.drafter_id, mode=mode.value, moved=response.moved_sessions,
                 peer=context.peer())  # fmt: skip
        return response

    async def SetAlgorithm(
        self, request: admin_pb2.SetAlgorithmRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.SetAlgorithmResponse:
        """Switches an algorithm on or off. InvalidArgument for one that does not exist."""
        self._check(context)
        if request.algorithm not in common_pb2.Algorithm.values()[1:]:
            known = ", ".join(common_pb2.Algorithm.keys()[1:])
            raise InvalidArgument(f"algorithm is {request.algorithm}; known are {known}", field="algorithm")

        def change() -> admin_pb2.SetAlgorithmResponse:
            moved = self._drafters.set_algorithm(request.algorithm, enabled=request.enabled)
            return admin_pb2.SetAlgorithmResponse(moved_sessions=moved)

        response = await self._ask(change)
        log.info("algorithm switched", algorithm=common_pb2.Algorithm.Name(request.algorithm), enabled=request.enabled,
                 moved=response.moved_sessions, peer=context.peer())  # fmt: skip
        return response

    def _check(self, context: grpc.aio.ServicerContext) -> None:
        if not self._has_token and not context.peer().startswith("unix:"):
            raise Unauthenticated("this service is managed over Unix sockets alone, unless it has --admin-token-file")

    async def _ask(self, work: Callable[[], ResultT]) -> ResultT:
        """Has the engine do the work between two steps."""
        if self._num_asked >= MAX_CALLS:
            raise ResourceExhausted(
                f"{self._num_asked} calls wait for the engine; at most {MAX_CALLS} may", retry_after_s=RETRY_SOON_S
            )
        self._num_asked += 1
        answer: ThreadFuture[ResultT] = ThreadFuture(self._answered)
        self._inbox.put(Ask(work, answer))
        return await answer

    def _answered(self) -> None:
        self._num_asked -= 1


def _managed(drafter: Drafter) -> admin_pb2.ManagedDrafter:
    return admin_pb2.ManagedDrafter(
        drafter_id=drafter.drafter_id,
        algorithm=drafter.algorithm,
        draft_model=drafter.draft_model,
        mode=_WIRE_MODES[drafter.mode],
        sessions=len(drafter.assignments),
        max_sessions=drafter.max_sessions,
        silent_sessions=sum(assignment.brake.silent for assignment in drafter.assignments.values()),
        draft_tokens=drafter.counts["drafted_tokens"],
        accepted_tokens=drafter.counts["accepted_tokens"],
        gains_nothing=drafter.record.gains_nothing,
    )


def _names() -> list[str]:
    return [admin_pb2.DrafterMode.Name(number) for number in _MODES]
