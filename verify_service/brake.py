"""What drafts are worth: how many nodes pay for themselves, and how long a wait does.

A drafter can only help. Verify measures what a step costs by the rows in it and how often drafts of a given score are
accepted, keeps the nodes whose expected tokens are worth their cost, none included, and probes a silenced session at
growing intervals. It takes nobody's word: reply times are its own too.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ALPHA = 0.1  # weight of a new measurement in a moving average
_BINS = 16  # scores 0..255 fall in bins of 16: a factor of e in probability each
_SETTLED = 6  # rounds before a session can be silenced
_FIRST_PROBE, _LAST_PROBE = 8, 512  # steps between probes of a silenced session
_PROBE_NODES = 4  # of the likeliest
_PROBE_SHARE = 0.02  # of the step time that probes may cost


class CostTable:
    """Milliseconds of a step by its rows, measured, between the points by straight lines."""

    POINTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)

    def __init__(self, measured_ms: dict[int, float] | None = None) -> None:
        self._ms: dict[int, float] = dict(measured_ms or {})
        self._refresh()

    def observe(self, rows: int, ms: float) -> None:
        """Takes in a step's time."""
        point = self.POINTS[min(bisect.bisect_left(self.POINTS, rows), len(self.POINTS) - 1)]
        known = self._ms.get(point)
        # One slow step (a page fault, a busy core) moves the table little.
        self._ms[point] = ms if known is None else known + _ALPHA * (min(ms, 2 * known) - known)
        self._refresh()

    def ms(self, rows: int | NDArray[np.integer]) -> NDArray[np.float64]:
        """Expected time of a step with that many rows; 1 where nothing is measured yet."""
        if not self._xs:
            return np.ones_like(rows, np.float64)
        ms = np.interp(rows, self._xs, self._ys)
        beyond = np.maximum(0, np.asarray(rows) - self._xs[-1])
        return ms + beyond * (self._ys[-1] / self._xs[-1])

    def _refresh(self) -> None:
        self._xs = sorted(self._ms)
        # More rows never cost less: the table is made monotone from the left.
        self._ys = np.maximum.accumulate([self._ms[x] for x in self._xs]).tolist() if self._xs else []


class Acceptance:
    """How often a drafter's nodes are accepted, by score."""

    def __init__(self) -> None:
        # The prior trusts scores half: exp(-score / 16) of the bin's middle, worth eight nodes.
        middles = np.exp(-np.arange(_BINS, dtype=np.float64))
        self._verified = np.full(_BINS, 8.0)
        self._accepted = 8.0 * 0.5 * middles

    def probabilities(self, scores: NDArray[np.uint8]) -> NDArray[np.float64]:
        """float64 [n]: estimated probability that each node is accepted; it never rises with the score."""
        return np.minimum.accumulate(self._accepted / self._verified)[scores >> 4]

    def observe(self, scores: NDArray[np.uint8], accepted: NDArray[np.bool_]) -> None:
        """Takes in the outcome of verified nodes; old ones fade."""
        bins = scores >> 4
        self._verified += np.bincount(bins, minlength=_BINS)
        self._accepted += np.bincount(bins, weights=accepted, minlength=_BINS)
        fade = np.where(self._verified > 512.0, 0.5, 1.0)
        self._verified *= fade
        self._accepted *= fade


@dataclass(slots=True)
class SessionBrake:
    """Whether one drafter's work on one session pays, as a moving average of milliseconds saved per round.

    A session for which it does not is silenced: no waiting, no nodes, a node budget of 0. A probe lifts that for one
    round, at intervals that grow up to where probes cost `_PROBE_SHARE` of the time. A session whose trees are trimmed
    away is probed too: estimates that nothing is verified for would never rise again.
    """

    acceptance: Acceptance
    factor: float = 1.0  # accepted over expected
    expected_accepted: float = 1.0  # drafts accepted per round
    expected_nodes: float = 4.0  # nodes verified per round
    saved_ms: float = 0.0
    lost_ms: float = 0.0  # what a round costs beside its gain
    rounds: int = 0
    silent: bool = False
    probing: bool = False  # the next tree is verified in part, whatever it seems worth
    probe_after: int = _FIRST_PROBE
    plain_steps: int = 0  # in a row

    def probabilities(self, scores: NDArray[np.uint8]) -> NDArray[np.float64]:
        """float64 [n]: estimated probability that each node is accepted in this session."""
        return np.minimum(1.0, self.acceptance.probabilities(scores) * self.factor)

    def least_nodes(self) -> int:
        """Nodes of the next tree that are verified whatever they seem worth."""
        return _PROBE_NODES if self.probing else 0

    def verified(self, scores: NDArray[np.uint8], accepted: NDArray[np.bool_]) -> None:
        """Takes in which nodes of a tree were accepted."""
        expected = float(self.acceptance.probabilities(scores).sum())
        ratio = (float(accepted.sum()) + 0.25) / (expected + 0.25)
        self.factor += _ALPHA * (min(4.0, ratio) - self.factor)
        self.acceptance.observe(scores, accepted)

    def round_done(self, *, nodes: int, accepted: int, gain_ms: float, loss_ms: float, step_ms: float) -> None:
        """Takes in a round that used or awaited drafts: what the accepted tokens saved, what nodes and wait cost."""
        self.rounds += 1
        self.plain_steps = 0
        self.probing = self.probing and not nodes
        probing = self.rounds > _SETTLED and self.probe_after > _FIRST_PROBE
        alpha = 0.5 if probing else _ALPHA
        self.expected_accepted += alpha * (accepted - self.expected_accepted)
        self.expected_nodes += alpha * (nodes - self.expected_nodes)
        self.saved_ms += alpha * (gain_ms - loss_ms - self.saved_ms)
        self.lost_ms += alpha * (loss_ms - self.lost_ms)
        if self.rounds < _SETTLED:
            return
        if self.saved_ms >= 0.0:
            self.probe_after = _FIRST_PROBE
            return
        self.silent, self.probing = True, False
        affordable = self.lost_ms / (_PROBE_SHARE * step_ms) if step_ms > 0 else _LAST_PROBE
        self.probe_after = int(min(_LAST_PROBE, max(_FIRST_PROBE + 1, min(2 * self.probe_after, affordable))))

    def plain_step(self) -> None:
        """Counts a step without drafts; lifts the silence when a probe is due."""
        self.plain_steps += 1
        if self.plain_steps >= self.probe_after:
            self.silent, self.probing = False, True


@dataclass(slots=True)
class ReplyTimes:
    """How long a drafter takes to answer, as verify sees it: mean and mean deviation in ms (RFC 6298's estimator)."""

    mean_ms: float = 2.0
    deviation_ms: float = 1.0

    def observe(self, ms: float) -> None:
        """Takes in one answer."""
        self.deviation_ms += 0.25 * (abs(ms - self.mean_ms) - self.deviation_ms)
        self.mean_ms += 0.125 * (ms - self.mean_ms)

    @property
    def bound_ms(self) -> float:
        """A wait that almost all answers keep within."""
        return self.mean_ms + 4 * self.deviation_ms


def choose_nodes(
    costs: CostTable, base_rows: int, base_tokens: float, likely: Sequence[NDArray[np.float64]]
) -> list[int]:
    """How many of each session's nodes, likeliest first, to verify: the most tokens per ms of the whole step.

    base_rows and base_tokens: what the step has without them; likely[i]: acceptance probabilities in falling order.
    """
    counts = [0] * len(likely)
    owners = np.concatenate([np.full(len(p), i) for i, p in enumerate(likely)]) if likely else np.empty(0, int)
    if not owners.size:
        return counts
    gains = np.concatenate(likely)
    order = np.argsort(-gains, kind="stable")
    tokens = base_tokens + np.concatenate([[0.0], np.cumsum(gains[order])])
    rate = tokens / costs.ms(base_rows + np.arange(len(order) + 1))
    best = int(np.argmax(rate))
    for owner in owners[order[:best]].tolist():
        counts[owner] += 1
    return counts
