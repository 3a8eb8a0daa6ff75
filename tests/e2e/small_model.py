"""A model that starts in no time: a small random Llama with a byte-level tokenizer and a chat template.

It says nonsense, but serves as well as a large model: in fp32 it is as exact, it soon repeats itself, so that n-gram
drafts are accepted, and it is so sure of its tokens that no sampling boundary is near.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.gateway import models

CONTEXT = 1024


def write_small_model(folder: Path) -> Path:
    """Writes weights, tokenizer and template into `folder`, and returns it."""
    tokenizer = models.byte_level()
    models.write_folder(folder, tokenizer)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    config.architectures = None
    torch.manual_seed(7)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().save_pretrained(folder)
    return folder
