"""Products of a few rows with int8 and 4-bit weights on a CUDA device, in Triton.

Weights are widened in registers on their way into the product, so a step reads them once, as small as they are kept.
Every row's sum runs over the inputs in the same blocks, however many rows there are. Speed has not been measured.
"""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations

import torch
import triton.language as tl

from kernels.quantize import GROUP, MAX_FEW_ROWS
from kernels.triton_common import jit, operand

# Rows of a tile: the least that tensor cores take.
_BLOCK_M = 16
# Outputs and inputs of a tile: 4096 outputs are 128 programs, about one for each multiprocessor of a large GPU.
_BLOCK_N, _BLOCK_K = 32, 128


def takes(x: torch.Tensor) -> bool:
    """Whether these rows are better off here: few, and of a type that tensor cores multiply."""
    return len(x) <= MAX_FEW_ROWS and x.dtype is not torch.float32


def int8_product(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x [T, k] times codes int8 [n, k] with scales fp32 [n] -> [T, n] in x's dtype."""
    x, y = x.contiguous(), torch.empty((len(x), len(codes)), dtype=x.dtype, device=x.device)
    _int8_tile[_grid(x, codes)](
        x, codes, scales, y, len(x), len(codes), x.shape[1], BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K,
        OPERAND=operand(x.dtype), num_warps=4, num_stages=4,
    )  # fmt: skip
    return y


def int4_product(x: torch.Tensor, pairs: torch.Tensor, steps: torch.Tensor, lows: torch.Tensor) -> torch.Tensor:
    """x [T, k] times nibbles, two to a byte (pairs uint8 [n, padded k / 2]), with steps and lows bf16 [n, groups]."""
    x, y = x.contiguous(), torch.empty((len(x), len(pairs)), dtype=x.dtype, device=x.device)
    _int4_tile[_grid(x, pairs)](
        x, pairs, steps, lows, y, len(x), len(pairs), x.shape[1], pairs.shape[1], steps.shape[1],
        PAIRS=GROUP // 2, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K // 2, OPERAND=operand(x.dtype),
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return y


def _grid(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    return -(-len(weight) // _BLOCK_N), -(-len(x) // _BLOCK_M)


@jit
def _int8_tile(
    x: tp.Any, codes: tp.Any, scales: tp.Any, y: tp.Any, num_rows: tp.Any, num_outputs: tp.Any, num_inputs: tp.Any,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OPERAND: tl.constexpr,
) -> None:  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = x + m[:, None].to(tl.int64) * num_inputs
    weights = codes + n[:, None].to(tl.int64) * num_inputs
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k[None, :] < num_inputs
        left = tl.load(rows + k[None, :], mask=inside & (m[:, None] < num_rows), other=0.0).to(OPERAND)
        right = tl.load(weights + k[None, :], mask=inside & (n[:, None] < num_outputs), other=0)
        sums = tl.dot(left, tl.trans(right.to(OPERAND)), sums, input_precision="ieee")
    sums *= tl.load(scales + n, mask=n < num_outputs, other=0.0)[None, :]
    target = y + m[:, None].to(tl.int64) * num_outputs + n[None, :]
    tl.store(target, sums.to(y.dtype.element_ty), mask=(m[:, None] < num_rows) & (n[None, :] < num_outputs))


@jit
def _int4_tile(
    x: tp.Any, pairs: tp.Any, steps: tp.Any, lows: tp.Any, y: tp.Any, num_rows: tp.Any, num_outputs: tp.Any,
    num_inputs: tp.Any, num_pairs: tp.Any, num_groups: tp.Any,
    PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OPERAND: tl.constexpr,
) -> None:  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = x + m[:, None].to(tl.int64) * num_inputs
    weights = pairs + n[:, None].to(tl.int64) * num_pairs
    groups = n[:, None].to(tl.int64) * num_groups
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_pairs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k[None, :] < num_pairs) & (n[:, None] < num_outputs)
        both = tl.load(weights + k[None, :], mask=inside, other=0)
        at = groups + k[None, :] // PAIRS
        step = tl.load(steps + at, mask=inside, other=0.0).to(tl.float32)
        low = tl.load(lows + at, mask=inside, other=0.0).to(tl.float32)
        there = m[:, None] < num_rows
        even = tl.load(rows + 2 * k[None, :], mask=there & (2 * k[None, :] < num_inputs), other=0.0).to(OPERAND)
        odd = tl.load(rows + 2 * k[None, :] + 1, mask=there & (2 * k[None, :] + 1 < num_inputs), other=0.0).to(OPERAND)
        first = ((both & 15).to(tl.float32) * step + low).to(OPERAND)
        second = ((both >> 4).to(tl.float32) * step + low).to(OPERAND)
        sums = tl.dot(even, tl.trans(first), sums, input_precision="ieee")
        sums = tl.dot(odd, tl.trans(second), sums, input_precision="ieee")
    target = y + m[:, None].to(tl.int64) * num_outputs + n[None, :]
    tl.store(target, sums.to(y.dtype.element_ty), mask=(m[:, None] < num_rows) & (n[None, :] < num_outputs))
