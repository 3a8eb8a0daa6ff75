"""Rows of keys or values into a paged pool and out of it, whatever the pool keeps them in."""

from __future__ import annotations

import torch

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Names of `--kv-cache-dtype` and what they mean."""


def store(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows [T, heads, head_dim] to slots (int64 [T]) of pool [num_slots, heads, head_dim].

    An fp8 pool takes the nearest number it has; what is beyond its range becomes its largest (torch's own conversion
    would make NaN of it).
    """
    if pool.dtype.itemsize > 1:
        pool.index_copy_(0, slots, rows.to(pool.dtype))
        return
    largest = torch.finfo(pool.dtype).max
    narrow = rows.float().clamp(-largest, largest).to(pool.dtype)
    # Bytes, since not every operator knows fp8.
    pool.view(torch.uint8).index_copy_(0, slots, narrow.view(torch.uint8))


def load(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [n, heads, head_dim] of a pool at `slots` (int [n]); those of an fp8 pool in `dtype`, others as they are."""
    if pool.dtype.itemsize > 1:
        return pool.index_select(0, slots)
    return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype).to(dtype)
