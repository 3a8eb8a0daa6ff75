"""Random steps over a paged pool: what every attention kernel is tested on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from kernels.attention.layout import AttentionLayout


@dataclass
class Case:
    """A step: queries, a pool that holds all keys and values, and where everything sits."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    layout: AttentionLayout
    scale: float


@dataclass
class Piece:
    """A segment to be: `parents` of a tree (-1: the root), or None for a causal run of `count` rows."""

    prefix_len: int
    count: int
    parents: list[int] | None = None


def random_tree(rng: np.random.Generator, count: int) -> list[int]:
    """A parent for each row, all above it."""
    return [-1, *(int(rng.integers(0, row)) for row in range(1, count))]


PIECES = st.lists(  # all kinds of segments, in any order
    st.one_of(
        st.builds(Piece, st.integers(0, 300), st.just(1)),
        st.builds(Piece, st.integers(0, 90), st.integers(1, 30)),
        st.tuples(st.integers(0, 150), st.integers(1, 12), st.integers(0, 99)).map(
            lambda t: Piece(t[0], t[1], random_tree(np.random.default_rng(t[2]), t[1]))
        ),
    ),
    min_size=1,
    max_size=4,
)


def make_case(
    pieces: list[Piece], *, heads: int = 6, kv_heads: int = 2, head_dim: int = 16,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Case:  # fmt: skip
    """Slots are scattered over a pool whose other slots hold large numbers: reading one of them shows."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    used = sum(piece.prefix_len + piece.count for piece in pieces)
    order = rng.permutation(used + 16).astype(np.int32)
    table = np.full((len(pieces), 1 + max(piece.prefix_len for piece in pieces)), order[-1], np.int32)
    slots, positions, masks, starts, taken = [], [], [], [], 0
    for index, piece in enumerate(pieces):
        table[index, : piece.prefix_len] = order[taken : taken + piece.prefix_len]
        slots.append(order[taken + piece.prefix_len : taken + piece.prefix_len + piece.count])
        taken += piece.prefix_len + piece.count
        depths, mask = _tree(piece)
        positions.append(piece.prefix_len + depths)
        starts.append(-1 if mask is None else sum(m.size for m in masks))
        if mask is not None:
            masks.append(mask)
    counts = np.array([piece.count for piece in pieces], np.int32)
    k_pool, v_pool = (torch.randn((used + 16, kv_heads, head_dim), generator=generator) for _ in range(2))
    k_pool[order[used:]] = v_pool[order[used:]] = 1e4
    layout = AttentionLayout(
        slot_table=table,
        first_rows=(np.cumsum(counts) - counts).astype(np.int32),
        num_rows=counts,
        prefix_lens=np.array([piece.prefix_len for piece in pieces], np.int32),
        table_rows=np.arange(len(pieces), dtype=np.int32),
        slots=np.concatenate(slots),
        positions=np.concatenate(positions).astype(np.int32),
        masks=np.concatenate([mask.ravel() for mask in masks]) if masks else np.zeros(0, np.bool_),
        mask_starts=np.array(starts, np.int64),
    )
    q = torch.randn((int(counts.sum()), heads, head_dim), generator=generator).to(dtype)
    return Case(q, k_pool.to(dtype), v_pool.to(dtype), layout, head_dim**-0.5)


def _tree(piece: Piece) -> tuple[np.ndarray, np.ndarray | None]:
    if piece.parents is None:
        return np.arange(piece.count), None
    depths, mask = np.zeros(piece.count, np.int64), np.eye(piece.count, dtype=np.bool_)
    for row, parent in enumerate(piece.parents):
        if parent >= 0:
            depths[row] = depths[parent] + 1
            mask[row] |= mask[parent]
    return depths, mask
