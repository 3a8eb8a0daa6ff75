"""kernels.paired_norms on a CUDA device, in Triton: a launch instead of four. Its speed has not been measured."""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations

import torch
import triton
import triton.language as tl

from kernels.norm_triton import normed
from kernels.triton_common import jit


def paired_norms(
    embedding: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor, embedding_norm: torch.Tensor,
    state_norm: torch.Tensor, eps: float,
) -> torch.Tensor:  # fmt: skip
    """Computes kernels.paired_norms; all of one dtype, rows contiguous."""
    num_rows, width = states.shape
    out = torch.empty((num_rows, 2 * width), dtype=states.dtype, device=states.device)
    block = triton.next_power_of_2(width)
    if num_rows:
        _paired_norms[(num_rows, 2)](
            embedding, tokens.contiguous(), states, embedding_norm, state_norm, out, eps,
            EMBEDDING_ROW=embedding.stride(0), STATE_ROW=states.stride(0), WIDTH=width, BLOCK=block,
            num_warps=max(1, min(16, block // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    return out


@jit
def _paired_norms(
    embedding: tp.Any, tokens: tp.Any, states: tp.Any, embedding_norm: tp.Any, state_norm: tp.Any, out: tp.Any,
    eps: tp.Any, EMBEDDING_ROW: tl.constexpr, STATE_ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Programs [T, 2]: of the embedding, then of the state."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if part == 0:
        token = tl.load(tokens + row).to(tl.int64)
        narrow = tl.load(embedding + token * EMBEDDING_ROW + column, mask=inside, other=0.0)
        weight = tl.load(embedding_norm + column, mask=inside, other=0.0)
    else:
        narrow = tl.load(states + row * STATE_ROW + column, mask=inside, other=0.0)
        weight = tl.load(state_norm + column, mask=inside, other=0.0)
    result = normed(narrow.to(tl.float32), weight, eps, WIDTH)
    tl.store(out + (row * 2 + part) * WIDTH + column, result, mask=inside)
