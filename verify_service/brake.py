"""What drafts are worth: how many nodes pay for themselves, and whether to listen at all.

A drafter can only help. Verify measures what a step costs by the rows in it, how often drafts of a given score come
true, and what listening to a drafter costs beside that (weighing.py): the drafter's work on shared cores, frames, the
time that verify spends on them. It keeps the nodes whose expected tokens are worth their cost, none included, silences
a session for which all that does not pay, and takes nobody's word.

A silenced session is probed at growing intervals. A probe verifies nothing: output depends on no draft, so what is
committed later tells what a tree would have given (hindsight.py). It costs one draft.

Words: a session is `silent` by its own account (here); all are `hushed` while plain steps are measured, or drafting
does not pay for so many (weighing.py). It `listens` where it is neither, or its user fixed its tree; it `asks` where
the next verdict wants a draft, since it listens, or as a probe; it was `told` where drafts were asked for, for the step
under way. Its assignment `is_silenced` where the last verdict sent had a node budget of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.cost_table import CostTable
from verify_service.acceptance import Acceptance
from verify_service.drafter_record import PROBE_SHARE, TOLERANCE, DrafterRecord

_ALPHA = 0.1  # weight of a new measurement in a moving average
_SETTLED = 6  # rounds before a session can be silenced
_FIRST_PROBE, _LAST_PROBE = 8, 64  # plain steps between probes of a silenced session, at least
_LAST_TRIAL = 512  # the same where probes were right and what followed was not
_PROBE_PATIENCE = 16  # plain steps in which a probe must have brought a tree
_FEW = 16  # nodes of a lone tree that are chosen from one by one


@dataclass(slots=True)
class SessionBrake:
    """Whether one drafter's work on one session pays, as a moving average of milliseconds saved per round.

    A session for which it does not is silenced: no waiting, a node budget of 0. What it has cost until then is its
    debt; it is paid off by a small share of the plain steps' time, and nothing new is tried before. Then a probe asks
    for one tree. When hindsight finds that its nodes would have paid, the session is heard again.
    """

    record: DrafterRecord
    acceptance: Acceptance
    silent: bool = False
    expected_accepted: float = 1.0  # drafts accepted per round
    expected_nodes: float = 4.0  # nodes verified per round
    fixed: bool = False  # by the user: neither trimmed nor silenced
    probing: bool = False  # one tree is asked for in spite of the silence
    probe_sent: bool = False
    told: bool = False  # drafts are asked for, for the step under way
    saved_ms: float = 0.0
    debt_ms: float = 0.0
    rounds: int = 0
    probe_after: int = _FIRST_PROBE
    plain_steps: int = 0  # in a row

    @classmethod
    def of(cls, record: DrafterRecord) -> SessionBrake:
        """A new session's: it begins in silence where the others have gained nothing."""
        return cls(
            record, Acceptance(record.acceptance), silent=record.gains_nothing,
            expected_accepted=record.expected_accepted, expected_nodes=record.expected_nodes,
        )  # fmt: skip

    @property
    def listens(self) -> bool:
        """Whether drafts are wanted for each step, and worth a wait."""
        return self.fixed or not (self.silent or self.record.hushed)

    def probabilities(self, scores: NDArray[np.uint8], depths: NDArray[np.integer]) -> list[float]:
        """[n]: estimated probability that each node comes true in this session."""
        return self.acceptance.probabilities(scores, depths)

    @property
    def hoped_accepted(self) -> float:
        """Drafts accepted per round, as waits reckon with it.

        A lone session that is listened to is waited for as others were: a draft that nobody waits for comes late, and
        is for nothing. If it is worth less, it falls silent.
        """
        return max(self.expected_accepted, self.record.expected_accepted if self.record.alone else 0.0)

    @property
    def asks(self) -> bool:
        """Whether the next verdict asks for drafts."""
        return self.listens or (self.probing and not self.probe_sent and not self.record.hushed)

    def tell(self) -> bool:
        """Called with each verdict that is sent: whether it asks for drafts."""
        asks = self.asks
        if asks and not self.listens:
            self.probe_sent = True
            self.debt_ms += self.record.probe_ms
        self.told = self.told or asks
        return asks

    def judged(
        self, scores: NDArray[np.uint8], depths: NDArray[np.integer], true: Sequence[int], *,
        value_ms: float, node_ms: float,
    ) -> None:  # fmt: skip
        """Takes in which of a tree's n nodes came true, by index; scores, depths: [n].

        value_ms, node_ms: what a token is worth, and a row costs.
        """
        self.acceptance.observe(scores, depths, true)
        self.record.trees.observe(len(true))
        if self.fixed or not self.silent:
            return
        # With what has just been learnt: too much hope costs a few rounds, too little another probe.
        worth_it = [chance * value_ms > node_ms for chance in self.probabilities(scores, depths)]
        nodes, gained = float(sum(worth_it)), float(sum([worth_it[node] for node in true]))
        net_ms = gained * value_ms - nodes * node_ms - self.record.tax_ms
        self.record.worth.observe(net_ms / value_ms)
        if net_ms > 0.0:
            self.silent = self.probing = self.probe_sent = False
            self.saved_ms, self.rounds = net_ms, _SETTLED
            self.expected_accepted, self.expected_nodes = gained, nodes
        elif self.probing:
            self._probe_failed()

    def round_done(self, *, nodes: int, accepted: int, net_ms: float, step_ms: float) -> bool:
        """Takes in a round that used, awaited or asked for drafts. Returns whether the session falls silent by it.

        net_ms: what the accepted tokens saved, less what nodes, wait and telling cost; step_ms: a session's share of a
        plain step.
        """
        self.rounds += 1
        self.plain_steps = 0
        alpha = 2 * _ALPHA if self.probe_after > _FIRST_PROBE else _ALPHA
        if nodes:  # what a draft is worth when it comes; one that does not come in time is a loss by its wait
            self.expected_accepted += alpha * (accepted - self.expected_accepted)
            self.expected_nodes += alpha * (nodes - self.expected_nodes)
            self.record.expected_accepted += 0.01 * (accepted - self.record.expected_accepted)
            self.record.expected_nodes += 0.01 * (nodes - self.record.expected_nodes)
        self.saved_ms += alpha * (net_ms - self.saved_ms)
        self.debt_ms = max(0.0, self.debt_ms - net_ms)
        self.record.worth.observe(net_ms / step_ms)
        if self.silent:  # asked for before it was
            self._bound_debt(step_ms)
            return False
        if self.rounds < _SETTLED:
            return False
        if self.saved_ms >= -TOLERANCE * step_ms:
            if self.saved_ms > 0.0 and self.debt_ms == 0.0:
                self.probe_after = _FIRST_PROBE
            return False
        if self.debt_ms < self.record.patience * step_ms:
            return False
        self.silent = True
        self.probe_after = min(2 * self.probe_after, _LAST_TRIAL)
        self._bound_debt(step_ms)
        return True

    def _bound_debt(self, step_ms: float) -> None:
        """A session may be silenced by bad luck: it is tried again soon, and then less and less so."""
        self.debt_ms = min(self.debt_ms, self.probe_after * PROBE_SHARE * step_ms)

    def plain_step(self, step_ms: float) -> bool:
        """Counts a step without drafts, of which step_ms is the session's share. Returns whether a probe is due."""
        self.plain_steps += 1
        self.debt_ms = max(0.0, self.debt_ms - PROBE_SHARE * step_ms)
        if not self.silent or self.record.hushed:
            return False
        if self.probing:
            if self.plain_steps >= self.probe_after + _PROBE_PATIENCE:
                self._probe_failed()
            return False
        if self.plain_steps < self.probe_after or self.debt_ms > 0.0:
            return False
        self.probing, self.probe_sent = True, False
        self.plain_steps = self.probe_after
        return True

    def _probe_failed(self) -> None:
        self.probing = self.probe_sent = False
        self.plain_steps = 0
        self.probe_after = max(self.probe_after, min(2 * self.probe_after, _LAST_PROBE))


def choose_nodes(costs: CostTable, base_rows: int, base_tokens: float, likely: Sequence[list[float]]) -> list[int]:
    """How many of each session's nodes, likeliest first, to verify: the most tokens per ms of the whole step.

    base_rows and base_tokens: what the step has without them; likely[i]: acceptance probabilities in falling order.
    """
    if len(likely) == 1 and len(likely[0]) <= _FEW:
        return [_choose_of_one(costs, base_rows, base_tokens, likely[0])]
    counts = [0] * len(likely)
    if not any(likely):
        return counts
    owners = np.repeat(np.arange(len(likely)), [len(chances) for chances in likely])
    gains = np.concatenate(likely)
    order = np.argsort(-gains, kind="stable")
    tokens = base_tokens + np.concatenate([[0.0], np.cumsum(gains[order])])
    rate = tokens / costs.ms_each(base_rows + np.arange(len(order) + 1))
    best = int(np.argmax(rate))
    for owner in owners[order[:best]].tolist():
        counts[owner] += 1
    return counts


def _choose_of_one(costs: CostTable, base_rows: int, base_tokens: float, likely: list[float]) -> int:
    """What choose_nodes does, for one session with few nodes: done before numpy would have begun."""
    best, best_rate, tokens = 0, 0.0, base_tokens
    for count, ms in enumerate(costs.ms_from(base_rows, len(likely) + 1)):
        tokens += likely[count - 1] if count else 0.0
        if tokens / ms > best_rate:
            best, best_rate = count, tokens / ms
    return best
