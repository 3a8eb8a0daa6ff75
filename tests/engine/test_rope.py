"""A config's rotary embedding against transformers' own, from the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.config import ModelConfig
from engine.rope import rope_rows
from tests.engine.tiny import LLAMA3

YARN = {"rope_type": "yarn", "factor": 4.0}
FILES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_scaling": YARN | {"original_max_position_embeddings": 256}, "rope_theta": 1e6},
    "yarn-older-spelling": {"rope_scaling": {"type": "yarn", "factor": 40}},
    "yarn-newer-file": {"rope_parameters": YARN | {"rope_theta": 5e5, "original_max_position_embeddings": 64}},
    "yarn-length-at-the-top": {"rope_scaling": YARN, "original_max_position_embeddings": 128},
    "yarn-bounds": {"rope_scaling": YARN | {"beta_fast": 8, "beta_slow": 2.5}},
    "yarn-bounds-on-one-pair": {"rope_scaling": YARN | {"beta_fast": 1.01}, "original_max_position_embeddings": 6},
    "yarn-not-truncated": {"rope_scaling": YARN | {"truncate": False}},
    "yarn-attention-factor": {"rope_scaling": YARN | {"attention_factor": 0.8, "mscale": 2, "mscale_all_dim": 1}},
    "yarn-two-scales": {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 1.4}},
    "yarn-one-scale": {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0}},
    "yarn-shorter": {"rope_scaling": YARN | {"factor": 0.5}},
    "yarn-factor-left-out": {"rope_scaling": YARN | {"factor": None, "original_max_position_embeddings": 256}},
}


@pytest.mark.parametrize("name", FILES)
def test_cos_and_sin_are_transformers_own(name: str, tmp_path: Path) -> None:
    shape = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 192,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3, "max_position_embeddings": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape | FILES[name]))
    table = rope_rows(ModelConfig.from_folder(tmp_path), 1024)
    rotary = LlamaRotaryEmbedding(transformers.LlamaConfig.from_pretrained(tmp_path))
    cos, sin = rotary(torch.empty(1), torch.arange(1024)[None])
    torch.testing.assert_close(table[:, 0], cos[0, :, :32], atol=1e-7, rtol=0)
    torch.testing.assert_close(table[:, 1], sin[0, :, :32], atol=1e-7, rtol=0)
