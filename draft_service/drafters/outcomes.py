"""Which outcomes of a verify step are worth drafting below, before the step is done."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.tree import ROOT, TokenTree

MAX_OUTCOMES_TRIED = 4


def likely_outcomes(tree: TokenTree, probabilities: NDArray[np.float64], max_accepted: int) -> list[int]:
    """Nodes (-1: the root) at which acceptance most likely ends, likeliest first, at most MAX_OUTCOMES_TRIED of them.

    probabilities: float64 [n], of the paths. Acceptance ends at a node with its path's probability less its children's.
    Nodes deeper than `max_accepted` are left out.
    """
    ends = np.append(probabilities, 1.0)  # ROOT is -1: the last
    for node, parent in enumerate(tree.parents.tolist()):
        ends[parent] -= probabilities[node]
    order = np.argsort(-ends, kind="stable").tolist()
    nodes = [ROOT if node == len(tree) else node for node in order]
    depths = np.append(tree.depths, 0)
    return [node for node in nodes if depths[node] <= max_accepted][:MAX_OUTCOMES_TRIED]
