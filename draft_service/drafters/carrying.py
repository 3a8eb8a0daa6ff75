"""What a head gave out of the rows of trees and chains, kept for rows that go on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.base import Draft
from draft_service.drafters.expansion import Chosen
from draft_service.session import Grown
from kernels.transfer import to_device
from outrider.tree import ROOT
from outrider.wire import Ids


class _HasStates(Protocol):
    @property
    def states(self) -> torch.Tensor: ...


class Joined(NamedTuple):
    states: torch.Tensor


@dataclass(eq=False, slots=True)
class Carried:
    """What a head gave out of one tree's rows: the states that rows below them go on from.

    kept: has `states` [B + B * width * steps, hidden]: the roots', then those of each step's entries, tree by tree;
    entries: int32 [n], of each node, -1 where it was not run.
    """

    kept: _HasStates
    batch: int
    width: int
    index: int  # of the B trees that grew together
    entries: Ids

    def rows(self, nodes: Sequence[int]) -> torch.Tensor | None:
        """States [len(nodes), hidden] of nodes, -1 the root; None where one was not run."""
        found: list[int] = []
        for node in nodes:
            if node == ROOT:
                found.append(self.index)
                continue
            entry = int(self.entries[node])
            if entry < 0:
                return None
            step, place = divmod(entry, self.width)
            found.append(self.batch + (step * self.batch + self.index) * self.width + place)
        states = self.kept.states
        return states.index_select(0, to_device(np.array(found, np.int64), states.device))


class TreeStates:
    """What a head gives out of B trees' rows, in one tensor: the roots' states, then each step's, tree by tree."""

    def __init__(self, roots: torch.Tensor, num_steps: int, topk: int) -> None:
        batch, self._topk = len(roots), topk
        self._sizes = [batch] + [batch * topk] * (num_steps - 1)
        self.states = roots.new_empty((sum(self._sizes), roots.shape[1]))
        self.states[:batch] = roots
        self._each = torch.arange(batch, device=roots.device)[:, None]
        self._above = self._each.new_empty((batch, topk * (num_steps - 1)))  # of each entry, its parent's row

    def above(self, parents: torch.Tensor, step: int) -> torch.Tensor:
        """[B * step * K, hidden]: what all entries up to `step`'s go on from.

        parents: int64 [B, K], which of the K entries of the step before each of `step`'s hangs below.
        """
        end, width = step * self._topk, 1 if step == 1 else self._topk
        rows = parents.to(self._each.device) + width * self._each + sum(self._sizes[: step - 1])
        self._above[:, end - self._topk : end] = rows
        return self.states.index_select(0, self._above[:, :end].reshape(-1))

    def add(self, states: torch.Tensor, step: int) -> None:
        """Takes in what step `step`'s entries gave, [B * K, hidden]."""
        first = sum(self._sizes[:step])
        self.states[first : first + self._sizes[step]] = states


def joined_trees(
    states: _HasStates | None, grown: Grown, batch: int, counts: Sequence[int], chosen: Chosen
) -> list[Draft]:
    """Trees that grew together, B with those that nobody wants; counts[i] nodes of each are taken."""
    return [
        Draft(
            words[:n], parents[:n], chances[:n],
            memo=None if states is None else Carried(states, batch, grown.topk, i, entries[:n]),
            grown=grown,
        )
        for i, (n, words, parents, chances, entries) in enumerate(zip(counts, *chosen, strict=True))
    ]  # fmt: skip


def joined_chain(
    words: Ids, chances: NDArray[np.float64], states: list[torch.Tensor], grown: Grown, counts: Sequence[int]
) -> list[Draft]:
    """Chains that grew together: words, chances [B, steps], of which counts[i] are wanted.

    states: of each step, none of a language model.
    """
    parents, entries = _chain(grown.num_steps)
    kept = Joined(torch.cat(states)) if states else None
    return [
        Draft(
            words[i, :n], parents[:n], chances[i, :n],
            memo=None if kept is None else Carried(kept, len(counts), 1, i, entries),
            grown=grown,
        )
        for i, n in enumerate(min(count, grown.num_steps) for count in counts)
    ]  # fmt: skip


@lru_cache
def _chain(num_steps: int) -> tuple[Ids, Ids]:
    """A chain's parents and entries, not to be written to."""
    parents = np.arange(-1, num_steps - 1, dtype=np.int32)
    entries = np.append(parents[1:], np.int32(-1))
    parents.flags.writeable = entries.flags.writeable = False
    return parents, entries
