"""What the Triton kernels are told of a step: its tiles of rows, cut into pieces of keys, packed into one array.

Everything is worked out on the host, in numpy, from the layout, which lies there; one copy takes it to the device.
Sizes follow from the step itself, or from a bucket, so that a captured graph finds everything in the same places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.attention.layout import WORD_BITS, AttentionLayout
from kernels.attention.triton_blocks import Blocks, Heads, blocks_for, most_pieces, piece_len

# The columns of the arrays that the kernels read, all int32.
ITEM = ("segment", "row_start", "key_start", "key_end", "part")
"""One program's work: a tile of a segment's rows over keys key_start..key_end-1 of its prefix, and over its own rows
when key_end is the prefix's end. part -1: the result is final; segment -1: no work."""
SEGMENT = ("first_row", "num_rows", "prefix_len", "table_start", "mask_row")
"""table_start: where the prefix's pages start in the table; mask_row: its first row of mask bits, -1: causal."""
TILE = ("first_row", "num_rows", "first_part", "num_parts")
"""A tile that was cut; first_row counts in the whole step; num_rows 0: no work."""

# Sections start at multiples of 16 bytes: the compiler relies on it, and would compile again where it does not hold.
_ALIGNED = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """The largest step that a captured graph serves: its launches and places follow from these numbers alone."""

    num_segments: int
    rows_per_segment: int
    """Rows of the longest segment: 1 for plain decode, 1 + nodes for trees."""
    max_prefix_len: int
    has_masks: bool

    @property
    def num_rows(self) -> int:
        """Rows of the largest step."""
        return self.num_segments * self.rows_per_segment

    def check(self, layout: AttentionLayout) -> None:
        """Raises ValueError for a step that does not fit."""
        longest, prefix_len = int(layout.num_rows.max()), int(layout.prefix_lens.max())
        if len(layout.num_rows) > self.num_segments or longest > self.rows_per_segment:
            raise ValueError(f"{len(layout.num_rows)} segments of up to {longest} rows do not fit {self}")
        if prefix_len > self.max_prefix_len:
            raise ValueError(f"a prefix of {prefix_len} does not fit {self}")
        if not self.has_masks and (layout.mask_starts >= 0).any():
            raise ValueError(f"a tree does not fit {self}")


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `attend`, and one of `combine` when `num_parts`; `items` and `tiles` are places in the array."""

    blocks: Blocks
    has_masks: bool
    num_parts: int
    items: int
    num_items: int
    tiles: int
    num_tiles: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A step as one int32 array, and where its sections start; a bucket's later steps may need `size` numbers."""

    data: np.ndarray
    size: int
    launches: tuple[Launch, ...]
    segments: int
    slots: int
    positions: int
    masks: int
    mask_words: int
    """int64 words in a row of mask bits."""
    table: int


def pack(
    layout: AttentionLayout, heads: Heads, page_size: int, bucket: Bucket | None = None, *, narrow_trees: bool = False
) -> Packed:
    """Plans a step. Raises ValueError for one that does not fit the bucket.

    narrow_trees: trees go to the tiles of plain decode, whatever their rows; a tree's keys are then read once for each
    of its tiles, by more programs at a time.
    """
    if bucket is not None:
        bucket.check(layout)
    sections = _Sections()
    works = _works(layout, heads, bucket, narrow_trees)
    launches = tuple(_add_launch(sections, work, heads, bucket) for work in works)
    num_segments, num_rows = (bucket.num_segments, bucket.num_rows) if bucket else (0, 0)
    masked = np.flatnonzero(layout.mask_starts >= 0)
    longest = bucket.rows_per_segment if bucket else int(layout.num_rows[masked].max(initial=0))
    words = -(-longest // WORD_BITS)
    masks, mask_rows = _mask_bits(layout, masked, words)
    table, table_starts = _table(layout, page_size)
    columns = (layout.first_rows, layout.num_rows, layout.prefix_lens, table_starts, mask_rows)
    segments = sections.add(np.stack(columns, axis=1), num_segments)
    slots, positions = sections.add(layout.slots, num_rows), sections.add(layout.positions, num_rows)
    masks_at = sections.add(masks, num_rows if bucket and bucket.has_masks else 0)
    # Last, so that what is copied can end where the prefixes do.
    table_at = sections.add(table, 0)
    room = bucket.num_segments * -(-bucket.max_prefix_len // page_size) if bucket else 0
    size = max(sections.size, table_at + room + -room % _ALIGNED)  # even: mask bits are read as int64
    return Packed(sections.joined(), size, launches, segments, slots, positions, masks_at, words, table_at)


class _Sections:
    """int32 arrays one behind another, each at an aligned start."""

    def __init__(self) -> None:
        self._pieces: list[np.ndarray] = []
        self.size = 0

    def add(self, array: np.ndarray, room: int, filler: int = 0) -> int:
        """Adds an array, filled up to `room` rows; where it starts."""
        start, flat = self.size, array.reshape(-1)
        missing = max(0, room - len(array)) * int(np.prod(array.shape[1:]))
        missing += -(len(flat) + missing) % _ALIGNED
        self._pieces += [flat, np.full(missing, filler, np.int32)]
        self.size += len(flat) + missing
        return start

    def joined(self) -> np.ndarray:
        """All arrays in one."""
        return np.concatenate(self._pieces, dtype=np.int32, casting="same_kind")


@dataclass(frozen=True, slots=True)
class _Work:
    """The segments that one tile size serves, as items and tiles."""

    blocks: Blocks
    has_masks: bool
    num_parts: int
    items: np.ndarray
    tiles: np.ndarray


def _add_launch(sections: _Sections, work: _Work, heads: Heads, bucket: Bucket | None) -> Launch:
    num_items, num_tiles, num_parts, has_masks = len(work.items), len(work.tiles), work.num_parts, work.has_masks
    if bucket is not None:
        num_tiles = bucket.num_segments * -(-bucket.rows_per_segment // (work.blocks.rows // heads.group))
        num_items, num_parts = most_pieces(num_tiles, heads.num_kv_heads)
        has_masks = bucket.has_masks
    items, tiles = sections.add(work.items, num_items, filler=-1), sections.add(work.tiles, num_tiles)
    return Launch(work.blocks, has_masks, num_parts, items, num_items, tiles, num_tiles)


def _works(layout: AttentionLayout, heads: Heads, bucket: Bucket | None, narrow_trees: bool) -> list[_Work]:
    """Each segment goes to the smallest tile that holds it; in a bucket all go to the one that holds the longest."""
    sizes = blocks_for(heads)
    rows = np.array([blocks.rows // heads.group for blocks in sizes])
    longest = np.full_like(layout.num_rows, bucket.rows_per_segment) if bucket else layout.num_rows
    chosen = np.minimum(np.searchsorted(rows, longest), len(sizes) - 1)
    if narrow_trees:
        chosen[:] = np.where(bucket.has_masks if bucket else layout.mask_starts >= 0, 0, chosen)
    return [_cut(layout, np.flatnonzero(chosen == size), sizes[size], heads) for size in np.unique(chosen)]


def _cut(layout: AttentionLayout, members: np.ndarray, blocks: Blocks, heads: Heads) -> _Work:
    per_tile = blocks.rows // heads.group
    tiles_each = -(-layout.num_rows[members] // per_tile)
    segment, row_start = np.repeat(members, tiles_each), _counted(tiles_each) * per_tile
    num_rows = np.minimum(per_tile, layout.num_rows[segment] - row_start)
    prefix = layout.prefix_lens[segment].astype(np.int64)
    piece = piece_len(int(prefix.sum()), heads.num_kv_heads)
    pieces = np.maximum(1, -(-prefix // piece))
    tile, nth = np.repeat(np.arange(len(segment)), pieces), _counted(pieces)
    key_start, key_end = nth * piece, np.minimum((nth + 1) * piece, prefix[tile])
    is_part = pieces[tile] > 1
    part = np.where(is_part, np.cumsum(is_part) - 1, -1)
    items = np.stack([segment[tile], row_start[tile], key_start, key_end, part], axis=1)
    tiles = np.stack([layout.first_rows[segment] + row_start, num_rows, part[nth == 0], pieces], axis=1)
    # The longest first: what starts last should end soon.
    num_keys = key_end - key_start + np.where(key_end == prefix[tile], (row_start + num_rows)[tile], 0)
    order = np.argsort(-num_keys, kind="stable")
    has_masks = bool((layout.mask_starts[members] >= 0).any())
    return _Work(blocks, has_masks, int(is_part.sum()), items[order], tiles[pieces > 1])


def _counted(counts: np.ndarray) -> np.ndarray:
    """0..n-1 for each n of counts, one behind another."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _mask_bits(layout: AttentionLayout, masked: np.ndarray, words: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits of the masked segments' rows, int32 [rows, 2 * words], and each segment's first row or -1."""
    counts = layout.num_rows[masked]
    mask_rows = np.full(len(layout.num_rows), -1)
    mask_rows[masked] = np.cumsum(counts) - counts
    dense = np.zeros((int(counts.sum()), words * WORD_BITS), np.bool_)
    for index, count in zip(masked.tolist(), counts.tolist(), strict=True):
        start, row = layout.mask_starts[index], mask_rows[index]
        dense[row : row + count, :count] = layout.masks[start : start + count * count].reshape(count, count)
    bits = np.packbits(dense, axis=1, bitorder="little")
    return bits.view("<i4").reshape(len(dense), 2 * words), mask_rows


def _table(layout: AttentionLayout, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The prefixes' pages, one behind another, and where each segment's start; 4 bytes a page is all that is copied."""
    counts = -(-layout.prefix_lens // page_size)
    rows = zip(layout.table_rows.tolist(), layout.prefix_lens.tolist(), strict=True)
    pages = np.concatenate([layout.slot_table[row, :length:page_size] for row, length in rows])
    return pages // page_size if page_size > 1 else pages, np.cumsum(counts) - counts
