"""kernels.norm's functions and kernels.gating.gated on a CUDA device, in Triton.

A launch each, where torch takes eight, nine and two: in a step of a few rows they are all latency, and an 8B model's
step has 65 norms, 64 of them of a sum, and 32 gates.
"""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations

import torch
import triton
import triton.language as tl

from kernels.triton_common import jit

_GATE_BLOCK = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes kernels.norm.rms_norm; x [T, width] or [T, heads, width], weight [width] in x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, None, weight, eps, out, None)
    return out


def add_rms_norm(
    x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes kernels.norm.add_rms_norm; x, more [T, width], weight [width], all of one dtype."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _norm(x, more if more.stride(-1) == 1 else more.contiguous(), weight, eps, out, total)
    return total, out


def _norm(
    x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor,
    total: torch.Tensor | None,
) -> None:  # fmt: skip
    """Norms of rows, into `out`; with `more`, of their sums, which go into `total`."""
    if not x.numel():
        return
    width, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    rows = x if x.stride(-1) == 1 else x.contiguous()
    block = triton.next_power_of_2(width)
    _rms_norm[(len(x), heads)](
        rows, more, weight, out, total, eps, ROW=rows.stride(0), HEAD=rows.stride(1) if heads > 1 else 0,
        MORE_ROW=0 if more is None else more.stride(0), HEADS=heads, WIDTH=width, BLOCK=block,
        num_warps=max(1, min(16, block // 512)), enable_fp_fusion=False,
    )  # fmt: skip


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes kernels.gating.gated."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    rows = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _gated[(num_rows, triton.cdiv(width, _GATE_BLOCK))](
            rows, out, ROW=rows.stride(0), WIDTH=width, BLOCK=_GATE_BLOCK, num_warps=4, enable_fp_fusion=False
        )
    return out


@jit
def _rms_norm(
    x: tp.Any, more: tp.Any, weight: tp.Any, out: tp.Any, total: tp.Any, eps: tp.Any, ROW: tl.constexpr,
    HEAD: tl.constexpr, MORE_ROW: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Programs [T, HEADS]; one head where there is `more`."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    wide = tl.load(x + row * ROW + head * HEAD + column, mask=inside, other=0.0).to(tl.float32)
    if more is not None:
        summed = wide + tl.load(more + row * MORE_ROW + column, mask=inside, other=0.0).to(tl.float32)
        narrow = summed.to(out.dtype.element_ty)  # as the sum is kept, and as torch's operators would go on with it
        tl.store(total + row * WIDTH + column, narrow, mask=inside)
        wide = narrow.to(tl.float32)
    by = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + (row * HEADS + head) * WIDTH + column, normed(wide, by, eps, WIDTH), mask=inside)


@jit
def normed(wide: tp.Any, weight: tp.Any, eps: tp.Any, WIDTH: tl.constexpr) -> tp.Any:
    """kernels.norm's rule for one row of WIDTH numbers in fp32, 0 beyond; in the weight's dtype."""
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    narrow = (wide * scale).to(weight.dtype)  # rounded before the weight is applied
    return (narrow.to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@jit
def _gated(gate_up: tp.Any, out: tp.Any, ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Programs [T, blocks of a row]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * ROW + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * ROW + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded between the two, as torch's operators do it.
    fall = tl.exp(-tl.abs(gate))  # which does not overflow
    opened = (gate * tl.where(gate < 0.0, fall, 1.0) / (1.0 + fall)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (opened * up).to(out.dtype.element_ty), mask=inside)
