"""Which outcomes of a verify step are worth drafting below, before the step is done.

An outcome is an accepted path and the bonus token after it. It is as likely as both: that acceptance ends at the path's
node, and that the target's own token there is the one guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.tree import ROOT, TokenTree

MAX_OUTCOMES_TRIED = 4


def likely_ends(tree: TokenTree, probabilities: NDArray[np.float64], max_accepted: int) -> list[tuple[int, float]]:
    """Nodes (-1: the root) at which acceptance most likely ends, and how likely, at most MAX_OUTCOMES_TRIED of them.

    probabilities: float64 [n], of the paths. Acceptance ends at a node with its path's probability less its children's.
    Nodes deeper than `max_accepted` are left out; the likeliest comes first.
    """
    # Plain lists: numpy takes longer for so few numbers, and a verdict waits.
    paths = probabilities.tolist()
    ends = [*paths, 1.0]  # ROOT is -1: the last
    for parent, chance in zip(tree.parents.tolist(), paths, strict=True):
        ends[parent] -= chance
    depths = [*tree.depths.tolist(), 0]
    within = [node for node in range(len(ends)) if depths[node] <= max_accepted]
    order = sorted(within, key=lambda node: -ends[node])[:MAX_OUTCOMES_TRIED]
    return [(ROOT if node == len(tree) else node, max(0.0, ends[node])) for node in order]


def likely_outcomes(
    ends: Sequence[float], guesses: Sequence[Sequence[tuple[int, float]]], count: int
) -> list[tuple[int, int]]:
    """The `count` likeliest outcomes, likeliest first: (index of the end, bonus token).

    ends: how likely acceptance ends there; guesses: for each end, tokens that no child offers and their probabilities,
    falling. Among those the bonus is one of them: their sum counts as 1.
    """
    found: list[tuple[float, int, int]] = []
    for index, (end, tokens) in enumerate(zip(ends, guesses, strict=True)):
        total = sum(chance for _, chance in tokens)
        for token, chance in tokens[:count]:
            found.append((-end * (chance / total if total > 0.0 else 0.0), index, token))
    found.sort(key=lambda outcome: outcome[0])  # stable: equals keep the order of ends, and of guesses
    return [(index, token) for _, index, token in found[:count]]
