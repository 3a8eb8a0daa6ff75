"""What one drafter's sessions have shown together: what it is worth, what it costs, and how patient to be with it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from verify_service.acceptance import Acceptance

_PROVEN = 0.1  # steps that a round must save on average for drafting for several to have proved its worth
_PATIENCE = 3.0  # steps' time that a session may then lose before it is silenced, and one of a new drafter
_TRUST = 4.0  # times as much may be lost where all sessions together gain
# Rounds' worth that a lone session may fall behind those before it: rounds differ by 1.3 steps. Of MT-bench's answers,
# which gain 0.3 to 0.6 steps a round, half were silenced where 3 steps were allowed, few at 6 to 12 (computed).
_LUCK_ROUNDS = 30.0
_NEW_PATIENCE = 6.0  # steps' time that a lone session of a new drafter may lose: its first rounds are its slowest
PROBE_SHARE = 0.01  # of plain steps' time, which goes to what silenced sessions have cost, and to new ones
TOLERANCE = 0.02  # of a step's time, which a session that gains nothing may cost without being silenced
_SLOW_ROUNDS = 16  # first rounds of a process, which tell nothing of later ones: its code is not warm
# Nodes that must come true of each tree for a drafter to be of use, and how many more it might have had in all with
# better luck: it is no good if even so there are too few, as after six trees of which nothing came true. A good drafter
# has such six now and then, and is found out by its next probes.
_LEAST_TRUE, _LUCK = 0.2, 1.1
_TREES = 64.0  # trees after which old ones fade
_LOSS = 0.05  # of a step's time that rounds must cost on average for a lone session to begin in silence
_MANY_ROUNDS = 192  # rounds from which on a drafter's worth is known within a tenth of a step
_FEW_ROUNDS = 64  # rounds of a drafter before sessions may begin in silence because others gained nothing
_PURSE_STEPS = 2.0  # plain steps' time that is saved up for new sessions at most
_MOST_STEPS = 100.0  # plain steps' time that opening one may cost: a long text is paid for in ten thousand at most


@dataclass(slots=True)
class _Tax:
    """What one telling costs, averaged over about `window` of them."""

    window: float
    # A tenth of a millisecond is what frames and bookkeeping of one session take, until it is measured.
    extra_ms: float = 0.8
    num_told: float = 8.0

    @property
    def ms(self) -> float:
        return max(0.0, self.extra_ms / self.num_told)

    def observe(self, extra_ms: float, num_told: float) -> None:
        self.extra_ms += extra_ms
        self.num_told += num_told
        if self.num_told > self.window:
            self.extra_ms *= 0.5
            self.num_told *= 0.5


@dataclass(slots=True)
class _Worth:
    """What rounds saved, in steps per session, as a moving average; the first ones tell nothing."""

    mean: float = 0.0
    rounds: int = 0
    tell_after: int = _SLOW_ROUNDS

    def observe(self, worth: float) -> None:
        self.rounds += 1
        if self.rounds > self.tell_after:
            self.mean += max(0.01, 1.0 / (self.rounds - _SLOW_ROUNDS)) * (worth - self.mean)


@dataclass(slots=True)
class _Trees:
    """How many nodes of trees came true, which is known sooner than what they are worth: no time is measured for it."""

    count: float = 0.0
    true: float = 0.0

    @property
    def are_wrong(self) -> bool:
        return self.true + _LUCK <= _LEAST_TRUE * self.count

    def observe(self, true: int) -> None:
        self.count += 1.0
        self.true += true
        if self.count > _TREES:
            self.count *= 0.5
            self.true *= 0.5


@dataclass(slots=True, eq=False)
class DrafterRecord:
    """What one drafter's sessions have shown together; what it is worth to one alone and to several, each by itself.

    Drafting for several takes cores from all of them, and says nothing of what it saves one.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    hushed: bool = False  # all its sessions: what plain steps take is measured, or drafts do not pay for so many
    pays: bool = False  # all sessions together gain, as far as is known
    alone: bool = False  # one session runs, whoever's
    worth_alone: _Worth = field(default_factory=_Worth)
    worth_to_several: _Worth = field(default_factory=_Worth)
    trees: _Trees = field(default_factory=_Trees)
    expected_accepted: float = 1.0  # drafts accepted per round
    expected_nodes: float = 4.0  # nodes verified per round
    purse_ms: float = 0.0  # what may be spent on new sessions while sessions gain nothing
    step_ms: float = 0.0  # the newest plain step's
    tried: tuple[int, int] | None = None  # a session that another might have gained, and its committed length then
    _tax: _Tax = field(default_factory=lambda: _Tax(256.0))
    _probe_tax: _Tax = field(default_factory=lambda: _Tax(32.0))

    def handed_on(self) -> DrafterRecord:
        """The record with which the drafter's next process begins.

        Where drafting was worth it, its first rounds are left out again, since new processes are slow; else they count,
        so that no drafter reconnects to be forgiven.
        """
        record = copy.deepcopy(self)
        record.purse_ms, record.tried = max(0.0, record.purse_ms), None
        for worth in (record.worth_alone, record.worth_to_several):
            if worth.mean > 0.0:
                worth.tell_after = worth.rounds + _SLOW_ROUNDS
        return record

    @property
    def worth(self) -> _Worth:
        """What rounds have been worth with as many sessions as run now: one, or several."""
        return self.worth_alone if self.alone else self.worth_to_several

    @property
    def patience(self) -> float:
        """Steps' time that a session may lose before it is silenced.

        With several the account of all tells more: what they cost one another is in no session's own. Of a new drafter
        it bounds what all lose; one by one they would fall silent in its first rounds, and the rest not pay for it.
        """
        most = _PATIENCE * _TRUST
        is_new = self.worth.rounds < _MANY_ROUNDS and not self.trees.are_wrong
        if self.alone:
            least = _NEW_PATIENCE if is_new else 0.0
            return max(least, min(_LUCK_ROUNDS * self.worth.mean, most))
        if self.worth.mean <= _PROVEN:
            return _PATIENCE if is_new else 0.0
        return most if self.pays else _PATIENCE

    @property
    def tax_ms(self) -> float:
        """What telling one session costs a step beside nodes and waits."""
        return self._tax.ms

    @property
    def probe_ms(self) -> float:
        """What one probe costs, all steps together: the drafter catches up, and drafts once."""
        return self._probe_tax.ms

    def observe_tax(self, extra_ms: float, num_told: float, *, probing: bool = False) -> None:
        """Takes in how much longer than expected a step took in which so many sessions were told, or probed."""
        (self._probe_tax if probing else self._tax).observe(extra_ms, num_told)

    @property
    def gains_nothing(self) -> bool:
        """Whether sessions begin in silence, and are opened as the purse allows."""
        if self.trees.are_wrong and self.worth.mean <= 0.0:
            return True
        return self.worth.rounds >= _FEW_ROUNDS and self.worth.mean < -(_LOSS if self.alone else TOLERANCE)

    @property
    def is_due_a_try(self) -> bool:
        """Whether all is saved up that is for a session that another drafter might gain, and none is with it."""
        return self.gains_nothing and self.tried is None and self.purse_ms >= _PURSE_STEPS * self.step_ms > 0.0

    def tries(self, session: int) -> bool:
        """Whether the session is with its drafter as a try."""
        return self.tried is not None and self.tried[0] == session

    def earn(self, step_ms: float, *, sharers: int = 1) -> None:
        """Saves up for new sessions while they gain nothing: a share of a step's time, split among so many drafters."""
        self.step_ms = step_ms
        self.purse_ms = min(self.purse_ms + PROBE_SHARE / sharers * step_ms, _PURSE_STEPS * step_ms)

    def may_open(self, cost_ms: float) -> bool:
        """Whether a session may be opened now, which costs so much beside a probe; takes it from the purse."""
        if not self.gains_nothing:
            return True
        if self.purse_ms <= 0.0:
            return False
        self.purse_ms -= min(cost_ms, _MOST_STEPS * self.step_ms) + self.probe_ms
        return True

    def end_try(self, session: int, committed_len: int) -> None:
        """Notes that it lost a session. A try is paid for then: another drafter might have gained all its steps."""
        if self.tried is not None and self.tries(session):
            self.purse_ms -= (committed_len - self.tried[1]) * self.step_ms
            self.tried = None
