"""Where the rows of a step sit: what every attention kernel is told besides the tensors.

A step is a flat list of rows, cut into segments: a prompt's chunk, one decoded token, or a tree. A segment's row sees
its session's prefix, found through the slot table, and those rows of its own segment that the mask allows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kernels.transfer import to_device

WORD_BITS = 64
"""Bits of a word where a row's mask is packed."""


@dataclass(slots=True)
class AttentionLayout:
    """The rows of one step, in numpy (S segments, T rows).

    slot_table  int32 [sessions, max_len]: position -> slot, of prefixes
    first_rows  int32 [S]: each segment's first row; num_rows int32 [S]: how many follow
    prefix_lens int32 [S]: positions 0..prefix_len-1 come from slot_table[table_rows[s]]
    table_rows  int32 [S]
    slots       int32 [T]: where each row's own key and value lie; positions int32 [T]
    masks       bool [...]: the segments' [n, n] masks behind one another (row i sees row j); a row sees itself
    mask_starts int64 [S]: where a segment's mask starts in `masks`; -1: causal, row i sees rows 0..i
    """

    slot_table: np.ndarray
    first_rows: np.ndarray
    num_rows: np.ndarray
    prefix_lens: np.ndarray
    table_rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    masks: np.ndarray
    mask_starts: np.ndarray
    addresses: Any = field(default=None, repr=False)
    """The arrays' addresses as the C kernels want them; theirs to fill in, good for any layout in the same memory."""
    row_bits: torch.Tensor | None = field(default=None, repr=False)
    """int64 [T, words] on the device, where that alone knows who sees whom: bit j of a row is its segment's row j. In
    place of what `masks` say, of a step in which every segment has a mask."""
    _plan: list[SegmentPlan] = field(default_factory=list, repr=False)

    def plan(self, device: torch.device) -> list[SegmentPlan]:
        """The segments as index tensors, one entry each; made once per step."""
        if not self._plan:
            self._plan.extend(self._segment_plan(index, device) for index in range(len(self.first_rows)))
        return self._plan

    def see(self, bits: torch.Tensor) -> None:
        """Other `row_bits` from here on; what was planned is forgotten."""
        self.row_bits = bits
        self._plan.clear()

    def _segment_plan(self, index: int, device: torch.device) -> SegmentPlan:
        first, count, prefix_len = (int(a[index]) for a in (self.first_rows, self.num_rows, self.prefix_lens))
        rows = slice(first, first + count)
        prefix = self.slot_table[self.table_rows[index], :prefix_len]
        start = int(self.mask_starts[index])
        if self.row_bits is not None:
            inside = unpacked(self.row_bits[rows], count)
        elif start < 0:
            inside = to_device(np.tri(count, dtype=np.bool_), device)
        else:
            inside = to_device(self.masks[start : start + count * count].reshape(count, count), device)
        return SegmentPlan(
            rows=rows,
            slots=to_device(np.concatenate([prefix, self.slots[rows]]), device),
            visible=torch.cat([inside.new_ones((count, prefix_len)), inside], dim=1),
            positions=self.positions[rows],
        )

    def selected(self, members: np.ndarray) -> tuple[AttentionLayout, np.ndarray]:
        """The step of some of the segments (ascending indices), and which rows are theirs: int64, ascending."""
        counts = self.num_rows[members]
        first_rows = (np.cumsum(counts) - counts).astype(np.int32)
        rows = np.arange(int(counts.sum())) + np.repeat(self.first_rows[members] - first_rows, counts)
        part = AttentionLayout(
            slot_table=self.slot_table,
            first_rows=first_rows,
            num_rows=counts,
            prefix_lens=self.prefix_lens[members],
            table_rows=self.table_rows[members],
            slots=self.slots[rows],
            positions=self.positions[rows],
            masks=self.masks,
            mask_starts=self.mask_starts[members],
        )
        if self.row_bits is not None:
            part.row_bits = self.row_bits[to_device(rows, self.row_bits.device)]
        return part, rows


@dataclass(slots=True)
class SegmentPlan:
    """One segment: its rows, its keys' slots (int32 [prefix_len + n]), who sees what (bool [n, prefix_len + n])."""

    rows: slice
    slots: torch.Tensor
    visible: torch.Tensor
    positions: np.ndarray
    """int32 [n]: of its rows."""
    _near: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def seen(self, window: int) -> torch.Tensor:
        """`visible` without the keys that lie `window` or more positions back; 0: no window."""
        if not window:
            return self.visible
        if window not in self._near:
            keys = np.concatenate([np.arange(len(self.slots) - len(self.positions)), self.positions])
            near = self.positions[:, None] - keys[None, :] < window
            self._near[window] = self.visible & to_device(near, self.visible.device)
        return self._near[window]


def unpacked(bits: torch.Tensor, count: int) -> torch.Tensor:
    """bool [n, count] from bits int64 [n, words], lowest first."""
    places = torch.arange(count, device=bits.device)
    return (bits[:, places // WORD_BITS] >> (places % WORD_BITS) & 1).bool()
