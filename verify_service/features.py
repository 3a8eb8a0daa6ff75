"""Rows of target hidden states, from the pool's feature plane to the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

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


class FeatureSender:
    """Rows of a runner's feature plane [num_slots, width] for drafters; where it keeps none, nothing is sent."""

    def __init__(self, runner: Runner) -> None:
        self._plane, self._slot_table = runner.features, runner.slot_table
        self._row_bytes = 0 if self._plane is None else self._plane.shape[1] * self._plane.element_size()
        self._data: Rows | None = None  # uint8 [num_slots, bytes of a row], where the plane lies in the host's memory
        if self._plane is not None and self._plane.device.type == "cpu":
            self._data = self._plane.view(torch.uint8).numpy()

    def answer(self, drafters: Drafters, asked: ReadFeatures) -> None:
        """Rows of a session that is open to the asking drafter, as a wire tensor, or None where they are not there."""
        assignment = asked.drafter.find(asked.session, asked.generation) if asked.drafter in drafters else None
        end = asked.first_pos + asked.count
        if self._plane is None or assignment is None or end > assignment.session.kv_len:
            asked.answer(None)
            return
        tensor = common_pb2.Tensor()
        self._fill(tensor, self._slots(assignment, asked.first_pos, end))
        asked.answer(tensor)

    def send(self, assignment: Assignment, end_pos: int, verdict: verify_pb2.Verdict | None = None) -> None:
        """Sends rows not yet sent up to `end_pos` beside the verdicts, and the rows from there on inside `verdict`.

        Each row goes once per generation. Nothing happens where the drafter needs no features.
        """
        if self._plane is None or not assignment.drafter.needs_features:
            return
        if assignment.features_sent < end_pos:
            first = assignment.features_sent
            features = verify_pb2.SessionFeatures(
                session=assignment.session.session_id, generation=assignment.generation
            )
            self._put(features.rows, first, self._slots(assignment, first, end_pos), assignment.drafter.ring)
            assignment.drafter.outbox.feature_rows(features)
            assignment.features_sent = end_pos
            assignment.drafter.wake()
        if verdict is not None:
            self.send_verdicts([(assignment, verdict)])

    def send_verdicts(self, verdicts: Sequence[tuple[Assignment, verify_pb2.Verdict]]) -> None:
        """Puts the rows of what verdicts commit in them: one a token, from that of the token before the first on."""
        if self._plane is None:
            return
        by_drafter: dict[int, list[tuple[Assignment, verify_pb2.Verdict]]] = {}
        for assignment, verdict in verdicts:
            if assignment.drafter.needs_features:
                by_drafter.setdefault(id(assignment.drafter), []).append((assignment, verdict))
        for own in by_drafter.values():
            wanted: list[tuple[common_pb2.FeatureRows, int, list[int]]] = []
            for assignment, verdict in own:
                first = verdict.base_len - 1
                end = assignment.features_sent = first + len(verdict.tokens)
                wanted.append((verdict.features, first, self._slots(assignment, first, end)))
            self._put_many(wanted, own[0][0].drafter.ring)

    def _slots(self, assignment: Assignment, first: int, end: int) -> list[int]:
        return self._slot_table[assignment.session.table_row, first:end].tolist()

    def _put(
        self, features: common_pb2.FeatureRows, first_pos: int, slots: list[int], ring: RowRing | None
    ) -> None:  # fmt: skip
        """Fills `features` with the rows: in the ring, or inline, or announced where they are over the inline limit."""
        features.first_pos, features.count = first_pos, len(slots)
        number = None if ring is None else ring.put(len(slots), lambda rows: self._gather(slots, rows))
        if number is not None:
            features.slot_seq = number
        elif len(slots) * self._row_bytes > INLINE_FEATURE_BYTES:
            features.announced = True
        else:
            self._fill(features.rows, slots)  # in place: a message that is copied takes as long as its rows once more

    def _put_many(
        self, wanted: Sequence[tuple[common_pb2.FeatureRows, int, list[int]]], ring: RowRing | None
    ) -> None:  # fmt: skip
        """Fills each message with the rows of (first_pos, slots), as _put; in the ring all are written in one go."""
        number = None
        if ring is not None and len(wanted) > 1:
            every = [slot for _, _, slots in wanted for slot in slots]
            number = ring.put(len(every), lambda rows: self._gather(every, rows))
        for features, first_pos, slots in wanted:
            if number is None:
                self._put(features, first_pos, slots, ring)
            else:
                features.first_pos, features.count, features.slot_seq = first_pos, len(slots), number
                number += len(slots)

    def _fill(self, tensor: common_pb2.Tensor, slots: list[int]) -> None:
        assert self._plane is not None
        rows = np.empty((len(slots), self._row_bytes), np.uint8)
        self._gather(slots, rows)
        tensor.dtype = DTYPES[self._plane.dtype]
        tensor.shape.extend((len(slots), self._plane.shape[1]))
        tensor.data = rows.tobytes()

    def _gather(self, slots: list[int], rows: Rows) -> None:
        """Copies rows of the plane to `rows` uint8 [len(slots), bytes of a row]."""
        if self._data is not None:
            # By numpy: torch hands even a few rows to its threads, which wake up in milliseconds where cores are busy.
            for row, slot in enumerate(slots):
                rows[row] = self._data[slot]
            return
        assert self._plane is not None
        index = torch.tensor(slots, device=self._plane.device)
        rows[:] = self._plane.index_select(0, index).cpu().view(torch.uint8).numpy()
