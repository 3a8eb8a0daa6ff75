"""The kinds of draft network that are trained, and the config.json of each, from the target's.

A kind knows its shape and how its rows lie: row r holds token r + shift. A head pairs a token with the state before it
(shift 1); a draft model reads tokens as they are (shift 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import torch

from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.models.heads.base import Attend, Head, HeadConfig, MakeLinear, Shapes, Tensors, Vocabulary
from engine.models.heads.block import Block, within
from engine.models.heads.config import RawConfig
from engine.models.heads.eagle import EagleConfig
from engine.models.heads.eagle3 import Eagle3Config
from engine.models.heads.mtp import MtpConfig
from engine.models.heads.names import OUTPUT_HEAD
from engine.models.heads.target import TargetShape
from engine.models.llama_weights import tensor_shapes
from engine.weight_files import WEIGHTS_KEY
from kernels.norm import rms_norm
from outrider.errors import StartupError
from outrider.text_files import read_json
from training.copying import NUM_COPYING

EAGLE, EAGLE3, NEXTN, STANDALONE = ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
# Draft models of fewer layers copy the target's as they are.
_FEWEST_WITH_COPYING: Final = 3
# What a head's layer has in common with the target's.
_INHERITED: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """What is trained. values: its config.json; shift: see above; num_copying: last heads that start by copying."""

    algorithm: str
    values: dict[str, Any]
    config: HeadConfig
    features: FeatureSpec
    shift: int
    num_copying: int = 0

    @property
    def has_output_head(self) -> bool:
        """Whether it names tokens by an output head of its own."""
        return self.algorithm == EAGLE3

    def shapes(self, num_drafted: int) -> Shapes:
        """Every tensor that is trained, by the engine's names."""
        own: Shapes = {OUTPUT_HEAD: (num_drafted, self.config.block.hidden_size)} if self.has_output_head else {}
        return self.config.shapes() | own


def make_kind(
    algorithm: str, target: Path, *, draft_vocab_size: int, num_kv_heads: int | None, num_layers: int,
    fc_norm: bool = True,
) -> Kind:  # fmt: skip
    """The kind of that name for a target. draft_vocab_size, fc_norm: of EAGLE-3; num_layers: of STANDALONE."""
    values = _common(target, num_kv_heads)
    raw = RawConfig(target / "config.json", values)
    shape, num_copying = TargetShape.from_folder(target), 0
    if algorithm != STANDALONE and num_kv_heads is None:
        num_copying = NUM_COPYING
        for key in ("num_attention_heads", "num_key_value_heads"):
            values[key] += num_copying
    if algorithm == EAGLE:
        values |= {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
        config: HeadConfig = EagleConfig.read(raw, {})
    elif algorithm == EAGLE3:
        layers = usual_aux_layers(shape.num_layers)
        values |= {
            "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab_size,
            "target_hidden_size": shape.hidden_size, "num_aux_hidden_states": len(layers),
            # vLLM reads this one, layers whose entering state is meant, and the other as if it meant the same.
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "eagle_config": {
                "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            },
        } | ({"fc_norm": True} if fc_norm else {})  # fmt: skip
        config = Eagle3Config.read(raw, {})
    elif algorithm == NEXTN:
        values |= {"architectures": ["LlamaForCausalLMNextN"], "num_nextn_predict_layers": 1}
        config = MtpConfig.read(raw, "nextn", 1)
    else:
        return _standalone(target, num_layers)
    return Kind(algorithm, values, config, config.features(shape), shift=1, num_copying=num_copying)


def usual_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose entering states EAGLE-3 reads: SGLang's choice, and thirds of a target too shallow for it.

    StartupError for a target of fewer than three layers.
    """
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    if num_layers < 3:
        raise StartupError(f"the target has {num_layers} layers; EAGLE3 needs the states of three, EAGLE of one")
    return tuple(round(num_layers * third / 3) for third in (1, 2, 3))


def _common(target: Path, num_kv_heads: int | None) -> dict[str, Any]:
    raw, config = read_json(target / "config.json"), ModelConfig.from_folder(target)
    inherited = {key: raw[key] for key in _INHERITED if raw.get(key) is not None}
    return inherited | {
        "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1, "head_dim": config.head_dim,
        "num_key_value_heads": num_kv_heads or config.num_heads, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


def source_layers(num_target: int, num_draft: int) -> list[int | None]:
    """Which of the target's layers each of a draft model's begins as; None: the one that copies (`shallow`).

    The last two, or one of few, stand above it. A model without it takes the first, the last and layers between.
    """
    if num_draft < _FEWEST_WITH_COPYING or num_target < num_draft:
        steps = max(num_draft - 1, 1)
        return [round(i * (num_target - 1) / steps) if num_draft > 1 else num_target - 1 for i in range(num_draft)]
    above = 2 if num_draft >= 5 else 1
    first = list(range(num_draft - 1 - above))
    return [*first, None, *range(num_target - above, num_target)]


def _standalone(target: Path, num_layers: int) -> Kind:
    raw, whole = read_json(target / "config.json"), ModelConfig.from_folder(target)
    windows = _windows(whole.windows, source_layers(whole.num_layers, num_layers))
    values = raw | {"num_hidden_layers": num_layers} | _per_layer(raw, whole.architecture, windows or (0,) * num_layers)
    values.pop(WEIGHTS_KEY, None)  # an export's have their usual name
    config = ShallowConfig(replace(whole, num_layers=num_layers, windows=windows))
    return Kind(STANDALONE, values, config, FeatureSpec("none"), shift=0)


def _windows(whole: Sequence[int], sources: Sequence[int | None]) -> tuple[int, ...]:
    """A draft model's, by layer: those of the target's layers; the one that copies sees as far as any of the target's.

    So it does in a Mistral, whose config.json names one window for all layers.
    """
    if not whole:
        return ()
    furthest = 0 if 0 in whole else max(whole)
    return tuple(furthest if source is None else whole[source] for source in sources)


def _per_layer(raw: Mapping[str, Any], architecture: str, windows: Sequence[int]) -> dict[str, Any]:
    """Keys of config.json about single layers, for layers with these windows: `layer_types` where the target's has it,
    or where a count of layers that see all, which is all that Qwen's older files have, may not tell it."""
    values: dict[str, Any] = {}
    if raw.get("layer_types") is not None or (any(windows) and architecture != "MistralForCausalLM"):
        values["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    if raw.get("max_window_layers") is not None:
        values["max_window_layers"] = len(list(takewhile(lambda window: not window, windows)))
    return values


@dataclass(frozen=True, slots=True)
class ShallowConfig:
    """A copy of the target with fewer layers, as a head that takes no states."""

    block: ModelConfig
    family = "standalone"
    feature_width = 0

    def shapes(self) -> Shapes:
        """The layers and the final norm by their names in a model; embedding and head are the target's."""
        every = tensor_shapes(self.block)
        return {name: shape for name, shape in every.items() if name.startswith(("model.layers.", "model.norm."))}

    def features(self, target: TargetShape) -> FeatureSpec:
        """A draft model takes no features."""
        return FeatureSpec("none")

    def build(self, tensors: Tensors, vocabulary: Vocabulary, max_len: int, make_linear: MakeLinear) -> Head:
        """The network."""
        return ShallowModel(self, tensors, vocabulary, max_len, make_linear)


class ShallowModel(Head):
    """The network."""

    def __init__(
        self, config: ShallowConfig, tensors: Mapping[str, torch.Tensor], vocabulary: Vocabulary, max_len: int,
        make_linear: MakeLinear,
    ) -> None:  # fmt: skip
        super().__init__(config, vocabulary, max_len, make_linear)
        self._norm, self._eps = tensors["model.norm.weight"], config.block.rms_eps
        self._layers = [
            Block(config.block, index, within(tensors, f"model.layers.{index}."), make_linear)
            for index in range(config.block.num_layers)
        ]

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend, stage: int = 0
    ) -> torch.Tensor:
        """See Head; `states` are not read."""
        x, rope = self.embedding[tokens], self.rope[positions]
        for layer in self._layers:
            x = layer(x, rope, attend)
        return rms_norm(x, self._norm, self._eps)
