"""A tree's candidates while it grows, and its nodes at the end, compiled by numba: EAGLE-2's rules over plain arrays.

For models without C kernels; kernels/native/grow.c has the same rules for heads that have them.
tests/draft_service/test_native_growth.py holds the two together.

The rules are those of kernels.tree_build, whose functions are the reference: each of S steps keeps the K likeliest of
K * K paths and goes on from them, and at the end the likeliest of all candidates are taken. Candidates are numbered
over all steps: 0..K-1 in the first, K + (i - 1) * K * K onwards in step i, row-major by parent. Equal scores go to the
lower id. Probabilities that are NaN count as 0.

Entry e of the frontier is the (e % K)-th node that step e // K goes on from, and row e of what the model runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.compiled import compiled
from outrider.tree_limits import most_nodes

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]
LongIds = NDArray[np.int64]


class Growth(NamedTuple):
    """Arrays of B trees of S steps and K branches. M candidates: K + (S - 1) * K * K; E entries: K * (S - 1)."""

    scores: Floats
    """[B, M]: probability of each candidate's path."""
    tokens: Ids
    """[B, M]"""
    frontier: Ids
    """[B, E]: candidate ids of the entries."""
    entry_tokens: Ids
    """[B, E]"""
    entry_parents: LongIds
    """[B, E]: which of the K entries of the step before each hangs below; 0 in the first."""
    masks: NDArray[np.bool_]
    """[B, E, E]: row e sees itself and its ancestors."""

    @classmethod
    def empty(cls, batch: int, num_steps: int, topk: int) -> Growth:
        """A growth before its first step."""
        most, entries = most_nodes(num_steps, topk), topk * (num_steps - 1)
        return cls(
            np.empty((batch, most), np.float32), np.empty((batch, most), np.int32),
            np.empty((batch, entries), np.int32), np.empty((batch, entries), np.int32),
            np.zeros((batch, entries), np.int64), np.zeros((batch, entries, entries), np.bool_),
        )  # fmt: skip

    def reach(self, first: int, end: int) -> float:
        """Chance that the accepted path goes through one of the entries first..end-1, on average over the trees."""
        found = np.take_along_axis(self.scores, self.frontier[:, first:end], axis=1)
        return float(found.sum(axis=1).mean())

    def after(self, num_steps: int, topk: int) -> Growth:
        """The growth after `num_steps` steps, as if its trees had no more."""
        most, entries = most_nodes(num_steps, topk), topk * (num_steps - 1)
        if most == self.scores.shape[1]:
            return self
        scores, tokens, frontier = self.scores[:, :most], self.tokens[:, :most], self.frontier[:, :entries]
        return self._replace(scores=scores.copy(), tokens=tokens.copy(), frontier=frontier.copy())


@compiled
def expand(growth: Growth, step: int, topk: int, probabilities: Floats, tokens: LongIds) -> None:
    """Takes in step `step`: probabilities, tokens [B, F, K] after its F parents, the root or K entries, falling.

    Fills the step's candidates and, unless it is the last, the entries to go on from.
    """
    scores, words, frontier, entry_tokens, entry_parents, masks = growth
    batch, num_parents = probabilities.shape[0], probabilities.shape[1]
    base = 0 if step == 0 else topk + (step - 1) * topk * topk
    first = (step - 1) * topk  # entry of the first parent
    entry = step * topk
    count = num_parents * topk
    for b in range(batch):
        for parent in range(num_parents):
            above = np.float32(1.0) if step == 0 else scores[b, frontier[b, first + parent]]
            for k in range(topk):
                p = probabilities[b, parent, k]
                if not p > 0.0:  # NaN too
                    p = np.float32(0.0)
                elif p > 1.0:
                    p = np.float32(1.0)
                scores[b, base + parent * topk + k] = above * p
                words[b, base + parent * topk + k] = tokens[b, parent, k]
        if entry == frontier.shape[1]:
            continue
        for j in range(topk):
            best = j
            if step > 0:
                best = -1
                for c in range(count):
                    taken = False
                    for earlier in range(j):
                        if frontier[b, entry + earlier] == base + c:
                            taken = True
                    if not taken and (best < 0 or scores[b, base + c] > scores[b, base + best]):
                        best = c
            at = entry + j
            frontier[b, at] = base + best
            entry_tokens[b, at] = words[b, base + best]
            if step > 0:
                entry_parents[b, at] = best // topk
                for column in range(entry):
                    masks[b, at, column] = masks[b, first + best // topk, column]
            masks[b, at, at] = True


class Chosen(NamedTuple):
    """The finished trees; of tree b the first counts[b] columns count."""

    tokens: Ids
    """[B, N]"""
    parents: Ids
    """[B, N]: node index, -1 the root."""
    probabilities: NDArray[np.float64]
    """[B, N]: of the paths."""
    entries: Ids
    """[B, N]: the entry that the node was, -1 where the model was not run on it."""


def choose(growth: Growth, topk: int, counts: list[int]) -> Chosen:
    """The counts[b] likeliest candidates of each tree (at most M), ascending, so that parents precede children."""
    batch, most = len(counts), max(counts, default=0)
    shape = (batch, most)
    chosen = Chosen(
        np.empty(shape, np.int32), np.empty(shape, np.int32), np.empty(shape, np.float64), np.empty(shape, np.int32)
    )
    _choose(growth.scores, growth.tokens, growth.frontier, topk, np.array(counts, np.int64), *chosen)
    return chosen


@compiled
def _choose(
    scores: Floats, words: Ids, frontier: Ids, topk: int, counts: LongIds,
    tokens: Ids, parents: Ids, probabilities: NDArray[np.float64], entries: Ids,
) -> None:  # fmt: skip
    most = scores.shape[1]
    index = np.empty(most, np.int32)
    entry = np.empty(most, np.int32)
    for b in range(scores.shape[0]):
        ids = np.sort(np.argsort(-scores[b], kind="mergesort")[: counts[b]])
        entry[:] = -1
        for e in range(frontier.shape[1]):
            entry[frontier[b, e]] = e
        # Scores never rise along a path and ties go to lower ids: a chosen candidate's parent is chosen.
        for node in range(len(ids)):
            candidate = ids[node]
            index[candidate] = node
            tokens[b, node] = words[b, candidate]
            parents[b, node] = -1 if candidate < topk else index[frontier[b, candidate // topk - 1]]
            probabilities[b, node] = scores[b, candidate]
            entries[b, node] = entry[candidate]
