"""One step's work: what sessions add to it, laid out as flat rows.

Knows rows, slots and positions; neither weights nor what a token means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.layout import WORD_BITS, AttentionLayout
from kernels.attention.triton_blocks import MIN_PIECE

_FEW = 16  # rows of a segment that are looked at one by one, sooner than numpy begins
_SIZES_KEPT = 64
_PAST = 2 * MIN_PIECE


@dataclass(slots=True)
class Segment:
    """The rows that one session adds to a step: a prefill chunk, one decoded token, or root and tree nodes."""

    table_row: int
    """Row of the slot table."""
    prefix_len: int
    """Positions 0..prefix_len-1 have KV at slot_table[table_row, :prefix_len]."""
    tokens: np.ndarray
    """int32 [n]"""
    slots: np.ndarray | Sequence[int]
    """[n]: where the rows' KV and features go; distinct."""
    depths: np.ndarray | None = None
    """int32 [n]: row i sits at position prefix_len + depths[i]; None: 0..n-1."""
    mask: np.ndarray | None = None
    """bool [n, n]: row i sees row j of this segment; true on the diagonal; None: causal."""
    num_logits: int = 1
    """Logits wanted for the last num_logits rows: 0 for a prefill chunk that is not the last, n for a tree."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """What only the device knows of a step's rows, in place of what its segments say: nobody waits for it."""

    tokens: torch.Tensor
    """int [T]"""
    row_bits: torch.Tensor | None = None
    """AttentionLayout's row_bits, where every segment has a mask."""


@dataclass(slots=True)
class Batch:
    """Segments as flat rows: tokens int32 [T], logit_rows int32 [L] (ascending), and where everything sits.

    Its arrays are the buffers' own, good until the next fill.
    """

    tokens: np.ndarray
    logit_rows: np.ndarray
    layout: AttentionLayout
    tokens_address: int
    logit_rows_address: int
    """Where the two arrays lie: asking numpy takes longer than it should, in every step."""
    device_tokens: torch.Tensor | None = None
    """int [T]: the tokens, where the device alone knows them."""

    @property
    def num_tokens(self) -> int:
        """Rows in this step."""
        return len(self.tokens)


class BatchBuffers:
    """Lays segments out one behind another in arrays made once, and checks every number in them.

    Kernels index memory with these numbers, so a step goes to them only when all are in bounds. Of a prefix, what an
    earlier step had is not looked at again: it grows with the context.
    """

    def __init__(
        self, slot_table: np.ndarray, *, vocab_size: int, num_slots: int, num_positions: int, max_tokens: int
    ) -> None:
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        # One array, so that one pass finds what is out of bounds; as unsigned, negative numbers are above every limit.
        self._rows = np.zeros((3, max_tokens), dtype=np.int32)
        self._unsigned_rows = self._rows.view(np.uint32)
        self._limits = (("token", vocab_size), ("slot", num_slots), ("position", num_positions))
        self._tokens, self._slots, self._positions = self._rows
        self._segments = np.zeros((4, max_tokens), dtype=np.int32)
        self._mask_starts = np.zeros(max_tokens, dtype=np.int64)
        self._masks = np.zeros(64 * 64, dtype=np.bool_)
        self._logit_rows = np.zeros(max_tokens, dtype=np.int32)
        self._count_up = np.arange(max_tokens, dtype=np.int32)
        self._slot_table, self._unsigned_table = slot_table, slot_table.view(np.uint32)
        # How far each row's prefix was looked at in earlier steps, and the last slot of it.
        self._checked: list[tuple[int, int]] = [(0, 0)] * len(slot_table)
        self._addresses: object = None
        self._views: dict[tuple[int, int, int, int], tuple[np.ndarray, ...]] = {}  # of the arrays, by a step's sizes
        self._row_addresses = (self._tokens.ctypes.data, self._logit_rows.ctypes.data)

    def fill(self, segments: Sequence[Segment], rows: DeviceRows | None = None) -> Batch:
        """The step made of these segments; rows: what stands in place of their tokens and masks.

        Raises ValueError for arrays whose lengths do not agree, and for numbers outside the model, the pool, the slot
        table or the buffers.
        """
        if not segments:
            raise ValueError("a step needs at least one segment")
        num_tokens = num_logits = num_mask = 0
        few = True  # and so checked already
        for index, segment in enumerate(segments):
            _check_shapes(segment)
            end = num_tokens + len(segment.tokens)
            if end > self.max_tokens:
                raise ValueError(f"a step of {end} tokens or more; the limit is {self.max_tokens}")
            self._check_prefix(segment)
            if len(segment.tokens) <= _FEW:
                self._place_few(segment, num_tokens, end)
            else:
                self._place_rows(segment, num_tokens, end)
                few = False
            self._segments[:, index] = num_tokens, end - num_tokens, segment.prefix_len, segment.table_row
            num_mask = self._place_mask(index, segment, num_mask)
            logits_end = num_logits + segment.num_logits
            self._logit_rows[num_logits:logits_end] = self._count_up[end - segment.num_logits : end]
            num_tokens, num_logits = end, logits_end
        if not few:
            self._check_rows(num_tokens)
        batch = self._batch(len(segments), num_tokens, num_mask, num_logits)
        if rows is not None:
            batch.device_tokens, batch.layout.row_bits = rows.tokens, rows.row_bits
        return batch

    def remember(self, batch: Batch) -> None:
        """Keeps the addresses that a kernel has looked up for `batch`: the next one lies in the same memory."""
        self._addresses = batch.layout.addresses

    def _batch(self, num_segments: int, num_tokens: int, num_mask: int, num_logits: int) -> Batch:
        sizes = num_segments, num_tokens, num_mask, num_logits
        views = self._views.get(sizes)
        if views is None:
            views = (
                self._tokens[:num_tokens], self._logit_rows[:num_logits], *self._segments[:, :num_segments],
                self._slots[:num_tokens], self._positions[:num_tokens], self._masks[:num_mask],
                self._mask_starts[:num_segments],
            )  # fmt: skip
            if len(self._views) >= _SIZES_KEPT:
                del self._views[next(iter(self._views))]
            self._views[sizes] = views
        tokens, logit_rows, first_rows, num_rows, prefix_lens, table_rows, slots, positions, masks, mask_starts = views
        layout = AttentionLayout(
            self._slot_table, first_rows, num_rows, prefix_lens, table_rows, slots, positions, masks, mask_starts,
            self._addresses,
        )  # fmt: skip
        return Batch(tokens, logit_rows, layout, *self._row_addresses)

    def _place_rows(self, segment: Segment, start: int, end: int) -> None:
        """Writes a segment to rows start..end-1."""
        self._tokens[start:end] = segment.tokens
        self._slots[start:end] = segment.slots
        depths = self._count_up[: end - start] if segment.depths is None else segment.depths
        np.add(depths, segment.prefix_len, out=self._positions[start:end])

    def _place_few(self, segment: Segment, start: int, end: int) -> None:
        """Places a few rows, which are checked on the way."""
        first, slots = segment.prefix_len, segment.slots
        depths = range(end - start) if segment.depths is None else segment.depths.tolist()
        rows = segment.tokens.tolist(), list(slots), [first + depth for depth in depths]
        for (name, limit), values in zip(self._limits, rows, strict=True):
            if not 0 <= min(values) <= max(values) < limit:
                raise _out_of_bounds(name, limit, min(values), max(values))
        self._rows[:, start:end] = rows

    def _place_mask(self, index: int, segment: Segment, mask_start: int) -> int:
        """Writes the mask of segment number `index`; returns where the next one starts."""
        if segment.mask is None:
            self._mask_starts[index] = -1
            return mask_start
        self._mask_starts[index] = mask_start
        mask_end = mask_start + segment.mask.size
        if mask_end > self._masks.size:
            self._masks = np.concatenate([self._masks, np.zeros(mask_end, dtype=np.bool_)])
            self._addresses = None
            self._views.clear()
        self._masks[mask_start:mask_end] = segment.mask.ravel()
        return mask_end

    def _check_prefix(self, segment: Segment) -> None:
        table = self._slot_table
        if not (0 <= segment.table_row < table.shape[0] and 0 <= segment.prefix_len <= table.shape[1]):
            raise ValueError(
                f"table row {segment.table_row} with a prefix of {segment.prefix_len}: the slot table is {table.shape}"
            )
        (checked, last), row, end = self._checked[segment.table_row], table[segment.table_row], segment.prefix_len
        begin = checked if checked <= end and (not checked or row[checked - 1] == last) else 0  # else another session's
        if begin < end and int(self._unsigned_table[segment.table_row, begin:end].max()) >= self.num_slots:
            prefix = table[segment.table_row, begin:end]
            raise ValueError(f"slot {prefix.min()} or {prefix.max()} of a prefix is out of bounds ({self.num_slots})")
        self._checked[segment.table_row] = end, int(row[end - 1]) if end else 0

    def _check_rows(self, num_tokens: int) -> None:
        highest = self._unsigned_rows[:, :num_tokens].max(axis=1).tolist()
        for (name, limit), found, row in zip(self._limits, highest, self._rows, strict=True):
            if found >= limit:
                values = row[:num_tokens]
                raise _out_of_bounds(name, limit, values.min(), values.max())


def of_each_size(most_rows: int, max_len: int) -> Iterator[Segment]:
    """Segments of 1, 2, 4, ... and `most_rows` rows: as chunks of prompts, and few rows as trees too.

    Kernels are compiled for some sizes of a segment, for trees, and for a past that is read in pieces; these meet all,
    so that no session waits for it. max_len: of past and rows together.
    """
    for rows in [*(1 << power for power in range(most_rows.bit_length()) if 1 << power < most_rows), most_rows]:
        tokens, slots, past = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32), min(_PAST, max_len - rows)
        yield Segment(0, past, tokens, slots)
        if rows <= WORD_BITS:
            yield Segment(0, past, tokens, slots, mask=np.tri(rows, dtype=np.bool_))


def _out_of_bounds(name: str, limit: int, lowest: int, highest: int) -> ValueError:
    return ValueError(f"a {name} is out of bounds (0 to {limit - 1}): {lowest} to {highest}")


def _check_shapes(segment: Segment) -> None:
    count = len(segment.tokens)
    if count == 0 or segment.tokens.ndim != 1 or len(segment.slots) != count:
        raise ValueError(f"a segment of {segment.tokens.shape} tokens with {len(segment.slots)} slots")
    if segment.depths is not None and segment.depths.shape != (count,):
        raise ValueError(f"a segment of {count} tokens with {segment.depths.shape} depths")
    if segment.depths is not None and segment.depths.min() < 0:
        raise ValueError(f"a segment with depth {segment.depths.min()}; its own rows come after its prefix")
    if segment.mask is not None and (segment.mask.shape != (count, count) or segment.mask.dtype != np.bool_):
        raise ValueError(f"a segment of {count} tokens with a {segment.mask.dtype} mask of {segment.mask.shape}")
    if not 0 <= segment.num_logits <= count:
        raise ValueError(f"{segment.num_logits} logits wanted of a segment of {count} tokens")
