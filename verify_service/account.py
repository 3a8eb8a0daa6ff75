"""The account of all sessions together: whether drafters are heard at all, by how many sessions run.

What sessions cost one another (cores that drafting takes, waiting, steps that leave some out) is in no session's own
account. Here tokens, at what they take in plain steps, stand against the time that went by. Drafting for a number of
sessions is on trial until it pays: drafters are given a few sessions, and a few more each time that all were heard. All
may owe a few steps' time, and more where it has paid before; when they owe that, drafters have none for a while, longer
each time. What fails with some sessions is not tried with more of them, nor with nearly as many. Many sessions begin
with such a while: what their first trial costs, plain steps have earned.
"""

from __future__ import annotations

from dataclasses import dataclass

_OWED_STEPS = 4.5  # plain steps' time that one session may owe
_MAX_STEP_LOSS = 0.75  # of what may be owed, which one step can cost: a longer stall has other causes
_READING_ALLOWANCE = 3.0  # plain steps' time that reading prompts may cost besides, which says nothing of drafts
_READING_SAVED = 0.01  # of a plain step's time that each step adds to what is left of that allowance
# Steps without drafts when they owe more; it doubles, so little is lost in the end.
_FIRST_PAUSE, _LAST_PAUSE = 192, 4096
_EARNED_SHARE = 0.1  # of what drafting has brought in, which it may owe later
_MAX_EARNED = 6.0  # plain steps' time that this comes to at most
_OWING_STEPS = 64  # steps without new losses after which a trial is widened in spite of old ones
# Sessions that are opened to drafters at once: a draft for one of them takes about as long as for all, and is worth
# less to them. Of 6 with answers of 128 tokens on two shared cores, reading prompts took what the drafts gained.
_FEW_SESSIONS = 4
# The same on trial, or an eighth of all: on shared cores reading four prompts took the time of five plain steps.
_TRIED_AT_ONCE = 2
_WATCHED_STEPS = 4  # on trial, after sessions were opened and before others are: what reading cost is known then
_PROVEN_STEPS = 8  # steps in a row without debts after which sessions are opened as they come
_RELIABLE_STEPS = 192  # steps in a row without debts after which the next pause is a first one


@dataclass(slots=True)
class _Pause:
    """Nobody is heard while more than `above` sessions run, for `left` steps. next_steps: of the one after it."""

    above: int
    left: int
    next_steps: int


class Account:
    """Whether drafting pays for all sessions together, by about how many run. Pure state."""

    def __init__(self) -> None:
        self.pays = False  # as far as is known
        self._owing: dict[int, int] = {}  # by about how many sessions: steps for which they owe much
        self._owed_ms: dict[int, float] = {}  # what it has cost about so many sessions and not brought in
        self._earned_ms: dict[int, float] = {}  # what it may owe besides, for what it has brought in
        self._paid_steps = 0  # in a row in which nothing was owed
        self._steps_to_trial = _FIRST_PAUSE  # of many sessions
        self._steps_watched = 0  # seen since sessions were opened
        self._reading_left = _READING_ALLOWANCE  # of plain steps' time, left for it
        self._proven: set[int] = set()  # about how many sessions drafting has paid for
        self._pauses: dict[int, _Pause] = {}  # by about how many sessions failed

    def is_paused(self, sessions: int) -> bool:
        """Whether drafters are not heard while so many sessions run."""
        if self._steps_to_trial and not (sessions.bit_length() in self._proven or self._opens_all(sessions)):
            return True
        return any(pause.left > 0 and pause.above < sessions for pause in self._pauses.values())

    def may_open(self, sessions: int, num_open: int, *, all_heard: bool) -> int:
        """Outside a pause, how many more sessions may be opened to drafters.

        All where it has paid for about so many, and, while little is owed, few sessions too, and up to twice as many
        where it has paid for about half of them. Of others, on trial, a few, no more than have one, some steps after
        those and once something was heard of all: reading prompts alone costs cores that verify runs on, and shows
        nothing.
        """
        size = sessions.bit_length()
        if size in self._proven:
            return sessions
        if num_open and (not all_heard or self._owing.get(size, 0) > 0):
            return 0
        if num_open and self._steps_watched < _WATCHED_STEPS and not self._opens_all(sessions):
            return 0
        return sessions if self._opens_all(sessions) else max(1, min(num_open, max(_TRIED_AT_ONCE, sessions // 8)))

    def opened(self) -> None:
        """Notes that sessions were opened."""
        self._steps_watched = 0

    def rest(self, sessions: int) -> None:
        """Counts a step."""
        size = sessions.bit_length()
        self._owing[size] = max(0, self._owing.get(size, 0) - 1)
        self._reading_left = min(self._reading_left + _READING_SAVED, _READING_ALLOWANCE)
        if sessions > _FEW_SESSIONS:
            self._steps_to_trial = max(0, self._steps_to_trial - 1)
        for pause in self._pauses.values():
            if pause.above < sessions:
                pause.left = max(0, pause.left - 1)

    def observe(
        self, sessions: int, *, committed: int, wall_ms: float, quiet_ms: float, reading: bool = False
    ) -> None:  # fmt: skip
        """Takes in a step that drafters had a part in.

        quiet_ms: what a plain one takes; reading: prompts were read meanwhile.
        """
        if self.is_paused(sessions):  # what was asked for before it is still made
            return
        self._steps_watched += 1
        size, base_ms = sessions.bit_length(), _OWED_STEPS / sessions**0.5 * quiet_ms
        gained_ms = committed * quiet_ms / sessions - wall_ms
        if reading and gained_ms < 0.0 and self._opens_all(sessions):
            spent_ms = min(-gained_ms, self._reading_left * quiet_ms)
            self._reading_left -= spent_ms / quiet_ms
            gained_ms += spent_ms
        gained_ms = max(-_MAX_STEP_LOSS * base_ms, min(gained_ms, 2 * quiet_ms))
        before_ms = self._owed_ms.get(size, 0.0)
        earned_ms = self._earned_ms.get(size, 0.0) + _EARNED_SHARE * max(0.0, gained_ms - before_ms)
        self._earned_ms[size] = min(earned_ms, _MAX_EARNED * quiet_ms)
        allowed_ms = base_ms + self._earned_ms[size]  # the luck of many sessions evens out: less says as much
        owed_ms = max(0.0, before_ms - gained_ms)
        self._owed_ms[size] = min(owed_ms, allowed_ms)
        self._paid_steps = 0 if owed_ms else self._paid_steps + 1
        self.pays = owed_ms < quiet_ms
        self._owing[size] = _OWING_STEPS if 2 * owed_ms > allowed_ms else 0
        if self._paid_steps >= _PROVEN_STEPS:
            self._proven.add(size)
        if self._paid_steps > _RELIABLE_STEPS:
            self._pauses.pop(size, None)
        # What one alone costs, its own brake knows, and may find the next one worth it.
        if owed_ms > allowed_ms and sessions > 1:
            self._pause(sessions)

    def _opens_all(self, sessions: int) -> bool:
        has_paid_for_half = sessions.bit_length() - 1 in self._proven
        return sessions <= _FEW_SESSIONS or (has_paid_for_half and sessions <= 2 * _FEW_SESSIONS)

    def _pause(self, sessions: int) -> None:
        size = sessions.bit_length()
        # Where it has failed with fewer sessions too, it is tried again as seldom as there.
        failed = [pause.next_steps for fewer, pause in self._pauses.items() if fewer <= size]
        steps = max(failed, default=_FIRST_PAUSE)
        self._pauses[size] = _Pause(sessions // 2, steps, min(2 * steps, _LAST_PAUSE))
        self._owed_ms[size] = self._earned_ms[size] = 0.0
        self._owing[size] = 0
        self._paid_steps, self.pays = 0, False
        self._proven = {proven for proven in self._proven if proven < size}
