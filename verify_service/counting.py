"""Plain numbers that the engine's loop keeps as it goes: for server info, metrics and the decode log line.

Owned by the engine; others read them without a lock, and may see a step half counted.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.metrics import Buckets
from outrider.speculation_count import SpeculationCount

# Phases of the loop, in the order in which a step goes through them.
PHASES = ("idle", "plan", "wait", "tell", "forward", "commit")
IDLE, PLAN, WAIT, TELL, FORWARD, COMMIT = range(len(PHASES))


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    steps: int = 0
    output_tokens: int = 0
    tokens_per_s: float = 0.0  # over about the last second of work
    waits: int = 0  # for drafters
    missing: int = 0  # drafts that a wait ended without
    silenced: int = 0  # times that the brake silenced a session's drafter
    probes: int = 0  # that it began, of silenced sessions
    phase_ns: list[int] = field(default_factory=lambda: [0] * len(PHASES))
    decode_s: Buckets = field(default_factory=Buckets)  # forward passes without prompts' chunks
    prefill_s: Buckets = field(default_factory=Buckets)  # those with some
    # Of 0: plain steps.
    by_algorithm: defaultdict[int, SpeculationCount] = field(default_factory=lambda: defaultdict(SpeculationCount))
    is_idle: bool = False  # the loop waits for a command
    _lap_ns: int = field(default_factory=time.monotonic_ns)
    _most_idle_ns: int = 0  # that was read
    _window_ns: int = 0
    _window_tokens: int = 0

    def lap(self, phase: int) -> int:
        """Counts the time since the last lap as spent in `phase`; returns the time now, in monotonic nanoseconds."""
        now_ns = time.monotonic_ns()
        self.phase_ns[phase] += now_ns - self._lap_ns
        self._lap_ns = now_ns
        return now_ns

    def progress(self) -> object:
        """For a watchdog: what changes as the loop goes on, None while it waits for commands."""
        return None if self.is_idle else (self._lap_ns, self.steps)

    def spent_ns(self) -> list[int]:
        """Nanoseconds by phase, the idle time since the last lap included; never less than was read before."""
        spent_ns = self.phase_ns.copy()
        if self.is_idle:
            spent_ns[IDLE] += time.monotonic_ns() - self._lap_ns
        spent_ns[IDLE] = self._most_idle_ns = max(spent_ns[IDLE], self._most_idle_ns)
        return spent_ns

    def count(self, tokens: int, elapsed_ns: int) -> None:
        """Counts one step that sent `tokens`."""
        self.steps += 1
        self.output_tokens += tokens
        self._window_ns += elapsed_ns
        self._window_tokens += tokens
        if self._window_ns >= 1_000_000_000:
            self.tokens_per_s = self._window_tokens * 1e9 / self._window_ns
            self._window_ns = self._window_tokens = 0


@dataclass(slots=True)
class DraftTotals:
    """What became of one algorithm's drafts; drafters that left are counted too."""

    counts: Counter[str] = field(default_factory=Counter)  # of drafters that left
    ages: Buckets = field(default_factory=Buckets)  # from being told of a length to a proposal for it, in seconds
    proposed_tokens: int = 0  # nodes of proposals that were kept
    overlap_hits: int = 0  # trees verified that were drafted before the newest token was known
    overlap_misses: int = 0
    accepted_early: int = 0  # tokens of the former, and of the latter
    accepted_fresh: int = 0

    def count_used(self, accepted: int, *, early: bool) -> None:
        """Counts a tree that was verified, of which so many nodes; `early`: drafted before its root was known."""
        self.overlap_hits += early
        self.overlap_misses += not early
        self.accepted_early += accepted * early
        self.accepted_fresh += accepted * (not early)


class DecodeLog:
    """SGLang's line about decoding, once in `interval` steps; 0: never."""

    def __init__(self, interval: int, counters: Counters, stats: SpeculationCount, say: Callable[..., object]) -> None:
        self._interval = interval
        self._counters, self._stats, self._say = counters, stats, say
        self._last = (0, 0, 0)  # verify steps, drafted, accepted at the last line

    def step(self, *, running: int, waiting: int, tokens: int, pool_tokens: int) -> None:
        """Counts a step; says the line when it is due. tokens: those in the pool's pages that are in use."""
        if not self._interval or self._counters.steps % self._interval:
            return
        stats, (calls, drafted, accepted) = self._stats, self._last
        self._last = (stats.verify_steps, stats.draft_tokens, stats.accepted_tokens)
        calls, drafted, accepted = self._last[0] - calls, self._last[1] - drafted, self._last[2] - accepted
        self._say(
            "decode batch", running_req=running, token=tokens, token_usage=round(tokens / max(1, pool_tokens), 2),
            accept_len=round(1 + accepted / max(1, calls), 2), accept_rate=round(accepted / max(1, drafted), 2),
            gen_throughput=round(self._counters.tokens_per_s, 2), queue_req=waiting,
        )  # fmt: skip
