"""What became of a request's `prediction`: how much of it is in the output, in order, whoever drafted it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PredictionCount:
    """Tokens of a prediction that appeared in the output, and those that did not."""

    accepted: int
    rejected: int


class PredictionMatch:
    """The longest common subsequence of a prediction and one choice's tokens as they come.

    Hyyrö's bit-parallel algorithm: a bit of `_row` per predicted token, 0 where the length grows by one.
    """

    def __init__(self, predicted: Sequence[int]) -> None:
        self._predicted = np.asarray(predicted, np.int32)
        self._words = frozenset(predicted)
        self._all = (1 << len(predicted)) - 1
        self._row = self._all

    def feed(self, tokens: Iterable[int]) -> None:
        """Takes in the output's next tokens."""
        for token in filter(self._words.__contains__, tokens):
            # Made anew for each token: kept ones would be as large as a long prediction's square.
            where = np.packbits(self._predicted == token, bitorder="little")
            both = self._row & int.from_bytes(where.tobytes(), "little")
            if both:
                self._row = ((self._row + both) | (self._row - both)) & self._all

    @property
    def count(self) -> PredictionCount:
        """The counts so far."""
        rejected = self._row.bit_count()
        return PredictionCount(len(self._predicted) - rejected, rejected)
