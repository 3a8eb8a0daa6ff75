"""Spans of drafts, for sessions whose requests are traced."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from draft_service.drafters.base import Draft
from draft_service.session import Session
from outrider.tracing import Tracing


def record_drafts(
    tracing: Tracing, name: str, start_ns: int, drafted: Iterable[tuple[Session, Sequence[Draft]]]
) -> None:
    """One span for each traced session of a call that began at `start_ns` of time.perf_counter_ns."""
    end_ns = time.perf_counter_ns()
    for session, drafts in drafted:
        if session.traceparent:
            nodes = sum(len(draft) for draft in drafts)
            attributes = {"outrider.proposals": len(drafts), "outrider.nodes": nodes}
            tracing.record(name, session.traceparent, start_ns, end_ns, attributes)
