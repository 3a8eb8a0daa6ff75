"""Rotary embedding against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels.rope import apply_rope, rope_frequencies, rope_table

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
]  # fmt: skip


def config(scaling: dict[str, Any]) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=192, num_attention_heads=3, head_dim=64, max_position_embeddings=4096, rope_parameters=scaling
    )


def ours(scaling: dict[str, Any]) -> torch.Tensor:
    return rope_frequencies(
        64, scaling["rope_theta"], kind=scaling["rope_type"], factor=scaling.get("factor", 1.0),
        low_freq_factor=scaling.get("low_freq_factor", 1.0), high_freq_factor=scaling.get("high_freq_factor", 4.0),
        original_max_position=scaling.get("original_max_position_embeddings", 8192),
    )  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_rotation(scaling: dict[str, Any]) -> None:
    q, k = torch.randn(1, 3, 50, 64), torch.randn(1, 3, 50, 64)
    positions = torch.randint(0, 4096, (1, 50))
    cos, sin = LlamaRotaryEmbedding(config(scaling))(q, positions)
    expected, _ = apply_rotary_pos_emb(q, k, cos, sin)
    table = rope_table(ours(scaling), 4096)
    assert table.shape == (4096, 2, 32)
    rotated = apply_rope(q[0].transpose(0, 1), table[positions[0]])
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), atol=1e-5, rtol=0)


def test_llama3_frequencies() -> None:
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config(SCALINGS[2]), torch.device("cpu"))
    torch.testing.assert_close(ours(SCALINGS[2]), expected, atol=0, rtol=1e-6)


def test_the_dtype_is_kept_and_position_0_does_nothing() -> None:
    x = torch.randn(4, 2, 64).bfloat16()
    table = rope_table(rope_frequencies(64, 1e4), 8)
    assert torch.equal(apply_rope(x, table[:1].expand(4, -1, -1)), x)


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="'dynamic'"):
        rope_frequencies(64, 1e4, kind="dynamic")
