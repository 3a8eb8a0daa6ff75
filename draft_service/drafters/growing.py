"""Growing draft trees below the last rows of sequences, many at a time: the expansion of EAGLE-2 over a paged cache.

Shapes depend on the number of sequences, of steps and of branches only. A chain appends its rows to the sequence. A
tree's nodes lie in slots of no sequence: each step runs all nodes so far under their mask, since a row sees its
session's prefix and rows of its own step; that costs little, as a step's time is that of reading the weights.
Depth d sits d - 1 positions after the sequence's last row.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch

from draft_service.drafters.base import Draft
from draft_service.drafters.kv import Sequence
from draft_service.drafters.models import DraftModel, Tips, advance, one_each
from engine.batch import Segment
from kernels.tree_build import Expansion, build_tree, expand_frontier, expand_root
from outrider.wire import Ids


def slots_needed(num_steps: int, topk: int) -> int:
    """Slots that growing takes for one sequence, all given back."""
    return topk * (num_steps - 1)


def most_nodes(num_steps: int, topk: int) -> int:
    """Candidates of a tree."""
    return topk + (num_steps - 1) * topk * topk


def grow(
    model: DraftModel, sequences: Many[Sequence], tips: Tips, *, num_steps: int, topk: int, num_nodes: Many[int],
    check: Callable[[], None] = lambda: None,
) -> list[Draft]:  # fmt: skip
    """A tree of at most num_nodes[i] nodes below each sequence's last row, its likeliest ones.

    `tips` are the last rows'. There must be slots_needed() free slots for each. The sequences are left as they were.
    check: called before each step; what it raises ends the work.
    """
    if topk == 1:
        return _chains(model, sequences, tips, num_steps, num_nodes, check)
    return _chosen(_expansions(model, sequences, tips, num_steps, topk, check), num_nodes)


def _chains(
    model: DraftModel, sequences: Many[Sequence], tips: Tips, num_steps: int, num_nodes: Many[int],
    check: Callable[[], None],
) -> list[Draft]:  # fmt: skip
    lengths = [sequence.num_rows for sequence in sequences]
    tokens, probabilities = [tips.tokens[:, 0]], [tips.probabilities[:, 0]]
    try:
        for _ in range(1, num_steps):
            check()
            tips = advance(model, sequences, one_each(tokens[-1]), tips.states, 1)
            tokens.append(tips.tokens[:, 0])
            probabilities.append(probabilities[-1] * tips.probabilities[:, 0])
    finally:
        for sequence, length in zip(sequences, lengths, strict=True):
            model.cache.truncate(sequence, length)
    words = torch.stack(tokens, dim=1).to("cpu", torch.int32).numpy()
    chances = torch.stack(probabilities, dim=1).double().nan_to_num().cpu().numpy()
    parents = np.arange(-1, num_steps - 1, dtype=np.int32)
    return [Draft(words[i, :n], parents[:n], chances[i, :n]) for i, n in enumerate(_capped(num_nodes, num_steps))]


def _expansions(
    model: DraftModel, sequences: Many[Sequence], tips: Tips, num_steps: int, topk: int, check: Callable[[], None]
) -> list[Expansion]:
    batch, count = len(sequences), slots_needed(num_steps, topk)
    expansions = [expand_root(tips.probabilities[:, :topk], tips.tokens[:, :topk])]
    slots: list[Ids] = []
    tokens = np.zeros((batch, count), np.int32)
    masks = np.zeros((batch, count, count), np.bool_)
    depths = np.repeat(np.arange(num_steps - 1, dtype=np.int32), topk)
    inputs: list[torch.Tensor] = []
    outputs = None if tips.states is None else tips.states[:, None]
    try:
        slots += [model.cache.scratch(count) for _ in sequences]
        for step in range(1, num_steps):
            check()
            frontier, end = expansions[-1], step * topk
            new = np.arange(end - topk, end)
            parents = frontier.frontier_parents
            tokens[:, new] = frontier.frontier_tokens.cpu().numpy()
            if step > 1:
                above = masks[:, new - topk]
                masks[:, new] = np.take_along_axis(above, parents.cpu().numpy()[:, :, None], axis=1)
            masks[:, new, new] = True
            if outputs is not None:
                inputs.append(outputs.gather(1, parents[:, :, None].expand(-1, -1, outputs.shape[2])))
            segments = [
                Segment(
                    sequence.table_row, sequence.num_rows, tokens[i, :end], slots[i][:end], depths[:end],
                    masks[i, :end, :end], num_logits=topk,
                )
                for i, sequence in enumerate(sequences)
            ]  # fmt: skip
            found = model.run(segments, torch.cat(inputs, dim=1).flatten(0, 1) if inputs else None, topk)
            outputs = None if found.states is None else found.states.view(batch, topk, -1)
            shape = (batch, topk, topk)
            expansions.append(
                expand_frontier(frontier, found.probabilities.view(shape), found.tokens.view(shape), step)
            )
    finally:
        for taken in slots:
            model.cache.release(taken)
    return expansions


def _chosen(expansions: list[Expansion], num_nodes: Many[int]) -> list[Draft]:
    """The likeliest nodes of each, those that want equally many together."""
    most = most_nodes(len(expansions), expansions[0].scores.shape[1])
    wanted = _capped(num_nodes, most)
    drafts: dict[int, Draft] = {}
    for count in sorted(set(wanted)):
        rows = [index for index, own in enumerate(wanted) if own == count]
        part = [Expansion(*(values[rows] for values in expansion)) for expansion in expansions]
        zeros = torch.zeros(len(rows), dtype=torch.int64, device=part[0].tokens.device)
        tree = build_tree(zeros, zeros, part, count + 1)
        tokens = tree.tokens[:, 1:].to("cpu", torch.int32).numpy()
        parents = (tree.parents[:, 1:] - 1).to("cpu", torch.int32).numpy()
        scores = tree.scores[:, 1:].double().cpu().numpy()
        drafts |= {row: Draft(tokens[i], parents[i], scores[i]) for i, row in enumerate(rows)}
    return [drafts[index] for index in range(len(wanted))]


def _capped(num_nodes: Many[int], most: int) -> list[int]:
    return [min(count, most) for count in num_nodes]
