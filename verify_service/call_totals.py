"""Plain numbers that the rpc handlers keep of requests and their sessions, for metrics.

Owned by the event loop; the thread that writes metrics reads them without a lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from outrider.metrics import Buckets
from outrider.v1 import verify_pb2
from verify_service.grammar_compiler import GrammarTotals
from verify_service.session import Session

_STAGE_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass(slots=True)
class CallTotals:
    """Totals since start."""

    grammars: GrammarTotals
    prompt_tokens: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # sessions by how they ended
    stages_s: dict[str, Buckets] = field(
        default_factory=lambda: {stage: Buckets(_STAGE_BOUNDS) for stage in ("queue", "prefill", "decode")}
    )

    def began(self, session: Session) -> None:
        """Counts a session that began, at its first response."""
        self.prompt_tokens += session.prompt_len
        self.queried_tokens += session.queried_len
        self.cached_tokens += session.cached_len

    def ended(self, finish: verify_pb2.GenerateFinish) -> None:
        """Counts a session that ended, by the finish of its last response."""
        self.finished[verify_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()] += 1
        for stage, spent_us in (
            ("queue", finish.queue_us), ("prefill", finish.prefill_us), ("decode", finish.decode_us)
        ):  # fmt: skip
            self.stages_s[stage].observe(spent_us / 1e6)
