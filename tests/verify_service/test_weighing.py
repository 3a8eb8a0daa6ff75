"""What steps cost and gave, as the Weigher tells brakes and drafters' records; a clock of the test's own."""

from __future__ import annotations

import pytest

from kernels.acceptance import Accepted
from outrider.cost_table import CostTable
from tests.verify_service.test_drafters import drafter, drafters, session
from verify_service.assignment import Assignment
from verify_service.counting import Counters
from verify_service.plain_times import SAMPLES
from verify_service.weighing import Seen, Weigher
from verify_service.work import Work

PLAIN_MS = 10.0
FLAT = {1: PLAIN_MS, 64: PLAIN_MS}
STEEP = {1: PLAIN_MS, 5: PLAIN_MS + 8.0}  # two milliseconds a node


class Scale:
    """Sessions of one drafter, all in every step, and a Weigher that is told of steps."""

    def __init__(self, num_sessions: int = 1, costs: dict[int, float] = FLAT, *, fixed: bool = False) -> None:
        self.drafter = drafter()
        self.record = self.drafter.record
        everybody = drafters(self.drafter)
        self.sessions = [session() for _ in range(num_sessions)]
        self.assignments: list[Assignment] = []
        for one in self.sessions:
            one.kv_len = one.committed_len - 1
            assignment = everybody.assign(one)
            assert assignment is not None
            assignment.brake.fixed = fixed
            assignment.has_answered = True
            self.assignments.append(assignment)
        self.counters = Counters()
        self._now_ns = 0
        self.weigher = Weigher(everybody, CostTable(costs), self.counters, clock=lambda: self._now_ns)

    def begin(self, sessions: int) -> tuple[int, bool]:
        """Room for sessions more, and whether there is a pause."""
        paused = self.weigher.begin(sessions)
        return self.weigher.room(sessions), paused

    def step(
        self, wall_ms: float = PLAIN_MS, *, tell: bool = False, nodes: int = 0, accepted: int = 0, times: int = 1,
        waited_ms: float = 0.0, between_ms: float = 0.0,
    ) -> None:  # fmt: skip
        """So many steps in which each session verifies `nodes`; tell: drafters are asked before, if brakes let them.

        waited_ms: the part of wall_ms in which all of them were waited for; between_ms: the part outside the step.
        """
        for _ in range(times):
            self._now_ns += int(wall_ms * 1e6)
            self.weigher.begin(len(self.sessions))
            asked = [assignment.brake.tell() for assignment in self.assignments] if tell else []
            rows = 1 + (nodes if not tell or any(asked) else 0)
            works = [
                Work(one, [0] * rows, samples=True, decodes=one.num_uncomputed == 1, assignment=assignment)
                for one, assignment in zip(self.sessions, self.assignments, strict=True)
            ]
            outcomes: list[Accepted | None] = [Accepted(list(range(min(accepted, rows - 1))), 1) for _ in works]
            running = {one.session_id for one in self.sessions}
            since_ms, told = self.weigher.ended(works)
            late, step_ms = self.assignments if waited_ms else [], wall_ms - waited_ms - between_ms
            self.weigher.weigh(Seen(works, outcomes, step_ms, waited_ms, since_ms, late, running, told))


def test_steps_without_drafts_say_what_plain_decoding_takes() -> None:
    scale = Scale(2)
    scale.step(times=SAMPLES + 2)
    assert scale.weigher.quiet.ms(2) == PLAIN_MS


def test_a_step_that_someone_joined_says_nothing_of_the_time_between_steps() -> None:
    scale = Scale()
    scale.step(1e4)  # it stood idle before
    assert scale.weigher.quiet.ms(1) is None


def test_steps_that_drafters_were_asked_in_and_verified_nothing_bound_what_plain_ones_take() -> None:
    scale = Scale(4)
    scale.step(2 * PLAIN_MS, times=SAMPLES + 2)  # prompts had just come
    assert scale.weigher.quiet.ms(4) == 2 * PLAIN_MS
    scale.step(tell=True, times=20)
    assert scale.weigher.quiet.ms(4) == pytest.approx(1.1 * PLAIN_MS)


def test_a_prompts_step_teaches_nothing() -> None:
    scale = Scale()
    scale.step(times=SAMPLES + 2)
    before = scale.record.tax_ms
    scale.sessions[0].kv_len = 0
    scale.step(1e3, tell=True, times=20)
    assert scale.record.tax_ms == before
    assert scale.weigher.quiet.ms(1) == PLAIN_MS


@pytest.mark.parametrize("num_sessions", [1, 4])
def test_what_telling_costs_is_shared_by_those_told(num_sessions: int) -> None:
    scale = Scale(num_sessions)
    scale.step(times=SAMPLES + 2)
    scale.step(PLAIN_MS + 4.0, tell=True, nodes=1, accepted=1, between_ms=4.0, times=400)
    assert scale.record.tax_ms == pytest.approx(4.0 / num_sessions, rel=0.1)


def test_nodes_are_not_counted_as_what_telling_costs() -> None:
    scale = Scale(costs=STEEP)
    scale.step(times=SAMPLES + 2)
    scale.step(PLAIN_MS + 8.0, tell=True, nodes=4, accepted=4, times=400)
    assert scale.record.tax_ms == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize(("accepted", "silenced"), [(0, True), (4, False)])
def test_a_session_whose_drafts_cost_more_than_they_bring_is_silenced(accepted: int, silenced: bool) -> None:
    scale = Scale(costs=STEEP)
    scale.step(times=SAMPLES + 2)
    scale.step(PLAIN_MS + 8.0, tell=True, nodes=4, accepted=accepted, times=12)
    assert scale.assignments[0].brake.silent is silenced
    assert scale.counters.silenced == silenced


def test_further_sessions_are_opened_once_something_was_heard_of_those_before() -> None:
    scale = Scale(2)
    scale.step(times=SAMPLES + 2)
    second = scale.assignments[1]
    second.has_answered = False
    second.session.table_row = 0
    for heard in ("has_answered", "is_silenced"):
        assert scale.begin(2)[0] == 0
        setattr(second, heard, True)
        assert scale.begin(2)[0] == 2
        setattr(second, heard, False)
    second.brake.fixed = True  # a request's own wish: it may never draft, and others do not wait for that
    scale.step(times=SAMPLES + 2)
    assert scale.begin(2)[0] == 2
    second.brake.fixed = False
    second.unheard_steps = 8
    assert scale.begin(2)[0] == 2


def test_a_session_fixed_by_its_request_is_left_alone() -> None:
    scale = Scale(costs=STEEP, fixed=True)
    scale.step(times=SAMPLES + 2)
    scale.step(10 * PLAIN_MS, tell=True, nodes=4, times=100)
    assert not scale.assignments[0].brake.silent
    assert not scale.record.hushed


def test_what_plain_steps_take_beside_a_session_fixed_by_its_request_has_its_drafts_in_it() -> None:
    scale = Scale(2, costs=STEEP)
    scale.step(times=SAMPLES + 2)
    scale.assignments[0].brake.fixed = True
    plain_ms = PLAIN_MS + 8.0
    for _ in range(SAMPLES + 2):
        scale.assignments[1].brake.silent = True
        scale.step(plain_ms, tell=True)
    assert scale.weigher.quiet.ms(2) == plain_ms
    scale.assignments[0].brake.fixed = False
    scale.weigher.begin(2)
    assert scale.weigher.quiet.ms(2) == PLAIN_MS


def test_where_every_step_asks_drafters_they_are_hushed_for_a_few_to_measure_without() -> None:
    scale = Scale()
    hushed: list[bool] = []
    for _ in range(200):
        scale.step(tell=True, nodes=2, accepted=2)
        hushed.append(scale.record.hushed)
    first = hushed.index(True)
    assert 0 < first < 100
    assert sum(hushed) <= 8
    assert not hushed[-1]
    assert scale.weigher.quiet.ms(1) == PLAIN_MS


def test_drafts_that_cost_all_sessions_together_too_much_are_paused_and_longer_each_time() -> None:
    scale = Scale(2)
    scale.step(times=SAMPLES + 2)
    pauses: list[int] = []
    for _ in range(2):
        for _ in range(20):
            for assignment in scale.assignments:
                assignment.brake.silent = False  # each alone may seem to gain
            scale.step(3 * PLAIN_MS, tell=True, nodes=1)
            if scale.record.hushed:
                break
        assert scale.record.hushed
        assert not scale.record.pays
        pauses.append(0)
        while scale.record.hushed and pauses[-1] < 10_000:
            scale.step(tell=True)
            pauses[-1] += 1
    assert pauses[1] > 1.5 * pauses[0] > 50


def test_drafts_that_pay_are_not_paused() -> None:
    scale = Scale(2)
    scale.step(times=SAMPLES + 2)
    scale.step(1.2 * PLAIN_MS, tell=True, nodes=3, accepted=2, times=50)
    assert scale.record.pays
    assert not scale.record.hushed


@pytest.mark.parametrize("num_sessions", [1, 4])
def test_a_wait_for_several_is_not_told_to_each_in_full(num_sessions: int) -> None:
    """Without one of them it would have been about as long: so none falls silent whose share of it seems too much."""
    scale = Scale(num_sessions)
    scale.step(times=SAMPLES + 2)
    scale.step(1.3 * PLAIN_MS, tell=True, nodes=1, waited_ms=0.3 * PLAIN_MS)
    (saved_ms, *others) = (assignment.brake.saved_ms for assignment in scale.assignments)
    share_ms = 0.3 * PLAIN_MS if num_sessions == 1 else 0.3 * PLAIN_MS / num_sessions / 4
    assert saved_ms == pytest.approx(-0.1 * (share_ms + scale.record.tax_ms), rel=0.3)
    assert all(other == saved_ms for other in others)


def test_steps_in_which_prompts_are_read_do_not_tell_against_drafts_at_once() -> None:
    paused: list[bool] = []
    for has_answered in (False, True):
        scale = Scale(4)
        scale.step(times=SAMPLES + 2)
        for assignment in scale.assignments:
            assignment.has_answered = has_answered
        scale.step(2 * PLAIN_MS, tell=True, times=4)
        paused.append(scale.weigher.begin(4))
    assert paused == [False, True]


def test_a_drafter_that_reads_a_prompt_is_given_time_and_one_that_never_answers_is_silenced() -> None:
    scale = Scale(costs=STEEP)
    scale.step(times=SAMPLES + 2)
    assignment = scale.assignments[0]
    assignment.has_answered = False
    scale.step(PLAIN_MS + 1.0, tell=True, times=40)
    assert assignment.brake.listens
    scale.step(PLAIN_MS + 1.0, tell=True, times=200)
    assert not assignment.brake.listens


def test_a_new_number_of_sessions_is_measured_then_opened_and_not_at_all_in_a_pause() -> None:
    scale = Scale(4)
    assert scale.begin(1) == (1, False)
    assert scale.begin(4) == (0, False)
    assert scale.record.hushed
    scale.step(times=8)
    assert scale.begin(4) == (4, False)
    assert not scale.record.hushed
    scale.step(5 * PLAIN_MS, tell=True, nodes=1, times=4)
    assert scale.begin(4) == (0, True)
    assert scale.record.hushed
