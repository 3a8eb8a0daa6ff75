"""Rows of features that lie on a device come to the host together, however many drafters and sessions want them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.row_ring import RowRing
from outrider.v1 import verify_pb2
from verify_service import features
from verify_service.features import FeatureSender
from verify_service.outbox import RoundOutbox

NUM_SLOTS, WIDTH = 64, 6


class FarPlane:
    """A plane of features that is not in the host's memory; counts how often it is read."""

    device, dtype, shape = torch.device("cuda"), torch.float32, (NUM_SLOTS, WIDTH)

    def __init__(self) -> None:
        self.rows = torch.arange(NUM_SLOTS * WIDTH, dtype=torch.float32).view(NUM_SLOTS, WIDTH)
        self.num_reads = 0

    def element_size(self) -> int:
        return self.rows.element_size()

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        self.num_reads += 1
        return self.rows.index_select(dim, index)


@dataclass(eq=False)
class FakeDrafter:
    """What FeatureSender needs of a drafter."""

    ring: RowRing | None
    outbox: RoundOutbox
    needs_features: bool = True
    wake: Callable[[], object] = lambda: None


def drafter(ring: RowRing | None, room: float = math.inf) -> Any:
    outbox = RoundOutbox()
    outbox.most_with_rows = room
    return FakeDrafter(ring, outbox)


def assigned(whose: Any, table_row: int) -> Any:
    session = SimpleNamespace(table_row=table_row)
    return SimpleNamespace(drafter=whose, session=session, features_sent=0, verdict=None, rows=None)


def fill(runner: Any, told: list[tuple[Any, verify_pb2.Verdict]]) -> None:
    """Has rows filled in for the verdicts of one step."""
    sender = FeatureSender(runner)
    for assignment, verdict in told:
        assignment.verdict = verdict
    sender.prepare([assignment for assignment, _ in told])
    sender.fill_verdicts([assignment for assignment, _ in told])


@pytest.mark.parametrize("with_ring", [False, True])
def test_verdicts_of_a_step_wait_once_for_the_device(with_ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "to_device", lambda array, device: torch.from_numpy(array))
    plane = FarPlane()
    slots = np.random.default_rng(1).permutation(NUM_SLOTS).reshape(4, 16)
    runner: Any = SimpleNamespace(features=plane, slot_table=slots)
    ring = RowRing(WIDTH * 4, 32) if with_ring else None
    near, far = drafter(ring), drafter(None)
    if ring is not None:
        ring.prove(bytes(ring._nonce))
    told = [
        (assigned(who, row), verify_pb2.Verdict(base_len=base_len, tokens=range(count)))
        for row, (who, base_len, count) in enumerate([(near, 3, 2), (far, 5, 4), (near, 1, 1), (far, 9, 3)])
    ]
    fill(runner, told)
    assert plane.num_reads == 1
    for assignment, verdict in told:
        first, count = verdict.base_len - 1, len(verdict.tokens)
        assert (verdict.features.first_pos, verdict.features.count) == (first, count)
        assert assignment.features_sent == first + count
        wanted = plane.rows[torch.from_numpy(slots[assignment.session.table_row, first : first + count])]
        if verdict.features.HasField("slot_seq"):
            assert ring is not None
            start = verdict.features.slot_seq
            found = ring._slots[start : start + count].tobytes()
        else:
            found = verdict.features.rows.data
        assert found == wanted.numpy().tobytes()
    assert sum(verdict.features.HasField("slot_seq") for _, verdict in told) == 2 * with_ring


def test_rows_over_what_may_wait_for_a_drafter_are_announced() -> None:
    """A step of many sessions with wide rows may commit more than that: nobody has read too slowly then."""
    slots = np.random.default_rng(1).permutation(NUM_SLOTS).reshape(4, 16)
    runner: Any = SimpleNamespace(features=torch.zeros(NUM_SLOTS, WIDTH), slot_table=slots)
    served = drafter(None, room=5 * WIDTH * 4)
    told = [(assigned(served, row), verify_pb2.Verdict(session=row, base_len=3, tokens=range(2))) for row in range(4)]
    fill(runner, told)
    assert [verdict.features.WhichOneof("location") for _, verdict in told] == ["rows", "rows", *["announced"] * 2]
    assert all(verdict.features.count == 2 for _, verdict in told)
    for _, verdict in told:
        served.outbox.verdict(verdict)
    session = SimpleNamespace(session_id=9, table_row=3)
    prompt: Any = SimpleNamespace(drafter=served, session=session, features_sent=0, generation=1)
    FeatureSender(runner).send(prompt, end_pos=4)
    frame = verify_pb2.Round()
    assert served.outbox.take(frame)
    assert frame.features[0].rows.announced


def test_a_rings_rows_are_numbered_in_the_order_in_which_they_are_told() -> None:
    """Verdicts of one step are told at different times, with rows of prompts between."""
    slots = np.arange(NUM_SLOTS).reshape(4, 16)
    runner: Any = SimpleNamespace(features=torch.zeros(NUM_SLOTS, WIDTH), slot_table=slots)
    ring = RowRing(WIDTH * 4, 64)
    ring.prove(bytes(ring._nonce))
    served, sender = drafter(ring), FeatureSender(runner)
    first, late = (assigned(served, row) for row in range(2))
    for assignment in (first, late):
        assignment.verdict = verify_pb2.Verdict(base_len=3, tokens=range(2))
    sender.prepare([first, late])
    sender.fill_verdicts([late])
    prompt: Any = SimpleNamespace(
        drafter=served, session=SimpleNamespace(session_id=9, table_row=2), features_sent=0, generation=1
    )
    sender.send(prompt, end_pos=4)
    sender.fill_verdicts([first, late])
    frame = verify_pb2.Round()
    assert served.outbox.take(frame)
    told = [late.verdict.features, frame.features[0].rows, first.verdict.features]
    assert [(rows.slot_seq, rows.count) for rows in told] == [(0, 2), (2, 4), (6, 2)]
