"""What became of a request's `prediction`: how much of it is in the output, in order, whoever drafted it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

_KEPT_BITS = 8 << 20  # of places: 1 MiB, since those of all its tokens would be as large as a long prediction's square


class Prediction:
    """Predicted tokens, laid out once for all choices that are compared with them."""

    def __init__(self, tokens: Sequence[int]) -> None:
        laid_out = np.asarray(tokens, np.int32)

        @lru_cache(1 + _KEPT_BITS // max(len(tokens), 1))
        def places(token: int) -> int:
            where = np.packbits(laid_out == token, bitorder="little")
            return int.from_bytes(where.tobytes(), "little")

        self.size = len(tokens)
        self.words = frozenset(tokens)
        self.everywhere = (1 << len(tokens)) - 1
        self.places = places  # of a token, a bit for each


class PredictionMatch:
    """The longest common subsequence of a prediction and one choice's tokens as they come.

    Hyyrö's bit-parallel algorithm: a bit of `_row` per predicted token, 0 where the length grows by one.
    """

    def __init__(self, prediction: Prediction) -> None:
        self.accepted = 0  # predicted tokens that appeared in the output
        self._prediction = prediction
        self._row = prediction.everywhere

    def feed(self, tokens: Iterable[int]) -> None:
        """Takes in the output's next tokens."""
        prediction = self._prediction
        for token in filter(prediction.words.__contains__, tokens):
            both = self._row & prediction.places(token)
            if both:
                self._row = ((self._row + both) | (self._row - both)) & prediction.everywhere
                self.accepted = prediction.size - self._row.bit_count()
