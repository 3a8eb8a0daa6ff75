"""What every draft head is: a small network that goes on from the target's hidden states.

A row pairs a token with the state of the position before it: row i holds token i + 1 and the target's feature of
position i, sits at position i, and tells what token i + 2 may be. Where the target has not been yet, the head's own
output stands in for the feature.

A head knows its weights and nothing of pools, sessions or sampling: keys and values are kept by the `attend` that it
is given. So the same code drafts (over a paged pool) and is trained (over whatever mask training unrolls; building one
from a training's parameters only concatenates them, which is differentiable).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import torch

from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.models.heads.target import TargetShape
from engine.quantization import MakeLinear
from engine.rope import rope_rows
from kernels.native_linear import NativeLinear

if TYPE_CHECKING:
    from engine.models.heads.block import Block


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Rotates q and k by rope [T, 2, d / 2], keeps rows' keys and values as those of layer `i`, and attends:
i, q [T, heads, d], k, v [T, kv heads, d], rope -> as q."""

Rows = Callable[[torch.Tensor], torch.Tensor]

Tensors = Mapping[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How a head reads and names tokens.

    embedding [target vocab, hidden]; head [drafted, hidden], its output rows; tokens int64 [drafted], the target's id
    of each output row, or None where row r is token r.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    tokens: torch.Tensor | None = None


class Entry(IntEnum):
    """How a row's embedding and state enter the layers (kernels/native/decoder.h)."""

    PAIR = 1
    """joins[0] of both, side by side."""
    APART = 2
    """joins[0] of the embedding and joins[1] of the state, added."""
    BESIDE = 3
    """The state; the first layer's q, k and v read both, side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """A head as a chain of parts that a kernel can go through; norms are None where there are none."""

    entry: Entry
    joins: Sequence[Rows] = ()
    embedding_norm: torch.Tensor | None = None
    state_norm: torch.Tensor | None = None
    layers: Sequence[Block]
    final_norm: torch.Tensor | None = None
    output: Rows
    residual_normed: bool = False
    """BESIDE: the state enters the stream after its norm."""
    carry_normed: bool = False
    """What is carried on are outputs after the final norm."""
    fuse: Rows | None = None
    """Makes states of features, whose parts have norms first where there are `fuse_norms`, [parts, width of a part]."""
    fuse_norms: torch.Tensor | None = None


class HeadConfig(Protocol):
    """A head's shape, as its checkpoint gives it."""

    @property
    def family(self) -> str:
        """eagle, eagle3, nextn, mimo or multi-layer."""
        ...

    @property
    def block(self) -> ModelConfig:
        """Shapes and constants of its decoder layers; num_layers is how many have keys and values."""
        ...

    @property
    def feature_width(self) -> int:
        """Numbers in a feature row."""
        ...

    def shapes(self) -> Shapes:
        """Every tensor that it must have, embedding and output head aside, by our name for it."""
        ...

    def features(self, target: TargetShape) -> FeatureSpec:
        """Which of the target's states it goes on from. StartupError when this target does not have them."""
        ...

    def build(self, tensors: Tensors, vocabulary: Vocabulary, max_len: int, make_linear: MakeLinear) -> Head:
        """The network over tensors of `shapes()`, for positions below max_len."""
        ...


class Head(ABC):
    """A draft head in the dtype and on the device of its weights."""

    num_stages = 1
    """Networks that take turns: stage i drafts the token i + 1 steps ahead (multi-layer heads); else one does all."""

    def __init__(self, config: HeadConfig, vocabulary: Vocabulary, max_len: int, make_linear: MakeLinear) -> None:
        self.config = config
        self.max_len = max_len
        self.tokens = vocabulary.tokens
        self.embedding = vocabulary.embedding
        self.rope = rope_rows(config.block, max_len).to(self.embedding.device)
        head = make_linear(vocabulary.head, None)
        self.output = head
        # Sums that are fp32 already are not rounded on the way.
        self._head = head.wide if isinstance(head, NativeLinear) else head

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and states."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """The device where it runs."""
        return self.embedding.device

    @property
    def num_drafted(self) -> int:
        """Tokens that it can draft: width of the logits."""
        return len(self.embedding) if self.tokens is None else len(self.tokens)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's feature rows [T, feature_width] as states [T, hidden]."""
        return features

    @abstractmethod
    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend, stage: int = 0
    ) -> torch.Tensor:
        """One row per token: tokens, positions int64 [T], states [T, hidden] -> outputs [T, hidden]."""

    def parts(self) -> HeadParts | None:
        """What the network is made of; None where that is more than HeadParts can say."""
        return None

    def carried(self, outputs: torch.Tensor) -> torch.Tensor:
        """What stands in for the target's state in the rows that follow `outputs` [T, hidden]."""
        return outputs

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """fp32 [T, drafted] from outputs [T, hidden]."""
        return self.narrow_logits(outputs).float()

    def narrow_logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logits [T, drafted] in the dtype that the output head gives them in, from outputs [T, hidden]."""
        return self._head(outputs)
