"""Rows of target hidden states, from the pool's feature plane to the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config import FeatureSpec
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import INLINE_FEATURE_BYTES

if TYPE_CHECKING:
    from verify_service.drafters import Assignment
    from verify_service.step_loop import Runner

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
    if plane.device.type == "cpu":
        # By numpy: torch hands even a few rows to its threads, which wake up in milliseconds where cores are busy.
        data = plane.view(torch.uint8).numpy()[slots].tobytes()
    else:
        index = torch.from_numpy(slots.astype(np.int64)).to(plane.device)
        data = plane.index_select(0, index).cpu().view(torch.uint8).numpy().tobytes()
    return common_pb2.Tensor(dtype=DTYPES[plane.dtype], shape=[len(slots), plane.shape[1]], data=data)


def feature_rows(plane: torch.Tensor, first_pos: int, slots: NDArray[np.int32]) -> common_pb2.FeatureRows:
    """Rows inline, or announced where they are over the inline limit."""
    count = len(slots)
    if count * row_bytes(plane) > INLINE_FEATURE_BYTES:
        return common_pb2.FeatureRows(first_pos=first_pos, count=count, announced=True)
    return common_pb2.FeatureRows(first_pos=first_pos, count=count, rows=read_rows(plane, slots))


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
        rows = feature_rows(plane, first, slots[first:end_pos])
        assignment.drafter.outbox.feature_rows(
            verify_pb2.SessionFeatures(session=session.session_id, generation=assignment.generation, rows=rows)
        )
        assignment.features_sent = end_pos
        assignment.drafter.wake()
    if verdict is not None:
        count = len(verdict.tokens)
        verdict.features.CopyFrom(feature_rows(plane, end_pos, slots[end_pos : end_pos + count]))
        assignment.features_sent = end_pos + count
