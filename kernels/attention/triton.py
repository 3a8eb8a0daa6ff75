"""Tree attention by our own Triton kernels, for CUDA devices; same signature as the reference.

Prefill, decode and tree verify go together in one step: segments are sorted by their number of rows into launches with
tiles to suit (kernels/attention/triton_blocks.py), long prefixes are cut into pieces that fill the GPU even for one
session, and the query heads of a kv head are handled together. The device is never waited for. On an H200
a layer's attention to 512 keys takes 10 us for one row and 12 for nine, joining pieces included.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.layout import AttentionLayout
from kernels.attention.native_plan import NativePlan
from kernels.attention.triton_blocks import Heads
from kernels.attention.triton_kernels import attend, combine
from kernels.attention.triton_plan import Bucket, Launch, Packed, pack
from kernels.transfer import send, to_device
from kernels.triton_common import operand


class TritonAttention:
    """Attention for one model on one device; called as kernels.attention.reference.attention is.

    A step is planned when its layout is first seen, once for all layers. For a CUDA graph, `prepare` the layout with
    a bucket before the capture, and again before every replay: it then writes to the same places, on the current
    stream. In rows that pad a step up to its bucket anything may lie, NaN too: rows know nothing of one another.
    page_size: position p of a prefix must lie at offset p % page_size of its page; 1 is right for any pool.
    narrow_trees: trees are verified as decode is, in narrow tiles, not as prefill is (kernels.attention.triton_plan).
    library: the C kernels, which plan the steps of buckets; None: numpy does.
    """

    def __init__(
        self, device: torch.device, *, page_size: int = 1, narrow_trees: bool = False,
        library: ctypes.CDLL | None = None,
    ) -> None:  # fmt: skip
        if page_size < 1:
            raise ValueError(f"page_size {page_size} must be at least 1")
        self.device = device
        self.page_size = page_size
        self.narrow_trees = narrow_trees
        self._library = library
        self._layout: AttentionLayout | None = None
        self._plan: _Plan | None = None
        self._buckets: dict[tuple[Bucket, Heads], _Plan] = {}
        self._room = torch.empty(0, dtype=torch.int32, device=device)
        self._parts = torch.empty(0, dtype=torch.float32, device=device)

    def prepare(self, layout: AttentionLayout, heads: Heads, bucket: Bucket | None = None) -> None:
        """Plans a step and sends the plan to the device. ValueError when it does not fit the bucket."""
        if bucket is None:
            packed = self._pack(layout, heads, None)
            parts = torch.empty(_parts_size(packed, heads), dtype=torch.float32, device=self.device)
            plan = _Plan(packed, heads, to_device(packed.data, self.device), parts)
        else:
            plan = self._buckets.get((bucket, heads))
            if plan is None:
                plan = self._buckets[bucket, heads] = self._bucket_plan(layout, heads, bucket)
            numbers = plan.native.fill(layout) if plan.native else self._pack(layout, heads, bucket).data
            plan.refill(numbers)
        if layout.row_bits is not None:
            plan.set_row_bits(layout.row_bits)
        self._layout, self._plan = layout, plan

    def see(self, bits: torch.Tensor) -> None:
        """Sets, from what the device knows, who sees whom in the step that was prepared last; can be captured."""
        assert self._plan is not None
        self._plan.set_row_bits(bits)

    def _pack(self, layout: AttentionLayout, heads: Heads, bucket: Bucket | None) -> Packed:
        return pack(layout, heads, self.page_size, bucket, narrow_trees=self.narrow_trees)

    def _bucket_plan(self, layout: AttentionLayout, heads: Heads, bucket: Bucket) -> _Plan:
        """Makes a bucket's plan in memory that all share, since one runs at a time; the largest comes first."""
        packed = self._pack(layout, heads, bucket)
        if self._room.numel() < packed.size:
            self._room = torch.zeros(packed.size, dtype=torch.int32, device=self.device)
        if self._parts.numel() < _parts_size(packed, heads):
            self._parts = torch.empty(_parts_size(packed, heads), dtype=torch.float32, device=self.device)
        native = self._library and NativePlan(self._library, packed, heads, self.page_size, bucket)
        return _Plan(packed, heads, self._room, self._parts, native)

    def __call__(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layout: AttentionLayout, scale: float, *,
        soft_cap: float = 0.0, window: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """q [T, heads, head_dim]; k_pool, v_pool [slots, kv_heads, head_dim]; returns [T, heads, head_dim] like q.

        soft_cap c > 0 bends scores to c * tanh(score / c); window w > 0 hides keys w or more positions back, where a
        causal segment's positions rise one by one. ValueError for shapes that no kernel covers.
        """
        heads = Heads(q.shape[1], k_pool.shape[1], q.shape[2], q.dtype)
        if self._plan is None or layout is not self._layout or heads != self._plan.heads:
            self.prepare(layout, heads)
        assert self._plan is not None
        if k_pool.stride() != v_pool.stride() or k_pool.stride(2) != 1:
            raise ValueError(f"pools with strides {k_pool.stride()} and {v_pool.stride()}; equal ones are needed")
        q = q if q.stride(2) == 1 else q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for launch in self._plan.launches:
            self._plan.run(launch, q, k_pool, v_pool, out, scale, soft_cap, window, self.page_size)
        return out


@dataclass(frozen=True, slots=True)
class _Placed:
    """A launch and its arrays on the device."""

    launch: Launch
    items: torch.Tensor
    tiles: torch.Tensor


class _Plan:
    """A packed step on the device."""

    def __init__(
        self, packed: Packed, heads: Heads, data: torch.Tensor, parts: torch.Tensor, native: NativePlan | None = None
    ) -> None:
        self.heads = heads
        self.native = native
        self._data = data
        self._segments = self._data[packed.segments :]
        self._slots = self._data[packed.slots :]
        self._positions = self._data[packed.positions :]
        self._masks = self._data[packed.masks :].view(torch.int64)
        self._mask_words = packed.mask_words
        self._table = self._data[packed.table :]
        self.launches = [_Placed(it, self._data[it.items :], self._data[it.tiles :]) for it in packed.launches]
        rows = _part_rows(packed, heads)
        self._parts = parts[: rows * heads.head_dim]
        self._part_sums = parts[rows * heads.head_dim :]

    def refill(self, numbers: np.ndarray) -> None:
        """Another step in the same places."""
        send(numbers, self._data[: len(numbers)])

    def set_row_bits(self, bits: torch.Tensor) -> None:
        """Sets who sees whom, in place of what the step was packed with: of all rows, in order."""
        words = min(self._mask_words, bits.shape[1])  # what a smaller step has no word for, nobody sees
        self._masks[: len(bits) * self._mask_words].view(len(bits), -1)[:, :words].copy_(bits[:, :words])

    def run(
        self, placed: _Placed, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, out: torch.Tensor,
        scale: float, soft_cap: float, window: int, page_size: int,
    ) -> None:  # fmt: skip
        """Launches one tile size; the grid depends on the plan's sizes only."""
        heads, launch = self.heads, placed.launch
        sizes = {
            "KV_HEADS": heads.num_kv_heads, "GROUP": heads.group, "HEAD_DIM": heads.head_dim,
            "BLOCK_D": max(16, 1 << (heads.head_dim - 1).bit_length()), "BLOCK_M": launch.blocks.rows,
        }  # fmt: skip
        attend[(launch.num_items * heads.num_kv_heads,)](
            q, k_pool, v_pool, out, self._parts, self._part_sums, placed.items, self._segments, self._table,
            self._slots, self._positions, self._masks, scale,
            Q_ROW=q.stride(0), Q_HEAD=q.stride(1), KV_SLOT=k_pool.stride(0), KV_HEAD=k_pool.stride(1),
            BLOCK_N=launch.blocks.keys, PAGE=page_size, MASK_WORDS=self._mask_words if launch.has_masks else 0,
            WINDOW=window, SOFT_CAP=soft_cap, OPERAND=operand(q.dtype), PRECISION="ieee", **sizes,
            num_warps=launch.blocks.num_warps, num_stages=launch.blocks.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
        if launch.num_parts:
            combine[(launch.num_tiles, heads.num_kv_heads, launch.blocks.rows)](
                out, self._parts, self._part_sums, placed.tiles, **sizes, num_warps=4, enable_fp_fusion=True
            )


def _part_rows(packed: Packed, heads: Heads) -> int:
    """Rows between attend and combine: launches follow each other on one stream, as layers do, so all share them."""
    return max(4, *(it.num_parts * heads.num_kv_heads * it.blocks.rows for it in packed.launches))


def _parts_size(packed: Packed, heads: Heads) -> int:
    """fp32 numbers: of each of those rows its values, and then each one's sum."""
    return _part_rows(packed, heads) * (heads.head_dim + 1)
