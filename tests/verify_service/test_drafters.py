"""Who gets which session, for how long, and what slow and flooding drafters get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.errors import InvalidArgument
from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import pack_ids
from tests.drafter_view import Draft, Seen
from tests.fakes import ToyModel, toy_config
from tests.verify_service.rig import MAX_KEPT, Sim, build_factory, build_rig, expected, request, taken
from verify_service.assignment import MAX_UNANSWERED
from verify_service.commands import Arrived
from verify_service.drafter import Drafter
from verify_service.drafters import MAX_REFUSALS, REFUSALS_FORGIVEN, Drafters
from verify_service.intake import take_proposals, take_releases
from verify_service.proposals import Proposal
from verify_service.session import Session

OUTBOX_BYTES = 2000
FACTORY = build_factory(toy_config(32, 400))


class Ends:
    """Remembers why a stream was ended."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)


def drafter(name: str = "d", **settings: Any) -> Drafter:
    return Drafter(
        **{
            "drafter_id": name,
            "algorithm": common_pb2.ALGORITHM_NGRAM,
            "draft_model": "",
            "max_sessions": 8,
            "needs_features": False,
            "wake": lambda: None,
            "end": Ends(),
            "taken": lambda: None,
            **settings,
        }
    )


def ends(of: Drafter) -> list[str]:
    assert isinstance(of.end, Ends)
    return of.end.reasons


def drafters(*enlisted: Drafter) -> Drafters:
    everybody = Drafters(max_kept=4, max_assumed=4, outbox_bytes=OUTBOX_BYTES)
    for one in enlisted:
        everybody.enlist(one)
    return everybody


def session(prompt_len: int = 3, **speculative: Any) -> Session:
    (made,) = FACTORY.build(
        verify_pb2.GenerateRequest(
            prompt_tokens=pack_ids([1] * prompt_len), speculative=common_pb2.SpeculativeParams(**speculative)
        )
    )
    return made


def arrived(to: Session, proposal_id: int, tokens: list[int] | InvalidArgument, generation: int = 1) -> Arrived:
    proposal = tokens
    if not isinstance(tokens, InvalidArgument):
        tree = TokenTree.chain(np.array(tokens, np.int32))
        proposal = Proposal(proposal_id, to.committed_len, np.empty(0, np.int32), tree)
    assert not isinstance(proposal, list)
    return Arrived(to.session_id, generation, proposal_id, proposal)


def test_the_least_busy_drafter_that_fits_gets_the_session() -> None:
    small, large = drafter("small", max_sessions=1), drafter("large")
    eagle = drafter("eagle", algorithm=common_pb2.ALGORITHM_EAGLE)
    everybody = drafters(small, large, eagle)
    owners: list[str] = []
    for _ in range(4):
        assignment = everybody.assign(session(algorithm=common_pb2.ALGORITHM_NGRAM))
        assert assignment is not None
        owners.append(assignment.drafter.drafter_id)
    assert owners == ["small", "large", "large", "large"]
    assert everybody.assign(session(algorithm=common_pb2.ALGORITHM_MTP)) is None
    assert everybody.assign(session(enabled=False)) is None
    assignment = everybody.assign(session())
    assert assignment is not None
    assert assignment.drafter is eagle


def test_the_generation_grows_with_every_opening_and_old_ones_are_foreign() -> None:
    first, second = drafter("first"), drafter("second")
    everybody, one = drafters(first, second), session()
    everybody.assign(one)
    assert first.find(one.session_id, 1) is not None
    for _ in range(2):
        everybody.leave(first)
    assert everybody.of(one) is None
    everybody.assign(one)
    assert second.find(one.session_id, 1) is None
    assert second.find(one.session_id, 2) is everybody.of(one)
    take_proposals(everybody, second, [arrived(one, 1, [4], generation=1)])
    assert second.counts["foreign"] == 1


def test_a_malformed_proposal_costs_the_drafter_that_session_for_ever_even_when_it_comes_again() -> None:
    bad = drafter("bad")
    everybody, one, other = drafters(bad), session(), session()
    for each in (one, other):
        everybody.assign(each)
    take_proposals(everybody, bad, [arrived(one, 1, InvalidArgument("tokens[0] is 99", field="tokens"))])
    take_proposals(everybody, bad, [arrived(other, 1, [4])])
    assert everybody.of(one) is None
    assert everybody.assign(one) is None
    everybody.leave(bad)
    again = drafter("bad")
    everybody.enlist(again)
    assert everybody.assign(one) is None
    assert everybody.assign(other) is not None
    assert (bad.counts["malformed"], bad.counts["kept"]) == (1, 1)
    frame = taken(bad.outbox)
    assert frame is not None
    assert [(c.session, c.reason) for c in frame.closed] == [(one.session_id, verify_pb2.CLOSE_REASON_QUARANTINED)]
    assert [(r.reason, r.detail) for r in frame.rejected] == [(verify_pb2.REJECT_REASON_MALFORMED, "tokens[0] is 99")]


def test_a_released_session_goes_to_another_and_never_back() -> None:
    first, second = drafter("first"), drafter("second")
    everybody, one = drafters(first, second), session()
    everybody.assign(one)
    release = verify_pb2.Release(session=one.session_id, generation=1)
    take_releases(everybody, first, [release, release, verify_pb2.Release(session=99, generation=1)])
    assert first.counts["released"] == 1
    assignment = everybody.assign(one)
    assert assignment is not None
    assert (assignment.drafter, assignment.generation) == (second, 2)
    everybody.leave(second)
    assert everybody.assign(one) is None
    everybody.forget(one)
    assert everybody.assign(one) is not None


def test_a_drafter_at_its_limit_is_told_that_a_session_closed_before_it_gets_another() -> None:
    full = drafter(max_sessions=1)
    everybody, old, new = drafters(full), session(), session()
    assert everybody.assign(old) is not None
    everybody.close(old, verify_pb2.CLOSE_REASON_FINISHED)
    assert everybody.assign(new) is None
    assert full.outbox.take(verify_pb2.Round())
    assert everybody.assign(new) is not None


def test_half_of_the_bound_is_for_rows() -> None:
    slow = drafter("slow")
    drafters(slow)
    slow.outbox.feature_rows(verify_pb2.SessionFeatures(session=1, generation=1))
    assert slow.outbox.room_for_rows == OUTBOX_BYTES // 2 - slow.outbox.num_bytes


def test_past_the_bound_the_largest_session_is_closed_and_its_drafter_keeps_the_others() -> None:
    slow = drafter("slow")
    everybody, small, large = drafters(slow), session(3), session(390)
    for each in (small, large):
        everybody.assign(each)
    everybody.bound_outboxes()
    assert not slow.outbox.has_unread_slow
    for _ in range(20):
        slow.outbox.feature_rows(verify_pb2.SessionFeatures(session=large.session_id, generation=1))
    slow.outbox.feature_rows(
        verify_pb2.SessionFeatures(
            session=large.session_id,
            generation=1,
            rows=common_pb2.FeatureRows(rows=common_pb2.Tensor(data=bytes(OUTBOX_BYTES))),
        )
    )
    everybody.bound_outboxes()
    assert everybody.of(large) is None
    assert everybody.of(small) is not None
    assert everybody.assign(large) is None
    assert slow.outbox.num_bytes < OUTBOX_BYTES // 2
    assert slow.outbox.has_unread_slow
    assert not ends(slow)
    frame = taken(slow.outbox)
    assert frame is not None
    assert [(c.session, c.reason) for c in frame.closed] == [(large.session_id, verify_pb2.CLOSE_REASON_SLOW)]
    assert not slow.outbox.has_unread_slow


def test_past_the_bound_again_with_the_notice_unread_the_stream_ends_and_its_sessions_are_free() -> None:
    slow = drafter("slow")
    everybody, one, two, three = drafters(slow), session(390), session(390), session(390)
    for each in (one, two):
        everybody.assign(each)
    everybody.bound_outboxes()
    assert slow.outbox.has_unread_slow
    assert not ends(slow)
    for _ in range(2):
        everybody.assign(three)
        slow.outbox.open(verify_pb2.Opened(session=1000, generation=1, tokens=bytes(OUTBOX_BYTES)))
    everybody.bound_outboxes()
    assert len(ends(slow)) == 1
    assert len(everybody) == 0
    assert everybody.of(two) is None
    assert everybody.of(three) is None


def test_what_waits_for_sessions_that_have_ended_goes_first_and_costs_nobody_anything() -> None:
    slow = drafter("slow")
    everybody, ended, alive = drafters(slow), session(390), session(100)
    for each in (ended, alive):
        everybody.assign(each)
    everybody.close(ended, verify_pb2.CLOSE_REASON_FINISHED)
    slow.outbox.reject(verify_pb2.Rejected(detail="x" * 100))
    everybody.bound_outboxes()
    assert everybody.of(alive) is not None
    assert not slow.outbox.has_unread_slow
    frame = taken(slow.outbox)
    assert frame is not None
    assert [opened.session for opened in frame.opened] == [alive.session_id]
    assert [closed.reason for closed in frame.closed] == [verify_pb2.CLOSE_REASON_FINISHED]


@pytest.mark.parametrize("kind", ["foreign", "replayed", "crowded"])
def test_a_flood_ends_the_stream_and_the_rest_of_it_is_not_even_looked_at(kind: str) -> None:
    bad = drafter("bad")
    everybody, one = drafters(bad), session()
    everybody.assign(one)
    generation = 2 if kind == "foreign" else 1
    flood = [
        arrived(one, 1 if kind == "replayed" else number, [4], generation) for number in range(1, 3 * MAX_REFUSALS)
    ]
    take_proposals(everybody, bad, flood)
    take_proposals(everybody, bad, flood)
    assert len(ends(bad)) == 1
    assert everybody.of(one) is None
    assert bad.counts[kind] <= MAX_REFUSALS
    assert len(everybody) == 0


def test_refusals_are_forgiven_once_for_a_length() -> None:
    """A drafter that got a few kept with each flood of them would else flood for ever."""
    bad = drafter("bad")
    everybody, one = drafters(bad), session()
    everybody.assign(one)
    bad.refusals = 3 * REFUSALS_FORGIVEN
    numbers = iter(range(1, 100))
    for _ in range(3):
        take_proposals(everybody, bad, [arrived(one, next(numbers), [4])])
    assert bad.refusals == 2 * REFUSALS_FORGIVEN
    one.commit([4])
    take_proposals(everybody, bad, [arrived(one, next(numbers), [5])])
    assert bad.refusals == REFUSALS_FORGIVEN


def test_the_next_of_an_algorithm_begins_from_what_the_last_one_showed() -> None:
    """A drafter that leaves in time would else be listened to for ever as if it were new, whatever its name."""
    bad = drafter("bad")
    everybody = drafters(bad, drafter("other", algorithm=common_pb2.ALGORITHM_MTP))
    scores, depths = np.zeros(4, np.uint8), np.ones(4, np.int32)
    for _ in range(12):
        bad.record.trees.observe(0)
        bad.record.acceptance.observe(scores, depths, [])
    assert bad.record.gains_nothing
    everybody.leave(bad)
    again, fresh = drafter("again"), drafter("fresh", algorithm=common_pb2.ALGORITHM_MTP)
    for each in (again, fresh):
        everybody.enlist(each)
    assert [each.record.gains_nothing for each in (again, fresh)] == [True, False]
    known = bad.record.acceptance.probabilities(scores, depths)[0]
    assert again.record.acceptance.probabilities(scores, depths)[0] == known < 0.4
    for _ in range(64):  # it is its own from here on
        again.record.trees.observe(4)
        again.record.acceptance.observe(scores, depths, range(4))
    assert not again.record.gains_nothing
    assert again.record.acceptance.probabilities(scores, depths)[0] > 0.5
    assert bad.record.gains_nothing
    assert bad.record.acceptance.probabilities(scores, depths)[0] == known


def useless(name: str, **settings: Any) -> Drafter:
    """A drafter of which nothing came true."""
    bad = drafter(name, **settings)
    for _ in range(12):
        bad.record.trees.observe(0)
    assert bad.record.gains_nothing
    return bad


def save_up(poor: Drafter) -> None:
    """Has a drafter save up all that is saved up for new sessions."""
    for _ in range(200):
        poor.record.earn(10.0)


def host(everybody: Drafters) -> str | None:
    """Opens a new session as the engine does; returns the id of the drafter that gets it."""
    assignment = everybody.assign(session(), row_ms=0.5)
    return None if assignment is None else assignment.drafter.drafter_id


def test_who_gains_nothing_keeps_no_session_from_who_may_gain() -> None:
    everybody = drafters(useless("bad"), drafter("good", max_sessions=4))
    assert [host(everybody) for _ in range(5)] == [*["good"] * 4, None]
    bad, _ = everybody
    bad.record.earn(10.0)
    assert [host(everybody) for _ in range(2)] == ["bad", None]  # the other has no room, and that was all it had saved


def test_who_gains_nothing_has_a_try_now_and_then() -> None:
    tried = 0
    for first in (True, False):  # enlisted
        bad, good = useless("bad"), drafter("good")
        everybody = drafters(*([bad, good] if first else [good, bad]))
        for _ in range(150):
            one = session()
            assignment = everybody.assign(one, row_ms=0.5)
            assert assignment is not None
            tried += assignment.drafter is bad
            for _ in range(200):
                one.commit([4])
                bad.record.earn(10.0)
            everybody.close(one, verify_pb2.CLOSE_REASON_FINISHED)
            assert assignment.drafter.outbox.take(verify_pb2.Round())
    assert tried == 4  # of 300: one in a hundred, and the first once its purse is full


def test_a_session_goes_over_once_from_who_gains_nothing_to_who_may() -> None:
    bad = drafter("bad")
    everybody, one = drafters(bad), session()
    assert everybody.assign(one, row_ms=0.5) is not None
    for _ in range(12):
        bad.record.trees.observe(0)
    save_up(bad)  # it might have a try
    assert everybody.misplaced() is None  # there is nobody else
    everybody.enlist(good := drafter("good", max_sessions=1))
    assert everybody.misplaced() is one
    moved = everybody.move(one)
    assert moved is not None
    assert moved.drafter is good
    for _ in range(12):
        good.record.trees.observe(0)
    for _ in range(64):
        bad.record.trees.observe(4)
    assert everybody.misplaced() is None


def test_a_session_stays_where_it_is_tried_and_where_nobody_has_room() -> None:
    bad, good = useless("bad"), drafter("good", max_sessions=1)
    everybody = drafters(bad, good)
    save_up(bad)
    assert host(everybody) == "bad"
    assert everybody.misplaced() is None
    bad.record.tried = None
    everybody.enlist(drafter("of another kind", algorithm=common_pb2.ALGORITHM_MTP, max_sessions=0))
    good.assignments[99] = bad.assignments[next(iter(bad.assignments))]
    assert everybody.misplaced() is None


def test_what_may_be_spent_on_those_who_gain_nothing_is_theirs_together() -> None:
    ones = [useless(str(number), max_sessions=2000) for number in range(4)]
    everybody, opened = drafters(*ones), 0
    for _ in range(1000):
        for one in ones:
            one.record.earn(10.0, sharers=len(ones))
        opened += host(everybody) is not None
    alone = useless("alone", max_sessions=2000)
    only, opened_alone = drafters(alone), 0
    for _ in range(1000):
        alone.record.earn(10.0)
        opened_alone += host(only) is not None
    assert opened <= opened_alone + 4


def test_a_session_with_a_fixed_tree_goes_to_who_may_gain() -> None:
    bad = useless("bad")
    bad.record.earn(10.0)
    assignment = drafters(bad, drafter("good")).assign(session())
    assert assignment is not None
    assert assignment.drafter.drafter_id == "good"


def test_one_that_may_not_be_opened_to_leaves_the_session_to_the_next() -> None:
    poor, saving = useless("poor"), useless("saving")
    saving.record.earn(10.0)
    everybody = drafters(poor, saving)
    assert [host(everybody) for _ in range(2)] == ["saving", None]


def test_no_debt_is_handed_on_nor_anything_to_another_model() -> None:
    bad = useless("bad", algorithm=common_pb2.ALGORITHM_EAGLE3, draft_model="a")
    bad.record.earn(10.0)
    assert bad.record.may_open(10_000.0)
    everybody = drafters(bad)
    everybody.leave(bad)
    same, other = (drafter(name, algorithm=common_pb2.ALGORITHM_EAGLE3, draft_model=name) for name in "ab")
    for each in (same, other):
        everybody.enlist(each)
    assert [each.record.gains_nothing for each in (same, other)] == [True, False]
    same.record.earn(10.0)
    assert same.record.may_open(0.0)


@pytest.mark.parametrize(("worth", "is_spared"), [(0.5, True), (-0.5, False)])
def test_a_restart_may_be_slow_at_first_only_where_it_was_worth_it(worth: float, is_spared: bool) -> None:
    """A drafter that was not worth it would else come back for the sake of that."""
    first = drafter("first")
    everybody = drafters(first)
    for _ in range(200):
        first.record.worth.observe(worth)
    everybody.leave(first)
    again = drafter("again")
    everybody.enlist(again)
    for _ in range(16):
        again.record.worth.observe(-20.0)
    assert (again.record.worth.mean == worth) is is_spared
    assert (again.record.worth.mean < -2.0) is not is_spared


def test_what_is_counted_after_it_left_is_not_lost() -> None:
    gone = drafter("gone")
    everybody = drafters(gone)
    gone.counts["kept"] = 2
    everybody.leave(gone)
    gone.counts["used"] += 1
    assert everybody.totals[gone.algorithm].counts == {"kept": 2, "used": 1}


def test_a_drafter_that_proposes_much_and_sensibly_is_no_flood() -> None:
    model = ToyModel(vocab_size=32, order=3)
    rig = build_rig(model, context=120, pages=400)

    def policy(seen: Seen) -> list[Draft]:
        return [Draft([token, 1]) for token in range(3 * MAX_KEPT)]

    sim: Sim = rig.join(policy)
    sessions = [rig.submit(request([n], SamplingParams(temperature=0.0, max_tokens=100)))[0] for n in range(5)]
    rig.run()
    assert sim.ended is None
    assert sim.drafter.counts["crowded"] > 1000
    assert [rig.output(one) for one in sessions] == [expected(rig, one) for one in sessions]


def test_answers_are_timed_also_when_nobody_waits_any_more() -> None:
    """A drafter slower than the bound on its reply would else be thought as fast as ever, and never be waited for."""
    everybody = drafters(drafter())
    assignment = everybody.assign(session())
    assert assignment is not None
    served = assignment.drafter
    replies = served.replies
    before_ms = replies.mean_ms
    for length in (3, 4, 5, 6):
        assignment.asked(length, now_ns=length * 1_000_000)
    assignment.answered(3, now_ns=9_000_000_000, drafted=True)  # the first one: the prompt was read for it
    served.look_back()
    assert replies.mean_ms == before_ms
    assignment.answered(5, now_ns=45_000_000, drafted=True)
    served.look_back()
    assert replies.mean_ms == pytest.approx(before_ms + (40.0 - before_ms) / 8)
    assert replies.bound_ms > 40.0
    after_ms = replies.mean_ms
    assignment.answered(5, now_ns=90_000_000, drafted=True)
    assignment.answered(4, now_ns=90_000_000, drafted=True)  # it went on to 5 since
    served.look_back()
    assert replies.mean_ms == after_ms
    for length in range(7, 200):
        assignment.asked(length, now_ns=0)
    assert len(assignment.asked_ns) <= MAX_UNANSWERED
