"""How sessions end: at a stop, a length, a failure or with the server, and resumed ones that have ended before."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence

import grpc
import pytest
import torch

from engine.batch import Segment
from outrider.errors import ENGINE_FAILED, Internal, OutriderError, Unavailable
from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from tests.drafter_view import Draft
from tests.fake_drafters import Truth, perfect, random_trees
from tests.verify_service.rig import MAX_NODES, build_rig, expected, prompt_of, request
from tests.verify_service.scenes import MODEL, SAMPLED, VOCAB, check_outputs, learn
from verify_service import intake
from verify_service.commands import Arrived, Ask, Stop, ThreadFuture
from verify_service.drafter import Drafter
from verify_service.drafters import Drafters
from verify_service.step_failures import MAX_FAILED_STEPS


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
    assert rig.loop.counters.output_tokens == sum(map(len, rig.tokens.values()))
    for session in sick:
        error = rig.errors[session.session_id]
        assert isinstance(error, OutriderError)
        assert error.status is grpc.StatusCode.INTERNAL
    # Those that had a tree then are tried without drafts before they end.
    ends = verify_pb2.CLOSE_REASON_ERROR, verify_pb2.CLOSE_REASON_REASSIGNED
    assert sum(reason in ends for reason in sim.view.closed.values()) == 3


def test_what_a_poisoned_session_computed_is_not_shared() -> None:
    rig = build_rig(MODEL, nan_tokens=frozenset({5}))
    (sick,) = rig.submit(request([1, 2, 5], SamplingParams(temperature=0.0, max_tokens=4)))
    rig.run()
    assert sick.session_id in rig.errors
    assert rig.loop.scheduler.pages.pool.num_free == rig.loop.scheduler.pages.pool.num_pages


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


def test_a_step_that_fails_for_one_session_ends_that_one() -> None:
    rig = build_rig(MODEL, chunk=4)
    sim = rig.join(perfect(Truth([[1, 2, *MODEL.greedy([1, 2], 20)]])))
    good, sick, late = (rig.submit(request(prompt))[0] for prompt in ([1, 2], [3, 4], [5] * 11))
    forward = rig.runner.forward

    def failing(segments: Sequence[Segment]) -> torch.Tensor:
        if sick.output_len >= 5 and any(segment.table_row == sick.table_row for segment in segments):
            raise RuntimeError("cannot be computed")
        return forward(segments)

    rig.runner.forward = failing
    rig.run()
    error = rig.errors.pop(sick.session_id)
    assert isinstance(error, Internal)
    check_outputs(rig, good, late)
    assert rig.tokens[sick.session_id] == expected(rig, sick)[:5]
    assert len(rig.finishes) == 2
    assert sim.view.num_accepted > 0
    assert verify_pb2.CLOSE_REASON_ERROR in sim.view.closed.values()
    rig.check_whole()


def test_prompt_rows_come_once_though_their_step_is_run_again() -> None:
    rig = build_rig(MODEL, chunk=4)
    asked = request([7, 6, 5, 4, 3, 2, 1], SamplingParams(temperature=0.0, max_tokens=3))
    asked.logprobs = asked.prompt_logprobs = True
    for fails_in in (1, 2, 3):
        (session,) = rig.submit(asked)
        steps = itertools.count(1)

        def fail(steps: Iterator[int] = steps, fails_in: int = fails_in) -> None:
            if next(steps) == fails_in:
                raise RuntimeError("once")

        rig.runner.on_forward = fail
        rig.run()
        assert rig.output(session) == MODEL.greedy([7, 6, 5, 4, 3, 2, 1], 3)
        shown = [entry.token for entry in rig.responses[session.session_id][0].prompt_logprobs]
        assert shown == [7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_prompt_rows_come_once_though_their_session_is_preempted(steps: int) -> None:
    """While its prompt is computed, and once they were sent."""
    rig = build_rig(MODEL, chunk=4)
    asked = request([7, 6, 5, 4, 3, 2, 1], SamplingParams(temperature=0.0, max_tokens=3))
    asked.prompt_logprobs = True
    (session,) = rig.submit(asked)
    for _ in range(steps):
        rig.step()
    rig.loop.scheduler.preempt(session)
    rig.run()
    assert rig.output(session) == MODEL.greedy([7, 6, 5, 4, 3, 2, 1], 3)
    shown = [[entry.token for entry in each.prompt_logprobs] for each in rig.responses[session.session_id]]
    assert shown == [[7, 6, 5, 4, 3, 2, 1], [], []]


@pytest.mark.parametrize("error", [torch.AcceleratorError("device-side assert"), MemoryError("no more")])
def test_an_error_of_the_engine_ends_every_session_and_is_raised(error: Exception) -> None:
    """A device's error at once; any other when it keeps coming back. Other replicas may go on with the sessions."""
    rig = build_rig(MODEL)
    sessions = rig.submit(request([1, 2]))

    def fail() -> None:
        raise error

    rig.runner.on_forward = fail
    if isinstance(error, MemoryError):
        for _ in range(MAX_FAILED_STEPS - 1):
            rig.step()
            assert isinstance(rig.errors[sessions[-1].session_id], Internal)
            sessions += rig.submit(request([1, 2]))
    with pytest.raises(type(error)):
        rig.loop.run()
    if not isinstance(error, MemoryError):
        ended = rig.errors[sessions[-1].session_id]
        assert isinstance(ended, Unavailable)
        assert ended.code == ENGINE_FAILED
        assert "assert" not in ended.message
    assert rig.is_idle


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


@pytest.mark.asyncio
async def test_stopping_answers_who_asked_too_late() -> None:
    rig = build_rig(MODEL)
    rig.submit(request([1, 2]))
    late: ThreadFuture[None] = ThreadFuture()
    rig.runner.on_forward = lambda: rig.inbox.put(Ask(pytest.fail, late))
    rig.inbox.put(Stop(Unavailable("shutting down")))
    rig.loop.run()
    later: ThreadFuture[None] = ThreadFuture()
    rig.inbox.put(Ask(pytest.fail, later))
    for answer in (late, later):
        with pytest.raises(Unavailable, match="shutting down"):
            await asyncio.wait_for(answer, 5)


@pytest.mark.asyncio
async def test_a_question_that_fails_ends_nothing_but_itself() -> None:
    rig = build_rig(MODEL)
    (session,) = rig.submit(request([1, 2]))
    answer: ThreadFuture[None] = ThreadFuture()

    def fail() -> None:
        raise KeyError("nobody foresaw it")

    rig.inbox.put(Ask(fail, answer))
    rig.run()
    check_outputs(rig, session)
    with pytest.raises(KeyError, match="nobody foresaw it"):
        await asyncio.wait_for(answer, 5)


def test_a_frame_that_fails_ends_its_own_drafters_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = build_rig(MODEL)
    bad, good = (rig.join(perfect(Truth([[1, 2, *MODEL.greedy([1, 2], 20)]])), name=name) for name in ("bad", "good"))
    take = intake._take

    def fail(drafters: Drafters, drafter: Drafter, arrived: Arrived) -> None:
        if drafter is bad.drafter:
            raise IndexError("nobody foresaw it")
        take(drafters, drafter, arrived)

    monkeypatch.setattr(intake, "_take", fail)
    sessions = [
        rig.submit(request([1, 2], speculative=common_pb2.SpeculativeParams(enabled=enabled)))[0]
        for enabled in (True, True, False)
    ]
    rig.run()
    check_outputs(rig, *sessions)
    assert [sim.ended is not None for sim in (bad, good)] == [True, False]
    rig.check_whole()
