"""kernels.norm.rms_norm and kernels.gating.gated on a CUDA device, in Triton.

A launch each, where torch takes eight and two: in a step of a few rows they are all latency, and an 8B model's step has
65 norms and 32 gates.
"""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations

import torch
import triton
import triton.language as tl

jit: tp.Any = triton.jit  # what it says of its result's type differs from version to version
_GATE_BLOCK = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As kernels.norm.rms_norm; x [T, width] or [T, heads, width], weight [width] in x's dtype."""
    width = x.shape[-1]
    rows = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    heads = x.shape[1] if x.dim() == 3 else 1
    block = triton.next_power_of_2(width)
    _rms_norm[(len(x), heads)](
        rows, weight, out, eps, ROW=rows.stride(0), HEAD=rows.stride(1) if heads > 1 else 0, HEADS=heads, WIDTH=width,
        BLOCK=block, num_warps=max(1, min(16, block // 512)), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """As kernels.gating.gated."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    rows = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _gated[(triton.cdiv(width, _GATE_BLOCK), num_rows)](
            rows, out, ROW=rows.stride(0), WIDTH=width, BLOCK=_GATE_BLOCK, num_warps=4, enable_fp_fusion=False
        )
    return out


@jit
def _rms_norm(
    x: tp.Any, weight: tp.Any, out: tp.Any, eps: tp.Any, ROW: tl.constexpr, HEAD: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Programs [T, HEADS]."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    wide = tl.load(x + row * ROW + head * HEAD + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    # Rounded before the weight is applied, as in kernels.norm.
    normed = (wide * scale).to(out.dtype.element_ty)
    scaled = normed.to(tl.float32) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (row * HEADS + head) * WIDTH + column, scaled.to(out.dtype.element_ty), mask=inside)


@jit
def _gated(gate_up: tp.Any, out: tp.Any, ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Programs [blocks of a row, T]."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * ROW + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * ROW + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded between the two, as torch's operators do it.
    fall = tl.exp(-tl.abs(gate))  # which does not overflow
    opened = (gate * tl.where(gate < 0.0, fall, 1.0) / (1.0 + fall)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (opened * up).to(out.dtype.element_ty), mask=inside)
