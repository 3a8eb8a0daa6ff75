"""A decoder layer as heads use it: Llama's, with the parts that heads leave out or widen left to the caller."""

from __future__ import annotations

import torch

from engine.config import ModelConfig
from engine.models.heads.base import Attend, MakeLinear, Shapes, Tensors
from engine.models.llama_weights import tensor_shapes
from kernels.gating import gated
from kernels.norm import add_rms_norm, rms_norm

_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def block_shapes(config: ModelConfig, *, input_width: int | None = None) -> Shapes:
    """A layer's tensors by their names within it; `input_width`: what q, k and v read, where not hidden_size."""
    prefix = "model.layers.0."
    every = tensor_shapes(config).items()
    shapes = {name.removeprefix(prefix): shape for name, shape in every if name.startswith(prefix)}
    for name in _INPUTS if input_width is not None else ():
        shapes[f"{name}.weight"] = (shapes[f"{name}.weight"][0], input_width or 0)
    return shapes


class Block:
    """One layer; `index` names its keys and values to `attend`. q, k, v go as one matrix, gate and up as another."""

    def __init__(self, config: ModelConfig, index: int, tensors: Tensors, make_linear: MakeLinear) -> None:
        self.config = config
        self.index = index
        self.input_norm = tensors.get("input_layernorm.weight")
        self.post_norm = tensors["post_attention_layernorm.weight"]
        self.q_norm = tensors.get("self_attn.q_norm.weight")
        self.k_norm = tensors.get("self_attn.k_norm.weight")
        bias = torch.cat([tensors[f"{name}.bias"] for name in _INPUTS]) if config.qkv_bias else None
        self.qkv = make_linear(torch.cat([tensors[f"{name}.weight"] for name in _INPUTS]), bias)
        self.output = make_linear(tensors["self_attn.o_proj.weight"], tensors.get("self_attn.o_proj.bias"))
        self.gate_up = make_linear(torch.cat([tensors["mlp.gate_proj.weight"], tensors["mlp.up_proj.weight"]]), None)
        self.down = make_linear(tensors["mlp.down_proj.weight"], None)

    def __call__(self, x: torch.Tensor, rope: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Rows x [T, hidden] through the layer, which has no input norm where its checkpoint has none."""
        normed = x if self.input_norm is None else rms_norm(x, self.input_norm, self.config.rms_eps)
        return self.mlp(x, self.attention(normed, rope, attend))

    def attention(self, x: torch.Tensor, rope: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Attention of rows x [T, input width], normalised already; rope [T, 2, head_dim / 2]. [T, hidden]"""
        config = self.config
        heads = self.qkv(x).view(len(x), -1, config.head_dim)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, config.rms_eps), rms_norm(k, self.k_norm, config.rms_eps)
        mixed = attend(self.index, q, k, v, rope)
        return self.output(mixed.reshape(len(x), config.q_size))

    def mlp(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] plus what attention made of it, plus the MLP of that sum."""
        x, normed = add_rms_norm(x, attended, self.post_norm, self.config.rms_eps)
        return x + self.down(gated(self.gate_up(normed)))


def within(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors below `prefix`, by what follows it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
