"""Growing draft trees below the last rows of sequences, many at a time: the expansion of EAGLE-2 over a paged cache.

Shapes depend on the number of sequences, of steps and of branches only. A chain's rows follow the sequence's own. A
tree's nodes lie in slots of no sequence: each step runs all nodes so far under their mask, since a row sees its
session's prefix and rows of its own step; that costs little, as a step's time is that of reading the weights.
Depth d sits d - 1 positions after the sequence's last row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.base import Draft
from draft_service.drafters.carrying import Carried, TreeStates, joined_chain, joined_trees
from draft_service.drafters.expansion import Growth, choose, expand
from draft_service.drafters.features import joined
from draft_service.drafters.growing_device import grow_chains, grow_trees
from draft_service.drafters.growing_native import NativeGrower
from draft_service.drafters.kv import CacheRows
from draft_service.drafters.models import DraftModel, Tip, Tips, on_host
from draft_service.drafters.paths import Behind
from draft_service.session import Grown
from engine.batch import Segment
from engine.models.heads.trees import Given
from outrider.tree_limits import most_nodes

Check = Callable[[], None]
"""Called before each step; what it raises ends the work."""


@dataclass(slots=True, eq=False)
class Job:
    """Trees to grow, below the last rows of B sequences; see `grow`. taken: slots for all of them, in order."""

    model: DraftModel
    sequences: Sequence[CacheRows]
    taken: list[int]
    num_steps: int
    topk: int
    counts: list[int]  # nodes of each tree, at most
    least_reach: float
    check: Check | None

    def slots(self) -> NDArray[np.int32]:
        """The slots of each sequence, int32 [B, slots_needed()]."""
        return np.array(self.taken, np.int32).reshape(len(self.sequences), slots_needed(self.num_steps, self.topk))


def slots_needed(num_steps: int, topk: int) -> int:
    """Slots that growing takes for one sequence, all given back."""
    return topk * (num_steps - 1)


def grow(
    model: DraftModel, sequences: Sequence[CacheRows], tips: Tips | Sequence[Behind], *, num_steps: int, topk: int,
    num_nodes: Sequence[int], num_top: int = 1, least_reach: float = 0.0, check: Check | None = None,
) -> list[Draft]:  # fmt: skip
    """A tree of at most num_nodes[i] nodes below each sequence's last row, its likeliest ones.

    `tips` are the last rows'; of a model with a grower, its newest rows can be Behind, and are run too, all of them on
    features or all on states. There must be slots_needed() free slots for each. The sequences are left as they were.

    least_reach: no further step is run where the chance that the accepted path goes on below the newest ones, as the
    model sees it, is less on average; of a model that runs apart all steps are run. check: called before each step;
    what it raises ends the work.
    """
    count = slots_needed(num_steps, topk)
    taken = model.cache.scratch(len(sequences) * count)
    counts = [min(wanted, most_nodes(num_steps, topk)) for wanted in num_nodes]
    try:
        job = Job(model, sequences, taken, num_steps, topk, counts, least_reach, check)
        if model.grower is not None:
            return _grow_native(job, model.grower, tips, num_top)
        assert isinstance(tips, Tips)
        with torch.inference_mode():
            if model.runs_apart:
                graph = model.trees.find(num_steps, topk, len(sequences)) if model.trees is not None else None
                if graph is not None:
                    if check is not None:
                        check()
                    return graph.grow(sequences, tips, job.slots(), counts)
                return grow_chains(job, tips) if topk == 1 else grow_trees(job, tips)
            return _grow_chains(job, tips) if topk == 1 else _grow_trees(job, tips)
    finally:
        model.cache.release(taken)


def _grow_native(job: Job, grower: NativeGrower, tips: Tips | Sequence[Behind], num_top: int) -> list[Draft]:
    num_steps, topk, counts = job.num_steps, job.topk, job.counts
    behind = () if isinstance(tips, Tips) else tips
    trees = grower.begin(
        job.sequences, job.taken, num_steps=num_steps, topk=topk, counts=counts, num_drafted=job.model.num_drafted,
        least_reach=job.least_reach, behind=[own.words for own in behind], num_tips=num_top if behind else 0,
    )  # fmt: skip
    if isinstance(tips, Tips):
        assert tips.states is not None
        trees.go_on_from((tips.probabilities, tips.tokens, tips.states))
    else:
        inputs = joined([piece for own in behind if (piece := own.inputs()) is not None])
        grower.run_first(trees, inputs, are_states=tips[0].are_states)
    num_run = grower.run(trees, num_steps, job.check)
    found = _tips_of(trees.given)
    for row, own in enumerate(behind):
        own.done(Tip(found, row))
    drafts: list[Draft] = []
    grown = Grown(topk, num_run, num_run < num_steps)
    for index, wanted in enumerate(counts):
        n = min(wanted, most_nodes(num_run, topk))
        tokens, parents, entries = trees.nodes[:, index, :n].copy()
        memo = Carried(trees.given, len(counts), topk, index, entries)
        chances = trees.chances[index, :n].copy()
        drafts.append(Draft(tokens, parents, chances, memo=memo, grown=grown))
    return drafts


def _tips_of(given: Given) -> Callable[[], Tips]:
    """Gives the tips, always the same object."""
    made: list[Tips] = []

    def tips() -> Tips:
        if not made:
            made.append(Tips(*given.tips))
        return made[0]

    return tips


def _grow_chains(job: Job, tips: Tips) -> list[Draft]:
    model, sequences, slots, num_steps = job.model, job.sequences, job.slots(), job.num_steps
    for sequence, own in zip(sequences, slots, strict=True):
        model.cache.slot_table[sequence.table_row, sequence.num_rows : sequence.num_rows + len(own)] = own
    places = [
        (sequence.table_row, sequence.num_rows - 1, own)
        for sequence, own in zip(sequences, slots.tolist(), strict=True)
    ]
    words = np.empty((len(sequences), num_steps), np.int32)
    paths = [1.0] * len(sequences)
    chances: list[list[float]] = []
    steps: list[torch.Tensor] = []
    for step in range(num_steps):
        if step:
            if job.least_reach and sum(paths) < job.least_reach * len(paths):
                break
            if job.check is not None:
                job.check()
            segments = [
                Segment(table_row, last + step, words[i, step - 1 : step], own[step - 1 : step])
                for i, (table_row, last, own) in enumerate(places)
            ]
            tips = model.run(segments, tips.states, 1)
        words[:, step] = on_host(tips.tokens)[:, 0]
        likely = on_host(tips.probabilities)[:, 0].tolist()
        paths = [path * (p if p > 0.0 else 0.0) for path, p in zip(paths, likely, strict=True)]  # NaN counts as 0
        chances.append(paths)
        if tips.states is not None:
            steps.append(tips.states)
    grown = Grown(1, len(chances), len(chances) < num_steps)
    return joined_chain(words, np.array(list(zip(*chances, strict=True))), steps, grown, job.counts)


def _grow_trees(job: Job, tips: Tips) -> list[Draft]:
    sequences, slots, num_steps, topk = job.sequences, job.slots(), job.num_steps, job.topk
    batch, num_run = len(sequences), 1
    growth = Growth.empty(batch, num_steps, topk)
    depths = np.repeat(np.arange(num_steps - 1, dtype=np.int32), topk)
    _expand(growth, 0, topk, tips, batch)
    states = None if tips.states is None else TreeStates(tips.states, num_steps, topk)
    for step in range(1, num_steps):
        end = step * topk
        if job.least_reach and growth.reach(end - topk, end) < job.least_reach:
            break
        if job.check is not None:
            job.check()
        segments = [
            Segment(sequence.table_row, sequence.num_rows, words, own, depths[:end], mask, topk)
            for sequence, words, own, mask in zip(
                sequences, growth.entry_tokens[:, :end], slots[:, :end], growth.masks[:, :end, :end], strict=True
            )
        ]
        parents = growth.entry_parents[:, end - topk : end]
        above = None if states is None else states.above(torch.from_numpy(parents), step)
        found = job.model.run(segments, above, topk)
        _expand(growth, step, topk, found, batch)
        if states is not None and found.states is not None:
            states.add(found.states, step)
        num_run += 1
    grown = Grown(topk, num_run, num_run < num_steps)
    counts = [min(count, most_nodes(num_run, topk)) for count in job.counts]
    return joined_trees(states, grown, batch, counts, choose(growth.after(num_run, topk), topk, counts))


def _expand(growth: Growth, step: int, topk: int, tips: Tips, batch: int) -> None:
    """Takes the tips of the root, or of the newest entries, into the growth."""
    probabilities, tokens = on_host(tips.probabilities)[:, :topk], on_host(tips.tokens)[:, :topk]
    shape = (batch, -1, topk)
    expand(
        growth, step, topk,
        np.ascontiguousarray(probabilities).reshape(shape), np.ascontiguousarray(tokens).reshape(shape),
    )  # fmt: skip
