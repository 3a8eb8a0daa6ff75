"""Random heads of every family, written as their authors publish them, and a tiny target to share tensors with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 80, 8
NARROW = 48  # tokens that a head with a vocabulary of its own drafts

CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk: its folder, and what was written, by the names in the file."""

    folder: Path
    config: dict[str, Any]
    tensors: Tensors


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Written:
    """Saves a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return Written(folder, config, tensors)


def rewrite(written: Written, *, drop: tuple[str, ...] = (), **changes: Any) -> Written:
    """The same checkpoint with config values changed and tensors replaced (given by name) or dropped."""
    tensors = load_file(written.folder / "model.safetensors")
    new = changes.pop("tensors", {})
    kept = {name: tensor for name, tensor in (tensors | new).items() if name not in drop}
    return write(written.folder, written.config | changes, kept)


def noise(generator: torch.Generator, *shape: int, gain: float = 1.0) -> torch.Tensor:
    """Random numbers that keep activations near 1."""
    return torch.randn(shape, generator=generator) * gain * shape[-1] ** -0.5


def norm(generator: torch.Generator, width: int = HIDDEN) -> torch.Tensor:
    """A norm's weight."""
    return 1.0 + 0.2 * torch.randn(width, generator=generator)


def layer(generator: torch.Generator, *, inputs: int = HIDDEN, bias: bool = False, qk_norm: bool = False) -> Tensors:
    """A decoder layer's tensors by their names within it."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "input_layernorm.weight": norm(generator),
        "self_attn.q_proj.weight": noise(generator, q, inputs, gain=2.0),
        "self_attn.k_proj.weight": noise(generator, kv, inputs, gain=2.0),
        "self_attn.v_proj.weight": noise(generator, kv, inputs),
        "self_attn.o_proj.weight": noise(generator, HIDDEN, q),
        "post_attention_layernorm.weight": norm(generator),
        "mlp.gate_proj.weight": noise(generator, FFN, HIDDEN, gain=2.0),
        "mlp.up_proj.weight": noise(generator, FFN, HIDDEN),
        "mlp.down_proj.weight": noise(generator, HIDDEN, FFN),
    }
    if bias:
        for name, width in (("q", q), ("k", kv), ("v", kv)):
            tensors[f"self_attn.{name}_proj.bias"] = 0.3 * torch.randn(width, generator=generator)
    if qk_norm:
        tensors |= {f"self_attn.{name}_norm.weight": norm(generator, HEAD_DIM) for name in "qk"}
    return tensors


def below(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors with a prefix before their names."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def write_target(folder: Path, seed: int = 1, **changes: Any) -> Written:
    """A target: all that a head may need of one."""
    generator = torch.Generator().manual_seed(seed)
    config = CONFIG | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS} | changes
    tensors = {
        "model.embed_tokens.weight": torch.randn((VOCAB, HIDDEN), generator=generator),
        "model.norm.weight": norm(generator),
    }
    for index in range(LAYERS):
        tensors |= below(f"model.layers.{index}.", layer(generator))
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = noise(generator, VOCAB, HIDDEN, gain=2.0)
    return write(folder, config, tensors)


def eagle(folder: Path, seed: int = 2, *, bias: bool = True, qkv_bias: bool = False, layers: int = 1) -> Written:
    """EAGLE-1/2 in SGLang's layout."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"fc.weight": noise(generator, HIDDEN, 2 * HIDDEN)}
    if bias:
        tensors["fc.bias"] = 0.3 * torch.randn(HIDDEN, generator=generator)
    for index in range(layers):
        tensors |= below(f"layers.{index}.", layer(generator, bias=qkv_bias))
    del tensors["layers.0.input_layernorm.weight"]
    config = CONFIG | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": layers, "bias": bias}
    return write(folder, config | ({"qkv_bias": True} if qkv_bias else {}), tensors)


def eagle3(
    folder: Path, seed: int = 3, *, spelling: str = "midlayer", layers: int = 1, qk_norm: bool = False,
    narrow: bool = True, **config: Any,
) -> Written:  # fmt: skip
    """EAGLE-3: the layer spelt `midlayer` (EAGLE, SGLang) or `layers.0` (speculators, vLLM)."""
    generator = torch.Generator().manual_seed(seed)
    num_aux = config.get("num_aux_hidden_states", 3)
    tensors = {"fc.weight": noise(generator, HIDDEN, num_aux * HIDDEN), "norm.weight": norm(generator)}
    tensors |= below(f"{spelling}.", layer(generator, inputs=2 * HIDDEN, qk_norm=qk_norm))
    tensors[f"{spelling}.hidden_norm.weight"] = norm(generator)
    for index in range(1, layers):
        tensors |= below(f"layers.{index}.", layer(generator, qk_norm=qk_norm))
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": norm(generator) for index in range(num_aux)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(generator, num_aux * HIDDEN)
    if config.get("bias"):
        tensors["fc.bias"] = 0.3 * torch.randn(HIDDEN, generator=generator)
    own: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": layers}
    if narrow:
        ids = torch.randperm(VOCAB, generator=generator)[:NARROW].sort().values
        tensors["lm_head.weight"] = noise(generator, NARROW, HIDDEN, gain=2.0)
        tensors["d2t"] = ids - torch.arange(NARROW)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        own["draft_vocab_size"] = NARROW
    if qk_norm:
        own["model_type"] = "qwen3"
    return write(folder, CONFIG | own | config, tensors)


def add_nextn(target: Written, seed: int = 4) -> Written:
    """DeepSeek's layout: the layer after the target's last."""
    generator = torch.Generator().manual_seed(seed)
    prefix = f"model.layers.{LAYERS}."
    own = {
        "enorm.weight": norm(generator), "hnorm.weight": norm(generator),
        "eh_proj.weight": noise(generator, HIDDEN, 2 * HIDDEN), "shared_head.norm.weight": norm(generator),
        "shared_head.head.weight": torch.zeros(VOCAB, HIDDEN), "embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
    }  # fmt: skip
    return rewrite(target, tensors=below(prefix, own | layer(generator)), num_nextn_predict_layers=1)


def add_mimo(target: Written, seed: int = 5) -> Written:
    """MiMo-7B's layout: `mtp_layers` beside the target's own; Qwen2's biases."""
    generator = torch.Generator().manual_seed(seed)
    own = {
        "token_layernorm.weight": norm(generator), "hidden_layernorm.weight": norm(generator),
        "input_proj.weight": noise(generator, HIDDEN, 2 * HIDDEN), "final_layernorm.weight": norm(generator),
    }  # fmt: skip
    tensors = below("model.mtp_layers.0.", own | layer(generator, bias=True))
    return rewrite(target, tensors=tensors, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)


def add_multi_layer(target: Written, stages: int = 3, seed: int = 6) -> Written:
    """MiMo-V2's layout: a layer for each step."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for stage in range(stages):
        block = layer(generator)
        block["pre_mlp_layernorm.weight"] = block.pop("post_attention_layernorm.weight")
        own = {
            "enorm.weight": norm(generator), "hnorm.weight": norm(generator),
            "eh_proj.weight": noise(generator, HIDDEN, 2 * HIDDEN), "final_layernorm.weight": norm(generator),
        }  # fmt: skip
        tensors |= below(f"model.mtp.layers.{stage}.", own | block)
    return rewrite(target, tensors=tensors, architectures=["MiMoV2FlashForCausalLM"])
