"""Generate calls: how they begin, what their sessions say to them, how they end. Owned by the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import RETRY_SOON_S, Internal, ResourceExhausted, Unavailable
from outrider.telemetry import get_logger
from outrider.tracing import REQUEST_ID, Tracing, metadata_value
from outrider.v1 import verify_pb2
from verify_service.call_totals import CallTotals
from verify_service.commands import Cancel, Inbox, Submit
from verify_service.requests import SessionFactory
from verify_service.session import Session
from verify_service.target import Target
from verify_service.tracing import CallTrace, begin
from verify_service.unsent import Responses

log = get_logger(__name__)

Tell = Callable[[verify_pb2.GenerateResponse | Exception], object]

_GOING = "this server is shutting down"


@dataclass(slots=True, eq=False)
class Call:
    """One Generate call. `tell` gets what its sessions say, or why they cannot go on."""

    sessions: list[Session]
    request_id: str
    trace: CallTrace | None
    tell: Tell
    running: dict[int, Session] = field(init=False)  # those that have not finished, by session id
    started: set[int] = field(default_factory=set)
    how: str = "finished"  # it ended: or cancelled, refused, or error

    def __post_init__(self) -> None:
        self.running = {session.session_id: session for session in self.sessions}


class Calls:
    """All calls of the process. `idle` is set while there are none."""

    def __init__(
        self,
        factory: SessionFactory,
        inbox: Inbox,
        target: Target,
        totals: CallTotals,
        tracing: Tracing | None,
        max_untaken: int,
    ) -> None:
        """max_untaken: requests that may wait for the engine to look at them; it looks once a step."""
        self._max_untaken = max_untaken
        self._factory = factory
        self._inbox = inbox
        self._target = target
        self._totals = totals
        self._tracing = tracing
        self._by_session: dict[int, Call] = {}
        self._open: set[Call] = set()
        self._num_beginning = 0  # whose sessions are being made
        self._num_compiling = 0  # of these
        self.draining = False  # no new ones are taken
        self.stopped = False  # the engine takes none any more
        self.idle = asyncio.Event()
        self.idle.set()

    async def begin(self, request: verify_pb2.GenerateRequest, metadata: Any, tell: Tell) -> Call:
        """Makes the request's sessions and hands them to the engine. Whoever gets the call must `leave` it.

        metadata: the caller's, for the request's name and its trace. InvalidArgument for a request that breaks a rule,
        Unavailable while draining and after the engine's end, ResourceExhausted where more came during one step than
        could be queued after it, or wait for their grammars.
        """
        if self.draining:
            raise Unavailable(_GOING)
        untaken = self._inbox.num_calls + self._num_compiling
        if untaken >= self._max_untaken:
            self._totals.finished["refused"] += 1  # its choices were not looked at
            raise ResourceExhausted(
                f"{untaken} requests came during one step, or wait for their grammars, and at most "
                f"{self._max_untaken} may; try again later",
                retry_after_s=RETRY_SOON_S,
            )
        self._num_beginning += 1
        self.idle.clear()
        try:
            sessions = await self._compiled(request) if _has_grammar(request) else self._factory.build(request)
            request_id = request.request_id or metadata_value(metadata, REQUEST_ID)
            call = Call(sessions, request_id, begin(self._tracing, metadata, sessions, request_id), tell)
            self._by_session.update(dict.fromkeys(call.running, call))
            self._open.add(call)
            self._submit(call)
        finally:
            self._num_beginning -= 1
            self._rest()
        return call

    def _submit(self, call: Call) -> None:
        """Hands a call's sessions to the engine. Unavailable where that has ended."""
        self._inbox.put(Submit(call.sessions))
        if self._inbox.has_ended:
            self.give_up(call, "refused")
            self.leave(call)
            raise Unavailable(_GOING)

    async def _compiled(self, request: verify_pb2.GenerateRequest) -> list[Session]:
        """The request's sessions, once its grammar is compiled."""
        self._num_compiling += 1
        try:
            sessions = await self._factory.build_with_grammar(request)
        finally:
            self._num_compiling -= 1
        if self.stopped:
            raise Unavailable(_GOING)
        return sessions

    def _rest(self) -> None:
        if not self._open and not self._num_beginning:
            self.idle.set()

    def close(self) -> None:
        """Drops what calls that are gone have left to do."""
        self._factory.close()

    def deliver(self, responses: Responses) -> None:
        """Takes a step's responses to the calls that wait for them; runs on the event loop."""
        for session, response in responses:
            call = self._by_session.get(session.session_id)
            if call is None:
                continue
            try:
                if not isinstance(response, Exception):
                    self._note(call, session, response)
                call.tell(response)
            except Exception as error:  # of this call alone: the others' responses are still to come
                log.error("a call cannot be answered", request_id=call.request_id, exc_info=error)
                self.give_up(call, "error")
                with contextlib.suppress(Exception):
                    call.tell(Internal("this call cannot be answered; the server's log says why"))

    def give_up(self, call: Call, how: str) -> None:
        """Ends what still runs of the call, which was `cancelled`, or failed (`how_ended`); its pages are free within
        one step."""
        if not call.running:
            return
        call.how = how
        self._totals.finished[how] += len(call.running)
        self._inbox.put(Cancel(list(call.running.values())))
        for session_id in call.running:
            del self._by_session[session_id]
        call.running = {}

    def leave(self, call: Call) -> None:
        """Forgets a call whose caller has all of it, or wants no more."""
        self.give_up(call, "cancelled")
        self._open.discard(call)
        self._rest()
        if call.trace is not None:
            call.trace.end(call.how)
        sessions = call.sessions
        log.info(
            "generate", request_id=call.request_id, end=call.how, sessions=[each.session_id for each in sessions],
            prompt_tokens=sessions[0].prompt_len, tokens=sum(session.output_len for session in sessions),
            ms=(time.monotonic_ns() - sessions[0].arrived_ns) // 1_000_000,
        )  # fmt: skip

    def _note(self, call: Call, session: Session, response: verify_pb2.GenerateResponse) -> None:
        """Counts and traces a response, and completes it where it is a session's first."""
        if session.session_id not in call.started:
            call.started.add(session.session_id)
            self._totals.began(session)
            response.start.CopyFrom(
                verify_pb2.GenerateStart(
                    seed=session.seed,
                    boot_id=self._target.boot_id,
                    numerics_id=self._target.model.numerics_id,
                    cached_tokens=session.cached_len,
                )
            )
        if call.trace is not None:
            call.trace.responded(session, response)
        if response.HasField("finish"):
            self._totals.ended(response.finish)
            del call.running[session.session_id], self._by_session[session.session_id]


def how_ended(error: Exception) -> str:
    """The name under which sessions that end with this error are counted: they failed, or there was no room."""
    return "refused" if isinstance(error, ResourceExhausted) else "error"


def _has_grammar(request: verify_pb2.GenerateRequest) -> bool:
    return request.sampling.HasField("grammar")
