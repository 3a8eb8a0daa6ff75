"""Rows of target hidden states, from the pool's feature plane to the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from engine.feature_spec import FeatureSpec
from outrider.row_ring import RowRing, Rows
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import INLINE_FEATURE_BYTES
from verify_service.runner import Runner

if TYPE_CHECKING:
    from verify_service.assignment import Assignment
    from verify_service.commands import ReadFeatures
    from verify_service.drafters import Drafters

DTYPES = {
    torch.float32: common_pb2.DTYPE_FLOAT32,
    torch.float16: common_pb2.DTYPE_FLOAT16,
    torch.bfloat16: common_pb2.DTYPE_BFLOAT16,
}


KINDS = {
    "none": common_pb2.FEATURE_KIND_NONE,
    "last": common_pb2.FEATURE_KIND_LAST,
    "aux": common_pb2.FEATURE_KIND_AUX,
}


def feature_layout(spec: FeatureSpec, plane: torch.Tensor | None) -> common_pb2.FeatureLayout:
    """What a row holds, as drafters are told."""
    layout = common_pb2.FeatureLayout(kind=KINDS[spec.kind], aux_layers=spec.layers)
    if plane is not None:
        layout.width, layout.dtype = plane.shape[1], DTYPES[plane.dtype]
    return layout


def row_bytes(plane: torch.Tensor) -> int:
    """Bytes of one row of the plane [num_slots, width]."""
    return plane.shape[1] * plane.element_size()


def read_rows(plane: torch.Tensor, slots: NDArray[np.int32]) -> common_pb2.Tensor:
    """The rows [len(slots), width] as a wire tensor."""
    tensor = common_pb2.Tensor()
    _fill(tensor, plane, slots)
    return tensor


def answer_read(runner: Runner, drafters: Drafters, asked: ReadFeatures) -> None:
    """Answers with the rows of a session that is open to the asking drafter, or None where the pool has them not."""
    plane = runner.features
    assignment = asked.drafter.find(asked.session, asked.generation) if asked.drafter in drafters else None
    if plane is None or assignment is None or asked.first_pos + asked.count > assignment.session.kv_len:
        asked.answer(None)
        return
    slots = runner.slot_table[assignment.session.table_row, asked.first_pos :][: asked.count]
    asked.answer(read_rows(plane, slots))


def put_rows(
    features: common_pb2.FeatureRows, plane: torch.Tensor, first_pos: int, slots: NDArray[np.int32],
    ring: RowRing | None = None,
) -> None:  # fmt: skip
    """Fills `features` with the rows: in the ring, or inline, or announced where they are over the inline limit."""
    features.first_pos, features.count = first_pos, len(slots)
    number = None if ring is None else ring.put(len(slots), lambda rows: _gather(plane, slots, rows))
    if number is not None:
        features.slot_seq = number
    elif len(slots) * row_bytes(plane) > INLINE_FEATURE_BYTES:
        features.announced = True
    else:
        _fill(features.rows, plane, slots)  # in place: a message that is copied takes as long as its rows once more


def put_many(
    wanted: Sequence[tuple[common_pb2.FeatureRows, int, NDArray[np.int32]]], plane: torch.Tensor, ring: RowRing | None
) -> None:
    """Fills each message with the rows of (first_pos, slots), as put_rows; in the ring all are written in one go."""
    counts = [len(slots) for _, _, slots in wanted]
    number = None
    if ring is not None and len(wanted) > 1:
        every = np.concatenate([slots for _, _, slots in wanted])
        number = ring.put(len(every), lambda rows: _gather(plane, every, rows))
    for (features, first_pos, slots), count in zip(wanted, counts, strict=True):
        if number is None:
            put_rows(features, plane, first_pos, slots, ring)
        else:
            features.first_pos, features.count, features.slot_seq = first_pos, count, number
            number += count


def _fill(tensor: common_pb2.Tensor, plane: torch.Tensor, slots: NDArray[np.int32]) -> None:
    rows = np.empty((len(slots), row_bytes(plane)), np.uint8)
    _gather(plane, slots, rows)
    tensor.dtype = DTYPES[plane.dtype]
    tensor.shape.extend((len(slots), plane.shape[1]))
    tensor.data = rows.tobytes()


def _gather(plane: torch.Tensor, slots: NDArray[np.int32], rows: Rows) -> None:
    """Copies rows of the plane to `rows` uint8 [len(slots), bytes of a row]."""
    if plane.device.type == "cpu":
        # By numpy: torch hands even a few rows to its threads, which wake up in milliseconds where cores are busy.
        data = plane.view(torch.uint8).numpy()
        for row, slot in zip(rows, slots.tolist(), strict=True):
            row[:] = data[slot]
    else:
        index = torch.from_numpy(slots.astype(np.int64)).to(plane.device)
        rows[:] = plane.index_select(0, index).cpu().view(torch.uint8).numpy()


def send_features(
    runner: Runner, assignment: Assignment, end_pos: int, verdict: verify_pb2.Verdict | None = None
) -> None:
    """Sends rows not yet sent up to `end_pos` beside the verdicts, and the rows from there on inside `verdict`.

    Each row goes once per generation. Nothing happens where the drafter needs no features.
    """
    plane, session = runner.features, assignment.session
    if plane is None or not assignment.drafter.needs_features:
        return
    slots = runner.slot_table[session.table_row]
    if assignment.features_sent < end_pos:
        first = assignment.features_sent
        features = verify_pb2.SessionFeatures(session=session.session_id, generation=assignment.generation)
        put_rows(features.rows, plane, first, slots[first:end_pos], assignment.drafter.ring)
        assignment.drafter.outbox.feature_rows(features)
        assignment.features_sent = end_pos
        assignment.drafter.wake()
    if verdict is not None:
        send_verdict_rows(runner, [(assignment, verdict)])


def send_verdict_rows(runner: Runner, verdicts: Sequence[tuple[Assignment, verify_pb2.Verdict]]) -> None:
    """Puts the rows of what they commit in verdicts: one row a token, from that of the token before the first on."""
    plane = runner.features
    if plane is None:
        return
    by_drafter: dict[int, list[tuple[Assignment, verify_pb2.Verdict]]] = {}
    for assignment, verdict in verdicts:
        if assignment.drafter.needs_features:
            by_drafter.setdefault(id(assignment.drafter), []).append((assignment, verdict))
    for own in by_drafter.values():
        wanted: list[tuple[common_pb2.FeatureRows, int, NDArray[np.int32]]] = []
        for assignment, verdict in own:
            first = verdict.base_len - 1
            end = assignment.features_sent = first + len(verdict.tokens)
            wanted.append((verdict.features, first, runner.slot_table[assignment.session.table_row, first:end]))
        put_many(wanted, plane, own[0][0].drafter.ring)
