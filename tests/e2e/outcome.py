"""The outcome of a run of tests/e2e/chaos.py."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

_WARM = 0.3  # of the run: memory is compared from there on


@dataclass
class Outcome:
    """The result of a run. `grown_kib` compares, process by process, its last third's memory with its second's."""

    events: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    broken_calls: int = 0  # that the gateway mended
    rogues: dict[str, list[str]] = field(default_factory=dict)  # how often each came, and how its streams ended
    enlisted: set[str] = field(default_factory=set)  # rogues that verify took
    memory_kib: dict[str, list[int]] = field(default_factory=dict)
    pages_kept: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # of processes, about themselves
    comings: list[str] = field(default_factory=list)  # and goings of verify services, as the gateway saw them

    @property
    def grown_kib(self) -> dict[str, int]:
        """How much each process's memory grew after it was warm; those with few samples are left out."""
        grown: dict[str, int] = {}
        for name, samples in self.memory_kib.items():
            warm = samples[int(len(samples) * _WARM) :]
            if len(warm) >= 4:
                half = len(warm) // 2
                grown[name] = sorted(warm[half:])[half // 2] - sorted(warm[:half])[half // 2]
        return grown

    def report(self) -> str:
        """The outcome as JSON."""
        return json.dumps(
            {
                "answers": self.answers, "wrong": self.wrong, "lost": self.lost, "broken_calls": self.broken_calls,
                "pages_kept": self.pages_kept, "complaints": self.complaints,
                "events": dict(self.events), "rogues": self.rogues,
                "memory_kib": {name: [samples[0], samples[-1]] for name, samples in self.memory_kib.items()},
                "memory_grown_kib": self.grown_kib,
            },
            indent=1,
        )  # fmt: skip
