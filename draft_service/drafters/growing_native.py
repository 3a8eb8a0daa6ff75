"""Growing draft trees by the C kernels: what growing.py does, where a head's step is one call of theirs."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.expansion import Chosen, Growth, choose
from draft_service.drafters.kv import Sequence
from engine.models.heads.native import NativeHead
from engine.models.heads.trees import GrowingTrees

_SHAPES_KEPT = 16

Shape = tuple[int, int, int]
"""Trees, steps, branches."""


class NativeGrower:
    """Trees on one head. names: the target's ids of the head's own, int64, where they differ."""

    def __init__(self, head: NativeHead, slot_table: NDArray[np.int32], *, names: torch.Tensor | None, num_read: int):
        self._head, self._slot_table, self._names, self._num_read = head, slot_table, names, num_read
        self._kept: dict[Shape, tuple[Growth, GrowingTrees]] = {}

    def grow(
        self, sequences: Many[Sequence], tips: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        slots: NDArray[np.int32], *, num_steps: int, topk: int, counts: list[int], num_drafted: int,
        check: Callable[[], None],
    ) -> tuple[Chosen, list[torch.Tensor]]:  # fmt: skip
        """The chosen nodes, and the states carried by step. check: called before each step; what it raises ends it."""
        growth, trees = self._of_shape((len(sequences), num_steps, topk))
        if topk == 1:  # a chain's rows are its sequence's while it grows
            for sequence, own in zip(sequences, slots, strict=True):
                self._slot_table[sequence.table_row, sequence.num_rows : sequence.num_rows + len(own)] = own
        trees.begin(
            tips, self._slot_table, [s.table_row for s in sequences], [s.num_rows for s in sequences], slots,
            names=self._names, num_drafted=num_drafted, num_read=self._num_read,
        )  # fmt: skip
        for step in range(1, num_steps):
            check()
            trees.step(step)
        return choose(growth, topk, counts), trees.states()

    def _of_shape(self, shape: Shape) -> tuple[Growth, GrowingTrees]:
        """Arrays for trees of a shape; those used last are kept."""
        found = self._kept.pop(shape, None)
        if found is None:
            growth = Growth.empty(*shape)
            found = growth, GrowingTrees(self._head, *shape, growth._asdict())
        if len(self._kept) >= _SHAPES_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[shape] = found
        return found
