"""How often a drafter's nodes come true, by what it says of them and how deep they lie."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BINS = 16  # scores 0..255 fall in bins of 16: a factor of e in probability each
_DEPTHS = 8  # deeper ones count as the deepest
_OWN_WEIGHT = 4.0  # nodes of its own after which a session counts as much as all others of its drafter


class Acceptance:
    """How often a drafter's nodes come true, by score and depth: what it says of deep nodes is often too good.

    shared: of all its sessions, where this is one's own.
    """

    def __init__(self, shared: Acceptance | None = None) -> None:
        self._shared = shared
        self._window = 64.0 if shared else 512.0
        self._verified = np.zeros((_DEPTHS, _BINS))
        self._accepted = np.zeros((_DEPTHS, _BINS))
        if shared is None:
            # The prior trusts scores half: exp(-score / 16) of the bin's middle, worth eight nodes.
            self._verified += 8.0
            self._accepted += 8.0 * 0.5 * np.exp(-np.arange(_BINS, dtype=np.float64))

    def probabilities(
        self, scores: NDArray[np.uint8], depths: NDArray[np.integer] | None = None
    ) -> NDArray[np.float64]:
        """float64 [n]: estimated probability that each node comes true; it rises with neither score nor depth.

        depths: from 1, or all 1.
        """
        rates = np.minimum.accumulate(np.minimum.accumulate(self._rates(), axis=0), axis=1)
        return rates[_rows(scores, depths), scores >> 4]

    def observe(
        self, scores: NDArray[np.uint8], accepted: NDArray[np.bool_], depths: NDArray[np.integer] | None = None
    ) -> None:
        """Takes in what became of a tree's nodes; old ones fade."""
        cells = _rows(scores, depths) * _BINS + (scores >> 4)
        shape = self._verified.shape
        self._verified += np.bincount(cells, minlength=_DEPTHS * _BINS).reshape(shape)
        self._accepted += np.bincount(cells, weights=accepted, minlength=_DEPTHS * _BINS).reshape(shape)
        fade = np.where(self._verified > self._window, 0.5, 1.0)
        self._verified *= fade
        self._accepted *= fade
        if self._shared is not None:
            self._shared.observe(scores, accepted, depths)

    def _rates(self) -> NDArray[np.float64]:
        if self._shared is None:
            return self._accepted / self._verified
        return (_OWN_WEIGHT * self._shared._rates() + self._accepted) / (_OWN_WEIGHT + self._verified)


def _rows(scores: NDArray[np.uint8], depths: NDArray[np.integer] | None) -> NDArray[np.intp]:
    return np.zeros(len(scores), np.intp) if depths is None else np.minimum(depths, _DEPTHS).astype(np.intp) - 1
