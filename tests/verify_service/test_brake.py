"""The brake keeps what pays and ends what does not, by what it measures itself; no drafter can make it lose much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cost_table import CostTable
from verify_service.acceptance import Acceptance
from verify_service.brake import SessionBrake, choose_nodes
from verify_service.drafter_record import DrafterRecord
from verify_service.replies import ReplyTimes

STEEP = CostTable({1: 10.0, 32: 41.0})  # a millisecond a row: a small CPU
FLAT = CostTable({1: 10.0, 32: 10.5})  # nodes cost next to nothing: a GPU


def test_estimates_follow_what_is_accepted_and_never_rise_with_the_score() -> None:
    acceptance, rng = Acceptance(), np.random.default_rng(0)
    truth, depths = np.exp(-np.arange(256) / 40.0), np.ones(256, np.int32)
    for _ in range(2000):
        scores = rng.integers(0, 256, 8).astype(np.uint8)
        acceptance.observe(scores, depths[:8], np.flatnonzero(rng.random(8) < truth[scores]).tolist())
    estimates = acceptance.probabilities(np.arange(256, dtype=np.uint8), depths)
    assert (np.diff(estimates) <= 0).all()
    assert np.abs(estimates - truth).max() < 0.2


@given(
    likely=st.lists(
        st.lists(st.floats(0, 1), max_size=6).map(lambda chances: sorted(chances, reverse=True)), max_size=4
    ),
    slope=st.floats(0.0, 5.0),
    base_rows=st.integers(1, 8),
    base_tokens=st.floats(1.0, 8.0),
)
def test_the_nodes_chosen_give_the_most_tokens_per_ms(
    likely: list[list[float]], slope: float, base_rows: int, base_tokens: float
) -> None:
    costs = CostTable({1: 10.0, 64: 10.0 + 63 * slope})

    def rate(counts: list[int]) -> float:
        gained = sum(sum(p[:count]) for p, count in zip(likely, counts, strict=True))
        return (base_tokens + gained) / costs.ms(base_rows + sum(counts))

    counts = choose_nodes(costs, base_rows, base_tokens, likely)
    assert all(0 <= count <= len(p) for count, p in zip(counts, likely, strict=True))
    everything = [[]]
    for p in likely:
        everything = [[*head, count] for head in everything for count in range(len(p) + 1)]
    assert rate(counts) == pytest.approx(max(map(rate, everything)))


def test_nodes_that_cost_nothing_are_all_taken_and_hopeless_ones_are_not() -> None:
    assert choose_nodes(FLAT, 1, 1.0, [[0.9, 0.5, 0.3]]) == [3]
    assert choose_nodes(STEEP, 1, 1.0, [[0.9, 0.01], [0.02]]) == [1, 0]
    assert choose_nodes(STEEP, 1, 1.0, []) == []


def test_the_bound_on_a_reply_covers_its_usual_spread() -> None:
    replies, rng = ReplyTimes(), np.random.default_rng(0)
    times = rng.uniform(3.0, 5.0, 300)
    for ms in times:
        replies.observe([float(ms)])
    assert (times <= replies.bound_ms).mean() > 0.99
    assert replies.bound_ms < 10.0


# What a drafter does in a round: the tree's scores, and how many of its first nodes come true.
Behaviour = Callable[[int, bool], tuple[list[int], int]]
CHAIN = [2, 4, 6, 8]


def always_right(step: int, is_probe: bool) -> tuple[list[int], int]:
    return CHAIN, 4


def always_wrong(step: int, is_probe: bool) -> tuple[list[int], int]:
    return CHAIN, 0


def wrong_and_sure(step: int, is_probe: bool) -> tuple[list[int], int]:
    return [0] * 32, 0


def treacherous(step: int, is_probe: bool) -> tuple[list[int], int]:
    return CHAIN, 4 if is_probe else 0


def wrong_now_and_then(step: int, is_probe: bool) -> tuple[list[int], int]:
    return CHAIN, 4 * (step // 200 % 2)


@dataclass
class Played:
    """One session alone. speed: tokens per ms over those of plain decoding; steps with drafts, and with probes."""

    speed: float
    rounds: list[int] = field(default_factory=list)
    probes: list[int] = field(default_factory=list)


def simulate(
    behaviour: Behaviour, costs: CostTable, *, steps: int, reply_ms: float = 0.0, tax_ms: float = 0.1,
    record: DrafterRecord | None = None,
) -> Played:  # fmt: skip
    """Verify waits for replies as long as its planner would; what is drafted for a step comes true in it, or not."""
    record = record or DrafterRecord()
    brake, played = SessionBrake.of(record), Played(0.0)
    plain_ms = costs.ms(1)
    node_ms = (costs.ms(5) - plain_ms) / 4
    total_ms, tokens = 0.0, 0
    for step in range(steps):
        is_probe = brake.asks and not brake.listens
        if not brake.tell():
            brake.plain_step(plain_ms)
            total_ms, tokens = total_ms + plain_ms, tokens + 1
            continue
        record.observe_tax(tax_ms, 1)
        scores, right = behaviour(step, is_probe)
        tree, true = np.array(scores, np.uint8), range(min(right, len(scores)))
        depths = np.ones(len(scores), np.int32)
        break_even_ms = (1 + brake.expected_accepted) * plain_ms - costs.ms(1 + round(brake.expected_nodes))
        wait_ms = 0.0 if is_probe else max(0.0, min(reply_ms, break_even_ms))
        nodes = 0
        if wait_ms == reply_ms:
            (nodes,) = choose_nodes(costs, 1, 1.0, [sorted(brake.probabilities(tree, depths), reverse=True)])
        accepted = min(right, nodes)
        ms = costs.ms(1 + nodes)
        if is_probe:
            played.probes.append(step)
        if nodes or not is_probe:
            lost_ms = ms - plain_ms + wait_ms + record.tax_ms
            brake.round_done(nodes=nodes, accepted=accepted, net_ms=accepted * plain_ms - lost_ms, step_ms=plain_ms)
        else:
            brake.plain_step(plain_ms)
        brake.judged(tree, depths, true, value_ms=plain_ms, node_ms=node_ms)
        brake.told = False
        total_ms, tokens = total_ms + ms + wait_ms + tax_ms, tokens + 1 + accepted
        if nodes:
            played.rounds.append(step)
    played.speed = tokens / total_ms * plain_ms
    return played


@pytest.mark.parametrize("costs", [STEEP, FLAT])
def test_a_drafter_that_is_right_is_never_silenced(costs: CostTable) -> None:
    played = simulate(always_right, costs, steps=500)
    assert len(played.rounds) == 500
    assert played.speed > 2.0


@pytest.mark.parametrize("costs", [STEEP, FLAT])
@pytest.mark.parametrize("behaviour", [always_wrong, wrong_and_sure, treacherous, wrong_now_and_then])
@pytest.mark.parametrize(("reply_ms", "tax_ms"), [(0.0, 0.1), (5.0, 0.1), (0.0, 4.0)])
def test_no_behaviour_costs_a_twentieth(
    behaviour: Behaviour, costs: CostTable, reply_ms: float, tax_ms: float
) -> None:  # fmt: skip
    assert simulate(behaviour, costs, steps=4000, reply_ms=reply_ms, tax_ms=tax_ms).speed > 0.95


def test_a_drafter_that_is_wrong_falls_silent_and_probes_come_at_growing_intervals() -> None:
    played = simulate(always_wrong, STEEP, steps=4000, tax_ms=0.5)
    assert len(played.rounds) < 30
    gaps = np.diff(played.probes)
    assert (np.diff(gaps) >= 0).all()
    assert gaps[0] < gaps[-1]
    assert 20 < len(played.probes) < 200


def test_a_draft_that_came_too_late_says_nothing_of_what_drafts_are_worth() -> None:
    brake = SessionBrake.of(DrafterRecord())
    before = brake.expected_accepted, brake.expected_nodes
    brake.round_done(nodes=0, accepted=0, net_ms=-5.0, step_ms=10.0)
    assert (brake.expected_accepted, brake.expected_nodes) == before
    assert brake.saved_ms < 0


def test_probes_that_cost_much_are_rare() -> None:
    dear = simulate(always_wrong, STEEP, steps=20_000, tax_ms=8.0)
    assert dear.probes
    assert len(dear.probes) * 8.0 < 0.03 * 20_000 * 10.0
    assert np.diff(dear.probes).min() > 30


def test_a_drafter_that_gets_good_is_used_again_within_two_probes() -> None:
    def late_bloomer(step: int, is_probe: bool) -> tuple[list[int], int]:
        return CHAIN, 4 if step > 1000 else 0

    played = simulate(late_bloomer, STEEP, steps=5000)
    first = min(step for step in played.rounds if step > 1000)
    assert sum(1000 < step <= first for step in played.probes) <= 2
    assert played.speed > 2.0


def test_a_drafter_whose_work_slows_steps_down_more_than_it_gains_is_silenced() -> None:
    def one_in_two(step: int, is_probe: bool) -> tuple[list[int], int]:
        return [4], step % 2

    assert simulate(one_in_two, FLAT, steps=2000, tax_ms=0.2).speed > 1.2
    played = simulate(one_in_two, FLAT, steps=2000, tax_ms=8.0)
    assert played.speed > 0.95
    assert len(played.rounds) < 200


def test_new_sessions_of_a_useless_drafter_begin_in_silence_and_of_a_good_one_do_not() -> None:
    useless, good = DrafterRecord(), DrafterRecord()
    for _ in range(12):
        simulate(always_wrong, STEEP, steps=60, tax_ms=1.0, record=useless)
        simulate(always_right, STEEP, steps=60, tax_ms=1.0, record=good)
    assert not SessionBrake.of(useless).listens
    assert SessionBrake.of(good).listens
    helped = simulate(always_right, STEEP, steps=400, tax_ms=1.0, record=useless)
    assert helped.speed > 2.0


def test_an_unlucky_session_of_a_drafter_that_is_new_or_gains_much_is_given_more_time() -> None:
    def rounds_until_silenced(record: DrafterRecord, net_ms: float = -5.0) -> int:
        brake, count = SessionBrake.of(record), 1
        while not brake.round_done(nodes=6, accepted=0, net_ms=net_ms, step_ms=10.0):
            count += 1
        return count

    def record(worth: float, rounds: int, *, alone: bool) -> DrafterRecord:
        found = DrafterRecord(alone=alone)
        found.worth.mean, found.worth.rounds = worth, rounds
        return found

    poor, usual, good = (rounds_until_silenced(record(worth, 300, alone=True)) for worth in (0.02, 0.2, 0.8))
    assert poor < 8 < usual < 12
    assert 1.5 * usual < good < 40
    assert 10 < rounds_until_silenced(record(0.8, 3, alone=True)) < 15  # it may have been luck
    assert rounds_until_silenced(record(0.0, 3, alone=False)) < 10
    assert rounds_until_silenced(record(0.8, 100, alone=False)) < 10  # others may pay for it
    known, new = (rounds_until_silenced(record(0.0, rounds, alone=False), -2.0) for rounds in (300, 3))
    assert known < 8 < 12 < new < 20  # what a trial costs all of them is bounded elsewhere


def test_a_lone_session_is_waited_for_as_its_drafters_others_were() -> None:
    record = DrafterRecord(alone=True, expected_accepted=1.5)
    brake = SessionBrake.of(record)
    for _ in range(20):
        brake.round_done(nodes=4, accepted=0, net_ms=-1.0, step_ms=10.0)
    assert brake.expected_accepted < 0.5 < 1.2 < brake.hoped_accepted
    record.alone = False  # waiting for it costs others
    assert brake.hoped_accepted == brake.expected_accepted


def test_what_its_first_rounds_cost_is_not_held_against_a_drafter() -> None:
    record = DrafterRecord()
    for _ in range(16):
        record.worth.observe(-5.0)
    assert record.worth.mean == 0.0
    for _ in range(100):
        record.worth.observe(-0.5)
    assert record.gains_nothing


def test_a_new_drafter_of_which_nothing_comes_true_falls_silent_at_once_and_begins_in_silence_next() -> None:
    record = DrafterRecord(alone=True)
    first = simulate(always_wrong, FLAT, steps=60, tax_ms=1.0, record=record)
    assert 6 <= len(first.rounds) < 10
    second = simulate(always_wrong, FLAT, steps=60, tax_ms=1.0, record=record)
    assert second.rounds == second.probes
    assert second.speed > 0.95


def test_a_drafter_that_had_bad_luck_at_first_is_heard_again_within_two_probes() -> None:
    record = DrafterRecord(alone=True)
    simulate(always_wrong, STEEP, steps=60, record=record)
    assert not SessionBrake.of(record).listens
    helped = simulate(always_right, STEEP, steps=400, record=record)
    assert len(helped.probes) <= 2
    assert len(helped.rounds) > 350
    assert SessionBrake.of(record).listens


def test_a_drafter_that_is_seldom_right_and_pays_is_not_taken_for_a_wrong_one() -> None:
    record = DrafterRecord(alone=True)
    record.worth.mean, record.worth.rounds = 0.1, 64
    for _ in range(64):
        record.trees.observe(0)
    assert record.trees.are_wrong
    assert SessionBrake.of(record).listens
    assert record.patience > 0.0


def test_what_drafting_costs_several_is_not_held_against_one() -> None:
    """Nor is what drafting costs one held against several."""
    for alone in (False, True):
        record = DrafterRecord(alone=alone)
        for _ in range(200):
            record.worth.observe(-0.5)
        record.earn(10.0)
        assert record.gains_nothing
        assert record.may_open(50.0)  # of which it has not saved up the next one
        assert not record.may_open(50.0)
        assert not SessionBrake.of(record).listens
        record.alone = not alone
        assert record.may_open(50.0)
        assert SessionBrake.of(record).listens


def test_a_hushed_drafter_is_not_heard_and_a_fixed_session_is_never_silenced() -> None:
    record = DrafterRecord(hushed=True)
    brake = SessionBrake.of(record)
    assert not brake.tell()
    brake.fixed = True
    assert brake.tell()
    record.hushed = False
    brake.fixed = False
    assert brake.tell()


def test_what_one_session_teaches_serves_the_next_and_its_own_counts_soon_weigh_more() -> None:
    shared, zeros, depths = Acceptance(), np.zeros(4, np.uint8), np.ones(4, np.int32)
    first = Acceptance(shared)
    for _ in range(50):
        first.observe(zeros, depths, [])
    second = Acceptance(shared)
    assert second.probabilities(zeros, depths)[0] < 0.1
    for _ in range(4):
        second.observe(zeros, depths, range(4))
    assert second.probabilities(zeros, depths)[0] > 0.7
