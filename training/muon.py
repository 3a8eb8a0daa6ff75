"""Muon, a block at a time: momentum made orthogonal before it moves a matrix (Jordan et al., 2024).

Orthogonalising costs the cube of the smaller side, which on small batches is more than the gradients do. So a matrix is
taken as blocks that mean something by themselves: an attention head's rows of q, k and v and columns of the output
matrix, and slices of the wide side of everything else. Scaled to AdamW's step size (Liu et al., 2025), so one learning
rate serves both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

MOMENTUM = 0.95
NUM_ITERATIONS = 5
LARGEST_BLOCK = 192
# Of the quintic a x + b x^3 + c x^5, which brings singular values near 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_RMS = 0.2
_HEAD_ROWS, _HEAD_COLUMNS = ("q_proj/weight", "k_proj/weight", "v_proj/weight"), ("o_proj/weight",)


class Muon(Optimizer):
    """Muon over named matrices; head_dim: rows of an attention head."""

    def __init__(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], *, lr: float, weight_decay: float, head_dim: int
    ) -> None:
        super().__init__([parameter for _, parameter in named], {"lr": lr, "weight_decay": weight_decay})
        self._cuts = {parameter: _cut(name, parameter, head_dim) for name, parameter in named}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; a parameter without a gradient stays."""
        assert closure is None
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            by_shape: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
            for parameter in moved:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - MOMENTUM)
                update = blocks_of(parameter.grad.lerp(state["momentum"], MOMENTUM), *self._cuts[parameter])
                by_shape[update.shape[1:]].append((blocks_of(parameter, *self._cuts[parameter]), update))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            for shape, pairs in by_shape.items():
                orthogonal = orthogonalized(torch.cat([update for _, update in pairs]))
                size = -group["lr"] * _RMS * max(shape) ** 0.5
                parts = orthogonal.split([len(update) for _, update in pairs])
                for (blocks, _), part in zip(pairs, parts, strict=True):
                    blocks.add_(part, alpha=size)


def blocks_of(matrix: torch.Tensor, by_rows: bool, size: int) -> torch.Tensor:
    """A matrix as a view of blocks [count, size, other side], cut along its rows or its columns."""
    return (matrix if by_rows else matrix.T).unflatten(0, (-1, size))


def orthogonalized(blocks: torch.Tensor) -> torch.Tensor:
    """The matrices nearest to `blocks` [count, n, m] with singular values of about 1, in fp32; computed in bf16."""
    x = blocks.to(torch.bfloat16)
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None].to(x.dtype)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x if wide else x.mT).float()


def _cut(name: str, parameter: torch.Tensor, head_dim: int) -> tuple[bool, int]:
    """Whether a matrix is cut along its rows, and into blocks of how many."""
    rows, columns = parameter.shape
    if name.endswith(_HEAD_ROWS) and rows % head_dim == 0:
        return True, head_dim
    if name.endswith(_HEAD_COLUMNS) and columns % head_dim == 0:
        return False, head_dim
    by_rows = rows >= columns
    side = max(rows, columns)
    return by_rows, next(size for size in range(min(side, LARGEST_BLOCK), 0, -1) if side % size == 0)
