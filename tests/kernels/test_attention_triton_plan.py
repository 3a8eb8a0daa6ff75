"""The plan that the Triton kernels follow: every key once, sizes as a bucket promises. No triton needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import BatchBuffers, Segment, of_each_size
from engine.cpu_kernels import cpu_kernels
from kernels.attention.layout import AttentionLayout
from kernels.attention.native_plan import NativePlan
from kernels.attention.triton_blocks import MIN_PIECE, Heads, blocks_for
from kernels.attention.triton_plan import ITEM, SEGMENT, TILE, Bucket, Launch, Packed, pack
from tests.kernels.attention_cases import Piece, make_case, random_tree

HEADS = [
    Heads(32, 8, 128, torch.bfloat16),
    Heads(9, 3, 64, torch.float32),
    Heads(28, 4, 128, torch.float16),
    Heads(40, 1, 256, torch.float32),
    Heads(64, 64, 96, torch.bfloat16),
]
PIECES = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 90), st.booleans()).map(
        lambda t: Piece(t[0], t[1], random_tree(np.random.default_rng(t[1]), t[1]) if t[2] else None)
    ),
    min_size=1,
    max_size=6,
)


def layout_of(pieces: list[Piece]) -> AttentionLayout:
    return make_case(pieces, heads=1, kv_heads=1, head_dim=1).layout


def rows_at(packed: Packed, start: int, count: int, fields: tuple[str, ...]) -> np.ndarray:
    return packed.data[start : start + count * len(fields)].reshape(count, len(fields))


def check_launch(packed: Packed, launch: Launch, heads: Heads, seen: list[np.ndarray]) -> None:
    """Adds to `seen` [n, prefix_len + 1], by segment, what the launch's programs cover; last: the own rows."""
    items = rows_at(packed, launch.items, launch.num_items, ITEM)
    items = items[items[:, 0] >= 0]
    tiles = rows_at(packed, launch.tiles, launch.num_tiles, TILE)
    parts = sorted(items[items[:, 4] >= 0, 4])
    assert parts == list(range(len(parts)))
    assert len(parts) <= launch.num_parts
    assert sorted(p for _, _, first, count in tiles if count for p in range(first, first + count)) == parts
    for segment, row_start, key_start, key_end, part in items:
        count, prefix_len = seen[segment].shape[0], seen[segment].shape[1] - 1
        rows = slice(row_start, min(row_start + launch.blocks.rows // heads.group, count))
        assert key_start % launch.blocks.keys == 0
        seen[segment][rows, key_start:key_end] += 1
        if key_end == prefix_len:
            seen[segment][rows, prefix_len] += 1
        if part >= 0:
            first_row = rows_at(packed, packed.segments, segment + 1, SEGMENT)[segment, 0] + row_start
            tile = tiles[(tiles[:, 2] <= part) & (part < tiles[:, 2] + tiles[:, 3])]
            assert tile[:, :2].tolist() == [[first_row, rows.stop - rows.start]]


@settings(deadline=None, max_examples=60)
@given(PIECES, st.sampled_from(HEADS), st.booleans(), st.booleans())
def test_every_row_sees_every_key_once(pieces: list[Piece], heads: Heads, in_bucket: bool, narrow: bool) -> None:
    layout = layout_of(pieces)
    bucket = Bucket(7, int(layout.num_rows.max()) + 1, 3000, has_masks=True) if in_bucket else None
    packed = pack(layout, heads, 1, bucket, narrow_trees=narrow)
    seen = [np.zeros((piece.count, piece.prefix_len + 1), np.int64) for piece in pieces]
    for launch in packed.launches:
        check_launch(packed, launch, heads, seen)
    assert all((cover == 1).all() for cover in seen)


@settings(deadline=None, max_examples=30)
@given(PIECES, PIECES, st.sampled_from(HEADS), st.sampled_from([1, 16, 64]))
def test_in_a_bucket_only_the_numbers_change(one: list[Piece], other: list[Piece], heads: Heads, page: int) -> None:
    bucket = Bucket(6, 90, 3000, has_masks=True)
    first, second = (pack(layout_of(pieces), heads, page, bucket) for pieces in (one, other))
    no_data = np.empty(0, np.int32)
    assert repr(replace(first, data=no_data)) == repr(replace(second, data=no_data))
    assert first.size >= max(len(first.data), len(second.data))
    assert first.table == second.table
    starts = [first.segments, first.slots, first.positions, first.masks, first.table]
    assert all(start % 4 == 0 for start in starts)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(PIECES, min_size=1, max_size=3), st.sampled_from(HEADS), st.sampled_from([1, 16, 64]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_the_c_kernel_plans_to_the_byte(
    steps: list[list[Piece]], heads: Heads, page: int, narrow: bool, masked: bool
) -> None:
    library = cpu_kernels()
    assert library is not None
    bucket = Bucket(6, 90, 3000, has_masks=masked)
    native: NativePlan | None = None
    for pieces in steps:  # in the same memory
        layout = layout_of(pieces if masked else [replace(piece, parents=None) for piece in pieces])
        layout.slot_table[:] = np.random.default_rng(len(pieces)).permutation(layout.slot_table.size).reshape(
            layout.slot_table.shape
        )  # fmt: skip
        packed = pack(layout, heads, page, bucket, narrow_trees=narrow)
        native = native or NativePlan(library, packed, heads, page, bucket)
        assert native.fill(layout).tobytes() == packed.data.tobytes()


def test_sections_hold_what_the_layout_says() -> None:
    layout = layout_of([Piece(33, 3, [-1, 0, 0]), Piece(16, 1)])
    layout.slot_table[0, :33] = np.concatenate([np.arange(64, 80), np.arange(16), [32]])
    layout.slot_table[1, :16] = np.arange(48, 64)
    packed = pack(layout, HEADS[1], 16)
    assert packed.data[packed.table : packed.table + 4].tolist() == [4, 0, 2, 3]
    assert rows_at(packed, packed.segments, 2, SEGMENT).tolist() == [[0, 3, 33, 0, 0], [3, 1, 16, 3, -1]]
    assert packed.data[packed.slots : packed.slots + 4].tolist() == layout.slots.tolist()
    assert packed.data[packed.positions : packed.positions + 4].tolist() == [33, 34, 34, 16]
    assert packed.data[packed.masks : packed.masks + 6].view(np.int64).tolist() == [0b001, 0b011, 0b101]


def test_one_long_session_fills_the_gpu_and_a_short_one_is_not_cut() -> None:
    heads = HEADS[0]
    (launch,) = pack(layout_of([Piece(40_000, 1)]), heads, 1).launches
    assert 264 <= launch.num_items * heads.num_kv_heads <= 1024
    (launch,) = pack(layout_of([Piece(MIN_PIECE, 1)]), heads, 1).launches
    assert (launch.num_items, launch.num_parts) == (1, 0)


def test_narrow_trees_go_to_the_tiles_of_decode() -> None:
    pieces = [Piece(5, 1), Piece(5, 16), Piece(900, 16, random_tree(np.random.default_rng(1), 16))]
    wide, narrow = (pack(layout_of(pieces), HEADS[0], 1, narrow_trees=narrow) for narrow in (False, True))
    assert [launch.blocks.rows for launch in wide.launches] == [16, 64]
    assert [launch.blocks.rows for launch in narrow.launches] == [16, 64]
    # Four heads share a tile of 16 rows, so a tree of 16 nodes takes four of them.
    assert (wide.launches[0].num_tiles, narrow.launches[0].num_tiles) == (0, 4)
    (in_bucket,) = pack(layout_of(pieces), HEADS[0], 1, Bucket(4, 33, 900, has_masks=True), narrow_trees=True).launches
    assert in_bucket.blocks.rows == 16


def test_segments_go_to_the_smallest_tile_that_holds_them() -> None:
    pieces = [Piece(5, 1), Piece(5, 16), Piece(5, 17), Piece(5, 400)]
    launches = pack(layout_of(pieces), HEADS[0], 1).launches
    assert [(launch.blocks.rows, launch.num_items) for launch in launches] == [(16, 1), (64, 1), (128, 1 + 13)]


@pytest.mark.parametrize(
    ("pieces", "bucket", "message"),
    [
        ([Piece(1, 1)] * 3, Bucket(2, 4, 50, has_masks=False), "3 segments"),
        ([Piece(1, 5)], Bucket(2, 4, 50, has_masks=False), "up to 5 rows"),
        ([Piece(51, 1)], Bucket(2, 4, 50, has_masks=False), "prefix of 51"),
        ([Piece(1, 2, [-1, 0])], Bucket(2, 4, 50, has_masks=False), "tree"),
    ],
)
def test_a_bucket_refuses_what_does_not_fit(pieces: list[Piece], bucket: Bucket, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(layout_of(pieces), HEADS[0], 1, bucket)
    library = cpu_kernels()
    assert library is not None
    native = NativePlan(library, pack(layout_of([Piece(1, 1)]), HEADS[0], 1, bucket), HEADS[0], 1, bucket)
    with pytest.raises(ValueError, match=message):
        native.fill(layout_of(pieces))


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((6, 4, 64, torch.bfloat16), "cannot share"),
        ((65, 1, 64, torch.bfloat16), "at most 64"),
        ((8, 8, 320, torch.bfloat16), "head_dim is 320"),
        ((8, 8, 64, torch.float64), "float64"),
    ],
)
def test_heads_that_no_kernel_covers(heads: tuple[int, int, int, torch.dtype], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Heads(*heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 16, 33, 64])
def test_tiles_hold_the_group_and_divide_words_and_pieces(dtype: torch.dtype, head_dim: int, group: int) -> None:
    sizes = blocks_for(Heads(2 * group, 2, head_dim, dtype))
    assert all(blocks.rows >= group and 64 % blocks.keys == 0 and MIN_PIECE % blocks.keys == 0 for blocks in sizes)
    assert [blocks.rows for blocks in sizes] == sorted(blocks.rows for blocks in sizes)


@pytest.mark.parametrize("max_len", [541, 542, 600])
def test_mask_bits_can_be_read_as_int64(max_len: int) -> None:
    packed = pack(layout_of([Piece(40, 1)]), HEADS[0], 1, Bucket(1, 1, max_len, has_masks=False))
    assert packed.masks % 2 == 0
    assert packed.size % 2 == 0


@pytest.mark.parametrize("heads", HEADS)
def test_some_sizes_of_segments_meet_all_kernels(heads: Heads) -> None:
    """What is compiled at start is what later steps launch: the tile, whether with masks, whether with pieces."""
    most, max_len = 700, 1000
    buffers = BatchBuffers(
        np.zeros((1, max_len), np.int32), vocab_size=1, num_slots=most, num_positions=max_len, max_tokens=most
    )

    def met(segment: Segment) -> set[tuple[int, bool, bool]]:
        packed = pack(buffers.fill([segment]).layout, heads, 1)
        return {(one.blocks.rows, one.has_masks, has) for one in packed.launches for has in {False, one.num_parts > 0}}

    at_start = set().union(*(met(segment) for segment in of_each_size(most, max_len)))
    for rows in range(1, most, 3):
        tokens, slots = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32)
        assert met(Segment(0, 300, tokens, slots)) <= at_start
        if rows <= 64:
            assert met(Segment(0, 300, tokens, slots, mask=np.eye(rows, dtype=np.bool_))) <= at_start
