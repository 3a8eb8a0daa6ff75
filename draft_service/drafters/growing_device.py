"""Growing draft trees on a device that the host does not wait for between steps: what growing.py does, in tensors.

Each step's tokens, masks and states come from the one before it, on the device; the host lays rows out, which depends
on shapes alone, while earlier steps still run. It waits once, for the finished trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.base import Draft
from draft_service.drafters.carrying import TreeStates, joined_chain, joined_trees
from draft_service.drafters.expansion import Chosen, Growth, choose
from draft_service.session import Grown
from engine.batch import DeviceRows, Segment
from kernels.attention.layout import WORD_BITS
from kernels.transfer import Readback
from kernels.tree_build import Expansion, expand_frontier, expand_root

if TYPE_CHECKING:
    from draft_service.drafters.growing import Job
    from draft_service.drafters.models import Tips

_UNKNOWN = np.zeros(1, np.int32)


def grow_chains(job: Job, tips: Tips) -> list[Draft]:
    """Chains of num_steps nodes below each sequence; all steps are run."""
    model, sequences, slots, num_steps = job.model, job.sequences, job.slots(), job.num_steps
    own = slots.tolist()
    for sequence, mine in zip(sequences, slots, strict=True):
        model.cache.slot_table[sequence.table_row, sequence.num_rows : sequence.num_rows + len(mine)] = mine
    found, states = [tips], [tips.states]
    for step in range(num_steps - 1):
        if job.check is not None:
            job.check()
        segments = [
            Segment(sequence.table_row, sequence.num_rows + step, _UNKNOWN, [mine[step]])
            for sequence, mine in zip(sequences, own, strict=True)
        ]
        tips = model.run(segments, tips.states, 1, rows=DeviceRows(tips.tokens[:, 0]))
        found.append(tips)
        states.append(tips.states)
    back = Readback()
    back.add(torch.stack([each.tokens[:, 0] for each in found], dim=1))
    back.add(torch.stack([each.probabilities[:, 0].double() for each in found], dim=1))
    words, chances = back.fetch()
    paths: NDArray[np.float64] = np.cumprod(np.fmax(chances, 0.0), axis=1, dtype=np.float64)  # NaN counts as 0
    kept = [each for each in states if each is not None]
    return joined_chain(words.astype(np.int32), paths, kept, Grown(1, num_steps), job.counts)


def grow_trees(job: Job, tips: Tips) -> list[Draft]:
    """Trees of num_steps steps below each sequence; all steps are run."""
    sequences, slots, num_steps, topk = job.sequences, job.slots(), job.num_steps, job.topk
    batch = len(sequences)
    rows = _Rows(batch, num_steps, topk, tips.tokens.device)
    states = None if tips.states is None else TreeStates(tips.states, num_steps, topk)
    depths = np.repeat(np.arange(num_steps - 1, dtype=np.int32), topk)
    newest = expand_root(tips.probabilities[:, :topk], tips.tokens[:, :topk])
    expansions = [newest]
    for step in range(1, num_steps):
        end = step * topk
        if job.check is not None:
            job.check()
        tokens, mask = np.zeros(end, np.int32), np.eye(end, dtype=np.bool_)
        segments = [
            Segment(sequence.table_row, sequence.num_rows, tokens, mine, depths[:end], mask, topk)
            for sequence, mine in zip(sequences, slots[:, :end], strict=True)
        ]
        above = None if states is None else states.above(newest.frontier_parents, step)
        found = job.model.run(segments, above, topk, rows=rows.with_entries(newest, step))
        shape = (batch, topk, topk)
        newest = expand_frontier(newest, found.probabilities.reshape(shape), found.tokens.reshape(shape), step)
        expansions.append(newest)
        if states is not None and found.states is not None:
            states.add(found.states, step)
    return joined_trees(states, Grown(topk, num_steps), batch, job.counts, _chosen(expansions, topk, job.counts))


class _Rows:
    """The entries of B trees as they grow, on the device: tokens, and who sees whom (AttentionLayout.row_bits)."""

    def __init__(self, batch: int, num_steps: int, topk: int, device: torch.device) -> None:
        entries = topk * (num_steps - 1)
        words = max(1, -(-entries // WORD_BITS))
        own = np.zeros((entries, words), np.uint64)
        places = np.arange(entries)
        own[places, places // WORD_BITS] = np.uint64(1) << (places % WORD_BITS).astype(np.uint64)
        self._topk = topk
        self._own = torch.from_numpy(own.view(np.int64)).to(device)  # each entry's own bit
        self._tokens = torch.empty((batch, entries), dtype=torch.int64, device=device)
        self._bits = torch.empty((batch, entries, words), dtype=torch.int64, device=device)

    def with_entries(self, newest: Expansion, step: int) -> DeviceRows:
        """Rows of all entries up to those that `step` goes on from."""
        first, end = (step - 1) * self._topk, step * self._topk
        own = self._own[first:end]
        self._tokens[:, first:end] = newest.frontier_tokens
        if step == 1:
            self._bits[:, :end] = own
        else:
            parents = newest.frontier_parents[:, :, None].expand(-1, -1, own.shape[1])
            self._bits[:, first:end] = self._bits[:, first - self._topk : first].gather(1, parents) | own
        return DeviceRows(self._tokens[:, :end].reshape(-1), self._bits[:, :end].flatten(0, 1))


def _chosen(expansions: list[Expansion], topk: int, counts: list[int]) -> Chosen:
    """The likeliest nodes, on the host."""
    back = Readback()
    back.add(torch.cat([each.scores for each in expansions], dim=1).double())
    back.add(torch.cat([each.tokens for each in expansions], dim=1))
    entries = [each.frontier_ids for each in expansions[:-1]]
    back.add(torch.cat(entries, dim=1) if entries else expansions[0].frontier_ids[:, :0])
    scores, tokens, frontier = back.fetch()
    growth = Growth.empty(len(counts), len(expansions), topk)._replace(
        scores=scores.astype(np.float32), tokens=tokens.astype(np.int32), frontier=frontier.astype(np.int32)
    )
    return choose(growth, topk, counts)
