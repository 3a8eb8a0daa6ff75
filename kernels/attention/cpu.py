"""Tree attention by the C kernel, keys read where they lie; same signature as the reference, but for the library."""

from __future__ import annotations

import ctypes

import torch

from kernels.attention.layout import AttentionLayout
from kernels.native.library import WIDTH_UNIT, CHeads, address, c_layout

COMPUTED = (torch.float32, torch.bfloat16)
"""What keys and values are computed with."""
_KEPT = {torch.float32: 0, torch.bfloat16: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}  # fp8.h


def c_heads(pool: torch.dtype, computed: torch.dtype, **shape: object) -> CHeads:
    """Attention's shape over a pool of `pool`; one of 16 or 32 bits is of what is `computed` with."""
    return CHeads(wide=computed is torch.float32, kept=_KEPT[pool], **shape)


def attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    *,
    library: ctypes.CDLL,
    soft_cap: float = 0.0,
    window: int = 0,
) -> torch.Tensor:
    """Computes kernels.attention.reference.attention for head_dim a multiple of WIDTH_UNIT.

    An fp8 pool is computed with in q's dtype, another in its own; q is rounded to bf16 where that is it and the CPU
    multiplies it. Runs on the calling thread; the whole decoder (engine/models/llama_native.py) uses the same C code on
    all of them. ValueError for capped scores, which it does not know.
    """
    if soft_cap:
        raise ValueError(f"the C kernel knows no soft cap ({soft_cap})")
    computed = q.dtype if k_pool.dtype.itemsize == 1 else k_pool.dtype
    supported = k_pool.dtype in _KEPT and computed in COMPUTED and k_pool.dtype == v_pool.dtype
    if not supported or q.shape[2] % WIDTH_UNIT:
        raise ValueError(f"no C kernel for {k_pool.dtype} and {v_pool.dtype} with head_dim {q.shape[2]}")
    rows = q.float().contiguous()
    out = torch.empty_like(rows)
    heads = c_heads(
        k_pool.dtype, computed, num_heads=q.shape[1], num_kv_heads=k_pool.shape[1], head_dim=q.shape[2], scale=scale,
        window=window,
    )  # fmt: skip
    done = library.outrider_attention(
        ctypes.byref(heads), ctypes.byref(c_layout(layout)), address(rows), address(k_pool), address(v_pool),
        address(out),
    )  # fmt: skip
    if not done:
        raise MemoryError("no memory for attention")
    return out.to(q.dtype)
