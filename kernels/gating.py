"""The gate of a Llama MLP."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from kernels.dispatch import runs_triton


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows [T, 2 ffn], gate before up: [T, ffn]."""
    if runs_triton(gate_up):
        from kernels import norm_triton

        return norm_triton.gated(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
