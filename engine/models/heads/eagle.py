"""EAGLE-1 and EAGLE-2's head (Li et al., 2024): a decoder layer over the token's embedding and the state before it.

x = fc([embedding, state]); the first layer has no input norm; its output, without a final norm, goes to the target's
output head and is the next row's state. The two differ in how trees are grown, not in the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.models.heads.base import (
    Attend,
    Entry,
    Head,
    HeadParts,
    MakeLinear,
    Shapes,
    Tensors,
    Vocabulary,
)  # fmt: skip
from engine.models.heads.block import Block, block_shapes, within
from engine.models.heads.config import RawConfig, check_fits
from engine.models.heads.target import TargetShape


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Shape of an EAGLE head."""

    raw: RawConfig
    block: ModelConfig
    has_fc_bias: bool
    family = "eagle"

    @classmethod
    def read(cls, raw: RawConfig, stored: Shapes) -> Self:
        """Reads config.json. `bias` and `qkv_bias` say which biases there are; where they do not, the tensors do."""
        raw.refuse("layernorms")
        has_qkv_bias = raw.flag("qkv_bias", "layers.0.self_attn.q_proj.bias" in stored)
        like = "Qwen2ForCausalLM" if has_qkv_bias else "LlamaForCausalLM"
        block = raw.block(like, num_layers=raw.count("num_hidden_layers", 1))
        return cls(raw, block, raw.flag("bias", "fc.bias" in stored))

    @property
    def feature_width(self) -> int:
        """Numbers in a feature row: the target's last state."""
        return self.block.hidden_size

    def shapes(self) -> Shapes:
        """Tensors by their published names."""
        hidden = self.block.hidden_size
        shapes: Shapes = {"fc.weight": (hidden, 2 * hidden)}
        if self.has_fc_bias:
            shapes["fc.bias"] = (hidden,)
        for index in range(self.block.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in block_shapes(self.block).items()}
        del shapes["layers.0.input_layernorm.weight"]
        return shapes

    def features(self, target: TargetShape) -> FeatureSpec:
        """The state that feeds the target's output head."""
        check_fits(self.raw.path, target, hidden_size=self.block.hidden_size, vocab_size=self.block.vocab_size)
        return FeatureSpec("last")

    def build(self, tensors: Tensors, vocabulary: Vocabulary, max_len: int, make_linear: MakeLinear) -> EagleHead:
        """The network."""
        return EagleHead(self, tensors, vocabulary, max_len, make_linear)


class EagleHead(Head):
    """The network."""

    def __init__(
        self, config: EagleConfig, tensors: Tensors, vocabulary: Vocabulary, max_len: int, make_linear: MakeLinear
    ) -> None:
        super().__init__(config, vocabulary, max_len, make_linear)
        # Embeddings are small beside states, and their weights large: rounded together, the states' would be lost.
        of_embedding, of_state = tensors["fc.weight"].split(config.block.hidden_size, dim=1)
        self._fc_embedding = make_linear(of_embedding.contiguous(), tensors.get("fc.bias"))
        self._fc_state = make_linear(of_state.contiguous(), None)
        self._layers = [
            Block(config.block, index, within(tensors, f"layers.{index}."), make_linear)
            for index in range(config.block.num_layers)
        ]

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend, stage: int = 0
    ) -> torch.Tensor:
        """See Head."""
        rope = self.rope[positions]
        x = self._fc_embedding(self.embedding[tokens]) + self._fc_state(states)
        for layer in self._layers:
            x = layer(x, rope, attend)
        return x

    def parts(self) -> HeadParts:
        """See Head."""
        joins = self._fc_embedding, self._fc_state
        return HeadParts(entry=Entry.APART, joins=joins, layers=self._layers, output=self.output)
