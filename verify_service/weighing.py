"""What a step cost and gave, told to the brakes of the sessions in it.

A step's time is measured from the one before it, so that nothing is left out: waiting, frames, Python. Steps in which
no drafter was asked for anything say what plain decoding takes with so many sessions; how much longer others take than
that, their nodes and their wait allowed for, is what telling drafters costs: on cores that they share with verify,
mostly their drafting. Drafters are hushed where that is to be measured (plain_times.py), and where drafting does not
pay for all sessions together (account.py).

Sessions whose users fixed their trees are drafted for all the time: that is part of what plain steps take beside about
as many of them, and neither their drafts nor what those bring in count for the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kernels.acceptance import Accepted
from outrider.cost_table import CostTable
from verify_service.account import Account
from verify_service.assignment import Assignment
from verify_service.counting import Counters
from verify_service.drafter_record import DrafterRecord
from verify_service.drafters import Drafters
from verify_service.plain_times import QuietTimes
from verify_service.work import Work

_LINGER_STEPS = 16  # steps after which a drafter that has not answered is thought to rest
_TRIAL_STEPS = 8  # steps after which it may be given further sessions though it has not answered for the last ones
# What a session that did without its draft would save of its share of a wait for most sessions' drafts: a call for one
# fewer takes hardly less. Whether they all are worth the whole wait, the account says.
_OWN_WAIT = 0.25
_READING_STEPS = 64  # steps that a drafter may take for a prompt before its silence tells against it

Told = tuple[DrafterRecord, bool]
"""A drafter's record, and whether its sessions are told of each step, or were by a probe."""


@dataclass(slots=True, eq=False)
class Seen:
    """A step as it ended."""

    works: list[Work]
    outcomes: list[Accepted | None]
    step_ms: float  # of forward pass and sampling
    waited_ms: float
    wall_ms: float  # since the step before it ended
    late: list[Assignment]
    running: set[int]  # ids of all sessions before it, those that it left out too
    told: set[Assignment]  # those that were asked for drafts before it

    @property
    def decodes(self) -> bool:
        """Whether it ran no prompt."""
        return all(work.decodes for work in self.works)


class Weigher:
    """Measures steps and tells brakes what drafts gave. Owned by the engine. clock: monotonic nanoseconds."""

    def __init__(self, drafters: Drafters, costs: CostTable, counters: Counters, clock: Callable[[], int]) -> None:
        self.quiet = QuietTimes(costs)  # beside as many sessions with fixed trees as there are
        self._quiet_beside: dict[int, QuietTimes] = {0: self.quiet}  # by about how many those are
        self._account = Account()
        self._drafters = drafters
        self._costs = costs
        self._counters = counters
        self._clock = clock
        self._last_ns = clock()
        self._sessions: set[int] = set()
        self._fixed: set[int] = set()  # those with drafters whose users fixed their trees
        self._decoded = True  # the last step ran no prompt, which slows the one after it too
        self._told_before: Counter[Told] = Counter()  # sessions told last
        self._linger = 0  # steps that drafts asked for then may still disturb

    def begin(self, sessions: int) -> bool:
        """Decides whether drafters are heard in a step of so many sessions.

        Returns whether there is a pause, in which drafters are to have no sessions.
        """
        self._fixed = {
            number
            for drafter in self._drafters
            for number, assignment in drafter.assignments.items()
            if assignment.brake.fixed
        }
        size = len(self._fixed).bit_length()
        if size not in self._quiet_beside:
            self._quiet_beside[size] = QuietTimes(self._costs)
        self.quiet = self._quiet_beside[size]
        self.quiet.begin(sessions)
        paused = self._account.is_paused(sessions)
        hushed = paused or self.quiet.is_measuring
        for drafter in self._drafters:
            drafter.record.hushed = hushed
            drafter.record.alone = sessions == 1
        return paused

    def room(self, sessions: int) -> int:
        """How many sessions more drafters may be given now; after `begin`."""
        if self._account.is_paused(sessions) or self.quiet.is_measuring:
            return 0
        assignments = [
            assignment
            for drafter in self._drafters
            for number, assignment in drafter.assignments.items()
            if number not in self._fixed
        ]
        all_heard = not any(one.is_unheard and one.unheard_steps < _TRIAL_STEPS for one in assignments)
        return self._account.may_open(sessions, len(assignments), all_heard=all_heard)

    def opened(self) -> None:
        """Notes that sessions were given to drafters, other than by their users' wish."""
        self._account.opened()

    def ended(self, works: list[Work]) -> tuple[float, set[Assignment]]:
        """Notes that a step has ended: the milliseconds since the one before, and who was asked for drafts before it.

        `weigh` follows, which can wait until drafters are told of the step.
        """
        now_ns = self._clock()
        wall_ms, self._last_ns = (now_ns - self._last_ns) / 1e6, now_ns
        told: set[Assignment] = set()
        for work in works:
            assignment = work.assignment
            if assignment is not None and assignment.brake.told:
                told.add(assignment)
                assignment.brake.told = False
        return wall_ms, told

    def weigh(self, seen: Seen) -> None:
        """Takes in a step."""
        works, late, wall_ms = seen.works, seen.late, seen.wall_ms
        decodes = seen.decodes
        steady, self._sessions = seen.running <= self._sessions, seen.running
        assignments = [a for work in works if (a := work.assignment) is not None and not a.brake.fixed]
        told = Counter((a.drafter.record, a.brake.listens) for a in assignments if a in seen.told)
        if told or not (self._linger and any(a.asked_ns for a in assignments)):
            self._linger = _LINGER_STEPS if told else 0
        if decodes:
            own_ms = wall_ms - seen.waited_ms if steady and self._decoded else None
            self._measure(works, told, seen.step_ms, own_ms, waited=bool(late))
            self._weigh(seen)
            if steady and (told or self._linger):
                self._balance(seen)
        else:
            self.quiet.prompt_step()
        self._decoded = decodes
        self._account.rest(len(self._sessions))
        self._linger = max(0, self._linger - 1)
        if told or not self._linger:
            self._told_before = told

    def _measure(
        self, works: list[Work], told: Counter[Told], step_ms: float, own_ms: float | None, *, waited: bool
    ) -> None:
        """Takes in what a step took.

        own_ms: of the whole step without its wait, where nothing else came between.
        """
        count, rows = len(works), sum(work.num_rows for work in works)
        fixed_nodes = sum(work.num_rows - 1 for work in works if _is_fixed(work))
        verifies_nothing = rows - fixed_nodes == count == len(self._sessions)
        is_quiet = verifies_nothing and not (told or self._told_before or waited)
        quiet_ms = self.quiet.ms(count)
        if (is_quiet and not self._fixed) or rows > count or quiet_ms is None:
            self._costs.observe(rows, step_ms)
        if is_quiet and own_ms is not None:
            self.quiet.observe(count, own_ms)
        elif own_ms is not None and quiet_ms is not None:
            if verifies_nothing:
                self.quiet.bound(count, own_ms)
            nodes_ms = self._costs.ms(rows) - self._costs.ms(count + fixed_nodes)
            # A step that stood still for other reasons says little.
            extra_ms = max(-0.5 * quiet_ms, min(own_ms - quiet_ms - nodes_ms, quiet_ms))
            self._tax(told, extra_ms)
        poor = max(1, sum(drafter.record.gains_nothing for drafter in self._drafters))
        for drafter in self._drafters:
            drafter.record.earn(self._costs.ms(count), sharers=poor)
        self.quiet.step(len(self._sessions), is_quiet=is_quiet)

    def _tax(self, told: Counter[Told], extra_ms: float) -> None:
        """Shares out what a step took beside what was expected; drafts asked for in the last one may still be made."""
        shares = told or self._told_before
        total = shares.total()
        for drafter in self._drafters:
            for listens in (True, False):
                key = drafter.record, listens
                if count := shares[key]:
                    drafter.record.observe_tax(extra_ms * count / total, told[key], probing=not listens)

    def _balance(self, seen: Seen) -> None:
        count = len(self._sessions)
        quiet_ms = self.quiet.ms(count)
        if quiet_ms is None:
            return
        free = [(work, outcome) for work, outcome in zip(seen.works, seen.outcomes, strict=True) if not _is_fixed(work)]
        committed = len(self._fixed & seen.running) + len(free)
        committed += sum(len(outcome.nodes) for _, outcome in free if outcome is not None)
        reading = any(work.assignment is not None and _is_reading(work.assignment) for work in seen.works)
        self._account.observe(
            count, committed=committed, wall_ms=seen.wall_ms, quiet_ms=quiet_ms, reading=reading
        )  # fmt: skip
        for drafter in self._drafters:
            drafter.record.pays = self._account.pays

    def _weigh(self, seen: Seen) -> None:
        """Tells each session's brake what its drafts saved and cost in this step."""
        works, late, num_running = seen.works, seen.late, len(seen.running)
        rows = sum(work.num_rows for work in works)
        nodes = rows - len(works)
        plain_ms = self._costs.ms(len(works))
        node_ms = max(0.0, self._costs.ms(rows) - plain_ms) / max(1, nodes)
        # What a token is worth: one of a plain step of all sessions, whoever was left out of this one.
        whole_ms = self._costs.ms(num_running) if num_running > len(works) else plain_ms
        share_ms = whole_ms / max(num_running, len(works))
        listening = sum(work.assignment is not None and work.assignment.brake.listens for work in works)
        left_out_ms = 0.0
        if num_running > len(works):
            left_out = seen.running - {work.session.session_id for work in works}
            # Nobody is charged for those that are left out because their users fixed their trees.
            charged = len(left_out - self._fixed) / len(left_out)
            left_out_ms = charged * max(0.0, plain_ms - share_ms * len(works)) / max(1, listening)
        waits_for_most = len(late) > 1 and 2 * len(late) > num_running
        wait_ms = seen.waited_ms / max(1, len(late)) * (_OWN_WAIT if waits_for_most else 1.0)
        for work, outcome in zip(works, seen.outcomes, strict=True):
            assignment = work.assignment
            if assignment is None or assignment.brake.fixed:
                continue
            brake, drafted = assignment.brake, work.num_rows - 1
            waited, told = assignment in late, assignment in seen.told
            if _is_reading(assignment):
                assignment.unheard_steps += 1
                continue
            if not (drafted or waited or (told and brake.listens)):
                self._counters.probes += brake.plain_step(share_ms)
                continue
            accepted = len(outcome.nodes) if outcome is not None else 0
            lost_ms = drafted * node_ms + waited * wait_ms + told * assignment.drafter.record.tax_ms
            lost_ms += left_out_ms * brake.listens
            self._counters.silenced += brake.round_done(
                nodes=drafted, accepted=accepted, net_ms=accepted * share_ms - lost_ms, step_ms=share_ms
            )


def _is_fixed(work: Work) -> bool:
    return work.assignment is not None and work.assignment.brake.fixed


def _is_reading(assignment: Assignment) -> bool:
    """Whether its drafter reads the prompt, and has had no more than its time for that."""
    return assignment.brake.listens and not assignment.has_answered and assignment.unheard_steps < _READING_STEPS
