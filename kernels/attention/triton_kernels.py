"""The attention kernels in Triton's language: a tile of rows over a piece of its keys, and the joining of pieces.

One program of `attend` takes a tile of one segment's rows, with all query heads of one kv head, so that each key is
read once for the whole group; softmax runs online in fp32 (Milakov and Gimelshein; FlashAttention). Where the prefix
is cut into pieces (Flash-Decoding's split), each piece leaves a normalised part and the log2 of its weights' sum, and
`combine` joins them. Prefill, decode and tree verify are the same code: they differ in tile sizes and in what a row
sees of its own segment. What is one item's work comes as numbers in `items` (kernels/attention/triton_plan.py), so a
launch depends on sizes only and can be captured in a graph.
"""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations

import triton.language as tl

from kernels.attention import triton_plan
from kernels.triton_common import jit

LOG2_E = tl.constexpr(1.4426950408889634)
ITEM_FIELDS = tl.constexpr(len(triton_plan.ITEM))
SEGMENT_FIELDS = tl.constexpr(len(triton_plan.SEGMENT))
TILE_FIELDS = tl.constexpr(len(triton_plan.TILE))
COMBINE_BLOCK = tl.constexpr(16)


@jit
def attend(
    q: tp.Any, k_pool: tp.Any, v_pool: tp.Any, out: tp.Any, parts: tp.Any, part_sums: tp.Any,
    items: tp.Any, segments: tp.Any, table: tp.Any, slots: tp.Any, positions: tp.Any,
    masks: tp.Any, scale: tp.Any,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, KV_SLOT: tl.constexpr, KV_HEAD: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, MASK_WORDS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """One item for one kv head; program = item * KV_HEADS + kv head.

    q, out [T, heads, HEAD_DIM]; parts fp32 [parts, KV_HEADS, BLOCK_M, HEAD_DIM], part_sums fp32 [.., BLOCK_M].
    WINDOW 0: none, else a row sees keys less than WINDOW positions back; SOFT_CAP 0: none. OPERAND: the dtype that
    the tensor cores multiply in; PRECISION: what fp32 operands are multiplied with.
    """
    ROWS: tl.constexpr = BLOCK_M // GROUP
    item = items + (tl.program_id(0) // KV_HEADS) * ITEM_FIELDS
    kv_head = tl.program_id(0) % KV_HEADS
    segment_index = tl.load(item)
    if segment_index < 0:  # padding up to the bucket
        return
    row_start, key_start, key_end = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    segment = segments + segment_index * SEGMENT_FIELDS
    first_row, num_rows, prefix_len = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    table_start, mask_row = tl.load(segment + 3), tl.load(segment + 4)

    # Tile place m is query head m % GROUP of row m // GROUP.
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row = row_start + m // GROUP
    in_tile = (m < ROWS * GROUP) & (row < num_rows)
    head = kv_head * GROUP + m % GROUP
    in_head = d < HEAD_DIM
    q_at = (first_row + row).to(tl.int64) * Q_ROW + head * Q_HEAD
    q_tile = tl.load(q + q_at[:, None] + d[None, :], mask=in_tile[:, None] & in_head[None, :], other=0.0).to(OPERAND)

    k_base, v_base = k_pool + kv_head * KV_HEAD, v_pool + kv_head * KV_HEAD
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The last piece of the prefix takes the segment's own rows too.
    own_start, own_end = 0, tl.where(mask_row < 0, tl.minimum(row_start + ROWS, num_rows), num_rows)
    own_end = tl.where(key_end == prefix_len, own_end, 0)
    row_pos = row
    if WINDOW > 0:
        row_pos = tl.load(positions + first_row + row, mask=in_tile, other=2147483647)
        oldest = tl.min(row_pos, 0) - WINDOW + 1  # what lies before it, no row of the tile sees
        key_start = tl.maximum(key_start, oldest // BLOCK_N * BLOCK_N)
        # A causal segment's positions rise one by one.
        own_start = tl.where(mask_row < 0, tl.maximum(oldest - prefix_len, 0) // BLOCK_N * BLOCK_N, 0)

    top, total, acc = _over_prefix(
        q_tile, k_base, v_base, table + table_start, key_start, key_end, row_pos, scale, top, total, acc,
        KV_SLOT, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, WINDOW, SOFT_CAP, PRECISION,
    )  # fmt: skip
    top, total, acc = _over_own(
        q_tile, k_base, v_base, slots + first_row, positions + first_row, masks, mask_row, own_start, own_end, row,
        row_pos, in_tile, scale, top, total, acc,
        KV_SLOT, HEAD_DIM, BLOCK_D, BLOCK_N, MASK_WORDS, WINDOW, SOFT_CAP, PRECISION,
    )  # fmt: skip

    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    inside = in_tile[:, None] & in_head[None, :]
    part = tl.load(item + 4)
    if part < 0:
        out_at = ((first_row + row).to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD_DIM
        tl.store(out + out_at[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        part_at = (part.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + m
        tl.store(parts + part_at[:, None] * HEAD_DIM + d[None, :], result, mask=inside)
        tl.store(part_sums + part_at, top + tl.log2(tl.where(total > 0.0, total, 1.0)), mask=in_tile)


@jit
def _over_prefix(
    q: tp.Any, k_base: tp.Any, v_base: tp.Any, pages: tp.Any, key_start: tp.Any, key_end: tp.Any, row_pos: tp.Any,
    scale: tp.Any, top: tp.Any, total: tp.Any, acc: tp.Any,
    KV_SLOT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple[tp.Any, tp.Any, tp.Any]:  # fmt: skip
    """Positions key_start..key_end-1 of the prefix, which every row sees unless its window hides them."""
    d = tl.arange(0, BLOCK_D)
    for first in range(key_start, key_end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        there = n < key_end
        if PAGE == 1:
            slot = tl.load(pages + n, mask=there, other=0)
        else:
            slot = tl.load(pages + n // PAGE, mask=there, other=0) * PAGE + n % PAGE
        seen = there[None, :]
        if WINDOW > 0:
            seen = seen & (row_pos[:, None] - n[None, :] < WINDOW)
        at, known = slot.to(tl.int64)[:, None] * KV_SLOT + d[None, :], there[:, None] & (d < HEAD_DIM)[None, :]
        top, total, acc = _absorb(q, k_base + at, v_base + at, known, seen, scale, top, total, acc, SOFT_CAP, PRECISION)
    return top, total, acc


@jit
def _over_own(
    q: tp.Any, k_base: tp.Any, v_base: tp.Any, slots: tp.Any, positions: tp.Any, masks: tp.Any, mask_row: tp.Any,
    own_start: tp.Any, own_end: tp.Any, row: tp.Any, row_pos: tp.Any, in_tile: tp.Any,
    scale: tp.Any, top: tp.Any, total: tp.Any, acc: tp.Any,
    KV_SLOT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK_WORDS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple[tp.Any, tp.Any, tp.Any]:  # fmt: skip
    """Rows own_start..own_end-1 of the segment itself: by the mask's bits where there is one, else causal."""
    d = tl.arange(0, BLOCK_D)
    for first in range(own_start, own_end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        there = n < own_end
        slot = tl.load(slots + n, mask=there, other=0)
        seen = n[None, :] <= row[:, None]
        if MASK_WORDS > 0:
            # A tile's keys lie within one word, since their number divides 64.
            bits_row = tl.where(mask_row < 0, -1, mask_row + row)
            word_at = masks + bits_row * MASK_WORDS + first // 64
            word = tl.load(word_at, mask=in_tile & (bits_row >= 0), other=0)
            allowed = (word[:, None] >> (n % 64).to(tl.int64)[None, :]) & 1
            seen = tl.where(mask_row < 0, seen, allowed != 0)
        seen = seen & there[None, :]
        if WINDOW > 0:
            key_pos = tl.load(positions + n, mask=there, other=0)
            seen = seen & (row_pos[:, None] - key_pos[None, :] < WINDOW)
        at, known = slot.to(tl.int64)[:, None] * KV_SLOT + d[None, :], there[:, None] & (d < HEAD_DIM)[None, :]
        top, total, acc = _absorb(q, k_base + at, v_base + at, known, seen, scale, top, total, acc, SOFT_CAP, PRECISION)
    return top, total, acc


@jit
def _absorb(
    q: tp.Any, k_at: tp.Any, v_at: tp.Any, known: tp.Any, seen: tp.Any, scale: tp.Any, top: tp.Any, total: tp.Any,
    acc: tp.Any, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple[tp.Any, tp.Any, tp.Any]:  # fmt: skip
    """One step of online softmax over N keys and values: the new maximum, sum and weighted values."""
    k = tl.load(k_at, mask=known, other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFT_CAP > 0.0:
        # cap * tanh(x / cap); the exponent's argument is at most 0, so nothing overflows.
        fall = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / SOFT_CAP))
        bent = (1.0 - fall) / (1.0 + fall) * SOFT_CAP
        scores = tl.where(scores < 0.0, -bent, bent)
    # Times log2(e), so that weights are powers of two.
    scores = tl.where(seen, scores * LOG2_E, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet: -inf minus -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    v = tl.load(v_at, mask=known, other=0.0).to(q.dtype)
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, total * shrink + tl.sum(weights, 1), acc


@jit
def combine(
    out: tp.Any, parts: tp.Any, part_sums: tp.Any, tiles: tp.Any,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    """Joins a tile's parts for one kv head and one row's head; programs [tiles, KV_HEADS, BLOCK_M]."""
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    kv_head, m = tl.program_id(1), tl.program_id(2)
    first_row, num_rows, first_part, num_parts = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    if m >= num_rows * GROUP:
        return
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_parts, COMBINE_BLOCK):
        s = first + tl.arange(0, COMBINE_BLOCK)
        there = s < num_parts
        at = ((first_part + s).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + m
        sums = tl.load(part_sums + at, mask=there, other=float("-inf"))
        part = tl.load(parts + at[:, None] * HEAD_DIM + d[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(sums, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(sums - base)
        shrink = tl.exp2(top - base)
        acc = acc * shrink + tl.sum(weights[:, None] * part, 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    out_at = ((first_row + m // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP) * HEAD_DIM
    tl.store(out + out_at + d, (acc / total).to(out.dtype.element_ty), mask=in_head)
