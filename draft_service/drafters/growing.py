"""Growing draft trees below the last rows of sequences, many at a time: the expansion of EAGLE-2 over a paged cache.

Shapes depend on the number of sequences, of steps and of branches only. A chain's rows follow the sequence's own. A
tree's nodes lie in slots of no sequence: each step runs all nodes so far under their mask, since a row sees its
session's prefix and rows of its own step; that costs little, as a step's time is that of reading the weights.
Depth d sits d - 1 positions after the sequence's last row.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.base import Draft
from draft_service.drafters.expansion import Growth, choose, expand
from draft_service.drafters.kv import Sequence
from draft_service.drafters.models import DraftModel, Tips, as_ids
from engine.batch import Segment
from outrider.tree import ROOT
from outrider.wire import Ids


def slots_needed(num_steps: int, topk: int) -> int:
    """Slots that growing takes for one sequence, all given back."""
    return topk * (num_steps - 1)


def most_nodes(num_steps: int, topk: int) -> int:
    """Candidates of a tree."""
    return topk + (num_steps - 1) * topk * topk


@dataclass(frozen=True, eq=False, slots=True)
class Carried:
    """What a head gave out of one tree's rows: the states that rows below them go on from.

    steps: of each step [B, F, hidden], the root's first; entries: int32 [n], of each node, -1 where it was not run.
    """

    steps: list[torch.Tensor]
    index: int  # of the B trees that grew together
    entries: Ids

    def rows(self, nodes: Many[int]) -> torch.Tensor | None:
        """States [len(nodes), hidden] of nodes, -1 the root; None where one was not run."""
        width, found = self.steps[-1].shape[1], []
        for node in nodes:
            entry = 0 if node == ROOT else int(self.entries[node])
            if entry < 0:
                return None
            step = self.steps[0] if node == ROOT else self.steps[1 + entry // width]
            found.append(step[self.index, entry % width if node != ROOT else 0])
        return torch.stack(found)


def grow(
    model: DraftModel, sequences: Many[Sequence], tips: Tips, *, num_steps: int, topk: int, num_nodes: Many[int],
    check: Callable[[], None] = lambda: None,
) -> list[Draft]:  # fmt: skip
    """A tree of at most num_nodes[i] nodes below each sequence's last row, its likeliest ones.

    `tips` are the last rows'. There must be slots_needed() free slots for each. The sequences are left as they were.
    check: called before each step; what it raises ends the work.
    """
    run = _grow_chains if topk == 1 else _grow_trees
    count = slots_needed(num_steps, topk)
    slots = model.cache.scratch(len(sequences) * count).reshape(len(sequences), count)
    counts = [min(wanted, most_nodes(num_steps, topk)) for wanted in num_nodes]
    try:
        return run(model, sequences, tips, slots, num_steps, topk, counts, check)
    finally:
        model.cache.release(slots.reshape(-1))


def _grow_chains(
    model: DraftModel, sequences: Many[Sequence], tips: Tips, slots: NDArray[np.int32], num_steps: int, topk: int,
    counts: list[int], check: Callable[[], None],
) -> list[Draft]:  # fmt: skip
    lengths = [sequence.num_rows for sequence in sequences]
    for sequence, own in zip(sequences, slots, strict=True):
        model.cache.slot_table[sequence.table_row, sequence.num_rows : sequence.num_rows + len(own)] = own
    words = np.empty((len(sequences), num_steps), np.int32)
    chances = np.empty((len(sequences), num_steps))
    steps: list[torch.Tensor] = []
    for step in range(num_steps):
        if step:
            check()
            segments = [
                Segment(sequence.table_row, length + step - 1, words[i, step - 1 : step], slots[i, step - 1 : step])
                for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
            ]
            tips = model.run(segments, tips.states, 1)
        words[:, step] = as_ids(tips.tokens[:, 0])
        chances[:, step] = tips.probabilities[:, 0].cpu().numpy()
        if tips.states is not None:
            steps.append(tips.states[:, None])
    np.cumprod(np.fmax(chances, 0.0, out=chances), axis=1, out=chances)  # fmax: NaN counts as 0
    parents = np.arange(-1, num_steps - 1, dtype=np.int32)
    entries = np.append(np.arange(num_steps - 1, dtype=np.int32), np.int32(-1))
    return [
        Draft(words[i, :n], parents[:n], chances[i, :n], memo=Carried(steps, i, entries) if steps else None)
        for i, n in enumerate(counts)
    ]


def _grow_trees(
    model: DraftModel, sequences: Many[Sequence], tips: Tips, slots: NDArray[np.int32], num_steps: int, topk: int,
    counts: list[int], check: Callable[[], None],
) -> list[Draft]:  # fmt: skip
    batch = len(sequences)
    growth = Growth.empty(batch, num_steps, topk)
    depths = np.repeat(np.arange(num_steps - 1, dtype=np.int32), topk)
    _expand(growth, 0, topk, tips, batch)
    inputs: list[torch.Tensor] = []
    steps = [] if tips.states is None else [tips.states[:, None]]
    for step in range(1, num_steps):
        check()
        end = step * topk
        if steps:
            inputs.append(_of_parents(steps[-1], growth.entry_parents[:, end - topk : end]))
        segments = [
            Segment(
                sequence.table_row, sequence.num_rows, growth.entry_tokens[i, :end], slots[i, :end], depths[:end],
                growth.masks[i, :end, :end], num_logits=topk,
            )
            for i, sequence in enumerate(sequences)
        ]  # fmt: skip
        found = model.run(segments, torch.cat(inputs, dim=1).flatten(0, 1) if inputs else None, topk)
        _expand(growth, step, topk, found, batch)
        if found.states is not None:
            steps.append(found.states.view(batch, topk, -1))
    chosen = choose(growth, topk, counts)
    return [
        Draft(
            chosen.tokens[i, :n], chosen.parents[i, :n], chosen.probabilities[i, :n],
            memo=Carried(steps, i, chosen.entries[i, :n]) if steps else None,
        )
        for i, n in enumerate(counts)
    ]  # fmt: skip


def _of_parents(states: torch.Tensor, parents: NDArray[np.int64]) -> torch.Tensor:
    """States [B, K, hidden] of the entries' parents [B, K], from those [B, F, hidden] that the step before gave."""
    batch, width, hidden = states.shape
    index = torch.from_numpy(parents + width * np.arange(batch)[:, None]).to(states.device)
    return states.reshape(batch * width, hidden).index_select(0, index.view(-1)).view(batch, -1, hidden)


def _expand(growth: Growth, step: int, topk: int, tips: Tips, batch: int) -> None:
    """Takes the tips of the root, or of the newest entries, into the growth."""
    probabilities = tips.probabilities[:, :topk].float().cpu().numpy()
    tokens = tips.tokens[:, :topk].cpu().numpy()
    shape = (batch, -1, topk)
    expand(
        growth, step, topk,
        np.ascontiguousarray(probabilities).reshape(shape), np.ascontiguousarray(tokens).reshape(shape),
    )  # fmt: skip
