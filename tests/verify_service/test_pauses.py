"""Sessions that drafters lose, as the step loop sees it: drafting that does not pay for all together is paused."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from tests.drafter_view import Draft, Seen
from tests.fake_drafters import Truth, perfect, wrong
from tests.verify_service.rig import FixedCosts, Rig, Sim, build_rig, request
from tests.verify_service.scenes import MODEL, SAMPLED, check_outputs, learn
from verify_service.commands import ProposalsArrived
from verify_service.parsing import parse_proposals
from verify_service.replies import ReplyTimes

PLAIN_MS = 10.0
LONG = SamplingParams(temperature=1.0, seed=1)


def build() -> tuple[Rig, Truth, Sim]:
    """A machine on which rows cost nothing, but drafts, right as they are, hold it up for long."""
    rig, truth = build_rig(MODEL, brake=True, costs=FixedCosts({1: PLAIN_MS}), context=800, pages=4000), Truth()
    draft, clock = perfect(truth), rig.clock
    assert clock is not None

    def slow(seen: Seen) -> list[Draft]:
        clock.spend(12 * PLAIN_MS)
        return draft(seen)

    return rig, truth, rig.join(slow)


def step_until(rig: Rig, sim: Sim, *, is_open: bool, most_steps: int) -> int:
    """Steps until the drafter has sessions, or none; returns how many steps."""
    for step in range(most_steps):
        if bool(sim.drafter.assignments) is is_open:
            return step
        rig.step()
    raise AssertionError(f"not within {most_steps} steps")


def test_a_pause_takes_sessions_back_and_the_next_one_lasts_longer() -> None:
    rig, truth, sim = build()
    sessions = [s for token in range(4) for s in rig.submit(request([1, token], LONG))]
    learn(truth, rig, *sessions)
    step_until(rig, sim, is_open=True, most_steps=20)
    pauses: list[int] = []
    for _ in range(2):
        step_until(rig, sim, is_open=False, most_steps=10)
        assert sim.drafter.record.hushed
        pauses.append(step_until(rig, sim, is_open=True, most_steps=400))
    assert pauses[1] > 1.5 * pauses[0] > 50
    assert set(sim.view.closed.values()) == {verify_pb2.CLOSE_REASON_REASSIGNED}
    rig.run()
    check_outputs(rig, *sessions)
    rig.check_whole()


def test_a_session_fixed_by_its_request_is_drafted_for_in_a_pause() -> None:
    rig, truth, sim = build()
    sessions = [s for token in range(4) for s in rig.submit(request([1, token], LONG))]
    learn(truth, rig, *sessions)
    step_until(rig, sim, is_open=True, most_steps=20)
    step_until(rig, sim, is_open=False, most_steps=10)
    fixed = rig.submit(request([2], LONG, speculative=common_pb2.SpeculativeParams(num_draft_tokens=3)))
    learn(truth, rig, *fixed)
    for _ in range(50):
        rig.step()
    assert [held.session for held in sim.drafter.assignments.values()] == fixed
    rig.run()
    check_outputs(rig, *sessions, *fixed)


def test_many_sessions_begin_without_drafts_and_a_trial_reads_the_shortest_text() -> None:
    rig, truth, sim = build()
    sessions = [s for count in (9, 3, 12, 5, 7, 4) for s in rig.submit(request(list(range(1, count)), LONG))]
    learn(truth, rig, *sessions)
    assert step_until(rig, sim, is_open=True, most_steps=400) > 150
    (first,) = sim.drafter.assignments.values()
    assert first.session is min(sessions, key=lambda session: session.committed_len)
    rig.run()
    check_outputs(rig, *sessions)
    rig.check_whole()


def test_others_are_weighed_beside_a_session_fixed_by_its_request() -> None:
    rig, truth, sim = build()
    fixed = rig.submit(request([2], LONG, speculative=common_pb2.SpeculativeParams(num_draft_tokens=3)))
    others = [s for token in range(7) for s in rig.submit(request([1, token], LONG))]
    learn(truth, rig, *fixed, *others)
    drafted_for = 0
    for _ in range(300):
        rig.step()
        drafted_for += any(held.session in others for held in sim.drafter.assignments.values())
    assert 0 < drafted_for < 10
    assert fixed[0].stats.accepted_tokens > 200
    rig.run()
    check_outputs(rig, *fixed, *others)
    rig.check_whole()


class Slow(ReplyTimes):
    """A drafter of which it is known that no wait for it pays."""

    def observe(self, times_ms: Collection[float]) -> None:
        """Learns nothing."""


@pytest.mark.parametrize("late_by", [2, 3, 5])
def test_a_session_fixed_by_its_request_keeps_its_drafts_and_holds_nobody_up(late_by: int) -> None:
    rig = build_rig(MODEL, brake=True, costs=FixedCosts({1: PLAIN_MS}), context=800, pages=4000, wait_ms=1e4)
    truth, steps = Truth(), 0
    sim = rig.join(perfect(truth), reads=lambda: steps % late_by == late_by - 1)
    sim.drafter.replies = Slow(mean_ms=1e3, least_ms=1e3)
    fixed = rig.submit(request([2], SAMPLED, speculative=common_pb2.SpeculativeParams(num_draft_tokens=3)))
    others = [s for token in range(3) for s in rig.submit(request([1, token], SAMPLED))]
    learn(truth, rig, *fixed, *others)
    while rig.inbox.num_waiting or not rig.is_idle:
        rig.step()
        steps += 1
    check_outputs(rig, *fixed, *others)
    assert rig.loop.counters.waits == 0
    plain, *_ = rig.finishes[fixed[0].session_id].speculation.accepted_histogram
    assert plain <= 1


def test_a_long_session_goes_over_to_a_drafter_that_comes_later() -> None:
    costs = FixedCosts({1: PLAIN_MS, 16: 1.1 * PLAIN_MS})
    rig, truth = build_rig(MODEL, brake=True, costs=costs, context=800, pages=4000), Truth()
    useless = rig.join(wrong(truth, MODEL.vocab_size), name="useless")
    (session,) = rig.submit(request([1, 2], LONG))
    learn(truth, rig, session)
    step_until(rig, useless, is_open=True, most_steps=4)
    for _ in range(12):  # others' sessions
        useless.drafter.record.trees.observe(0)
    good = rig.join(perfect(truth), name="good")
    step_until(rig, good, is_open=True, most_steps=4)
    rig.run()
    assert set(useless.view.closed.values()) == {verify_pb2.CLOSE_REASON_REASSIGNED}
    assert session.stats.accepted_tokens > 100
    check_outputs(rig, session)
    rig.check_whole()


def test_sessions_stay_with_a_useless_drafter_until_another_has_room() -> None:
    costs = FixedCosts({1: PLAIN_MS, 16: 1.1 * PLAIN_MS})
    rig, truth = build_rig(MODEL, brake=True, costs=costs, context=800, pages=4000), Truth()
    useless = rig.join(wrong(truth, MODEL.vocab_size), name="useless")
    sessions = [s for token in range(4) for s in rig.submit(request([1, token], LONG))]
    learn(truth, rig, *sessions)
    for _ in range(40):
        rig.step()
    had = len(useless.drafter.assignments)
    for _ in range(12):
        useless.drafter.record.trees.observe(0)
    good = rig.join(perfect(truth), name="good", max_sessions=1)
    for _ in range(60):
        rig.step()
        assert len(useless.drafter.assignments) >= had - 1
    assert len(good.drafter.assignments) == 1
    rig.run()
    check_outputs(rig, *sessions)
    rig.check_whole()


@pytest.mark.parametrize("needs_features", [False, True])
def test_a_late_tree_of_a_silent_session_is_verified_and_told_with_all_that_was_not(needs_features: bool) -> None:
    width = 8 if needs_features else 0
    costs, truth = FixedCosts({1: PLAIN_MS, 16: 1.1 * PLAIN_MS}), Truth()
    rig = build_rig(MODEL, brake=True, costs=costs, context=800, pages=4000, feature_width=width)
    sim = rig.join(needs_features=needs_features)
    (session,) = rig.submit(request([1, 2], LONG))
    learn(truth, rig, session)
    step_until(rig, sim, is_open=True, most_steps=4)
    while not (assignment := rig.loop.drafters.of(session)) or not assignment.is_silenced:
        if assignment is not None:
            assignment.brake.silent = True
        rig.step()
    rig.step()  # in which the drafter reads that
    (seen,) = sim.view.sessions.values()
    known, steps = len(seen.tokens), seen.steps
    for _ in range(3):
        rig.step()
    assert session.committed_len > len(seen.tokens) == known  # told of nothing
    untold = session.committed_len - known
    draft = sim.view.propose(seen, Draft(truth.after(seen.tokens, 12)))
    arrived = parse_proposals([draft], vocab_size=MODEL.vocab_size, max_nodes=64)
    rig.inbox.put(ProposalsArrived(sim.drafter, arrived, None))
    rig.step()
    rig.step()
    rig.step()
    assert sim.view.num_credits == 1
    assert sim.view.num_accepted == 12 - untold
    assert len(seen.tokens) >= known + 13
    assert seen.steps > steps + untold
    rig.run()
    check_outputs(rig, session)
    rig.check_whole()
