"""What a drafter's planner has measured: how deep drafts come true, what drafting takes, what verify's steps take."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draft_service.session import Extension, Session
from outrider.cost_table import CostTable
from outrider.tree import ROOT
from outrider.v1 import verify_pb2

MAX_DEPTH = 16
_PRIOR, _PRIOR_WEIGHT = 0.7, 4.0  # of a node whose parent was accepted, before anything is known
_WINDOW = 256.0  # tries at a depth after which old ones fade
_ALPHA = 0.1
_KEPT, _HALF_WEIGHT = 0.95, 0.5  # of a call's weight at the next one; of the call that is supposed
_ROW_GUESS = 0.02  # of a step: what a row more costs, where only one size was seen
_CALL_GUESS = 0.25  # of a plain step: a forward pass of a draft model that was not timed yet


class DepthAcceptance:
    """How often a draft of depth d is accepted once that of depth d-1 was, for trees of one number of branches."""

    def __init__(self) -> None:
        self._tries = np.full(MAX_DEPTH, _PRIOR_WEIGHT)
        self._hits = _PRIOR * self._tries

    def observe(self, root_depth: int, accepted: int, depth: int) -> None:
        """A tree was verified below a node at `root_depth`: `accepted` drafts of `depth` came true."""
        tried = slice(root_depth, min(root_depth + accepted + (accepted < depth), MAX_DEPTH))
        self._tries[tried] += 1.0
        self._hits[root_depth : min(root_depth + accepted, MAX_DEPTH)] += 1.0
        fade = np.where(self._tries > _WINDOW, 0.5, 1.0)
        self._tries *= fade
        self._hits *= fade

    def forget(self) -> None:
        """Lets what comes next count for more than what was."""
        keep = _PRIOR_WEIGHT / np.maximum(self._tries, _PRIOR_WEIGHT)
        self._tries *= keep
        self._hits *= keep

    def tokens(self) -> NDArray[np.float64]:
        """float64 [MAX_DEPTH + 1]: tokens that a round commits, by the depth of its drafts."""
        return 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(self._hits / self._tries))])


class StepTimes(CostTable):
    """Milliseconds of verify's steps by rows. Beyond those that were seen it goes on as they do, or rises little."""

    def ms(self, rows: int | NDArray[np.integer]) -> NDArray[np.float64]:
        """As CostTable's; hopeful where nothing is known, so that it is tried."""
        if not self._xs:
            return np.ones_like(rows, np.float64)
        span = self._xs[-1] - self._xs[0]
        slope = (self._ys[-1] - self._ys[0]) / span if span else _ROW_GUESS * self._ys[-1]
        return np.interp(rows, self._xs, self._ys) + slope * np.maximum(0, np.asarray(rows) - self._xs[-1])


class CallTimes:
    """Milliseconds of a call by the steps in it, a line fitted to what was measured; what is older counts less."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # weights, steps, ms, squared steps, steps times ms

    def observe(self, num_steps: int, ms: float) -> None:
        """Takes in a call."""
        if self._sums[0]:
            ms = min(ms, 2 * self.ms(num_steps))  # one that stood still for other reasons says little
        self._sums = _KEPT * self._sums + (1.0, num_steps, ms, num_steps**2, num_steps * ms)

    def ms(self, num_steps: int) -> float:
        """Expected time; while calls had one number of steps, half of it is taken for what every call costs."""
        weight, x, y, xx, xy = self._sums
        # One more call, of no steps, in half the mean's time.
        weight, y = weight + _HALF_WEIGHT, y + _HALF_WEIGHT * y / weight / 2
        slope = max(0.0, (xy - x * y / weight) / (xx - x * x / weight)) if x else 0.0
        return float(max(0.0, y / weight + slope * (num_steps - x / weight)))


class DraftTimes:
    """Milliseconds of a drafter's calls, by branches, sessions and steps."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], CallTimes] = {}

    def observe(self, topk: int, sessions: int, num_steps: int, ms: float) -> None:
        """A call that drafted trees for so many sessions took `ms`: a pass over what was committed, then each step."""
        self._calls.setdefault((topk, sessions.bit_length()), CallTimes()).observe(num_steps, ms)

    def ms(self, topk: int, sessions: int, num_steps: int, plain_ms: float) -> float:
        """Expected time of such a call; plain_ms: of a step of verify, which guesses it while nothing was timed."""
        if not self._calls:
            return _CALL_GUESS * plain_ms * num_steps
        nearest = min(self._calls, key=lambda key: (key[0] != topk, abs(key[1] - sessions.bit_length())))
        return self._calls[nearest].ms(num_steps)


class RoundTrip:
    """Milliseconds of a round beside verify's step and the draft: frames, threads that wake up, Python between."""

    def __init__(self) -> None:
        self.ms = 0.5

    def observe(self, ms: float) -> None:
        """Takes in a round's."""
        self.ms += _ALPHA * (min(max(0.0, ms), 2 * self.ms + 0.5) - self.ms)


class Evidence:
    """Taken from verdicts, whatever session or link they are of."""

    def __init__(self) -> None:
        self.costs = StepTimes()
        self.times = DraftTimes()
        self.round_trip = RoundTrip()
        self.sessions = 1  # in the newest round
        self.hit_rate = 0.0  # rounds that verified an early proposal
        self._accepted: dict[int, DepthAcceptance] = {}

    def accepted(self, topk: int) -> DepthAcceptance:
        """Of trees of so many branches."""
        return self._accepted.setdefault(topk, DepthAcceptance())

    def observe(self, extensions: list[Extension]) -> None:
        """Takes in a round's verdicts."""
        steps: dict[tuple[int, int], int] = {}
        for extension in extensions:
            verdict = extension.verdict
            if verdict.steps:
                steps[verdict.verify_us, verdict.batch_tokens] = verdict.steps
            for credit in verdict.credits:
                self._observe_credit(extension.session, credit)
        for (verify_us, rows), count in steps.items():
            self.costs.observe(rows // count, verify_us / count / 1000)
        if extensions:
            self.sessions = len(extensions)

    def _observe_credit(self, session: Session, credit: verify_pb2.Credit) -> None:
        proposal_id, root, nodes = credit.proposal_id, credit.root_node, credit.nodes_verified
        sent = session.sent.get(proposal_id)
        if sent is None or not -1 <= root < len(sent.tokens):
            return
        self.hit_rate += 0.05 * (float(len(sent.assumed) > 0 or root != ROOT) - self.hit_rate)
        if session.wishes.has_any:
            return
        depths = sent.tree.depths
        root_depth = int(depths[root]) if root != ROOT else 0
        depth = min(int(depths.max()) - root_depth, nodes)
        width = int(np.bincount(sent.parents + 1).max())
        self.accepted(width).observe(root_depth, len(credit.accepted_nodes), depth)
