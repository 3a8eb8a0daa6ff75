"""Root-mean-square normalisation."""

from __future__ import annotations

import torch

from kernels.dispatch import runs_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; x [..., width], weight [width].

    The statistics are in fp32 whatever x's dtype is; the normalised x is rounded to x's dtype before the weight is
    applied, as the published models were trained.
    """
    if x.dim() in {2, 3} and _in_triton(x, weight):
        from kernels import norm_triton

        return norm_triton.rms_norm(x, weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + more, rounded to their dtype, and its rms_norm; x, more [T, width]."""
    if x.dim() == 2 and more.dtype is x.dtype and _in_triton(x, weight):
        from kernels import norm_triton

        return norm_triton.add_rms_norm(x, more, weight, eps)
    total = x + more
    return total, rms_norm(total, weight, eps)


def _in_triton(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return runs_triton(x) and weight.dim() == 1 and weight.dtype is x.dtype
