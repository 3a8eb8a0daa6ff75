"""Plain numbers that drafting keeps as it goes, for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.metrics import Buckets
from outrider.v1 import verify_pb2


@dataclass(slots=True)
class DraftCounts:
    """Totals since start, of all links. Kinds: `tree` (at the committed state) and `early` (below a guess)."""

    calls_s: dict[str, Buckets] = field(default_factory=lambda: {"tree": Buckets(), "early": Buckets()})
    proposals: Counter[str] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    steps: int = 0  # of the draft model, one for all trees that grow together; for those at committed states

    def took(self, kind: str, ms: float) -> None:
        """Counts one call of the drafter."""
        self.calls_s[kind].observe(ms / 1000)

    def sent(self, proposals: Sequence[verify_pb2.Proposal]) -> None:
        """Counts proposals that go out."""
        for proposal in proposals:
            kind = "early" if proposal.assumed else "tree"
            self.proposals[kind] += 1
            self.nodes[kind] += len(proposal.tokens) // 4
