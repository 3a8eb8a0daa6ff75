"""Rotary embedding as a model's config has it."""

from __future__ import annotations

import torch

from engine.config import ModelConfig
from engine.rope_config import RopeScaling
from kernels.rope import rope_frequencies, rope_table


def rope_rows(config: ModelConfig, max_len: int) -> torch.Tensor:
    """cos and sin of every position, yarn's factor of attention in both, fp32 [max_len, 2, head_dim / 2]."""
    scaling = config.rope_scaling or RopeScaling("default", 1.0)
    frequencies = rope_frequencies(
        config.head_dim, config.rope_theta, kind=scaling.kind, factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor, high_freq_factor=scaling.high_freq_factor,
        original_max_position=scaling.original_max_position, truncate=scaling.truncate,
    )  # fmt: skip
    return rope_table(frequencies, max_len, scaling.attention_factor)
