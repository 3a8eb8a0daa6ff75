"""How often a drafter's nodes come true, by what it says of them and how deep they lie."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BINS = 16  # scores 0..255 fall in bins of 16: a factor of e in probability each
_DEPTHS = 8  # deeper ones count as the deepest
_OWN_WEIGHT = 4.0  # nodes of its own after which a session counts as much as all others of its drafter


class Acceptance:
    """How often a drafter's nodes come true, by score and depth: what it says of deep nodes is often too good.

    shared: of all its sessions, where this is one's own; it counts as it was when this one last learnt something.
    """

    def __init__(self, shared: Acceptance | None = None) -> None:
        self._shared = shared
        self._window = 64.0 if shared else 512.0
        # Plain numbers to write to, since a tree has few nodes and numpy is slow to begin; it reads the same memory.
        self._verified, self._accepted = (array("d", bytes(8 * _DEPTHS * _BINS)) for _ in range(2))
        if shared is None:
            # The prior trusts scores half: exp(-score / 16) of the bin's middle, worth eight nodes.
            self._verified = array("d", [8.0] * (_DEPTHS * _BINS))
            self._accepted = array("d", [8.0 * 0.5 * math.exp(-bin) for bin in range(_BINS)] * _DEPTHS)
        self._chances: list[float] | None = None if shared is None else self._rates_falling()

    def probabilities(self, scores: NDArray[np.uint8], depths: NDArray[np.integer]) -> list[float]:
        """[n]: estimated probability that each node comes true; it rises with neither score nor depth.

        depths: from 1.
        """
        chances = self._rates_falling() if self._chances is None else self._chances
        return [chances[cell] for cell in _cells(scores, depths)]

    def observe(self, scores: NDArray[np.uint8], depths: NDArray[np.integer], true: Sequence[int]) -> None:
        """Takes in which of a tree's n nodes came true, by index; old trees fade. scores, depths: [n]."""
        cells = _cells(scores, depths)
        hits = [cells[node] for node in true]
        self._count(cells, hits)
        if self._shared is not None:
            self._shared._count(cells, hits)
            self._chances = self._rates_falling()  # here, where no step waits for it

    def _count(self, cells: list[int], hits: list[int]) -> None:
        verified, accepted, window = self._verified, self._accepted, self._window
        for cell in hits:
            accepted[cell] += 1.0
        for cell in cells:
            verified[cell] = count = verified[cell] + 1.0
            if count > window:
                verified[cell] *= 0.5
                accepted[cell] *= 0.5

    def _rates_falling(self) -> list[float]:
        rates = self._rates().reshape(_DEPTHS, _BINS)
        return np.minimum.accumulate(np.minimum.accumulate(rates, axis=0), axis=1).reshape(-1).tolist()

    def _rates(self) -> NDArray[np.float64]:
        verified, accepted = np.frombuffer(self._verified), np.frombuffer(self._accepted)
        if self._shared is None:
            return accepted / verified
        return (_OWN_WEIGHT * self._shared._rates() + accepted) / (_OWN_WEIGHT + verified)


def _cells(scores: NDArray[np.uint8], depths: NDArray[np.integer]) -> list[int]:
    """Places in the tables."""
    both = zip(scores.tolist(), depths.tolist(), strict=True)
    return [(depth if depth < _DEPTHS else _DEPTHS) * _BINS + (score >> 4) - _BINS for score, depth in both]
