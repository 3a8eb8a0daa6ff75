"""What an EAGLE-3 layer reads: tokens' embeddings and the states before them, each normed, side by side."""

from __future__ import annotations

import torch

from kernels.dispatch import runs_triton
from kernels.norm import rms_norm


def paired_norms(
    embedding: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor, embedding_norm: torch.Tensor,
    state_norm: torch.Tensor, eps: float,
) -> torch.Tensor:  # fmt: skip
    """embedding [vocab, width], tokens int [T], states [T, width], norms [width] -> [T, 2 * width]."""
    parts = embedding, states, embedding_norm, state_norm
    if runs_triton(states) and all(part.dtype is states.dtype and part.stride(-1) == 1 for part in parts):
        from kernels import paired_norms_triton

        return paired_norms_triton.paired_norms(embedding, tokens, states, embedding_norm, state_norm, eps)
    pair = rms_norm(embedding[tokens], embedding_norm, eps), rms_norm(states, state_norm, eps)
    return torch.cat(pair, dim=-1)
