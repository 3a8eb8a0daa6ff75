"""The step loop over a toy model: whatever drafters, pages and clients do, each output is the one of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import OutriderError, Unavailable
from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from tests.fake_drafters import (
    Draft,
    Policy,
    Seen,
    Truth,
    declining,
    early,
    perfect,
    random_trees,
    silent,
    wrong,
)  # fmt: skip
from tests.fakes import ToyModel
from tests.verify_service.rig import MAX_NODES, Rig, Sim, build_rig, expected, prompt_of, request
from verify_service.brake import CostTable
from verify_service.commands import Stop
from verify_service.session import Session

VOCAB = 16
MODEL = ToyModel(vocab_size=VOCAB, order=3)
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=30)

POLICIES: dict[str, Callable[[Truth, random.Random], Policy]] = {
    "silent": lambda truth, rng: silent,
    "declining": lambda truth, rng: declining,
    "perfect": lambda truth, rng: perfect(truth),
    "wrong": lambda truth, rng: wrong(truth, VOCAB),
    "random": lambda truth, rng: random_trees(truth, VOCAB, rng),
    "early": lambda truth, rng: early(truth, VOCAB, rng),
}


def learn(truth: Truth, rig: Rig, *sessions: Session) -> None:
    """Tells drafters what will come."""
    truth.texts += [s.tokens[: s.prompt_len].tolist() + expected(rig, s) for s in sessions]


def check_outputs(rig: Rig, *sessions: Session) -> None:
    """Every session has the output of plain decoding, and counts that fit it."""
    for session in sessions:
        output = expected(rig, session)
        assert rig.output(session) == output
        finish = rig.finishes[session.session_id]
        assert finish.completion_tokens == len(output)
        assert finish.prompt_tokens == session.prompt_len
        stats = finish.speculation
        assert stats.accepted_tokens == sum(r.num_accepted for r in rig.responses[session.session_id])
        assert stats.committed_tokens == stats.accepted_tokens + stats.verify_steps - cut_bonuses(rig, session)
        assert sum(stats.accepted_histogram) == stats.verify_steps
        if finish.reason == verify_pb2.FINISH_REASON_STOP:
            assert output[-1] == finish.stop_token_id
            assert output[-1] in session.stop_ids
        else:
            assert finish.reason == verify_pb2.FINISH_REASON_LENGTH
            assert not finish.HasField("stop_token_id")


def cut_bonuses(rig: Rig, session: Session) -> int:
    """1 when the last step ended on an accepted draft, so that no bonus was committed."""
    last = rig.responses[session.session_id][-1]
    return int(len(last.tokens) == last.num_accepted > 0)


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
        """Something happens between two steps; returns the sessions that it ended."""
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
    rig.loop.step() if not rig.inbox._queue.empty() else None
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


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(temperature=0.0, max_tokens=30, frequency_penalty=0.3)])
def test_an_output_resumed_anywhere_goes_on_as_it_would_have(params: SamplingParams) -> None:
    rig = build_rig(MODEL, max_queued=64)
    prompt = prompt_of(6, VOCAB)
    output = MODEL.decode(prompt, params, seed=11, max_len=128)
    sessions = [
        session
        for split in range(len(output) + 1)
        for session in rig.submit(request(prompt, params, resumed=output[:split]))
    ]
    if params.seed is None:
        for session in sessions:
            assert session.params.temperature == 0.0
    rig.run()
    for split, session in enumerate(sessions):
        assert rig.tokens[session.session_id] == output[split:]
        assert rig.finishes[session.session_id].completion_tokens == len(output)
    rig.check_whole()


def test_what_is_resumed_at_its_stop_or_its_length_ends_at_once() -> None:
    rig = build_rig(MODEL)
    stop = SamplingParams(temperature=0.0, stop_token_ids=(7,), max_tokens=9)
    (stopped,) = rig.submit(request([1, 2], stop, resumed=[3, 7]))
    (full,) = rig.submit(request([1, 2], stop, resumed=[3] * 9))
    (early_stop,) = rig.submit(request([1, 2], SamplingParams(stop_token_ids=(7,), min_tokens=2, seed=1), resumed=[7]))
    rig.step()
    assert rig.runner.steps == 1  # the third session's
    assert rig.finishes[stopped.session_id].reason == verify_pb2.FINISH_REASON_STOP
    assert rig.finishes[stopped.session_id].stop_token_id == 7
    assert rig.finishes[full.session_id].reason == verify_pb2.FINISH_REASON_LENGTH
    assert rig.finishes[full.session_id].completion_tokens == 9
    assert early_stop.session_id not in rig.finishes


@pytest.mark.parametrize("min_tokens", [0, 3, 17])
def test_a_stop_inside_an_accepted_run_cuts_it_there(min_tokens: int) -> None:
    plain = MODEL.greedy([3, 1], 30)
    params = SamplingParams(temperature=0.0, stop_token_ids=(plain[6],), min_tokens=min_tokens, max_tokens=30)
    rig, truth = build_rig(MODEL), Truth()
    sim = rig.join(perfect(truth, 8))
    (session,) = rig.submit(request([3, 1], params))
    # A drafter that knows nothing of stops drafts past it.
    truth.texts.append([3, 1, *expected(rig, session), *plain])
    rig.run()
    check_outputs(rig, session)
    rig.check_whole()
    assert rig.output(session)[-1] == plain[6]
    assert sim.view.num_accepted > 0
    last = rig.responses[session.session_id][-1]
    if min_tokens == 0:
        assert len(last.tokens) == last.num_accepted


class FixedCosts(CostTable):
    """A machine whose step times never vary."""

    def observe(self, rows: int, ms: float) -> None:
        pass


@pytest.mark.parametrize("ms_of_32_rows", [41.0, 10.5])
def test_a_drafter_that_was_wrong_for_long_is_used_again_once_it_is_right(ms_of_32_rows: float) -> None:
    rig = build_rig(MODEL, brake=True, costs=FixedCosts({1: 10.0, 32: ms_of_32_rows}), context=1800, pages=1800)
    truth = Truth()
    bad, good = wrong(truth, VOCAB), perfect(truth)
    sim = rig.join(lambda seen: bad(seen) if len(seen.tokens) < 300 else good(seen))
    (session,) = rig.submit(request([1, 2], SamplingParams(temperature=1.0, seed=1)))
    learn(truth, rig, session)
    while session.committed_len < 300:
        rig.loop.step()
    assert sim.drafter.counts["drafted_tokens"] < 200
    accepted_before, steps_before = sim.drafter.counts["accepted_tokens"], rig.loop.counters.steps
    rig.run()
    check_outputs(rig, session)
    assert sim.drafter.counts["accepted_tokens"] - accepted_before > 1000
    assert rig.loop.counters.steps - steps_before < 600


def test_the_context_ends_an_output_and_no_tree_reaches_past_it() -> None:
    rig, truth = build_rig(MODEL, context=32, pages=32, cache=False), Truth()
    rig.join(random_trees(truth, VOCAB, random.Random(3), nodes=20))
    (session,) = rig.submit(request(prompt_of(20, VOCAB), SamplingParams(temperature=0.0)))
    learn(truth, rig, session)
    rig.run()
    check_outputs(rig, session)
    assert len(rig.output(session)) == 12
    rig.check_whole()


def test_a_row_without_a_distribution_fails_its_own_session_only() -> None:
    poison = 5
    rig, truth = build_rig(MODEL, nan_tokens=frozenset({poison}), context=24, pages=200), Truth()
    sim = rig.join(lambda seen: [Draft([t for t in range(MAX_NODES)], [-1] * MAX_NODES)])
    clean = SamplingParams(temperature=0.0, logit_bias={poison: -100.0}, max_tokens=20)
    healthy = [session for seed in range(3) for session in rig.submit(request([seed], clean))]
    sick = [
        *rig.submit(request([poison], clean)),
        *rig.submit(request([1, 2], SamplingParams(temperature=0.0, logit_bias={poison: 100.0}))),
        # Its poisoned row comes near the end of its context, with a tree wider than what is left of it.
        *rig.submit(request([1] * 20, SamplingParams(temperature=0.0, logit_bias={poison: 100.0}, max_tokens=3))),
    ]
    learn(truth, rig, *healthy)
    rig.run()
    check_outputs(rig, *healthy)
    rig.check_whole()
    for session in sick:
        error = rig.errors[session.session_id]
        assert isinstance(error, OutriderError)
        assert error.status is grpc.StatusCode.INTERNAL
    assert list(sim.view.closed.values()).count(verify_pb2.CLOSE_REASON_ERROR) == 3


def test_what_a_poisoned_session_computed_is_not_shared() -> None:
    rig = build_rig(MODEL, nan_tokens=frozenset({5}))
    (sick,) = rig.submit(request([1, 2, 5], SamplingParams(temperature=0.0, max_tokens=4)))
    rig.run()
    assert sick.session_id in rig.errors
    assert rig.loop.scheduler.pool.num_free == rig.loop.scheduler.pool.num_pages


def test_a_full_queue_refuses_a_request_whole_and_the_others_go_on() -> None:
    rig = build_rig(MODEL, max_running=2, max_queued=2)
    accepted = rig.submit(request([1], choices=4))
    refused = rig.submit(request([2], choices=2))
    rig.run()
    check_outputs(rig, *accepted)
    for session in refused:
        error = rig.errors[session.session_id]
        assert isinstance(error, OutriderError)
        assert error.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    rig.check_whole()


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


def test_num_draft_tokens_bounds_what_is_verified() -> None:
    rig, truth = build_rig(MODEL), Truth()
    rig.join(perfect(truth, 8))
    (session,) = rig.submit(request([1, 2], speculative=common_pb2.SpeculativeParams(num_draft_tokens=3)))
    learn(truth, rig, session)
    rig.run()
    check_outputs(rig, session)
    assert rig.runner.widest == 3


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


def test_an_error_of_the_loop_ends_every_session_with_it_and_is_raised() -> None:
    rig = build_rig(MODEL)
    (session,) = rig.submit(request([1, 2]))

    def fail() -> None:
        raise MemoryError("no more")

    rig.runner.on_forward = fail
    with pytest.raises(MemoryError):
        rig.loop.run()
    error = rig.errors[session.session_id]
    assert isinstance(error, OutriderError)
    assert error.status is grpc.StatusCode.INTERNAL
    assert "no more" not in error.message


def test_stopping_ends_running_waiting_and_unread_sessions() -> None:
    rig = build_rig(MODEL, max_running=1)
    sessions = rig.submit(request([1, 2], choices=2))
    rig.step()
    rig.inbox.put(Stop(Unavailable("shutting down")))
    sessions += rig.submit(request([3]))
    rig.loop.run()
    for session in sessions:
        error = rig.errors[session.session_id]
        assert isinstance(error, Unavailable)
    rig.check_whole()


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
