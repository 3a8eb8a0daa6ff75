"""Which trees to grow: steps and branches for each sequence, and those of one shape together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.base import NO_DRAFT, Draft
from draft_service.drafters.growing import Check, grow, slots_needed
from draft_service.drafters.models import DraftModel, Tips
from draft_service.drafters.paths import Start
from draft_service.drafters.shape import TreeShape
from draft_service.session import Wishes
from engine.models.heads.step import NUM_TOP


@dataclass(slots=True, eq=False)
class Wanted:
    """A tree of at most `num_nodes` nodes from where a sequence stands."""

    start: Start
    num_steps: int
    topk: int
    num_nodes: int
    least_reach: float = 0.0

    @property
    def slots(self) -> int:
        """Slots that it takes while it grows."""
        return slots_needed(self.num_steps, self.topk)


class TreeGrower:
    """Grows trees over one model; `shape` and `least_reach` (see `grow`) are for requests that wish nothing."""

    def __init__(self, model: DraftModel, shape: TreeShape) -> None:
        self.model = model
        self.shape = shape
        self.least_reach = 0.0
        self.num_top = max(NUM_TOP, shape.topk)

    def plan(
        self, start: Start, wishes: Wishes, *, max_depth: int, num_nodes: int
    ) -> Wanted | None:  # fmt: skip
        """The tree to grow; None where none is wanted or none fits the model's context."""
        num_rows = start.rows.num_rows + start.num_behind
        num_steps, topk = self.steps(num_rows, wishes, max_depth=max_depth, num_nodes=num_nodes)
        if min(num_steps, topk) < 1:
            return None
        return Wanted(start, num_steps, topk, num_nodes, 0.0 if wishes.has_any else self.least_reach)

    def steps(self, num_rows: int, wishes: Wishes, *, max_depth: int, num_nodes: int) -> tuple[int, int]:
        """Steps and branches of a tree below so many rows; steps at most 0: none."""
        # The deepest nodes are not run, so a tree of one step needs no row.
        room = self.model.cache.max_len - num_rows + 1
        num_steps = min(wishes.num_steps or self.shape.num_steps, max_depth, num_nodes, room)
        return num_steps, min(wishes.topk or self.shape.topk, self.num_top, self.model.num_drafted)

    def grow(self, trees: Sequence[Wanted], check: Check | None = None) -> list[Draft]:
        """A draft for each, in order. The pool must hold any one of them; as many as it holds grow together.

        check: called before each of the model's steps; what it raises ends the work, and nothing stays taken.
        """
        drafts = [NO_DRAFT] * len(trees)
        groups: dict[tuple[int, int, float, bool], list[int]] = defaultdict(list)
        for index, tree in enumerate(trees):
            groups[tree.num_steps, tree.topk, tree.least_reach, tree.start.tip is None].append(index)
        for (num_steps, topk, least_reach, _), members in groups.items():
            for part in self._parts(members, slots_needed(num_steps, topk)):
                starts = [trees[index].start for index in part]
                behind = [start.behind for start in starts if start.behind is not None]
                grown = grow(
                    self.model, [start.rows for start in starts],
                    behind or Tips.joined([start.tip for start in starts if start.tip is not None]),
                    num_steps=num_steps, topk=topk, num_nodes=[trees[index].num_nodes for index in part],
                    num_top=min(self.num_top, self.model.num_drafted), least_reach=least_reach, check=check,
                )  # fmt: skip
                for index, draft in zip(part, grown, strict=True):
                    drafts[index] = draft
        return drafts

    def _parts(self, members: list[int], slots: int) -> list[list[int]]:
        if len(members) == 1:
            return [members]
        size = max(1, min(self.model.max_batch_tokens, self.model.cache.num_free) // max(1, slots))
        return [members[first : first + size] for first in range(0, len(members), size)]
