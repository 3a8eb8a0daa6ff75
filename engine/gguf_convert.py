"""A Llama in GGUF, with a gpt2-style tokenizer, becomes a Hugging Face folder that any loader reads.

Knows llama.cpp's conventions: tensor names, the order of q and k rows, tokenizer metadata. Knows no network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from engine.progress import Progress
from engine.saving import save_tensors
from engine.tensors import OUTPUT_HEAD
from outrider.errors import StartupError

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3


def convert(gguf_path: Path, folder: Path) -> None:
    """Writes bf16 model.safetensors, config.json, generation_config.json and the tokenizer's two files to `folder`."""
    reader = gguf.GGUFReader(gguf_path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama" or meta.get("tokenizer.ggml.pre") != "smollm":
        raise StartupError(f"{gguf_path.name} is no SmolLM in Llama form")
    config = _config(meta)
    weights = _weights(reader, config["num_attention_heads"], config["num_key_value_heads"])
    config["tie_word_embeddings"] = OUTPUT_HEAD not in weights
    save_tensors(weights, folder / "model.safetensors")
    _write(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", ids)
    _write(folder / "tokenizer.json", _tokenizer(meta))
    _write(folder / "tokenizer_config.json", _tokenizer_config(meta))


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    num_heads = meta["llama.attention.head_count"]
    hidden_size = meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        # Stored as a 32-bit number; the decimal that was meant.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _weights(reader: gguf.GGUFReader, num_heads: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
    """All tensors in bf16, under Hugging Face's names."""
    weights = {}
    with Progress("Converting SmolLM2-135M-Instruct to safetensors") as progress:
        for index, tensor in enumerate(reader.tensors):
            full = gguf.dequantize(tensor.data, tensor.tensor_type)
            name, kind = _hugging_face_name(tensor.name)
            if kind in {"attn_q", "attn_k"}:
                full = _unpermute(full, num_heads if kind == "attn_q" else num_kv_heads)
            weights[name] = torch.from_numpy(np.array(full, dtype=np.float32)).to(torch.bfloat16)
            progress.at(index + 1, len(reader.tensors))
    return weights


def _hugging_face_name(name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` -> (`model.layers.3.self_attn.q_proj.weight`, `attn_q`)."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}", parts[2]
    if len(parts) == 2 and parts[0] in TOP_TENSORS:
        return f"{TOP_TENSORS[parts[0]]}.{parts[1]}", parts[0]
    raise StartupError(f"GGUF tensor {name!r} is unknown")


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """q or k rows [heads * head_dim, in] from llama.cpp's order (rotary pairs adjacent) to halves apart."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE; each digit is a word of its own, the rest is split as GPT-2 does."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, **_special(token)}
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def _special(token: str) -> dict[str, Any]:
    return {
        "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True,
    }  # fmt: skip


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    bos, eos, unknown, pad = (
        tokens[meta[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos", "unknown", "padding")
    )
    return {
        # The class that takes tokenizer.json as it stands; GPT-2's would put its own pre-tokenizer in place.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unknown,
        "pad_token": pad,
        "additional_special_tokens": [bos, eos],
        "chat_template": meta["tokenizer.chat_template"],
    }
