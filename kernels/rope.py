"""Rotary position embedding, halves apart: pair i is (x[i], x[i + head_dim / 2])."""

from __future__ import annotations

import math

import torch


def rope_frequencies(
    head_dim: int,
    theta: float,
    *,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position: int = 8192,
    truncate: bool = True,
) -> torch.Tensor:
    """Radians per position, fp32 [head_dim / 2], highest first.

    `linear` divides them by `factor`. `llama3` (Llama 3.1) leaves wavelengths below original_max_position /
    high_freq_factor, divides those above original_max_position / low_freq_factor, and blends linearly in between.
    `yarn` (Peng et al., 2023) has the same two bounds, rounded outwards to whole pairs if `truncate`, and blends
    linearly over the pairs between them.
    """
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    frequencies = 1.0 / powers
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / factor
    if kind == "yarn":
        first, last = (
            head_dim * math.log(original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (high_freq_factor, low_freq_factor)
        )
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        last += 0.001 if first == last else 0
        kept = 1 - ((torch.arange(head_dim // 2).float() - first) / (last - first)).clamp(0, 1)
        return 1.0 / (factor * powers) * (1 - kept) + frequencies * kept
    if kind != "llama3":
        raise ValueError(f"rope scaling {kind!r} is unknown")
    turns = original_max_position / (2 * math.pi / frequencies)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / factor + kept * frequencies


def rope_table(frequencies: torch.Tensor, num_positions: int, scale: float = 1.0) -> torch.Tensor:
    """cos and sin of every position, times `scale`, fp32 [num_positions, 2, head_dim / 2]."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=1) * scale


def apply_rope(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rotates x [T, heads, head_dim] by table rows [T, 2, head_dim / 2]; computed in fp32, returned in x's dtype."""
    cos, sin = rows[:, 0, None], rows[:, 1, None]
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
