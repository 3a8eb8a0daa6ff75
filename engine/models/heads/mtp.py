"""Multi-token-prediction layers: a whole decoder layer over the token's embedding and the state before it, both normed.

DeepSeek-V3's NextN (2024) joins [embedding, state], MiMo-7B's [state, embedding] with a zero embedding at position 0.
One layer is run again and again. Multi-layer heads (MiMo-V2) have a layer, a stage, for each step: stage i reads the
token i + 1 places ahead of the state, and always the target's state before its final norm. All use the target's output
head. Dense MLPs and ordinary attention only; a mixture of experts or latent attention is refused.
"""

from __future__ import annotations

from collections.abc import Collection
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
    Rows,
    Shapes,
    Tensors,
    Vocabulary,
)  # fmt: skip
from engine.models.heads.block import Block, block_shapes, within
from engine.models.heads.config import RawConfig, check_fits
from engine.models.heads.target import TargetShape
from kernels.norm import rms_norm

# Keys of config.json that change the layer's arithmetic in ways not covered here.
_UNSUPPORTED = ("kv_lora_rank", "q_lora_rank", "add_swa_attention_sink_bias", "add_full_attention_sink_bias")


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Shape of such a head: `num_stages` layers, each with norms and a projection of its own."""

    raw: RawConfig
    block: ModelConfig
    family: str

    @classmethod
    def read(cls, raw: RawConfig, family: str, num_stages: int, stored: Collection[str] = ()) -> Self:
        """Reads config.json; `family` is nextn, mimo or multi-layer, `stored` its tensors' names, if any."""
        raw.refuse(*_UNSUPPORTED)
        if family == "multi-layer":
            raw = _sliding_window_attention(raw)
        like = raw.layer_like(stored)
        if family == "mimo" or (like == "LlamaForCausalLM" and raw.flag("attention_bias", False)):
            like = "Qwen2ForCausalLM"  # biases on q, k and v, and not on the output
        return cls(raw, raw.block(like, num_layers=num_stages), family)

    @property
    def feature_width(self) -> int:
        """Numbers in a feature row: the target's last state."""
        return self.block.hidden_size

    def shapes(self) -> Shapes:
        """Tensors by NextN's names, with the stage before them: `0.enorm.weight`."""
        hidden = self.block.hidden_size
        stage: Shapes = {
            "enorm.weight": (hidden,),
            "hnorm.weight": (hidden,),
            "eh_proj.weight": (hidden, 2 * hidden),
            "norm.weight": (hidden,),
            **block_shapes(self.block),
        }
        return {f"{i}.{name}": shape for i in range(self.block.num_layers) for name, shape in stage.items()}

    def features(self, target: TargetShape) -> FeatureSpec:
        """The state after the target's final norm; for multi-layer heads the one before it."""
        check_fits(self.raw.path, target, hidden_size=self.block.hidden_size, vocab_size=self.block.vocab_size)
        return FeatureSpec("aux", (target.num_layers,)) if self.family == "multi-layer" else FeatureSpec("last")

    def build(self, tensors: Tensors, vocabulary: Vocabulary, max_len: int, make_linear: MakeLinear) -> MtpHead:
        """The network."""
        return MtpHead(self, tensors, vocabulary, max_len, make_linear)


class MtpHead(Head):
    """The network."""

    def __init__(
        self, config: MtpConfig, tensors: Tensors, vocabulary: Vocabulary, max_len: int, make_linear: MakeLinear
    ) -> None:
        super().__init__(config, vocabulary, max_len, make_linear)
        self._is_mimo = config.family == "mimo"
        self._stages = [
            _Stage(config, index, within(tensors, f"{index}."), make_linear) for index in range(config.block.num_layers)
        ]
        self.num_stages = len(self._stages)

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend, stage: int = 0
    ) -> torch.Tensor:
        """See Head."""
        embedded = self.embedding[tokens]
        if self._is_mimo:
            embedded = embedded * (positions != 0)[:, None].to(embedded.dtype)
        return self._stages[stage](embedded, states, self.rope[positions], attend)

    def parts(self) -> HeadParts | None:
        """See Head. MiMo's order and its first position are its own, and stages are several networks."""
        return None if self._is_mimo or self.num_stages > 1 else self._stages[0].parts(self.output)


class _Stage:
    """One layer with what is around it."""

    def __init__(self, config: MtpConfig, index: int, tensors: Tensors, make_linear: MakeLinear) -> None:
        self._eps = config.block.rms_eps
        self._state_first = config.family == "mimo"
        self._embedding_norm = tensors["enorm.weight"]
        self._state_norm = tensors["hnorm.weight"]
        self._joined = make_linear(tensors["eh_proj.weight"], None)
        self._layer = Block(config.block, index, tensors, make_linear)
        self._norm = tensors["norm.weight"]

    def __call__(
        self, embedded: torch.Tensor, states: torch.Tensor, rope: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        pair = [rms_norm(embedded, self._embedding_norm, self._eps), rms_norm(states, self._state_norm, self._eps)]
        x = self._joined(torch.cat(pair[::-1] if self._state_first else pair, dim=-1))
        return rms_norm(self._layer(x, rope, attend), self._norm, self._eps)

    def parts(self, output: Rows) -> HeadParts:
        return HeadParts(
            entry=Entry.PAIR, joins=[self._joined], embedding_norm=self._embedding_norm, state_norm=self._state_norm,
            layers=[self._layer], final_norm=self._norm, output=output, carry_normed=True,
        )  # fmt: skip


def _sliding_window_attention(raw: RawConfig) -> RawConfig:
    """MiMo-V2's stages have the shape of its sliding-window layers, which its config names apart."""
    values = dict(raw.values)
    for key, own in (
        ("num_attention_heads", "swa_num_attention_heads"), ("num_key_value_heads", "swa_num_key_value_heads"),
        ("head_dim", "swa_head_dim"), ("rope_theta", "swa_rope_theta"), ("rms_norm_eps", "layernorm_epsilon"),
        ("sliding_window", "sliding_window_size"),
    ):  # fmt: skip
        values[key] = values.get(own, values.get(key))
    values_dim = values.get("swa_v_head_dim", values.get("v_head_dim"))
    if values_dim not in (None, values.get("head_dim")):
        raw.fail(f"values of head_dim {values_dim} with keys of {values.get('head_dim')} are not supported in a head")
    return RawConfig(raw.path, {key: value for key, value in values.items() if value is not None})
