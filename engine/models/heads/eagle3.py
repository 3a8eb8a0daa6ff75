"""EAGLE-3's head (Li et al., 2025): a layer over the token's embedding beside several of the target's states, fused.

h = fc([states entering some of the target's layers]); the layer attends over [norm(embedding), norm(h)] and adds to h;
logits come from the normalised output through a head of its own, over a vocabulary that may be a part of the target's.
The output before that norm is the next row's h. Variants: layers after the first are Llama's; norms before fc, for
each state or for all together; the residual taken after the norm (speculators); the normed output carried on.
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
from kernels.native.library import WIDTH_UNIT
from kernels.native_linear import NativeLinear
from kernels.norm import rms_norm
from kernels.paired_norms import paired_norms
from outrider.errors import StartupError

NUM_AUX = 3


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shape of such a head. aux_layers: the target's layers whose entering states it reads, None for the usual."""

    raw: RawConfig
    block: ModelConfig
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None
    num_aux: int
    reads_aux: bool
    has_fc_bias: bool
    norms_each_aux: bool
    norms_all_aux: bool
    norm_before_residual: bool
    norm_output: bool
    draft_vocab_size: int | None
    family = "eagle3"

    @classmethod
    def read(cls, raw: RawConfig, stored: Shapes) -> Self:
        """Reads config.json, whose keys are SGLang's and, `norm_before_*` and aux layers at the top, speculators'.

        Layers are counted where they are stored: some configs give their target's number.
        """
        like = "Qwen3ForCausalLM" if raw.layer_like(stored) == "Qwen3ForCausalLM" else "LlamaForCausalLM"
        num_layers = len({name.split(".")[1] for name in stored if name.startswith("layers.")})
        block = raw.block(like, num_layers=num_layers or raw.count("num_hidden_layers", 1))
        reads_aux, layers = _aux_layers(raw)
        num_aux = raw.count("num_aux_hidden_states", NUM_AUX if layers is None else len(layers)) if reads_aux else 1
        if layers is not None and reads_aux and len(layers) != num_aux:
            raw.fail(f"num_aux_hidden_states is {num_aux}, but {len(layers)} aux layers are named: {list(layers)}")
        draft_vocab = raw.values.get("draft_vocab_size")
        return cls(
            raw=raw,
            block=block,
            target_hidden_size=raw.count("target_hidden_size", block.hidden_size),
            aux_layers=layers,
            num_aux=num_aux,
            reads_aux=reads_aux,
            has_fc_bias=raw.flag("bias", False),
            norms_each_aux=raw.flag("fc_norm", raw.flag("use_aux_norm", False)),
            norms_all_aux=raw.flag("norm_before_fc", False),
            norm_before_residual=raw.flag("norm_before_residual", False),
            norm_output=raw.flag("norm_output", False),
            draft_vocab_size=None if draft_vocab is None else raw.count("draft_vocab_size"),
        )

    @property
    def feature_width(self) -> int:
        """Numbers in a feature row: all the states together."""
        return self.num_aux * self.target_hidden_size

    @property
    def has_fc(self) -> bool:
        """Whether features are narrowed; one state of the head's own width is taken as it is."""
        return self.feature_width != self.block.hidden_size

    def shapes(self) -> Shapes:
        """Tensors by their published names, but `layers.0` for `midlayer`."""
        hidden = self.block.hidden_size
        shapes: Shapes = {"fc.weight": (hidden, self.feature_width)} if self.has_fc else {}
        if self.has_fc and self.has_fc_bias:
            shapes["fc.bias"] = (hidden,)
        for index in range(self.num_aux if self.norms_each_aux else 0):
            shapes[f"fc_norm.{index}.weight"] = (self.target_hidden_size,)
        if self.norms_all_aux:
            shapes["input_norm.weight"] = (self.feature_width,)
        shapes["layers.0.hidden_norm.weight"] = (hidden,)
        for index in range(self.block.num_layers):
            layer = block_shapes(self.block, input_width=2 * hidden if index == 0 else None)
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes | {"norm.weight": (hidden,)}

    def features(self, target: TargetShape) -> FeatureSpec:
        """The states entering its layers; by default the third, the middle and the third from the end's (SGLang's)."""
        check_fits(self.raw.path, target, hidden_size=self.target_hidden_size, vocab_size=self.block.vocab_size)
        if not self.reads_aux:
            return FeatureSpec("last")
        count = target.num_layers
        layers = (2, count // 2, count - 3) if self.aux_layers is None else self.aux_layers
        ascending = list(layers) == sorted(set(layers))
        if len(layers) != self.num_aux or not ascending or not 0 <= layers[0] <= layers[-1] <= count:
            raise StartupError(
                f"the draft head {self.raw.path.parent} goes on from {self.num_aux} states, entering layers "
                f"{list(layers)}; the target {target.folder} has {count} layers. The head's "
                f"eagle_aux_hidden_state_layer_ids must be {self.num_aux} ids, ascending and distinct"
            )
        return FeatureSpec("aux", layers)

    def build(self, tensors: Tensors, vocabulary: Vocabulary, max_len: int, make_linear: MakeLinear) -> Eagle3Head:
        """The network."""
        return Eagle3Head(self, tensors, vocabulary, max_len, make_linear)


class Eagle3Head(Head):
    """The network."""

    def __init__(
        self, config: Eagle3Config, tensors: Tensors, vocabulary: Vocabulary, max_len: int, make_linear: MakeLinear
    ) -> None:
        super().__init__(config, vocabulary, max_len, make_linear)
        self._shape = config
        self._eps = config.block.rms_eps
        self._fc = make_linear(tensors["fc.weight"], tensors.get("fc.bias")) if config.has_fc else None
        self._fc_norms: list[torch.Tensor] = []  # one after another; each [parts, width]: side by side, for one pass
        if config.norms_all_aux:
            self._fc_norms.append(tensors["input_norm.weight"][None])
        if config.norms_each_aux:
            self._fc_norms.append(torch.stack([tensors[f"fc_norm.{i}.weight"] for i in range(config.num_aux)]))
        self._wide_norms = None  # fp32: the last of them, where the kernel that multiplies does it
        if self._fc_norms and isinstance(self._fc, NativeLinear) and self._fc_norms[-1].shape[1] % WIDTH_UNIT == 0:
            self._wide_norms = self._fc_norms.pop().float().contiguous()
        self._embedding_norm = tensors["layers.0.input_layernorm.weight"]
        self._hidden_norm = tensors["layers.0.hidden_norm.weight"]
        self._norm = tensors["norm.weight"]
        self._layers = [
            Block(config.block, index, within(tensors, f"layers.{index}."), make_linear)
            for index in range(config.block.num_layers)
        ]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See Head."""
        for norms in self._fc_norms:
            features = rms_norm(features.unflatten(-1, norms.shape), norms, self._eps).flatten(-2)
        if self._wide_norms is not None:
            assert isinstance(self._fc, NativeLinear)
            return self._fc.of_normed(features, self._wide_norms, self._eps)
        return features if self._fc is None else self._fc(features)

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend, stage: int = 0
    ) -> torch.Tensor:
        """See Head."""
        rope = self.rope[positions]
        norms = self._embedding_norm, self._hidden_norm
        pair = paired_norms(self.embedding, tokens, states, *norms, self._eps)
        first, *others = self._layers
        residual = pair[:, states.shape[1] :] if self._shape.norm_before_residual else states
        x = first.mlp(residual, first.attention(pair, rope, attend))
        for layer in others:
            x = layer(x, rope, attend)
        return x

    def parts(self) -> HeadParts:
        """See Head."""
        fuses = isinstance(self._fc, NativeLinear) and not self._fc_norms
        return HeadParts(
            entry=Entry.BESIDE, embedding_norm=self._embedding_norm, state_norm=self._hidden_norm, layers=self._layers,
            final_norm=self._norm, output=self.output, residual_normed=self._shape.norm_before_residual,
            carry_normed=self._shape.norm_output, fuse=self._fc if fuses else None,
            fuse_norms=self._wide_norms if fuses else None,
        )  # fmt: skip

    def carried(self, outputs: torch.Tensor) -> torch.Tensor:
        """See Head."""
        return rms_norm(outputs, self._norm, self._eps) if self._shape.norm_output else outputs

    def narrow_logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """See Head."""
        return super().narrow_logits(rms_norm(outputs, self._norm, self._eps))


def _aux_layers(raw: RawConfig) -> tuple[bool, tuple[int, ...] | None]:
    """Whether the head reads layers' states, and which: those ENTERING the layers returned.

    SGLang's `eagle_config` names layers whose output is meant; speculators and vLLM, at the top, those entered.
    """
    nested = raw.values.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raw.fail("eagle_config must be an object")
    key = "eagle_aux_hidden_state_layer_ids"
    ids, shift = (nested[key], 1) if nested.get(key) else (raw.values.get(key), 0)
    if nested.get("use_aux_hidden_state") is False:
        return False, None
    if not ids:
        return True, None
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        raw.fail(f"{key} is {ids!r}; it must be a list of layer numbers")
    return True, tuple(layer + shift for layer in ids)
