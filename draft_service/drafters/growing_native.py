"""Growing draft trees by the C kernels: what growing.py does, where all of a head's trees are one call of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draft_service.drafters.features import Piece
from draft_service.drafters.kv import CacheRows
from engine.models.heads.runner import HeadRunner
from engine.models.heads.trees import NativeTrees
from outrider.wire import Ids

_SHAPES_KEPT = 16

Shape = tuple[int, int, int]
"""Trees, steps, branches."""


class NativeGrower:
    """Trees on a runner's native head. num_read: tokens that it has an embedding of."""

    def __init__(self, runner: HeadRunner, *, num_read: int) -> None:
        self._runner, self._num_read = runner, num_read
        self._kept: dict[Shape, NativeTrees] = {}

    def begin(
        self, sequences: Sequence[CacheRows], slots: Sequence[int], *, num_steps: int, topk: int, counts: list[int],
        num_drafted: int, least_reach: float, behind: Sequence[Ids] = (), num_tips: int = 0,
    ) -> NativeTrees:  # fmt: skip
        """Trees of so many nodes below sequences; `run_first` follows where rows are `behind`, else `go_on_from`.

        See NativeTrees.begin. least_reach: see `grow`.
        """
        trees = self._of_shape((len(sequences), num_steps, topk))
        trees.begin(
            [s.table_row for s in sequences], [s.num_rows for s in sequences], counts, slots, num_drafted=num_drafted,
            num_read=self._num_read, least_reach=least_reach, behind=behind, num_tips=num_tips,
        )  # fmt: skip
        return trees

    def run_first(self, trees: NativeTrees, inputs: Piece, *, are_states: bool) -> None:
        """See NativeTrees; from features in any case, or from states."""
        head = self._runner.native
        assert head is not None
        if are_states or head.fuses:
            trees.run_first(*inputs, are_states=are_states)
        else:
            states = self._runner.fuse(inputs.rows)
            trees.run_first(states, 0, len(states), are_states=True)

    def run(self, trees: NativeTrees, num_steps: int, check: Callable[[], None] | None) -> int:
        """All steps in one call, or as many as pay; where there is a check, one by one, and that before each but the
        first. Returns how many were run."""
        if check is None:
            return trees.grow(0, num_steps)
        for step in range(num_steps):
            if step:
                check()
            if trees.grow(step, step + 1) == step:
                return step
        return num_steps

    def _of_shape(self, shape: Shape) -> NativeTrees:
        """Arrays for trees of a shape; those used last are kept."""
        trees = self._kept.pop(shape, None)
        if trees is None:
            assert self._runner.native is not None
            trees = NativeTrees(
                self._runner.native, *shape, slot_table=self._runner.slot_table, names=self._runner.head.tokens
            )
        if len(self._kept) >= _SHAPES_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[shape] = trees
        return trees
