"""What a drafter's planner has measured: how deep drafts come true, what drafting takes, what verify's steps take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from draft_service.drafters.shape import TreeShape
from draft_service.session import Extension, Grown, Sent, Session
from outrider.cost_table import CostTable
from outrider.tree import ROOT
from outrider.v1 import verify_pb2

MAX_DEPTH = 16
_PRIOR, _PRIOR_WEIGHT = 0.7, 4.0  # of a node whose parent was accepted, before anything is known
_FEW_TREES = 8
_NARROWER = 0.8  # of a tree's chances to be accepted a step deeper, about what a chain has
_STEPS_PRIOR = 1.0  # of a step that may be run once the one before was
_WINDOW = 256.0  # tries at a depth after which old ones fade
_FADE_EVERY = 16  # trees
_ALPHA = 0.1
_FEW_OF_MANY = 0.02  # weight of one of the rounds, which differ much
_FEW_CALLS, _FIRST_ARE_SLOW = 6.0, 0.6  # of so few those before one that took so much less were the process's first
_KEPT, _HALF_WEIGHT = 0.95, 0.5  # of a call's weight at the next one; of the call that is supposed
_ROW_GUESS = 0.02  # of a step: what a row more costs, where only one size was seen
_ROUND_TRIP_GUESS = 0.5  # milliseconds
_TWICE_AS_MANY = 1.4  # times as long a call takes for twice as many sessions, before that is measured
_CALL_GUESS = 0.25  # of a plain step: a forward pass of a draft model that was not timed yet


class DepthReached:
    """How often depth d is reached once d-1 was, for trees of one number of branches.

    Plain numbers, as all here: a drafter's caches are emptied by verify's steps, and numpy begins slowly then.
    """

    def __init__(self, prior: float = _PRIOR) -> None:
        self.num_seen = 0
        self._tries = [_PRIOR_WEIGHT] * MAX_DEPTH
        self._hits = [prior * _PRIOR_WEIGHT] * MAX_DEPTH
        self._averages: dict[float, list[float]] = {}  # one_more's, until more is seen

    def observe(self, root_depth: int, reached: int, depth: int) -> None:
        """Takes in a tree: from `root_depth` on, `reached` more of the `depth` that there might have been."""
        self.num_seen += 1
        came = root_depth + reached
        for tried in range(root_depth, min(came + (reached < depth), MAX_DEPTH)):
            self._tries[tried] += 1.0
            self._hits[tried] += tried < came
        if self.num_seen % _FADE_EVERY == 0:
            self._keep([0.5 if tries > _WINDOW else 1.0 for tries in self._tries])
        self._averages.clear()

    def forget(self) -> None:
        """Lets what comes next count for more than what was."""
        self._keep([_PRIOR_WEIGHT / max(tries, _PRIOR_WEIGHT) for tries in self._tries])

    def one_more(self, times: float = 1.0) -> list[float]:
        """[MAX_DEPTH + 1]: one more than the depth reached on average, by the deepest there is.

        times: how much more often each depth is reached than was seen.
        """
        averages = self._averages.get(times)
        if averages is None:
            averages, chance = [1.0], 1.0
            for tries, hits in zip(self._tries, self._hits, strict=True):
                chance *= min(times * hits / tries, 1.0)
                averages.append(averages[-1] + chance)
            self._averages[times] = averages
        return averages

    def _keep(self, shares: list[float]) -> None:
        """Scales what was seen, by a share for each depth."""
        self._tries = [tries * share for tries, share in zip(self._tries, shares, strict=True)]
        self._hits = [hits * share for hits, share in zip(self._hits, shares, strict=True)]
        self._averages.clear()


class StepTimes(CostTable):
    """Milliseconds of verify's steps by rows. Beyond the only ones seen it rises little: what is not known is tried."""

    def _row_ms(self, xs: list[float], ys: list[float]) -> float:
        return super()._row_ms(xs, ys) if len(xs) > 1 else _ROW_GUESS * ys[-1]


class CallTimes:
    """Milliseconds of a call by the steps in it, a line fitted to what was measured; what is older counts less."""

    def __init__(self) -> None:
        self._sums = (0.0,) * 5  # weights, steps, ms, squared steps, steps times ms

    def observe(self, num_steps: int, ms: float) -> None:
        """Takes in a call."""
        if self._sums[0]:
            expected_ms = self.ms(num_steps)
            if self._sums[0] < _FEW_CALLS and ms < _FIRST_ARE_SLOW * expected_ms:
                self._sums = (0.0,) * 5
            ms = min(ms, 2 * expected_ms)  # one that stood still for other reasons says little
        weight, x, y, xx, xy = (_KEPT * old for old in self._sums)
        self._sums = weight + 1.0, x + num_steps, y + ms, xx + num_steps**2, xy + num_steps * ms

    def ms(self, num_steps: float) -> float:
        """Expected time; while calls had one number of steps, half of it is taken for what every call costs."""
        weight, x, y, xx, xy = self._sums
        # One more call, of no steps, in half the mean's time.
        weight, y = weight + _HALF_WEIGHT, y + _HALF_WEIGHT * y / weight / 2
        slope = max(0.0, (xy - x * y / weight) / (xx - x * x / weight)) if x else 0.0
        return max(0.0, y / weight + slope * (num_steps - x / weight))


class DraftTimes:
    """Milliseconds of a drafter's calls, by branches, sessions and steps."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], CallTimes] = {}

    def observe(self, topk: int, sessions: int, num_steps: int, ms: float) -> None:
        """A call that drafted trees for so many sessions took `ms`: a pass over what was committed, then each step."""
        self._calls.setdefault((topk, sessions.bit_length()), CallTimes()).observe(num_steps, ms)

    def ms(self, topk: int, sessions: int, num_steps: float, plain_ms: float) -> float:
        """Expected time of such a call; plain_ms: of a step of verify, which guesses it while nothing was timed."""
        if not self._calls:
            return _CALL_GUESS * plain_ms * num_steps
        nearest = min(self._calls, key=lambda key: (key[0] != topk, abs(key[1] - sessions.bit_length())))
        return self._calls[nearest].ms(num_steps) * _TWICE_AS_MANY ** max(0, sessions.bit_length() - nearest[1])


class RoundTrips:
    """Milliseconds of a round beside verify's step and the draft: frames, threads that wake up, Python between.

    The more sessions there are, the longer it takes.
    """

    def __init__(self) -> None:
        self._ms: dict[int, float] = {}  # by about how many sessions

    def ms(self, sessions: int) -> float:
        """Expected time, with about so many sessions."""
        if not self._ms:
            return _ROUND_TRIP_GUESS
        return self._ms[min(self._ms, key=lambda known: abs(known - sessions.bit_length()))]

    def observe(self, sessions: int, ms: float) -> None:
        """Takes in the time of a round."""
        known = self.ms(sessions)
        self._ms[sessions.bit_length()] = known + _ALPHA * (min(max(0.0, ms), 2 * known + 0.5) - known)


@dataclass(slots=True)
class TreeEvidence:
    """What was seen of trees with one number of branches.

    accepted: drafts; steps: run by the draft model, which may end early.
    """

    accepted: DepthReached = field(default_factory=DepthReached)
    steps: DepthReached = field(default_factory=lambda: DepthReached(_STEPS_PRIOR))
    nodes_a_step: float | None = None
    """Nodes that verify takes of a tree for each step that was run for it; None: not known."""


class Evidence:
    """What verdicts have told, whatever session or link they are of."""

    def __init__(self) -> None:
        self.costs = StepTimes()
        self.times = DraftTimes()
        self.round_trips = RoundTrips()
        self.sessions = 1  # in the newest round
        self.hit_rate = 0.0  # rounds that verified an early proposal
        self.committed = 2.0  # tokens that a session's round did, whatever of its drafts was verified
        self._trees: dict[int, TreeEvidence] = {}

    def trees(self, topk: int) -> TreeEvidence:
        """The evidence on trees with this many branches."""
        found = self._trees.get(topk)
        if found is None:
            found = self._trees[topk] = TreeEvidence()
        return found

    def tokens(self, shape: TreeShape) -> float:
        """Expected tokens of a round."""
        known, times = self._known(shape.topk, lambda trees: trees.accepted)
        return known.one_more(times)[shape.num_steps]

    def steps_run(self, shape: TreeShape) -> float:
        """Expected steps of the draft model for one such tree."""
        known, _ = self._known(shape.topk, lambda trees: trees.steps)
        return known.one_more()[shape.num_steps - 1]

    def nodes(self, shape: TreeShape) -> float:
        """Expected nodes of one such tree that verify takes."""
        most, each = shape.num_draft_tokens - 1, self.trees(shape.topk).nodes_a_step
        if each is None and shape.topk > 1:
            return most
        return min(most, (each or 1.0) * self.steps_run(shape))

    def _known(self, topk: int, part: Callable[[TreeEvidence], DepthReached]) -> tuple[DepthReached, float]:
        """What is known of so many branches, or of others where they were hardly tried, and how these differ."""
        own = part(self.trees(topk))
        if own.num_seen < _FEW_TREES:
            other, found = max(((topk, part(trees)) for topk, trees in self._trees.items()), key=_num_seen)
            if found.num_seen > own.num_seen:
                return found, _NARROWER if other > topk else 1.0
        return own, 1.0

    def observe(self, extensions: list[Extension]) -> None:
        """Takes in a round's verdicts."""
        steps: dict[tuple[int, int], int] = {}
        for extension in extensions:
            verdict = extension.verdict
            if verdict.steps:
                steps[verdict.verify_us, verdict.batch_tokens] = verdict.steps
            if extension.copied:
                continue
            if verdict.steps == 1 and extension.session.sent and not extension.session.wishes.has_any:
                self.committed += _FEW_OF_MANY * (len(verdict.tokens) - self.committed)
            for credit in verdict.credits:
                self._observe_credit(extension.session, credit)
        for (verify_us, rows), count in steps.items():
            self.costs.observe(rows // count, verify_us / count / 1000)
        if extensions:
            self.sessions = len({extension.session.uid for extension in extensions})

    def _observe_credit(self, session: Session, credit: verify_pb2.Credit) -> None:
        proposal_id, root, nodes = credit.proposal_id, credit.root_node, credit.nodes_verified
        sent = session.sent.get(proposal_id)
        if sent is None or not len(sent.tokens) or not -1 <= root < len(sent.tokens):
            return
        self.hit_rate += 0.05 * (float(len(sent.assumed) > 0 or root != ROOT) - self.hit_rate)
        if session.wishes.has_any:
            return
        depths = sent.tree.depths
        root_depth = int(depths[root]) if root != ROOT else 0
        below = int(depths.max()) - root_depth
        grown = sent.grown or Grown(int(np.bincount(sent.parents + 1).max()), below)
        trees = self.trees(grown.topk)
        # Of a tree that was cut short, what would have come next counts as not accepted: so it is with the next one.
        depth = nodes if nodes < below else below + grown.cut_short
        trees.accepted.observe(root_depth, len(credit.accepted_nodes), depth)
        if grown.topk > 1 and root == ROOT:  # a chain would have been the likeliest nodes
            likeliest = _likeliest_path(sent)
            reached = _num_common(likeliest, credit.accepted_nodes)
            # A path that ends before the tree does may have been accepted further.
            self.trees(1).accepted.observe(0, reached, depth if len(likeliest) >= below else min(len(likeliest), depth))
        if root == ROOT and grown.num_steps:
            ratio = nodes / grown.num_steps
            known = ratio if trees.nodes_a_step is None else trees.nodes_a_step
            trees.nodes_a_step = known + _ALPHA * (ratio - known)


def _likeliest_path(sent: Sent) -> list[int]:
    """Nodes that are their parents' likeliest children, which are the first, from the root on."""
    path: list[int] = []
    while children := sent.tree.children(path[-1] if path else ROOT):
        path.append(children[0])
    return path


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _num_seen(found: tuple[int, DepthReached]) -> int:
    return found[1].num_seen
