"""triton_plan.pack for a bucket's steps by the C kernel, in microseconds: the same bytes in the same places."""

from __future__ import annotations

import ctypes

import numpy as np

from kernels.attention.layout import AttentionLayout
from kernels.attention.triton_blocks import MIN_PIECE, TARGET_PROGRAMS, Heads
from kernels.attention.triton_plan import Bucket, Packed
from kernels.native.library import CPlan, c_layout


class NativePlan:
    """Plans the steps of one bucket into memory of its own, which the next one overwrites."""

    def __init__(self, library: ctypes.CDLL, packed: Packed, heads: Heads, page_size: int, bucket: Bucket) -> None:
        """`packed`: any step of the bucket's, by pack."""
        (launch,) = packed.launches
        self._library = library
        self._bucket = bucket
        self._data = np.empty(packed.size, np.int32)
        self._order = np.empty(launch.num_items, np.int64)
        self._items = np.empty(5 * launch.num_items, np.int32)
        self._plan = CPlan(
            data=self._data.ctypes.data, order=self._order.ctypes.data, items=self._items.ctypes.data,
            num_segments=bucket.num_segments, rows_per_segment=bucket.rows_per_segment,
            max_prefix_len=bucket.max_prefix_len, has_masks=bucket.has_masks,
            rows_per_tile=launch.blocks.rows // heads.group, num_items=launch.num_items,
            num_kv_heads=heads.num_kv_heads, page_size=page_size, min_piece=MIN_PIECE,
            target_programs=TARGET_PROGRAMS, tiles=launch.tiles, segments=packed.segments, slots=packed.slots,
            positions=packed.positions, masks=packed.masks, mask_words=packed.mask_words, table=packed.table,
        )  # fmt: skip

    def fill(self, layout: AttentionLayout) -> np.ndarray:
        """The step's numbers, int32. ValueError for one that does not fit the bucket."""
        used = self._library.outrider_plan(ctypes.byref(c_layout(layout)), ctypes.byref(self._plan))
        if not used:
            self._bucket.check(layout)
        return self._data[:used]
