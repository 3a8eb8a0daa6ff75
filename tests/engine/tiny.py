"""Tiny models of every family, made by transformers and saved as folders, and sessions to run them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.batch import Segment
from engine.runner import ModelRunner
from kernels.attention import torch_native
from kernels.attention.layout import AttentionLayout

VOCAB_SIZE = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 64}


def configs() -> dict[str, transformers.PretrainedConfig]:
    """A config of each family and variant that the engine claims."""
    return {
        "llama": transformers.LlamaConfig(**SHAPE),
        "llama-tied": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
        "llama-biased": transformers.LlamaConfig(**SHAPE, attention_bias=True),
        "llama3-rope": transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
        "llama-linear-rope": transformers.LlamaConfig(
            **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
        ),
        "llama-yarn-rope": transformers.LlamaConfig(**SHAPE, rope_parameters=YARN),
        "mistral": transformers.MistralConfig(**SHAPE, sliding_window=None),
        "qwen2": transformers.Qwen2Config(**SHAPE),
        "qwen3": transformers.Qwen3Config(**SHAPE),
    }


def other_families(vocab_size: int, hidden_size: int) -> dict[str, transformers.PretrainedConfig]:
    """Models of seven layers that transformers runs and whose files name sizes or tensors in ways of their own.

    OPT's output head reads its decoder, past the base model.
    """
    ids: dict[str, Any] = {"vocab_size": vocab_size, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    shape: dict[str, Any] = {
        "hidden_size": hidden_size, "num_hidden_layers": 7, "num_attention_heads": 4, "max_position_embeddings": 256,
    }  # fmt: skip
    return {
        "gpt2": transformers.GPT2Config(
            n_embd=hidden_size, n_layer=7, n_head=4, n_positions=256, initializer_range=0.2, **ids
        ),
        "gpt-neox": transformers.GPTNeoXConfig(intermediate_size=96, initializer_range=0.2, **shape, **ids),
        "opt": transformers.OPTConfig(
            ffn_dim=96, word_embed_proj_dim=hidden_size, init_std=0.2, **shape, **ids
        ),
    }  # fmt: skip


def save_model(name: str, folder: Path, *, vocab_size: int = VOCAB_SIZE) -> transformers.PreTrainedModel:
    """A random model of the family, weights and biases included, saved to `folder` and returned in fp32."""
    torch.manual_seed(len(name))
    config = configs()[name]
    config.vocab_size = vocab_size
    config.architectures = None
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            assert parameter.isfinite().all(), parameter_name
    model.save_pretrained(folder)
    return model


def saved_model(name: str) -> Any:
    """A fixture for a module: the folder of such a model."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp(name)
        save_model(name, path)
        return path

    return folder


class Session:
    """One sequence in a runner: hands out slots in a scattered order and writes the slot table, as a scheduler does."""

    def __init__(self, runner: ModelRunner, table_row: int, slots: np.ndarray) -> None:
        self.runner = runner
        self.table_row = table_row
        self.free = list(slots)
        self.length = 0

    def segment(self, tokens: list[int], num_logits: int | None = None) -> Segment:
        """The next tokens, committed: a prefill chunk or a decode step."""
        slots = self.take(len(tokens))
        wanted = len(tokens) if num_logits is None else num_logits
        segment = Segment(self.table_row, self.length, np.array(tokens, np.int32), slots, num_logits=wanted)
        self.runner.slot_table[self.table_row, self.length : self.length + len(tokens)] = slots
        self.length += len(tokens)
        return segment

    def tree(self, tokens: list[int], parents: list[int]) -> Segment:
        """Root and nodes below the committed tokens, not committed. `parents` by row; the root's is -1."""
        depths, mask = np.zeros(len(tokens), np.int32), np.eye(len(tokens), dtype=np.bool_)
        for row, parent in enumerate(parents):
            if parent >= 0:
                depths[row] = depths[parent] + 1
                mask[row] |= mask[parent]
        return Segment(
            self.table_row, self.length, np.array(tokens, np.int32), self.take(len(tokens)), depths, mask, len(tokens)
        )

    def take(self, count: int) -> np.ndarray:
        """Slots for `count` rows."""
        taken, self.free = self.free[:count], self.free[count:]
        return np.array(taken, np.int32)


def sessions(runner: ModelRunner, count: int, seed: int = 0) -> list[Session]:
    """Sessions that share the pool, their slots interleaved at random."""
    order = np.random.default_rng(seed).permutation(runner.pool.num_slots).astype(np.int32)
    return [Session(runner, row, slots) for row, slots in enumerate(np.array_split(order, count))]


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids of the tiny vocabulary."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist()


class Recorded:
    """torch's attention, and what came to it: rows of single segments, and whether they were trees."""

    def __init__(self) -> None:
        self.segments: set[tuple[int, bool]] = set()
        self.count = 0

    def __call__(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layout: AttentionLayout, scale: float,
        **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        self.segments.add((int(layout.num_rows[0]), bool(layout.mask_starts[0] >= 0)))
        self.count += 1
        return torch_native.attention(q, k_pool, v_pool, layout, scale, **options)
