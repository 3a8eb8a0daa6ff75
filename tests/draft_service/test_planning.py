"""The drafter's planner finds what pays, from verdicts alone, on a machine whose times are scripted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from draft_service.adaptive import AdaptivePlanner
from draft_service.drafters.base import Drafter
from draft_service.drafters.shape import TreeShape, tree_shape
from draft_service.evidence import DepthReached
from draft_service.overlap import MAX_OUTCOMES, FixedOverlap, OverlapRule
from draft_service.planners import make_planner
from draft_service.planning import CostPlanner, FixedPlanner, Plan, Planner, shapes
from draft_service.session import Extension, Grown, Sent, Session, Wishes
from outrider.args import DraftArgs
from outrider.errors import StartupError
from outrider.tiers import DEFAULT
from outrider.tree import ROOT
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import Ids

CHAIN = TreeShape(3, 1, 4)
NO_IDS = np.empty(0, np.int32)


def new_session(uid: int, wishes: Wishes | None = None) -> Session:
    return Session(
        uid=uid, session_id=uid, generation=1, prompt_len=1, remaining=10**6, vocabulary="", vocab_size=100,
        wishes=wishes or Wishes(), corpus_scope="", prediction=NO_IDS, tokens=np.zeros(4, np.int32),
    )  # fmt: skip


def tree_of(shape: TreeShape) -> tuple[Ids, Ids]:
    """Tokens and parents: the first child of each depth carries on, beside topk - 1 others."""
    parents: list[int] = []
    last = ROOT
    for _ in range(shape.num_steps):
        first = len(parents)
        parents += [last] * shape.topk
        last = first
    return np.arange(len(parents), dtype=np.int32), np.array(parents, np.int32)


@dataclass
class Machine:
    """Verify and a drafter in scripted time. chance: that a draft is accepted once the one above was."""

    planner: Planner
    chance: Callable[[int], float]  # by topk
    row_ms: float = 0.1
    plain_ms: float = 8.0
    forward_ms: float = 1.0
    slowed_ms: float = 0.0  # what drafting ahead adds to a step
    batch: int = 1
    call_ms: float = 0.0  # of a draft, whatever its steps
    way_ms: float = 0.0  # there and back
    sure: tuple[float, ...] = ()  # chances of rounds to come, in turn, which the drafter knows; else `chance`
    heeds_reach: bool = True
    now_s: float = 0.0
    tokens: int = 0
    plans: list[tuple[TreeShape | None, bool, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.made: Grown | None = None
        self.sessions = [new_session(uid) for uid in range(1, self.batch + 1)]

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round()

    def grown(self, plan: Plan) -> TreeShape | None:
        """The trees of the next round: as planned, or cut short."""
        if self.sure:
            chance_now = self.sure[len(self.plans) % len(self.sure)]
            self.chance = lambda topk: chance_now
        shape = plan.shape if plan.speculate else None
        if shape is None or not self.heeds_reach:
            return shape
        chance, steps = self.chance(shape.topk), 1
        while steps < shape.num_steps and chance**steps >= plan.least_reach:
            steps += 1
        return TreeShape(steps, shape.topk, shape.topk * steps + 1)

    def round(self) -> None:
        self.planner.meet(self.batch)
        plan = self.planner.current
        shape = self.grown(plan)
        rows = self.batch * (1 + (len(tree_of(shape)[0]) if shape is not None else 0))
        verify_ms = self.plain_ms + self.row_ms * rows
        draft_ms = self.call_ms + self.forward_ms * shape.num_steps if shape is not None else 0.0
        waits = plan.outcomes == 0
        self.now_s += (verify_ms + self.way_ms + (draft_ms if waits else self.slowed_ms)) / 1000
        if shape is not None:
            assert plan.shape is not None
            self.made = Grown(shape.topk, shape.num_steps, shape.num_steps < plan.shape.num_steps)
            self.planner.drafted([self.made], self.batch, draft_ms)
        extensions = [
            self.extension(session, shape, int(verify_ms * 1000), rows, not waits) for session in self.sessions
        ]
        self.planner.plan(extensions)
        self.plans.append((shape or plan.shape, plan.speculate, plan.outcomes))

    def extension(
        self, session: Session, shape: TreeShape | None, verify_us: int, rows: int, early: bool
    ) -> Extension:  # fmt: skip
        accepted = 0
        credits: list[verify_pb2.Credit] = []
        if shape is not None:
            tokens, parents = tree_of(shape)
            assumed = np.zeros(1, np.int32) if early else NO_IDS
            session.sent = {1: Sent(1, 4, assumed, tokens, parents, bytes(len(tokens)), grown=self.made)}
            while accepted < shape.num_steps and self.rng.random() < self.chance(shape.topk):
                accepted += 1
            nodes = [depth * shape.topk for depth in range(accepted)]
            credits = [
                verify_pb2.Credit(proposal_id=1, root_node=ROOT, nodes_verified=len(tokens), accepted_nodes=nodes)
            ]
        self.tokens += 1 + accepted
        verdict = verify_pb2.Verdict(
            base_len=4, tokens=[1] * (1 + accepted), credits=credits, verify_us=verify_us, batch_tokens=rows, steps=1
        )
        return Extension(session, 4, verdict)


def planned(first: TreeShape = CHAIN, most: TreeShape | None = None) -> CostPlanner:
    return CostPlanner(first, most or TreeShape(7, 1, 8), lambda shape, least_reach: None)


def settled(machine: Machine) -> TreeShape:
    """The shape that the last rounds had, most of them."""
    seen = [shape for shape, speculate, _ in machine.plans[-200:] if speculate and shape is not None]
    return max(set(seen), key=seen.count)


def test_depth_grows_with_acceptance_and_shrinks_where_rows_cost() -> None:
    good, bad = Machine(planned(), lambda topk: 0.95), Machine(planned(), lambda topk: 0.35)
    dear = Machine(planned(), lambda topk: 0.8, row_ms=2.0, batch=8)
    for machine in (good, bad, dear):
        machine.run(600)
    assert settled(good).num_steps >= 5
    assert settled(bad).num_steps <= 2
    assert settled(dear).num_steps < settled(good).num_steps


@pytest.mark.parametrize("first", [TreeShape(1, 1, 2), TreeShape(7, 1, 8)])
def test_depth_is_judged_by_what_a_step_more_costs(first: TreeShape) -> None:
    """A call costs most of its time whatever its steps: one step is no bargain."""
    machine = Machine(planned(first), lambda topk: 0.6, plain_ms=4.5, forward_ms=0.15, call_ms=1.0)
    machine.run(400)
    assert settled(machine).num_steps >= 3


@pytest.mark.parametrize("batch", [1, 8])
def test_a_draft_ends_where_its_next_step_takes_longer_than_it_gains(batch: int) -> None:
    """Every third round is as good as certain, the others are not: no fixed depth suits both."""
    rates = []
    for heeds_reach in (True, False):
        planner = planned()
        machine = Machine(planner, lambda topk: 0.0, batch=batch, sure=(0.95, 0.3, 0.5), heeds_reach=heeds_reach)
        machine.plain_ms, machine.forward_ms = 4.0, 0.4
        machine.run(900)
        rates.append(machine.tokens / machine.now_s)
        assert 0.1 < planner.current.least_reach < 0.8
    assert rates[0] > 1.05 * rates[1]


def test_steps_that_cost_nothing_are_all_run() -> None:
    cheap, dear = (Machine(planned(), lambda topk: 0.9, call_ms=1.0, row_ms=0.0) for _ in range(2))
    cheap.forward_ms = 0.0
    for machine in (cheap, dear):
        machine.run(300)
    assert settled(cheap).num_steps == 7
    assert cheap.planner.current.least_reach < 0.1 < dear.planner.current.least_reach


def test_more_sessions_than_ever_begin_with_short_chains_that_are_run_whole() -> None:
    """What was planned for one would come too late, and what calls for so many take is not known yet."""
    planner = planned(TreeShape(7, 1, 8))
    alone = Machine(planner, lambda topk: 0.95, forward_ms=0.2)
    alone.run(100)
    assert planner.current.shape is not None
    assert planner.current.shape.num_steps == 7
    several = Machine(planner, lambda topk: 0.95, forward_ms=0.2, batch=6)
    several.run(16)
    assert [shape.num_steps for shape, _, _ in several.plans if shape is not None] == [3] * 16
    several.run(100)
    assert planner.current.shape.num_steps == 7
    calls = planner.evidence.times
    assert calls.ms(1, 24, 3, 8.0) > 1.5 * calls.ms(1, 6, 3, 8.0)  # four times as many, of which none were timed
    assert calls.ms(1, 2, 3, 8.0) == pytest.approx(1.4 * calls.ms(1, 1, 3, 8.0))


def test_what_the_planner_wants_reaches_the_drafter() -> None:
    wanted: list[tuple[TreeShape, float]] = []
    planner = CostPlanner(CHAIN, TreeShape(7, 1, 8), lambda shape, least_reach: wanted.append((shape, least_reach)))
    Machine(planner, lambda topk: 0.6, forward_ms=0.5).run(100)
    assert wanted[-1] == (planner.current.shape, planner.current.least_reach)
    assert wanted[-1][1] > 0.1


def test_it_finds_out_when_steps_have_become_cheap() -> None:
    """Whether it paused, or had come down to single steps: what a step more costs is tried again."""
    for chance in (0.6, 0.75):
        fresh, late = (Machine(planned(), lambda topk, chance=chance: chance, batch=8) for _ in range(2))
        late.forward_ms = 2.5
        late.run(2000)
        for machine in (fresh, late):
            machine.forward_ms, machine.now_s, machine.tokens = 0.1, 0.0, 0
            machine.run(3000)
        assert late.tokens / late.now_s > 0.93 * fresh.tokens / fresh.now_s


def test_a_call_that_drafted_nothing_or_several_shapes_says_nothing_of_steps() -> None:
    planner = planned()
    Machine(planner, lambda topk: 0.6).run(50)
    shape = TreeShape(7, 1, 8)
    before = planner.evidence.steps_run(shape), planner.evidence.times.ms(1, 1, 3, 8.0)
    for made in ([], [Grown(1, 7), Grown(1, 2)]):
        planner.drafted(made, 1, 100.0)
    assert (planner.evidence.steps_run(shape), planner.evidence.times.ms(1, 1, 3, 8.0)) == before


def test_what_a_round_takes_beside_step_and_draft_is_measured() -> None:
    planner = CostPlanner(CHAIN, TreeShape(7, 1, 8), lambda shape, least_reach: None, clock=lambda: machine.now_s)
    machine = Machine(planner, lambda topk: 0.6, way_ms=1.5)
    machine.run(100)
    assert planner.evidence.round_trips.ms(1) == pytest.approx(1.5, abs=0.1)


def test_drafting_stops_where_it_does_not_pay_is_tried_again_and_comes_back() -> None:
    planner = planned()
    machine = Machine(planner, lambda topk: 0.02, row_ms=1.0, forward_ms=2.0)
    machine.run(1500)
    drafted = [speculate for _, speculate, _ in machine.plans[500:]]
    assert 0 < sum(drafted) < 0.2 * len(drafted)
    assert planner.decisions["paused"] > 0 < planner.decisions["resumed"]
    machine.chance = lambda topk: 0.95
    machine.run(1500)
    assert all(speculate for _, speculate, _ in machine.plans[-100:])


def test_what_did_not_pay_for_several_sessions_is_tried_at_once_with_fewer() -> None:
    planner = planned()
    machine = Machine(planner, lambda topk: 0.3, row_ms=3.0, forward_ms=40.0, batch=8)
    machine.run(2000)
    assert planner.decisions["paused"] > 3  # so the next pause is long
    while planner.current.speculate:
        machine.round()
    machine.sessions, machine.batch, machine.row_ms, machine.forward_ms = machine.sessions[:1], 1, 0.2, 0.2
    for _ in range(2):
        machine.round()
    assert planner.current.speculate
    machine.chance = lambda topk: 0.8
    machine.run(200)
    assert sum(speculate for _, speculate, _ in machine.plans[-100:]) > 90


def test_branches_are_used_where_they_are_accepted_more_often() -> None:
    tree, most = TreeShape(5, 4, 8), TreeShape(7, 4, 15)
    wide = Machine(planned(tree, most), lambda topk: 0.85 if topk > 1 else 0.5, row_ms=0.02)
    narrow = Machine(planned(tree, most), lambda topk: 0.85, row_ms=1.0)
    for machine in (wide, narrow):
        machine.run(1200)
    assert settled(wide).topk == 4
    assert settled(narrow).topk == 1


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("slowed_ms", "pays"), [(0.2, True), (6.0, False)])
def test_overlap_is_chosen_by_what_it_does_to_the_time_of_rounds(slowed_ms: float, pays: bool, first: bool) -> None:
    rule = OverlapRule(clock=lambda: machine.now_s, first=first)
    planner = FixedPlanner(rule)
    machine = Machine(planner, lambda topk: 0.7, slowed_ms=slowed_ms)
    # Fixed trees: only the overlap is planned.
    shape = TreeShape(3, 1, 4)
    for _ in range(1000):
        outcomes = planner.current.outcomes
        machine.now_s += (8.0 + (slowed_ms if outcomes else 3.0)) / 1000
        machine.planner.plan([machine.extension(machine.sessions[0], shape, 8000, 4, outcomes > 0)])
        machine.plans.append((None, True, outcomes))
    used = [outcomes == MAX_OUTCOMES for _, _, outcomes in machine.plans]
    assert used[1:9] == [first] * 8
    used = used[-600:]
    assert (sum(used) > 0.85 * len(used)) is pays
    assert (sum(used) < 0.15 * len(used)) is not pays


@pytest.mark.parametrize(("verify_ms", "given_up"), [(10, True), (24, False)])
def test_overlap_that_makes_rounds_far_longer_is_given_up_at_once(verify_ms: int, given_up: bool) -> None:
    """But not where steps took that time, which ran prompts."""
    now_s, rule, overlapped = [0.0], OverlapRule(clock=lambda: now_s[0], first=False), 0
    session, on = new_session(1), False
    for _ in range(OverlapRule.FIRST_HOLD + OverlapRule.TURNS * OverlapRule.WINDOW):
        now_s[0] += 0.025 if on else 0.011
        verdict = verify_pb2.Verdict(tokens=[1, 2], steps=1, verify_us=1000 * verify_ms if on else 10_000)
        on = rule.outcomes([Extension(session, 4, verdict)]) > 0
        overlapped += on
    assert overlapped > 0
    assert (overlapped <= OverlapRule.MOST_HOPELESS + 1) is given_up


def test_shapes_are_none_larger_than_the_largest_and_possible() -> None:
    found = shapes(TreeShape(5, 4, 11))
    assert TreeShape(5, 4, 11) in found
    assert TreeShape(5, 1, 6) in found
    for shape in found:
        assert shape.num_draft_tokens - 1 <= shape.topk + (shape.num_steps - 1) * shape.topk**2
        assert shape.num_steps <= 5


def test_requests_that_fix_their_trees_teach_the_planner_nothing() -> None:
    planner = planned()
    machine = Machine(planner, lambda topk: 0.0)
    machine.sessions = [new_session(1, Wishes(num_steps=3, topk=1, num_draft_tokens=4))]
    before = planner.evidence.trees(1).accepted.one_more()
    machine.run(50)
    assert planner.evidence.trees(1).accepted.one_more() == before


@pytest.mark.parametrize(("parents", "path", "led"), [([ROOT, 0, 1], [0, 1, 2], 3), ([ROOT, ROOT, 1], [1, 2], 0)])
def test_a_trees_branches_are_those_it_was_grown_with(parents: list[int], path: list[int], led: int) -> None:
    """Whatever nodes of it were chosen. What a chain would have had of it, its likeliest path tells."""
    planner, session = planned(TreeShape(5, 4, 8), TreeShape(7, 4, 15)), new_session(1)
    tree = np.arange(3, dtype=np.int32), np.array(parents, np.int32), bytes(3)
    session.sent = {1: Sent(1, 4, NO_IDS, *tree, grown=Grown(4, 3))}
    credit = verify_pb2.Credit(proposal_id=1, root_node=ROOT, nodes_verified=3, accepted_nodes=path)
    planner.evidence.observe([Extension(session, 4, verify_pb2.Verdict(credits=[credit]))])
    depth = 3 if led else 2
    for topk, reached in ((1, led), (4, len(path))):
        expected = DepthReached()
        expected.observe(0, reached, depth)
        assert planner.evidence.trees(topk).accepted.one_more() == expected.one_more()


def test_what_comes_after_a_draft_that_ended_early_counts_as_not_accepted() -> None:
    planner, session = planned(), new_session(1)
    chain = np.arange(2, dtype=np.int32), np.array([ROOT, 0], np.int32), bytes(2)
    for cut_short in (False, True):
        before = np.diff(planner.evidence.trees(1).accepted.one_more())
        session.sent = {1: Sent(1, 4, NO_IDS, *chain, grown=Grown(1, 2, cut_short))}
        credit = verify_pb2.Credit(proposal_id=1, root_node=ROOT, nodes_verified=2, accepted_nodes=[0, 1])
        planner.evidence.observe([Extension(session, 4, verify_pb2.Verdict(credits=[credit]))])
        after = np.diff(planner.evidence.trees(1).accepted.one_more())
        assert after[1] > before[1]
        assert bool(after[2] / after[1] < 0.99 * before[2] / before[1]) is cut_short


@pytest.mark.parametrize(("nodes", "root"), [(0, ROOT), (0, 0), (2, -2), (2, 2)])
def test_a_credit_for_what_there_was_not_is_nothing(nodes: int, root: int) -> None:
    planner, session = planned(), new_session(1)
    ids = np.arange(nodes, dtype=np.int32)
    session.sent = {1: Sent(1, 4, NO_IDS, ids, ids - 1, bytes(nodes), grown=None)}
    untouched = np.array(planner.evidence.trees(1).accepted.one_more())
    credit = verify_pb2.Credit(proposal_id=1, root_node=root, nodes_verified=2, accepted_nodes=[0, 1])
    planner.evidence.observe([Extension(session, 4, verify_pb2.Verdict(credits=[credit]))])
    assert (np.array(planner.evidence.trees(1).accepted.one_more()) == untouched).all()


def test_a_tree_cut_short_says_nothing_of_what_was_below() -> None:
    acceptance, untouched = DepthReached(), DepthReached().one_more()
    for _ in range(200):
        acceptance.observe(0, 2, 2)
    tokens = acceptance.one_more()
    assert tokens[2] > 2.9
    assert tokens[3] - tokens[2] == pytest.approx(0.7, abs=0.05)
    assert untouched[1] == pytest.approx(1.7)


# ---- SGLang's rule


def adaptive(steps: int = 3) -> AdaptivePlanner:
    return AdaptivePlanner(DEFAULT, steps, lambda shape: None)


def test_steps_follow_accepted_drafts_up_and_down() -> None:
    planner = adaptive()
    machine = Machine(planner, lambda topk: 0.97)
    machine.run(60)
    assert planner.current.shape == TreeShape(7, 1, 8)
    machine.chance = lambda topk: 0.05
    machine.run(100)
    assert planner.current.shape == TreeShape(1, 1, 2)
    assert planner.decisions["reshaped"] >= 2


def chain_verdict(session: Session, *accepted: int) -> Extension:
    """A verdict on as many steps as there are numbers, each with a chain of 3 of which so many were accepted."""
    credits = [
        verify_pb2.Credit(proposal_id=1, root_node=ROOT, nodes_verified=3, accepted_nodes=range(count))
        for count in accepted
    ]
    tokens = [1] * (sum(accepted) + len(accepted))
    verdict = verify_pb2.Verdict(
        base_len=4, tokens=tokens, credits=credits, verify_us=1000 * len(accepted), batch_tokens=4 * len(accepted),
        steps=len(accepted),
    )  # fmt: skip
    return Extension(session, 4, verdict)


@pytest.mark.parametrize("together", [1, 4])
def test_verdicts_of_several_steps_count_as_those_of_each(together: int) -> None:
    planner, session = adaptive(), new_session(1)
    for _ in range(40):
        planner.plan([chain_verdict(session, *([1] * together))])
    assert planner.current.shape == TreeShape(3, 1, 4)


def test_a_session_with_several_verdicts_is_one() -> None:
    late, one = adaptive(), new_session(1)
    for _ in range(40):
        late.plan([chain_verdict(one, 3) for _ in range(64)])
    assert late.current.shape == TreeShape(7, 1, 8)
    planner = planned()
    planner.plan([chain_verdict(one, 3) for _ in range(4)])
    assert planner.evidence.sessions == 1
    planner.plan([chain_verdict(new_session(uid), 3) for uid in range(4)])
    assert planner.evidence.sessions == 4


def test_requests_that_fix_their_trees_do_not_move_the_steps() -> None:
    planner = adaptive()
    fixed = new_session(1, Wishes(num_steps=3, topk=1))
    for _ in range(40):
        planner.plan([chain_verdict(fixed, 0), chain_verdict(new_session(2), 3)])
    assert planner.current.shape == TreeShape(7, 1, 8)


def test_nothing_changes_before_the_warm_up_is_over() -> None:
    planner = adaptive()
    machine = Machine(planner, lambda topk: 1.0)
    machine.run(9)
    assert planner.current.shape == TreeShape(3, 1, 4)
    machine.run(1)
    assert planner.current.shape == TreeShape(7, 1, 8)


def test_large_batches_have_candidates_of_their_own_and_none_means_no_speculation() -> None:
    planner = adaptive(1)
    machine = Machine(planner, lambda topk: 0.97, batch=32)
    machine.run(40)
    assert planner.current.shape == TreeShape(1, 1, 2)
    machine.sessions = [new_session(uid) for uid in range(64)]
    machine.run(2)
    assert not planner.current.speculate


# ---- Flags


class Shaped:
    """The part of a drafter that a planner needs."""

    algorithm = common_pb2.ALGORITHM_EAGLE3

    max_steps = None

    def __init__(self) -> None:
        self.shape = CHAIN

    def reshape(self, shape: TreeShape, least_reach: float = 0.0) -> None:
        self.shape = shape


def planner_of(monkeypatch: pytest.MonkeyPatch, overlap: str = "", **flags: Any) -> Planner:
    monkeypatch.setenv("OUTRIDER_ENABLE_SPEC_V2", overlap)
    monkeypatch.delenv("SGLANG_ENABLE_SPEC_V2", raising=False)
    return make_planner(DraftArgs(speculative_algorithm="EAGLE3", **flags), cast("Drafter", Shaped()))


def test_what_the_user_fixed_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    free = planner_of(monkeypatch)
    assert isinstance(free, CostPlanner)
    assert free.current.shape == CHAIN
    tree: dict[str, Any] = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    for overlap, outcomes in (("1", MAX_OUTCOMES), ("0", 0)):
        planner = planner_of(monkeypatch, overlap, **tree)
        assert isinstance(planner, FixedPlanner)
        assert planner.current.outcomes == outcomes
    overlap_only = planner_of(monkeypatch, "auto", **tree)
    assert overlap_only.current.shape is None


def test_the_adaptive_flag_brings_sglangs_rule_and_its_default_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(planner_of(monkeypatch, speculative_adaptive=True), AdaptivePlanner)
    args = DraftArgs(speculative_algorithm="EAGLE3", speculative_adaptive=True)
    assert tree_shape(args, is_head=True, target_architecture="LlamaForCausalLM") == TreeShape(3, 1, 4)
    none = planner_of(monkeypatch, speculative_adaptive=True, speculative_num_steps=0)  # a candidate of SGLang's
    assert not none.current.speculate
    with pytest.raises(StartupError, match="--speculative-num-steps is 5"):
        tree_shape(
            DraftArgs(speculative_algorithm="EAGLE3", speculative_adaptive=True, speculative_num_steps=5), is_head=True
        )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"speculative_adaptive_config": "x.json"}, "needs --speculative-adaptive"),
        ({"speculative_adaptive": True, "speculative_algorithm": "STANDALONE"}, "is STANDALONE"),
        ({"speculative_adaptive": True, "speculative_algorithm": "NGRAM"}, "is NGRAM"),
        ({"speculative_adaptive": True, "speculative_eagle_topk": 4}, "--speculative-eagle-topk is 4"),
        ({"speculative_adaptive": True, "enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
    ],
)
def test_flags_that_do_not_go_with_adaptive_steps_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        DraftArgs(**{"speculative_algorithm": "EAGLE3", **flags})


@pytest.mark.parametrize(("steps", "on", "first"), [(3, False, 0), (3, True, 2), (0, True, 0)])
def test_its_first_plan_overlaps_as_it_is_told(steps: int, on: bool, first: int) -> None:
    assert AdaptivePlanner(DEFAULT, steps, lambda shape: None, FixedOverlap(on=on)).current.outcomes == first
