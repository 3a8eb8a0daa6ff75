"""A ring of feature rows whose drafter did not read for a while, so that rows were left out of joined verdicts."""

from __future__ import annotations

import pytest

from outrider.row_ring import HEADER_BYTES, RowReader, RowRing
from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from tests.drafter_view import Draft, Seen
from tests.verify_service.rig import build_rig, expected, prompt_of, request

WIDTH = 8  # fp32 numbers of a row


def one_draft(seen: Seen) -> list[Draft]:
    """Any; its frame says what was read."""
    return [Draft([seen.tokens[-1]])]


@pytest.mark.parametrize("num_slots", [4, 8, 64])
@pytest.mark.parametrize("stalled", [1, 3, 20])
def test_rows_go_through_it_again_once_the_drafter_reads(num_slots: int, stalled: int) -> None:
    rig = build_rig(feature_width=WIDTH, context=400, chunk=8, wait_ms=0.0)
    reads = True
    sim = rig.join(one_draft, needs_features=True, reads=lambda: reads)
    ring = RowRing(4 * WIDTH, num_slots)
    reader = RowReader(
        ring.name, num_slots=num_slots, slot_bytes=4 * WIDTH, header_bytes=HEADER_BYTES, dtype=common_pb2.DTYPE_FLOAT32
    )
    ring.prove(reader.nonce)
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


def test_rows_of_a_verdict_that_is_told_later_stay_while_those_after_it_are_read() -> None:
    rig = build_rig(feature_width=WIDTH)
    drafter = rig.join(one_draft, needs_features=True).drafter
    for seed in range(2):
        rig.submit(request(prompt_of(12, 16, seed), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)))
    rig.step()
    drafter.ring = ring = RowRing(4 * WIDTH, 4)
    reader = RowReader(
        ring.name, num_slots=4, slot_bytes=4 * WIDTH, header_bytes=HEADER_BYTES, dtype=common_pb2.DTYPE_FLOAT32
    )
    ring.prove(reader.nonce)

    def put(value: int) -> int | None:
        return ring.put(1, lambda rows: rows.fill(value))

    told, waits = drafter.assignments.values()
    late, early = put(1), put(2)
    waits.verdict = verify_pb2.Verdict(features=common_pb2.FeatureRows(count=1, slot_seq=late))
    told.verdict = None
    assert early is not None
    drafter.rows_were_read(early)
    assert [put(9) for _ in range(4)].count(None) == 2
    assert reader.rows(late or 0, 1).tolist() == [[1] * 4 * WIDTH]
    waits.verdict = None
    drafter.rows_were_read(early)
    assert put(9) is not None
