"""A drafter that stalls costs every stream a bounded wait, a bounded number of times."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cost_table import CostTable
from outrider.v1 import verify_pb2
from tests.drafter_view import Draft
from tests.fake_drafters import Truth, perfect
from tests.verify_service.rig import Rig, build_rig, prompt_of, request
from tests.verify_service.scenes import MODEL, VOCAB, check_outputs, learn
from verify_service.assignment import MAX_UNANSWERED
from verify_service.commands import Command, Released
from verify_service.drafter import MAX_MISSED_IN_A_ROW
from verify_service.replies import ReplyTimes
from verify_service.turns import Compute, Pause

WAIT_MS = 0.2
MOST_LEFT_OUT = 8  # steps in a row; as many as fit in a wait


@dataclass
class Ledger:
    """What happened in a step: deadlines that were waited for, and how far off they were; forward passes."""

    waits_ms: list[float] = field(default_factory=list)
    forwards: int = 0

    def watch(self, rig: Rig) -> None:
        """Notes what the rig does from here on."""
        look, forward = rig.inbox.look, rig.runner.on_forward

        def noting_look(pause: Pause) -> list[Command]:
            if not isinstance(pause, Compute) and pause.until_ns:
                self.waits_ms.append((pause.until_ns - time.monotonic_ns()) / 1e6)
            return look(pause)

        def noting_forward() -> None:
            self.forwards += 1
            forward()

        rig.inbox.look = noting_look
        rig.runner.on_forward = noting_forward


@given(seed=st.integers(0, 2**32), brake=st.booleans(), sessions=st.integers(1, 6))
def test_a_streams_gap_is_one_step_and_one_wait(seed: int, brake: bool, sessions: int) -> None:
    """Drafters stall and come back at random moments: a step is at most a wait within the bound and one pass."""
    rng = random.Random(seed)
    rig = build_rig(MODEL, brake=brake, wait_ms=WAIT_MS)
    truth, ledger = Truth(), Ledger()
    awake = {name: True for name in "abc"}
    for name in awake:
        rig.join(perfect(truth), name=name, reads=lambda name=name: awake[name])
    asked = [rig.submit(request(prompt_of(1 + index, VOCAB, seed)))[0] for index in range(sessions)]
    learn(truth, rig, *asked)
    ledger.watch(rig)
    missed: Counter[int] = Counter()
    rig.step()
    while not rig.is_idle:
        awake[rng.choice("abc")] = rng.random() < 0.5
        decoding = {s.session_id: len(rig.responses[s.session_id]) for s in rig.loop.scheduler.running if s.output_len}
        waits, forwards = len(ledger.waits_ms), ledger.forwards
        rig.step()
        assert ledger.forwards == forwards + 1
        deadlines = ledger.waits_ms[waits:]
        assert all(left_ms <= WAIT_MS for left_ms in deadlines)
        got = {session_id: len(rig.responses[session_id]) - before for session_id, before in decoding.items()}
        assert all(count <= 1 for count in got.values())
        assert not got or any(got.values())
        for session_id, count in got.items():  # who is left out of a step (halves.py) has its turn soon
            missed[session_id] = 0 if count else missed[session_id] + 1
            assert missed[session_id] <= MOST_LEFT_OUT
    check_outputs(rig, *asked)
    rig.check_whole()


@pytest.mark.parametrize("sessions", [1, 5])
def test_a_drafter_that_never_answers_is_waited_for_twice(sessions: int) -> None:
    rig = build_rig(MODEL, wait_ms=WAIT_MS, max_running=8)
    answers = True
    truth = Truth()
    sim = rig.join(perfect(truth), reads=lambda: answers)
    asked = [rig.submit(request(prompt_of(3 + index, VOCAB)))[0] for index in range(sessions)]
    learn(truth, rig, *asked)
    rig.step()
    rig.step()
    answers = False
    waits = rig.loop.counters.waits
    rig.run()
    check_outputs(rig, *asked)
    assert rig.loop.counters.waits - waits <= MAX_MISSED_IN_A_ROW
    assert sim.drafter.stalled
    assert all(len(assignment.asked_ns) <= MAX_UNANSWERED for assignment in sim.drafter.assignments.values())


@pytest.mark.parametrize(("reply_ms", "waits"), [(0.5, True), (30.0, False)])
def test_a_drafter_is_waited_for_only_where_its_answer_is_likely_to_come_in_time(reply_ms: float, waits: bool) -> None:
    """Steps take a millisecond, and a draft saves a few of them."""
    rig = build_rig(MODEL, brake=True, costs=CostTable({1: 1.0, 16: 1.0}), wait_ms=1000.0)
    truth = Truth()
    sim = rig.join(perfect(truth))
    asked = rig.submit(request(prompt_of(3, VOCAB)))
    learn(truth, rig, *asked)
    rig.step()
    sim.drafter.replies = ReplyTimes(least_ms=reply_ms)
    (assignment,) = sim.drafter.assignments.values()
    assignment.asked_ns.clear()
    assert (rig.loop._planner.wait_ms([assignment]) > 0.0) == waits
    rig.run()
    check_outputs(rig, *asked)


def test_commands_without_end_do_not_lengthen_a_wait() -> None:
    """A drafter sends and sends, and never what is waited for."""
    rig = build_rig(MODEL, wait_ms=WAIT_MS)
    rig.join(name="silent")
    noisy = rig.join(lambda seen: [Draft([])], name="noisy", max_sessions=1)
    (session,) = rig.submit(request([1, 2]))
    rig.step()
    act = rig.inbox._act

    def chatter() -> None:
        act()
        rig.inbox.put(Released(noisy.drafter, [verify_pb2.Release(session=4711, generation=1)]))

    rig.inbox._act = chatter
    rig.run()
    check_outputs(rig, session)
