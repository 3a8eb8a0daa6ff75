"""What a draft head's step gives, and how one is computed."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from engine.models.llama import StepRows
from kernels.attention.layout import AttentionLayout

# Of each row, for a drafter: more than a tree's branches, so that one that no branch holds can be guessed.
NUM_TOP = 16


class HeadStep(NamedTuple):
    """What a step gives for the rows whose logits were wanted, in the segments' order."""

    logits: torch.Tensor
    """[L, drafted], good until the next step: fp32, within a graph of any dtype."""
    carried: torch.Tensor
    """[L, hidden]: the states of the rows that go on from these."""
    top: tuple[torch.Tensor, torch.Tensor] | None = None
    """The likeliest output rows of each row, as kernels.likeliest has them, [L, T] each; None: not looked for."""


class RunRows(Protocol):
    """Computes a step on the device: rows, their states [T, hidden], the layout, and which of the stages."""

    def __call__(self, rows: StepRows, states: torch.Tensor, layout: AttentionLayout, stage: int, /) -> HeadStep: ...
