"""Rows of target hidden states, from the pool's feature plane to the wire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.feature_spec import FeatureSpec
from engine.feature_wire import WIRE_DTYPES, wire_kind
from kernels.transfer import to_device
from outrider.row_ring import RowRing, Rows
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import INLINE_FEATURE_BYTES
from verify_service.assignment import Assignment, RowsWanted
from verify_service.drafter import Drafter
from verify_service.runner import Runner


def feature_layout(spec: FeatureSpec, plane: torch.Tensor | None) -> common_pb2.FeatureLayout:
    """What a row holds, as drafters are told."""
    layout = common_pb2.FeatureLayout(kind=wire_kind(spec.kind), aux_layers=spec.layers)
    if plane is not None:
        layout.width, layout.dtype = plane.shape[1], WIRE_DTYPES[plane.dtype]
    return layout


def row_bytes(plane: torch.Tensor | None) -> int:
    """Bytes of a row; 0: none are kept."""
    return 0 if plane is None else plane.shape[1] * plane.element_size()


Message = tuple[common_pb2.FeatureRows, RowsWanted]
"""Where rows are to be put, and which."""


class FeatureSender:
    """Rows of a runner's feature plane [num_slots, width] for drafters; where it keeps none, nothing is sent."""

    def __init__(self, runner: Runner) -> None:
        self._plane, self._slot_table = runner.features, runner.slot_table
        self._row_bytes = row_bytes(self._plane)
        self._data: Rows | None = None  # uint8 [num_slots, bytes of a row], where the plane lies in the host's memory
        if self._plane is not None and self._plane.device.type == "cpu":
            self._data = self._plane.view(torch.uint8).numpy()

    def read(self, assignment: Assignment, first_pos: int, count: int) -> common_pb2.Tensor | None:
        """Rows of a session as a wire tensor; None where they are not there."""
        end = first_pos + count
        if self._plane is None or end > assignment.session.kv_len:
            return None
        tensor = common_pb2.Tensor()
        self._fill(tensor, RowsWanted(first_pos, self._slots(assignment, first_pos, end)))
        return tensor

    def send(self, assignment: Assignment, end_pos: int) -> None:
        """Sends rows not yet sent up to `end_pos` beside the verdicts.

        Each row goes once per generation. Nothing happens where the drafter needs no features.
        """
        if self._plane is None or not assignment.drafter.needs_features or assignment.features_sent >= end_pos:
            return
        first = assignment.features_sent
        features = verify_pb2.SessionFeatures(session=assignment.session.session_id, generation=assignment.generation)
        rows = RowsWanted(first, self._slots(assignment, first, end_pos))
        self._put(features.rows, rows, assignment.drafter.ring, assignment.drafter.outbox.room_for_rows)
        assignment.drafter.outbox.feature_rows(features)
        assignment.features_sent = end_pos
        assignment.drafter.wake()

    def prepare(self, assignments: Sequence[Assignment]) -> None:
        """Notes the rows of what prepared verdicts commit: one a token, from that of the token before the first on."""
        if self._plane is None:
            return
        prepared: list[RowsWanted] = []
        for assignment in assignments:
            verdict = assignment.verdict
            if verdict is not None and assignment.drafter.needs_features:
                first = verdict.base_len - 1
                end = assignment.features_sent = first + len(verdict.tokens)
                assignment.rows = rows = RowsWanted(first, self._slots(assignment, first, end))
                prepared.append(rows)
        if self._data is None:
            self._fetch(prepared)

    def fill_verdicts(self, assignments: Sequence[Assignment]) -> None:
        """Puts noted rows in verdicts, which are told next: a ring's rows are named in the order of their numbers."""
        by_drafter: dict[Drafter, list[Message]] = {}
        for assignment in assignments:
            if assignment.rows is not None and assignment.verdict is not None:
                own = by_drafter.setdefault(assignment.drafter, [])
                own.append((assignment.verdict.features, assignment.rows))
                assignment.rows = None
        for drafter, own in by_drafter.items():
            self._put_many(own, drafter)

    def _slots(self, assignment: Assignment, first: int, end: int) -> list[int]:
        return self._slot_table[assignment.session.table_row, first:end].tolist()

    def _put(self, features: common_pb2.FeatureRows, wanted: RowsWanted, ring: RowRing | None, room: float) -> int:
        """Puts rows in the ring, or inline, or announces them where they are over the inline limit, or over `room`.

        Returns the bytes that are inline.
        """
        count = len(wanted.slots)
        features.first_pos, features.count = wanted.first_pos, count
        number = None if ring is None else ring.put(count, lambda rows: self._gather([wanted], rows))
        if number is not None:
            features.slot_seq = number
        elif count * self._row_bytes > min(INLINE_FEATURE_BYTES, room):
            features.announced = True
        else:
            self._fill(features.rows, wanted)  # in place: a message that is copied takes as long as its rows once more
            return count * self._row_bytes
        return 0

    def _put_many(self, messages: Sequence[Message], drafter: Drafter) -> None:
        """Does for each what _put does; in the ring all are written in one go."""
        ring, room, number = drafter.ring, drafter.outbox.room_for_rows, None
        if ring is not None and len(messages) > 1:
            wanted = [one for _, one in messages]
            number = ring.put(sum(len(one.slots) for one in wanted), lambda rows: self._gather(wanted, rows))
        for features, one in messages:
            if number is None:
                room -= self._put(features, one, ring, room)
            else:
                count = len(one.slots)
                features.first_pos, features.count, features.slot_seq = one.first_pos, count, number
                number += count

    def _fill(self, tensor: common_pb2.Tensor, wanted: RowsWanted) -> None:
        assert self._plane is not None
        rows = np.empty((len(wanted.slots), self._row_bytes), np.uint8)
        self._gather([wanted], rows)
        tensor.dtype = WIRE_DTYPES[self._plane.dtype]
        tensor.shape.extend((len(wanted.slots), self._plane.shape[1]))
        tensor.data = rows.tobytes()

    def _gather(self, wanted: Sequence[RowsWanted], rows: Rows) -> None:
        """Copies all that is wanted to `rows` uint8 [slots of all, bytes of a row]."""
        if self._data is not None:
            # By numpy: torch hands even a few rows to its threads, which wake up in milliseconds where cores are busy.
            slots = np.array([slot for one in wanted for slot in one.slots], np.intp)
            rows[:] = self._data[slots]  # np.take would copy a whole plane that is not contiguous
            return
        self._fetch([one for one in wanted if one.fetched is None])
        np.concatenate([one.fetched for one in wanted if one.fetched is not None], out=rows)

    def _fetch(self, wanted: Sequence[RowsWanted]) -> None:
        """Brings rows from the device to the host, with one wait for it."""
        slots = [slot for one in wanted for slot in one.slots]
        if not slots:
            return
        assert self._plane is not None
        index = to_device(np.array(slots), self._plane.device)
        rows, start = self._plane.index_select(0, index).cpu().view(torch.uint8).numpy(), 0
        for one in wanted:
            one.fetched = rows[start : start + len(one.slots)]
            start += len(one.slots)
