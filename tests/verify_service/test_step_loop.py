"""The step loop over a toy model: whatever drafters, pages and clients do, each output is the one of plain decoding."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from engine.batch import Segment
from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from outrider.v1 import common_pb2, verify_pb2
from tests.drafter_view import Draft, Seen
from tests.fake_drafters import Truth, early, perfect, random_trees, wrong
from tests.verify_service.rig import FixedCosts, Rig, Sim, build_rig, prompt_of, request
from tests.verify_service.scenes import MODEL, POLICIES, SAMPLED, VOCAB, check_outputs, learn
from verify_service.commands import Command
from verify_service.session import Session
from verify_service.turns import Compute, Pause


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("page_size", [1, 4])
def test_output_is_that_of_plain_decoding_whatever_is_drafted(name: str, temperature: float, page_size: int) -> None:
    rig = build_rig(MODEL, page_size=page_size, pages=512 // page_size)
    truth = Truth()
    sim = rig.join(POLICIES[name](truth, random.Random(5)))
    sessions = [
        *rig.submit(request(prompt_of(5, VOCAB, 1), SamplingParams(temperature=temperature, seed=3, max_tokens=40))),
        *rig.submit(request(prompt_of(37, VOCAB, 2), SamplingParams(temperature=temperature, top_k=5, max_tokens=23))),
        *rig.submit(request([1], SamplingParams(temperature=temperature, top_p=0.8, seed=2**63, max_tokens=9))),
        *rig.submit(request(prompt_of(5, VOCAB, 1), SamplingParams(temperature=temperature, seed=4), choices=3)),
    ]
    learn(truth, rig, *sessions)
    rig.run()
    check_outputs(rig, *sessions)
    rig.check_whole()
    assert set(sim.view.closed.values()) == {verify_pb2.CLOSE_REASON_FINISHED}
    assert not sim.view.sessions
    if name in ("perfect", "random", "early"):
        assert sim.view.num_accepted > 40
    if name in ("random", "early"):
        assert sim.view.num_rerooted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_not_finite_costs_no_words(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a draft spoils its whole tree where attention multiplies what it masks by 0."""
    rig, truth = build_rig(MODEL), Truth()
    rig.join(POLICIES["random"](truth, random.Random(5)))
    forward, spoilt = rig.runner.forward, []

    def spoiling(segments: Sequence[Segment]) -> torch.Tensor:
        logits, end = forward(segments), 0
        for segment in segments:
            end += segment.num_logits
            if segment.mask is not None and 7 in segment.tokens[1:].tolist():
                logits[end - segment.num_logits : end] = torch.nan
                spoilt.append(segment)
        return logits

    monkeypatch.setattr(rig.runner, "forward", spoiling)
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=40) for seed in range(6)]
    sessions = [session for each in params for session in rig.submit(request(prompt_of(5, VOCAB, 1), each))]
    learn(truth, rig, *sessions)
    rig.run()
    check_outputs(rig, *sessions)
    rig.check_whole()
    assert 0 < len(spoilt) <= len(sessions)


def test_a_perfect_drafter_saves_steps_and_a_dead_one_costs_none() -> None:
    steps: dict[str, int] = {}
    for name in ("perfect", "silent"):
        rig, truth = build_rig(MODEL), Truth()
        rig.join(POLICIES[name](truth, random.Random(0)))
        sessions = rig.submit(request(prompt_of(4, VOCAB), SamplingParams(temperature=0.0, max_tokens=50)))
        learn(truth, rig, *sessions)
        rig.run()
        check_outputs(rig, *sessions)
        steps[name] = rig.loop.counters.steps
    assert steps == {"perfect": 11, "silent": 50}


def test_sampled_output_follows_the_seed_and_the_choice() -> None:
    rig = build_rig(MODEL)
    first, second = rig.submit(request([1, 2], SAMPLED, choices=2))
    (third,) = rig.submit(request([1, 2], SamplingParams(temperature=1.0, seed=12, max_tokens=30)))
    rig.run()
    check_outputs(rig, first, second, third)
    assert len({tuple(rig.output(session)) for session in (first, second, third)}) == 3


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 4]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 40),
    min_tokens=st.sampled_from([0, 0, 5]),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 1.0]), max_size=2),
)
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


@dataclass
class Scene:
    """A rig with what goes on around it, all from one generator of random numbers."""

    rig: Rig
    rng: random.Random
    truth: Truth
    sims: list[Sim]

    def join(self) -> None:
        name = self.rng.choice(list(POLICIES))
        awake = self.rng.choice([0.2, 0.7, 1.0])
        self.sims.append(
            self.rig.join(
                POLICIES[name](self.truth, self.rng),
                name=f"{name}-{len(self.sims)}",
                needs_features=self.rig.runner.feature_width > 0 and self.rng.random() < 0.7,
                max_sessions=self.rng.choice([1, 3, 64]),
                reads=lambda: self.rng.random() < awake,
            )
        )

    def disturb(self, sessions: list[Session]) -> set[Session]:
        """Lets something happen between two steps; returns the sessions that it ended."""
        what = self.rng.random()
        present = [sim for sim in self.sims if sim in self.rig.sims]
        if what < 0.05:
            self.join()
        elif what < 0.10 and present:
            self.rig.leave(self.rng.choice(present))
        elif what < 0.15 and present:
            sim = self.rng.choice(present)
            if sim.view.sessions:
                self.rig.release(sim, self.rng.choice(list(sim.view.sessions.values())))
        elif what < 0.18:
            alive = [session for session in sessions if session.finish is None]
            if alive:
                victim = self.rng.choice(alive)
                self.rig.cancel(victim)
                return {victim}
        return set()


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.tuples(PROMPTS, PARAMS), min_size=1, max_size=6),
    pages=st.integers(64, 160),
    page_size=st.sampled_from([1, 1, 3]),
    cache=st.booleans(),
    lpm=st.booleans(),
    chunk=st.integers(1, 12),
    feature_width=st.sampled_from([0, 2, 5000]),
    brake=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_no_drafter_no_want_of_pages_and_no_cancelled_neighbour_changes_a_token(
    prompts: list[tuple[list[int], SamplingParams]],
    pages: int,
    page_size: int,
    cache: bool,
    lpm: bool,
    chunk: int,
    feature_width: int,
    brake: bool,
    seed: int,
) -> None:
    rig = build_rig(
        MODEL,
        pages=pages // page_size,
        page_size=page_size,
        context=60,
        cache=cache,
        longest_prefix_first=lpm,
        chunk=chunk,
        feature_width=feature_width,
        brake=brake,
        wait_ms=0.2,
    )
    scene = Scene(rig, random.Random(seed), Truth(), [])
    scene.join()
    sessions: list[Session] = []
    cancelled: set[Session] = set()
    waiting = list(prompts)
    while waiting or not rig.is_idle:
        if waiting and (rig.is_idle or scene.rng.random() < 0.3):
            prompt, params = waiting.pop()
            new = rig.submit(request(prompt, params, choices=scene.rng.choice([1, 1, 2])))
            learn(scene.truth, rig, *new)
            sessions += new
        cancelled |= scene.disturb(sessions)
        rig.step()
    rig.take_step() if rig.inbox.num_waiting else None
    check_outputs(rig, *(session for session in sessions if session.session_id in rig.finishes))
    for session in sessions:
        assert session.session_id in rig.finishes or session in cancelled
    assert not rig.errors
    rig.check_whole()
    for sim in rig.sims:
        rig.read(sim)
        assert not sim.view.sessions


def test_a_tiny_pool_preempts_again_and_again_and_no_output_changes() -> None:
    rig, truth = build_rig(MODEL, pages=64, context=60, chunk=8, max_running=6), Truth()
    rig.join(random_trees(truth, VOCAB, random.Random(1)))
    sessions = [
        session
        for seed in range(10)
        for session in rig.submit(
            request(prompt_of(10 + seed, VOCAB, seed), SamplingParams(temperature=1.0, seed=seed, max_tokens=30))
        )
    ]
    learn(truth, rig, *sessions)
    rig.run()
    check_outputs(rig, *sessions)
    rig.check_whole()
    assert rig.loop.scheduler.num_preemptions > 5
    assert rig.runner.widest > 1


def test_steps_that_cannot_be_accounted_for_are_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, truth = build_rig(MODEL), Truth()
    rig.join(random_trees(truth, VOCAB, random.Random(1)))
    (session,) = rig.submit(request(prompt_of(10, VOCAB, 1), SamplingParams(temperature=0.0, max_tokens=30)))
    learn(truth, rig, session)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rig.loop._weigher, "weigh", fail)
    with capture_logs() as logs:
        rig.run()
    check_outputs(rig, session)
    rig.check_whole()
    assert [log["event"] for log in logs if log["log_level"] == "error"] == [
        "a step cannot be accounted for, which is said once"
    ]


@pytest.mark.parametrize(("ms_of_32_rows", "most_drafted"), [(41.0, 120), (10.5, 900)])  # of 1,200
def test_a_drafter_that_was_wrong_for_long_is_used_again_once_it_is_right(
    ms_of_32_rows: float, most_drafted: int
) -> None:
    rig = build_rig(MODEL, brake=True, costs=FixedCosts({1: 10.0, 32: ms_of_32_rows}), context=1800, pages=1800)
    truth = Truth()
    bad, good = wrong(truth, VOCAB), perfect(truth)
    sim = rig.join(lambda seen: bad(seen) if len(seen.tokens) < 300 else good(seen))
    (session,) = rig.submit(request([1, 2], SamplingParams(temperature=1.0, seed=1)))
    learn(truth, rig, session)
    while session.committed_len < 300:
        rig.take_step()
    assert sim.drafter.counts["drafted_tokens"] < most_drafted
    accepted_before, steps_before = sim.drafter.counts["accepted_tokens"], rig.loop.counters.steps
    rig.run()
    check_outputs(rig, session)
    assert sim.drafter.counts["accepted_tokens"] - accepted_before > 500
    assert rig.loop.counters.steps - steps_before < 1000


def test_a_request_without_speculation_or_for_another_algorithm_is_opened_to_nobody() -> None:
    rig, truth = build_rig(MODEL), Truth()
    sim = rig.join(perfect(truth))
    off = common_pb2.SpeculativeParams(enabled=False)
    eagle = common_pb2.SpeculativeParams(algorithm=common_pb2.ALGORITHM_EAGLE)
    sessions = [
        *rig.submit(request([1], speculative=off)),
        *rig.submit(request([2], speculative=eagle)),
    ]
    learn(truth, rig, *sessions)
    rig.run()
    check_outputs(rig, *sessions)
    assert not sim.view.generations


@pytest.mark.parametrize(
    ("drafter", "wanted", "greedy"),
    [
        (common_pb2.ALGORITHM_NGRAM, common_pb2.SpeculativeParams(), True),
        (common_pb2.ALGORITHM_NGRAM, common_pb2.SpeculativeParams(algorithm=common_pb2.ALGORITHM_NGRAM), True),
        (common_pb2.ALGORITHM_NGRAM, common_pb2.SpeculativeParams(algorithm=common_pb2.ALGORITHM_EAGLE), False),
        (common_pb2.ALGORITHM_NGRAM, common_pb2.SpeculativeParams(enabled=False), False),
        (common_pb2.ALGORITHM_EAGLE, common_pb2.SpeculativeParams(), False),
        (None, common_pb2.SpeculativeParams(), False),
    ],
)  # fmt: skip
def test_who_n_grams_may_draft_for_can_be_made_greedy(
    drafter: common_pb2.Algorithm | None, wanted: common_pb2.SpeculativeParams, greedy: bool
) -> None:
    def said(temperature: float, *, greedy_for_ngram: bool) -> list[int]:
        rig = build_rig(MODEL, greedy_for_ngram=greedy_for_ngram)
        if drafter is not None:
            rig.join(POLICIES["random"](Truth(), random.Random(5)), algorithm=drafter)
        params = SamplingParams(temperature=temperature, seed=3, presence_penalty=0.5, max_tokens=40)
        (session,) = rig.submit(request(prompt_of(5, VOCAB, 1), params, speculative=wanted))
        rig.run()
        return rig.output(session)

    sampled, likeliest = said(1.0, greedy_for_ngram=False), said(0.0, greedy_for_ngram=False)
    assert sampled != likeliest
    assert said(1.0, greedy_for_ngram=True) == (likeliest if greedy else sampled)


def test_an_answer_that_began_is_not_made_greedy() -> None:
    rig = build_rig(MODEL, pages=64, context=60, chunk=8, max_running=6, greedy_for_ngram=True)
    prompts = [request(prompt_of(10 + seed, VOCAB, seed), SAMPLED) for seed in range(6)]
    sessions = [session for each in prompts for session in rig.submit(each)]
    rig.step()
    begun = [session for session in sessions if session.started_ns]
    rig.join()
    rig.run()
    assert rig.loop.scheduler.num_preemptions > 1
    check_outputs(rig, *begun)


def test_num_draft_tokens_bounds_what_is_verified() -> None:
    rig, truth = build_rig(MODEL), Truth()
    rig.join(perfect(truth, 8))
    (session,) = rig.submit(request([1, 2], speculative=common_pb2.SpeculativeParams(num_draft_tokens=3)))
    learn(truth, rig, session)
    rig.run()
    check_outputs(rig, session)
    assert rig.runner.widest == 3


@pytest.mark.parametrize("name", ["perfect", "early", "random"])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_num_steps_bounds_how_deep_what_is_verified_is(name: str, num_steps: int) -> None:
    rig, truth = build_rig(MODEL), Truth()
    rig.join(POLICIES[name](truth, random.Random(3)))
    wish = common_pb2.SpeculativeParams(num_steps=num_steps)
    (session,) = rig.submit(request([1, 2], speculative=wish, include_trees=True))
    (free,) = rig.submit(request([1, 2], include_trees=True))
    learn(truth, rig, session, free)
    rig.run()
    check_outputs(rig, session, free)

    def deepest(one: Session) -> int:
        trees = [response.tree for response in rig.responses[one.session_id] if response.HasField("tree")]
        shapes = [TokenTree(np.array(tree.tokens, np.int32), np.array(tree.parents, np.int32)) for tree in trees]
        return max(shape.depth for shape in shapes)

    assert deepest(session) == num_steps < deepest(free)


def test_trees_are_shown_as_they_were_verified() -> None:
    rig, truth = build_rig(MODEL), Truth()
    rig.join(random_trees(truth, VOCAB, random.Random(2)))
    (session,) = rig.submit(request([1, 2], include_trees=True))
    learn(truth, rig, session)
    rig.run()
    shown = [response for response in rig.responses[session.session_id] if response.HasField("tree")]
    assert shown
    for response in shown:
        tree = response.tree
        accepted = [token for token, hit in zip(tree.tokens, tree.accepted, strict=True) if hit]
        assert accepted == response.tokens[: response.num_accepted]
        assert len(tree.tokens) == len(tree.parents) == len(tree.probabilities)
        assert all(0.0 <= p <= 1.0 for p in tree.probabilities)


def test_a_session_goes_to_another_drafter_when_its_own_leaves_and_ends_up_with_none() -> None:
    rig, truth = build_rig(MODEL), Truth()
    first = rig.join(perfect(truth, 2), name="first")
    (session,) = rig.submit(request([1, 2], SamplingParams(temperature=0.0, max_tokens=40)))
    learn(truth, rig, session)
    for _ in range(4):
        rig.step()
    second = rig.join(perfect(truth, 2), name="second")
    rig.leave(first)
    for _ in range(4):
        rig.step()
    assert [seen.key for seen in second.view.sessions.values()] == [(session.session_id, 2)]
    rig.leave(second)
    rig.run()
    check_outputs(rig, session)
    assert first.view.num_accepted > 0
    assert second.view.num_accepted > 0


def test_who_is_told_to_wait_for_is_waited_for_and_a_decline_ends_it() -> None:
    rig = build_rig(MODEL)
    asked: list[verify_pb2.NextKind] = []

    def policy(seen: Seen) -> list[Draft]:
        asked.append(seen.next.kind)
        return [Draft([])]

    sim = rig.join(policy)
    (session,) = rig.submit(request([1, 2]))
    rig.run()
    check_outputs(rig, session)
    assert sim.drafter.missed_in_a_row == 0
    assert asked.count(verify_pb2.NEXT_KIND_WAITING) == 18  # nobody waits for the last token of 20


def rows_of_steps(rig: Rig) -> list[int]:
    """The rows of each step from here on, as they come."""
    rows: list[int] = []
    forward = rig.runner.forward

    def counted(segments: Sequence[Segment]) -> torch.Tensor:
        rows.append(sum(len(segment.tokens) for segment in segments))
        return forward(segments)

    rig.runner.forward = counted
    return rows


def test_a_long_prompt_holds_running_streams_up_by_one_chunk_a_step_at_most() -> None:
    rig = build_rig(chunk=16, context=128, cache=False)
    (running,) = rig.submit(request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)))
    rig.step()
    rows = rows_of_steps(rig)
    (long,) = rig.submit(request(prompt_of(100, rig.runner.model.vocab_size)))
    while not rig.tokens[long.session_id]:
        before = len(rig.tokens[running.session_id])
        rig.step()
        assert len(rig.tokens[running.session_id]) == before + 1
    assert len(rows) == 7  # 100 tokens in chunks of 16
    assert max(rows) <= 16 + 1


def test_a_beginning_that_many_bring_at_once_is_computed_once() -> None:
    rig = build_rig(MODEL, pages=2000, context=128, chunk=32)
    rows = rows_of_steps(rig)
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    beginning = prompt_of(60, VOCAB)
    sessions = [rig.submit(request([*beginning, *range(own, own + 10)], one_token))[0] for own in range(6)]
    rig.run()
    assert sum(rows) == 60 + 6 * 10
    check_outputs(rig, *sessions)
    rig.check_whole()


def test_a_short_prompt_does_not_wait_for_all_long_ones_before_it() -> None:
    rig = build_rig(MODEL, pages=2000, context=600, chunk=32)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    long = [*rig.submit(request(prompt_of(200, VOCAB), greedy)), *rig.submit(request(prompt_of(201, VOCAB), greedy))]
    short = [*rig.submit(request([1, 2, 3], greedy)), *rig.submit(request(prompt_of(16, VOCAB), greedy))]
    steps_to_first: dict[int, int] = {}
    steps = 0
    while len(steps_to_first) < 4:
        rig.step()
        for session in (*long, *short):
            if rig.output(session):
                steps_to_first.setdefault(session.session_id, steps)
        steps += 1
    rig.run()
    first, second, third, fourth = (steps_to_first[session.session_id] for session in (*long, *short))
    assert third <= 1
    assert fourth <= 2
    assert first <= 8  # of 32 rows at least half in two steps, all of them in the others
    assert second <= 14
    check_outputs(rig, *long, *short)
    rig.check_whole()


def test_long_prompts_go_on_however_many_short_ones_come() -> None:
    rig = build_rig(MODEL, pages=2000, context=600, chunk=32, max_running=40, cache=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    (long,) = rig.submit(request(prompt_of(200, VOCAB), greedy))
    for step in range(13):  # 16 rows each
        for n in range(4):
            rig.submit(request([step, n, *prompt_of(6, VOCAB)], greedy))
        rig.step()
    assert len(rig.output(long)) == 1


def test_a_step_is_not_lent_while_a_verdict_waits_to_be_sent() -> None:
    """The event loop would run it first, and the drafter hear of the step before when this one has ended."""
    rig, truth = build_rig(MODEL), Truth()
    sims = [rig.join(early(truth, VOCAB, random.Random(seed)), name=str(seed)) for seed in range(2)]
    sessions = [rig.submit(request([1, token]))[0] for token in range(6)]
    learn(truth, rig, *sessions)
    look, paused = rig.inbox.look, Counter[tuple[bool, bool]]()

    def noting_look(pause: Pause) -> list[Command]:
        if isinstance(pause, Compute):
            waits = any(sim.drafter.outbox._verdicts for sim in sims)
            paused[waits, math.isinf(pause.ms)] += 1
        return look(pause)

    rig.inbox.look = noting_look
    rig.run()
    check_outputs(rig, *sessions)
    assert paused[True, True]
    assert paused[False, False]
    assert not paused[True, False]
