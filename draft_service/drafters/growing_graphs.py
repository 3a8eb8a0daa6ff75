"""Whole draft trees as CUDA graphs: from what may follow the last rows to the finished candidates in one launch.

What growing_device.py does step by step, whose host lays rows out and launches for each step: for a head of one layer
that takes longer than its kernels. Here every step runs all of a tree's entries, those that are not known yet as rows
that nobody sees, so that places, positions and the plan of attention are the same in all steps and go to the device
once. A step more rows costs little, as its time is that of reading the weights.

There is a graph for each shape and each of a few numbers of sequences; what none holds grows step by step.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.base import Draft
from draft_service.drafters.carrying import Joined, joined_trees
from draft_service.drafters.expansion import Growth, choose
from draft_service.drafters.kv import CacheRows
from draft_service.session import Grown
from engine.batch import Batch, Segment
from engine.graphs import MAX_ROWS, Capturing, Replay, idle_layout
from engine.models.heads.runner import HeadRunner
from engine.models.llama import StepRows
from engine.progress import Progress
from kernels.attention.triton_plan import Bucket
from kernels.likeliest import likeliest
from kernels.transfer import to_device
from kernels.tree_growth import GrowingTrees, grow_on

if TYPE_CHECKING:
    from draft_service.drafters.models import Tips

_BATCHES = (1, 2, 4, 8, 16)
"""Sequences of a graph; more grow step by step, where launches matter less."""


class TreeSizes(NamedTuple):
    """Which trees there are graphs for: of so many steps, with `topk` branches or one, up to `max_trees` together."""

    steps: tuple[int, ...]
    topk: int
    max_trees: int
    max_rows: int = MAX_ROWS
    """Most rows of a step; with more, step by step is as good."""


class _Key(NamedTuple):
    num_steps: int
    topk: int
    batch: int

    @property
    def num_rows(self) -> int:
        """Rows of each step."""
        return self.batch * self.topk * (self.num_steps - 1)


class TreeGraphs:
    """A head's growths of trees, one for each of `sizes`."""

    def __init__(self, runner: HeadRunner, capturing: Capturing, sizes: TreeSizes) -> None:
        self._growths: dict[_Key, _Growth] = {}
        keys = [
            _Key(num_steps, topk, batch)
            for num_steps in sizes.steps
            for topk in sorted({1, min(sizes.topk, runner.num_drafted)})
            for batch in _batches(sizes.max_trees)
        ]
        keys = sorted((key for key in keys if 0 < key.num_rows <= sizes.max_rows), key=lambda key: -key.num_rows)
        with Progress("Capturing trees", unit="graph") as progress, torch.inference_mode():
            for done, key in enumerate(keys):
                progress.at(done, len(keys))
                self._growths[key] = _Growth(runner, capturing, key)
            progress.at(len(keys), len(keys))

    def find(self, num_steps: int, topk: int, batch: int) -> _Growth | None:
        """The graph that grows trees of that shape for so many sequences, or for a few more."""
        size = next((size for size in _BATCHES if size >= batch), 0)
        return self._growths.get(_Key(num_steps, topk, size))


def _batches(most: int) -> tuple[int, ...]:
    """Numbers of sequences whose graphs are needed to hold up to `most`."""
    return _BATCHES[: bisect.bisect_left(_BATCHES, most) + 1]


class _Growth:
    """Trees of S steps and K branches for B sequences, with E = K * (S - 1) entries each: places and a graph."""

    def __init__(self, runner: HeadRunner, capturing: Capturing, key: _Key) -> None:
        num_steps, topk, batch = self._key = key
        head, entries = runner.head, topk * (num_steps - 1)
        device, hidden = head.device, head.config.block.hidden_size
        self._runner, self._capturing = runner, capturing
        self._bucket = Bucket(batch, entries, head.max_len, has_masks=True)
        self._depths = np.repeat(np.arange(num_steps - 1, dtype=np.int32), topk)
        self._unknown, self._mask = np.zeros(entries, np.int32), np.eye(entries, dtype=np.bool_)
        newest = torch.arange(topk)[None, :] + entries * torch.arange(batch)[:, None]
        self._newest = [(newest + step * topk).reshape(-1).to(device) for step in range(num_steps - 1)]

        self._rows = torch.zeros((2, batch * entries), dtype=torch.int64, device=device)  # positions and slots
        self._chances = torch.zeros((batch, topk), device=device)
        self._words = torch.zeros((batch, topk), dtype=torch.int64, device=device)
        self._trees = GrowingTrees.places(batch, num_steps, topk, hidden, head.dtype, device)

        self._layout = idle_layout(batch, capturing.padding_slot)
        self._rows[1] = capturing.padding_slot
        capturing.prepare(self._layout, self._bucket)
        self._compute()
        self._replay: Replay = capturing.capture(self._compute)

    def grow(
        self, sequences: Sequence[CacheRows], tips: Tips, slots: NDArray[np.int32], counts: Sequence[int]
    ) -> list[Draft]:  # fmt: skip
        """Grows trees as growing_device.grow_trees does; slots [len(sequences), E]."""
        num_steps, topk, batch = self._key
        count = len(sequences)
        assert tips.states is not None
        laid_out = self._runner.laid_out(
            [
                Segment(sequence.table_row, sequence.num_rows, self._unknown, own, self._depths, self._mask, topk)
                for sequence, own in zip(sequences, slots, strict=True)
            ]
        )
        self._fill(laid_out)
        self._chances[:count] = tips.probabilities[:, :topk]
        self._words[:count] = tips.tokens[:, :topk]
        self._trees.states[:count] = tips.states
        self._replay()
        kept = Joined(self._trees.states.clone())
        chosen = choose(self._growth(count), topk, list(counts))
        return joined_trees(kept, Grown(topk, num_steps), batch, counts, chosen)

    def _fill(self, laid_out: Batch) -> None:
        layout, num_rows = laid_out.layout, laid_out.num_tokens
        rows = np.zeros(self._rows.shape, np.int64)
        rows[1] = self._capturing.padding_slot
        rows[:, :num_rows] = layout.positions, layout.slots
        self._rows.copy_(to_device(rows, self._rows.device), non_blocking=True)
        self._layout = layout
        self._capturing.prepare(layout, self._bucket)

    def _growth(self, count: int) -> Growth:
        """The growth of the first `count` trees, on the host: the one wait for the device."""
        found, most = self._trees.found[:count].cpu().numpy(), self._trees.num_candidates
        scores, words, frontier = found[:, :most], found[:, most : 2 * most], found[:, 2 * most :]
        return Growth.empty(count, self._key.num_steps, self._key.topk)._replace(
            scores=np.ascontiguousarray(scores).view(np.float64).astype(np.float32),
            tokens=words.astype(np.int32),
            frontier=frontier.astype(np.int32),
        )

    # ---- on the device, captured

    def _compute(self) -> None:
        num_steps, topk, batch = self._key
        trees, head = self._trees, self._runner.head
        positions, slots = self._rows
        grow_on(trees, 0, self._chances, self._words, trees.states[:batch])
        for step in range(1, num_steps):
            self._capturing.see(self._layout, trees.bits.flatten(0, 1))
            rows = StepRows(trees.tokens.view(-1), positions, slots, self._newest[step - 1])
            made = self._runner.run(rows, trees.inputs.flatten(0, 1), self._layout, 0)
            chances, ids = likeliest(made.logits, topk)
            grow_on(trees, step, chances, ids, made.carried, head.tokens)
