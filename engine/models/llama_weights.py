"""The tensors of a Llama-family decoder: their names and shapes in a checkpoint, and the fused form we compute with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from engine.config import ModelConfig
from engine.tensors import EMBEDDING, OUTPUT_HEAD


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint of such a model must have, in reading order."""
    hidden, q_size, kv_size = config.hidden_size, config.q_size, config.kv_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, q_size),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (config.intermediate_size, hidden),
            "mlp.up_proj.weight": (config.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
        if config.qkv_bias:
            layer["self_attn.q_proj.bias"] = (q_size,)
            layer["self_attn.k_proj.bias"] = layer["self_attn.v_proj.bias"] = (kv_size,)
        if config.output_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes[OUTPUT_HEAD] = (config.vocab_size, hidden)
    return shapes


@dataclass(slots=True)
class LayerWeights:
    """One layer, fused: qkv [q + 2 kv, hidden], gate_up [2 ffn, hidden] (gate above up), in the dtype computed with."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def fused(cls, tensors: Mapping[str, torch.Tensor]) -> LayerWeights:
        """Makes a layer's weights of its tensors, by their names within the layer."""
        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        has_bias = "self_attn.q_proj.bias" in tensors
        return cls(
            input_norm=tensors["input_layernorm.weight"],
            qkv=torch.cat([tensors[f"{name}.weight"] for name in attention]),
            qkv_bias=torch.cat([tensors[f"{name}.bias"] for name in attention]) if has_bias else None,
            q_norm=tensors.get("self_attn.q_norm.weight"),
            k_norm=tensors.get("self_attn.k_norm.weight"),
            output=tensors["self_attn.o_proj.weight"],
            output_bias=tensors.get("self_attn.o_proj.bias"),
            post_norm=tensors["post_attention_layernorm.weight"],
            gate_up=torch.cat([tensors["mlp.gate_proj.weight"], tensors["mlp.up_proj.weight"]]),
            down=tensors["mlp.down_proj.weight"],
        )


@dataclass(slots=True)
class TopWeights:
    """What is outside the layers; `head` is `embedding` itself in a tied model whose output rows are all wanted."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor


class LlamaWeights:
    """A decoder's weights, read layer by layer so that one layer at a time is held twice while it is being packed.

    Iterate `layers()` to its end, then take `top()`. `dtype` None: each tensor in the dtype that it is stored in.
    output_rows: int64 [n]: the ids whose rows of the output head are wanted; None: all.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Iterator[tuple[str, torch.Tensor]],
        dtype: torch.dtype | None,
        device: torch.device,
        output_rows: torch.Tensor | None = None,
    ) -> None:
        self._config = config
        self._output_rows = output_rows
        self._tensors = tensors
        self._dtype = dtype
        self._device = device
        self._top: dict[str, torch.Tensor] = {}

    def layers(self) -> Iterator[LayerWeights]:
        """The layers in order."""
        current, found = 0, {}
        for name, tensor in self._tensors:
            tensor = tensor.to(device=self._device, dtype=self._dtype or tensor.dtype)
            if not name.startswith("model.layers."):
                self._top[name] = tensor
                continue
            index, _, rest = name.removeprefix("model.layers.").partition(".")
            if int(index) != current:
                yield LayerWeights.fused(found)
                current, found = int(index), {}
            found[rest] = tensor
        yield LayerWeights.fused(found)

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]; from the first layer on."""
        return self._top[EMBEDDING]

    def top(self) -> TopWeights:
        """Embedding, final norm, head."""
        embedding = self.embedding
        head = embedding if self._config.tied_embeddings else self._top[OUTPUT_HEAD]
        if self._output_rows is not None:
            head = head[self._output_rows.to(head.device)]
        return TopWeights(embedding, self._top["model.norm.weight"], head)
