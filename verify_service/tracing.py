"""What one traced Generate call leaves behind: a span for the call, one for its prefill, one for each round.

Made of the responses as they pass on the event loop; the engine knows nothing of it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from outrider.algorithms import algorithm_name
from outrider.tracing import TRACEPARENT, Tracing, metadata_value
from outrider.v1 import verify_pb2
from verify_service.session import Session

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class CallTrace:
    """The spans of one call. A round is the time between two responses of one session."""

    def __init__(self, tracing: Tracing, span: Span, sessions: list[Session], request_id: str) -> None:
        self._tracing = tracing
        self._span = span
        self._parent = tracing.traceparent(span)
        self._last_ns = {session.session_id: session.arrived_ns for session in sessions}
        span.set_attribute("outrider.request_id", request_id)
        span.set_attribute("outrider.prompt_tokens", sessions[0].prompt_len)
        for session in sessions:
            session.traceparent = self._parent

    def responded(self, session: Session, response: verify_pb2.GenerateResponse) -> None:
        """Records a session's next response."""
        now_ns = time.monotonic_ns()
        began_ns, self._last_ns[session.session_id] = self._last_ns[session.session_id], now_ns
        attributes: dict[str, Any] = {"outrider.choice": response.choice_index, "outrider.tokens": len(response.tokens)}
        if not response.HasField("num_drafted"):
            if not response.tokens:
                return
            queued_ns = max(0, session.started_ns - session.arrived_ns)
            attributes |= {"outrider.cached_tokens": session.cached_len, "outrider.queue_ms": queued_ns / 1e6}
            self._tracing.record("prefill", self._parent, began_ns, now_ns, attributes)
            return
        attributes |= {"outrider.drafted": response.num_drafted, "outrider.accepted": response.num_accepted}
        if response.HasField("algorithm"):
            name = algorithm_name(response.algorithm)
            attributes["outrider.algorithm"] = name
        self._tracing.record("round", self._parent, began_ns, now_ns, attributes)

    def end(self, how: str) -> None:
        """Ends the call's span: `finished`, `cancelled` or `error`."""
        self._span.set_attribute("outrider.end", how)
        self._span.end()


def begin(tracing: Tracing | None, metadata: Any, sessions: list[Session], request_id: str) -> CallTrace | None:
    """A trace for a call, if it is to be traced."""
    if tracing is None:
        return None
    span = tracing.start("Generate", metadata_value(metadata, TRACEPARENT), server=True)
    if not span.is_recording():
        span.end()
        return None
    return CallTrace(tracing, span, sessions, request_id)
