"""Tree attention by the C kernel, keys read where they lie; same signature as the reference, but for the library."""

from __future__ import annotations

import ctypes

import torch

from kernels.attention.layout import AttentionLayout
from kernels.native.library import WIDTH_UNIT, CHeads, address, c_layout

POOL_DTYPES = (torch.float32, torch.bfloat16)


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
    """Computes kernels.attention.reference.attention for a fp32 or bf16 pool and head_dim a multiple of WIDTH_UNIT.

    With a bf16 pool and a CPU that multiplies bf16, q is rounded to bf16. Runs on the calling thread; the whole decoder
    (engine/models/llama_native.py) uses the same C code on all of them. ValueError for capped scores, which it does
    not know.
    """
    if soft_cap:
        raise ValueError(f"the C kernel knows no soft cap ({soft_cap})")
    if k_pool.dtype not in POOL_DTYPES or k_pool.dtype != v_pool.dtype or q.shape[2] % WIDTH_UNIT:
        raise ValueError(f"no C kernel for {k_pool.dtype} and {v_pool.dtype} with head_dim {q.shape[2]}")
    rows = q.float().contiguous()
    out = torch.empty_like(rows)
    heads = CHeads(
        num_heads=q.shape[1], num_kv_heads=k_pool.shape[1], head_dim=q.shape[2], wide=k_pool.dtype is torch.float32,
        scale=scale, window=window,
    )  # fmt: skip
    done = library.outrider_attention(
        ctypes.byref(heads), ctypes.byref(c_layout(layout)), address(rows), address(k_pool), address(v_pool),
        address(out),
    )  # fmt: skip
    if not done:
        raise MemoryError("no memory for attention")
    return out.to(q.dtype)
