"""A ring of feature rows whose drafter did not read for a while, so that rows were left out of joined verdicts."""

from __future__ import annotations

import collections
import random

import pytest

from outrider.row_ring import HEADER_BYTES, RowReader, RowRing
from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from tests.drafter_view import Draft, Seen
from tests.verify_service.rig import build_rig, expected, prompt_of, request, taken
from verify_service.session import Session

WIDTH = 8  # fp32 numbers of a row


def one_draft(seen: Seen) -> list[Draft]:
    """A policy of any one draft; its frame says what was read."""
    return [Draft([seen.tokens[-1]])]


def ring_of(num_slots: int) -> tuple[RowRing, RowReader]:
    """Both sides of a ring."""
    ring = RowRing(4 * WIDTH, num_slots)
    reader = RowReader(
        ring.name, num_slots=num_slots, slot_bytes=4 * WIDTH, header_bytes=HEADER_BYTES, dtype=common_pb2.DTYPE_FLOAT32
    )
    ring.prove(reader.nonce)
    return ring, reader


@pytest.mark.parametrize("num_slots", [4, 8, 64])
@pytest.mark.parametrize("stalled", [1, 3, 20])
def test_rows_go_through_it_again_once_the_drafter_reads(num_slots: int, stalled: int) -> None:
    rig = build_rig(feature_width=WIDTH, context=400, chunk=8, wait_ms=0.0)
    reads = True
    sim = rig.join(one_draft, needs_features=True, reads=lambda: reads)
    ring, reader = ring_of(num_slots)
    sim.drafter.ring, sim.view.ring = ring, reader
    sessions = [
        session
        for seed in range(2)
        for session in rig.submit(
            request(prompt_of(12, 16, seed), SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
        )
    ]
    for _ in range(10):
        rig.step()
    for _ in range(2):
        reads = False
        for _ in range(stalled):
            rig.step()
        reads, before = True, sim.view.num_shared
        for _ in range(10):
            rig.step()
        assert sim.view.num_shared >= before + 10
    rig.run()
    for session in sessions:
        assert rig.output(session) == expected(rig, session)


@pytest.mark.parametrize("seed", range(12))
def test_rows_stay_until_a_drafter_that_reads_late_has_them(seed: int) -> None:
    """The drafter says what it has read; Rounds sent meanwhile are read some steps later. View looks at each row."""
    rng = random.Random(seed)
    rig = build_rig(feature_width=WIDTH, context=400, chunk=8, max_running=6)
    sim = rig.join(one_draft, needs_features=True, reads=lambda: False)
    ring, reader = ring_of(24)
    sim.drafter.ring, sim.view.ring = ring, reader
    coming: collections.deque[verify_pb2.Round] = collections.deque()

    def take() -> None:  # as soon as there is something
        if (frame := taken(sim.drafter.outbox)) is not None:
            coming.append(frame)

    def act() -> None:
        take()
        while coming and (len(coming) > 4 or rng.random() < 0.5):
            told = sim.view.apply(coming.popleft())
            answered = [seen for seen in told if rng.random() < 0.7]  # the others are waited for
            rig.send(sim, *(sim.view.propose(seen, draft) for seen in answered for draft in one_draft(seen)))

    rig.act, sim.drafter.wake = act, take
    sessions, prefix = list[Session](), prompt_of(5, 16)  # whose rows are there when a session is opened
    for number in range(12):
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(5, 60), ignore_eos=True)
        sessions += rig.submit(request([*prefix, number], params))
        rig.step()
        for _ in range(rng.randint(0, 11)):
            if not rig.is_idle:
                rig.step()
    rig.run()
    assert sim.view.num_shared > 100
    for session in sessions:
        assert rig.output(session) == expected(rig, session)
