"""What speculation did, counted: by verify as it commits, by the gateway as it sees the stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.v1 import common_pb2

_NUMBERS = (
    "verify_steps", "draft_tokens", "accepted_tokens", "committed_tokens", "accepted_prediction_tokens",
    "rejected_prediction_tokens",
)  # fmt: skip


@dataclass(slots=True)
class SpeculationCount:
    """Counts of one output, or of several together; as on the wire, `drafts` aside."""

    verify_steps: int = 0
    drafts: int = 0  # steps that verified a tree
    draft_tokens: int = 0
    accepted_tokens: int = 0
    committed_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    accepted_histogram: list[int] = field(default_factory=list)

    @property
    def accept_length(self) -> float | None:
        """Tokens committed per verify step; None before the first."""
        return self.committed_tokens / self.verify_steps if self.verify_steps else None

    def count(self, *, drafted: int, accepted: int, committed: int) -> None:
        """Counts one verify step."""
        self.verify_steps += 1
        self.drafts += drafted > 0
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.committed_tokens += committed
        self._count_steps(accepted, 1)

    def add(self, other: SpeculationCount) -> None:
        """Adds another output's counts."""
        for name in ("drafts", *_NUMBERS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for accepted, steps in enumerate(other.accepted_histogram):
            self._count_steps(accepted, steps)

    def _count_steps(self, accepted: int, steps: int) -> None:
        missing = accepted + 1 - len(self.accepted_histogram)
        if missing > 0:
            self.accepted_histogram += [0] * missing
        self.accepted_histogram[accepted] += steps

    def to_proto(self) -> common_pb2.SpeculationStats:
        """The counts for the wire."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return common_pb2.SpeculationStats(accepted_histogram=self.accepted_histogram, **numbers)

    @classmethod
    def from_wire(cls, stats: common_pb2.SpeculationStats) -> SpeculationCount:
        """The counts that another process made."""
        numbers = {name: getattr(stats, name) for name in _NUMBERS}
        return cls(accepted_histogram=list(stats.accepted_histogram), **numbers)


def total_speculation(counts: Iterable[SpeculationCount]) -> SpeculationCount:
    """Counts added up."""
    total = SpeculationCount()
    for count in counts:
        total.add(count)
    return total
